"""RatioNorm against the published formula, and its two purposes: mean 0 and the same standard deviation at every step."""

import pytest
import torch
from torch import Tensor

from retouch.core.transitions import TransitionResult, ratio_norm, transition


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


def test_ratio_norm_without_density_is_nan_and_can_be_masked_out():
    mean = torch.ones(2, 3, requires_grad=True)
    log_ratio = ratio_norm(torch.ones(2, 3), mean, torch.zeros(2, 3), step_std=torch.tensor([0.0, 0.5]), reduction="mean")
    assert log_ratio.isnan().tolist() == [True, False]
    log_ratio.masked_fill(torch.tensor([True, False]), 0).sum().backward()
    torch.testing.assert_close(mean.grad, torch.tensor([[0.0] * 3, [2 / 3] * 3]))
