"""RatioNorm against the published formula, and its two purposes: mean 0 and the same standard deviation at every step."""

import pytest
import torch
from torch import Tensor

from retouch.core.transitions import TransitionResult, gradient_balance, ratio_norm, transition


def pair(
    kind: str, sigma: float, sigma_next: float, *, rows: int = 4, reduction: str = "mean"
) -> tuple[TransitionResult, TransitionResult]:
    """A sampled step, and the same step evaluated with another velocity."""
    generator = torch.Generator().manual_seed(0)
    x, velocity, other, noise = (torch.randn(rows, 3, 5, generator=generator) for _ in range(4))
    columns = (torch.full((rows,), sigma), torch.full((rows,), sigma_next))
    options = {"noise_level": 0.7, "sigma_max": 0.95, "reduction": reduction}
    acted = transition(kind, x, velocity, *columns, noise=noise, **options)
    moved = (velocity + 0.1 * other).requires_grad_()
    return acted, transition(kind, x, moved, *columns, next=acted.next, **options)


def norm(acted: TransitionResult, new: TransitionResult, reduction: str = "mean") -> Tensor:
    return ratio_norm(acted.next, new.mean, acted.mean, step_std=acted.step_std, reduction=reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["sde", "dance"])
def test_ratio_norm_equals_the_published_formula(kind, reduction):
    acted, new = pair(kind, 0.8, 0.6, reduction=reduction)
    moved = (new.mean - acted.mean).square().flatten(1)
    bias = (moved.mean(1) if reduction == "mean" else moved.sum(1)) / (2 * acted.step_std**2)
    expected = (new.log_prob - acted.log_prob + bias) * acted.step_std
    torch.testing.assert_close(norm(acted, new, reduction), expected, atol=1e-5, rtol=1e-4)


def test_ratio_norm_of_cps_equals_the_gaussian_formula():
    acted, new = pair("cps", 0.8, 0.6)
    moved = (new.mean - acted.mean).square().flatten(1).mean(1)
    gaussian = (new.log_prob - acted.log_prob + moved) / (2 * acted.step_std**2)
    torch.testing.assert_close(norm(acted, new), gaussian * acted.step_std, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", ["sde", "cps", "dance"])
def test_log_ratio_has_mean_0_and_the_same_std_at_every_step(kind):
    generator = torch.Generator().manual_seed(0)
    rows, elements, shift = 40_000, 8, 0.02
    spreads = []
    for sigma, sigma_next in [(0.9, 0.8), (0.5, 0.2), (0.2, 0.15)]:
        x, velocity = torch.zeros(rows, elements), torch.ones(rows, elements)
        noise = torch.randn(rows, elements, generator=generator)
        columns = (torch.full((rows,), sigma), torch.full((rows,), sigma_next))
        acted = transition(kind, x, velocity, *columns, noise_level=0.7, sigma_max=0.95, reduction="mean", noise=noise)
        log_ratio = ratio_norm(acted.next, acted.mean + shift, acted.mean, step_std=acted.step_std, reduction="mean")
        spreads.append(float(log_ratio.std()))
        assert abs(float(log_ratio.mean())) < 4 * spreads[-1] / rows**0.5
    assert spreads == pytest.approx([shift / elements**0.5] * 3, rel=0.02)


def test_ratio_norm_is_exactly_0_before_the_first_update():
    acted, _ = pair("sde", 0.8, 0.6)
    assert (norm(acted, acted) == 0).all()


def test_gradient_runs_through_the_new_mean_only():
    acted, new = pair("sde", 0.8, 0.6)
    mean, old_mean = (tensor.detach().clone().requires_grad_() for tensor in (new.mean, acted.mean))
    ratio_norm(acted.next, mean, old_mean, step_std=acted.step_std, reduction="sum").sum().backward()
    torch.testing.assert_close(mean.grad, (acted.next - acted.mean).detach() / acted.step_std.view(-1, 1, 1))
    assert old_mean.grad is None


def test_ratio_norm_without_density_is_nan_and_can_be_masked_out():
    mean = torch.ones(2, 3, requires_grad=True)
    log_ratio = ratio_norm(torch.ones(2, 3), mean, torch.zeros(2, 3), step_std=torch.tensor([0.0, 0.5]), reduction="mean")
    assert log_ratio.isnan().tolist() == [True, False]
    log_ratio.masked_fill(torch.tensor([True, False]), 0).sum().backward()
    torch.testing.assert_close(mean.grad, torch.tensor([[0.0] * 3, [2 / 3] * 3]))


def test_gradient_balance_gives_the_same_gradient_norm_at_every_step():
    """With it, the gradient of the sde's log-ratio with respect to the velocity has the same scale whatever dt is."""
    scales = []
    for sigma, sigma_next in [(0.9, 0.8), (0.5, 0.2), (0.2, 0.15)]:
        generator = torch.Generator().manual_seed(0)
        x, noise = torch.randn(1, 64, generator=generator), torch.randn(1, 64, generator=generator)
        velocity = torch.zeros(1, 64, requires_grad=True)
        columns = (torch.tensor([sigma]), torch.tensor([sigma_next]))
        acted = transition("sde", x, velocity, *columns, noise_level=0.7, sigma_max=0.95, reduction="mean", noise=noise)
        log_ratio = ratio_norm(acted.next, acted.mean, acted.mean, step_std=acted.step_std, reduction="mean")
        (grad,) = torch.autograd.grad((log_ratio * gradient_balance(*columns)).sum(), velocity)
        scales.append(float(grad.norm()))
    assert scales == pytest.approx([scales[0]] * 3, rel=1e-4)
