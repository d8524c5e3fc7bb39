"""Surrogates against the textbook formulas in ratio space, their closed-form gradients, and that masked actions have no effect."""

import math

import pytest
import torch
from jaxtyping import TypeCheckError
from torch import Tensor

from retouch.core.surrogates import approx_kl, cispo, clip_fraction, clipped_surrogate, reinforce, sequence_log_ratio

B, T = 6, 40
REFUSED = (ValueError, TypeCheckError)  # the second where annotations are checked at run time


def draw(spread: float = 0.5) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    log_ratio = spread * torch.randn(B, T, generator=generator)
    advantages = torch.randn(B, T, generator=generator)
    advantages[0, :5] = 0
    return log_ratio.requires_grad_(), advantages


def gradient(loss: Tensor, of: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(loss.sum(), of, retain_graph=True)
    return grad


@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.2, 0.28), (1e-3, 2e-3)])
@pytest.mark.parametrize("dual", [None, 1.5, 3.0])
def test_clipped_surrogate_equals_ppo(low, high, dual):
    log_ratio, advantages = draw(spread=0.5 if high > 0.1 else 2e-3)
    ratio = log_ratio.exp()
    expected = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if dual is not None:
        expected = torch.where(advantages < 0, torch.minimum(expected, -dual * advantages), expected)
    ours = clipped_surrogate(log_ratio, advantages, low=low, high=high, dual=dual)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradient(ours, log_ratio), gradient(expected, log_ratio))
    assert 0.1 < (gradient(ours, log_ratio) == 0).float().mean() < 0.9


def test_a_huge_ratio_that_is_clipped_has_no_nan_gradient():
    log_ratio = torch.tensor([[200.0, 200.0, -200.0, 200.0]], requires_grad=True)
    advantages = torch.tensor([[1.0, 0.0, -1.0, -1.0]])
    loss = clipped_surrogate(log_ratio, advantages, low=0.2, high=0.25, dual=3.0)
    torch.testing.assert_close(loss, torch.tensor([[-1.25, 0.0, 0.8, 3.0]]))
    assert gradient(loss, log_ratio).tolist() == [[0, 0, 0, 0]]
    single = clipped_surrogate(log_ratio[:, :3], advantages[:, :3], low=0.2, high=0.25)
    assert torch.equal(single, loss[:, :3])


def test_a_nan_in_an_unmasked_action_gives_a_nan_loss():
    log_ratio, advantages = torch.tensor([[math.nan, 0.0]]), torch.ones(1, 2)
    assert clipped_surrogate(log_ratio, advantages, low=0.2, high=0.2).isnan().tolist() == [[True, False]]
    assert reinforce(log_ratio, advantages).isnan().tolist() == [[True, False]]
    assert cispo(log_ratio, log_ratio, advantages, low=None, high=4.0).isnan().tolist() == [[True, False]]


@pytest.mark.parametrize("low", [None, 0.2])
def test_cispo_gradient_is_the_clamped_ratio_times_reinforce(low):
    log_ratio, advantages = draw()
    log_probs = (log_ratio.detach() - 1).requires_grad_()
    ours = cispo(log_ratio, log_probs, advantages, low=low, high=0.3)
    ratio = log_ratio.detach().exp().clamp(0 if low is None else 1 - low, 1.3)
    torch.testing.assert_close(ours, -ratio * advantages * log_probs)
    torch.testing.assert_close(gradient(ours, log_probs), -ratio * advantages)
    assert not ours.sum().isnan()
    assert torch.autograd.grad(cispo(log_ratio, log_probs, advantages, low=low, high=0.3).sum(), log_ratio, allow_unused=True) == (
        None,
    )


def test_reinforce_is_minus_advantage_times_log_prob():
    log_probs, advantages = draw()
    ours = reinforce(log_probs, advantages)
    torch.testing.assert_close(ours, -advantages * log_probs)
    torch.testing.assert_close(gradient(ours, log_probs), -advantages)


def test_at_ratio_one_every_surrogate_has_the_policy_gradient():
    log_probs, advantages = draw()
    log_ratio = log_probs - log_probs.detach()
    for loss in (
        clipped_surrogate(log_ratio, advantages, low=0.2, high=0.2, dual=3.0),
        cispo(log_ratio, log_probs, advantages, low=None, high=0.2),
        reinforce(log_probs, advantages),
        clipped_surrogate(
            sequence_log_ratio(log_ratio, torch.ones(B, T, dtype=torch.bool), gradient="token"), advantages, low=3e-4, high=4e-4
        ),
    ):
        assert torch.equal(gradient(loss, log_probs), -advantages)


SURROGATES = {
    "clipped": lambda x, a, m: clipped_surrogate(x, a, low=0.2, high=0.2, mask=m),
    "cispo": lambda x, a, m: cispo(x, x, a, low=0.2, high=0.2, mask=m),
    "reinforce": lambda x, a, m: reinforce(x, a, mask=m),
    "gspo": lambda x, a, m: clipped_surrogate(sequence_log_ratio(x, m), a, low=0.2, high=0.2, mask=m),
    "gspo-token": lambda x, a, m: clipped_surrogate(sequence_log_ratio(x, m, gradient="token"), a, low=0.2, high=0.2, mask=m),
    "clip_fraction": lambda x, a, m: clip_fraction(x, a, low=0.2, high=0.2, mask=m) + 0 * x.nan_to_num(0, 0, 0),
    "approx_kl": lambda x, a, m: approx_kl(x, mask=m) + 0 * x.nan_to_num(0, 0, 0),
}


@pytest.mark.parametrize("name", SURROGATES)
@pytest.mark.parametrize("padding", [math.nan, math.inf, -math.inf, 1e4, 0.0])
def test_masked_actions_have_no_loss_and_no_gradient(name, padding):
    clean, advantages = draw()
    mask = torch.rand(B, T, generator=torch.Generator().manual_seed(0)) > 0.4
    mask[1] = False
    padded = clean.detach().masked_fill(~mask, padding).requires_grad_()
    loss = SURROGATES[name](padded, advantages, mask)
    assert (loss[~mask] == 0).all()
    assert (gradient(loss, padded)[~mask] == 0).all()
    other = clean.detach().masked_fill(~mask, 0.1).requires_grad_()
    same = SURROGATES[name](other, advantages, mask)
    assert torch.equal(loss, same)
    assert torch.equal(gradient(SURROGATES[name](padded, advantages, mask), padded), gradient(same, other))


def test_sequence_log_ratio_is_the_mean_over_the_row():
    log_ratio, _ = draw()
    mask = torch.zeros(B, T, dtype=torch.bool)
    for row in range(B):
        mask[row, : 3 + 5 * row] = True
    mask[2] = False
    for gradient_kind in ("sequence", "token"):
        ours = sequence_log_ratio(log_ratio, mask, gradient=gradient_kind)
        for row in range(B):
            own = log_ratio[row][mask[row]]
            torch.testing.assert_close(ours[row][mask[row]], own.mean().expand_as(own))
        assert (ours[~mask] == 0).all()


def test_clip_fraction_is_1_where_clipping_sets_the_gradient_to_0():
    log_ratio, advantages = draw()
    grad = gradient(clipped_surrogate(log_ratio, advantages, low=0.2, high=0.3), log_ratio)
    cut = clip_fraction(log_ratio, advantages, low=0.2, high=0.3)
    assert torch.equal(cut.bool(), (grad == 0) & (advantages != 0))
    assert 0.1 < cut.mean() < 0.6
    assert not cut.requires_grad


def test_half_precision_is_computed_in_fp32():
    log_ratio, advantages = draw()
    ours = clipped_surrogate(log_ratio.bfloat16(), advantages.bfloat16(), low=0.2, high=0.2)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, clipped_surrogate(log_ratio.bfloat16().float(), advantages.bfloat16().float(), low=0.2, high=0.2))


def test_bad_bounds_are_refused():
    log_ratio, advantages = draw()
    with pytest.raises(ValueError, match="dual"):
        clipped_surrogate(log_ratio, advantages, low=0.2, high=0.2, dual=1.0)
    with pytest.raises(ValueError, match="low"):
        cispo(log_ratio, log_ratio, advantages, low=1.5, high=0.2)
    with pytest.raises(REFUSED, match=r"'sequence' or 'token'|Type-check"):
        sequence_log_ratio(log_ratio, torch.ones(B, T, dtype=torch.bool), gradient="row")
