"""Divergences against exact sums, torch.distributions and Monte Carlo over real transitions."""

import math

import pytest
import torch
from jaxtyping import TypeCheckError
from torch.distributions import Categorical, Normal, kl_divergence

from retouch.core.surrogates import gaussian_kl, k3


def test_k3_has_the_kl_as_its_exact_expectation():
    generator = torch.Generator().manual_seed(0)
    p, q = (Categorical(logits=torch.randn(4, 9, generator=generator)) for _ in range(2))
    values = k3(p.logits, q.logits)
    assert (values >= 0).all()
    torch.testing.assert_close((p.probs * values).sum(1), kl_divergence(p, q))


def test_k3_is_accurate_for_small_differences():
    d = 1e-3
    assert float(k3(torch.zeros(1, 1), torch.full((1, 1), d))) == pytest.approx(d * d / 2, rel=1e-2)


@pytest.mark.parametrize("padding", [math.nan, -math.inf, 1e4])
def test_k3_of_masked_actions_is_zero_with_zero_gradient(padding):
    mask = torch.tensor([[True, False, True]])
    log_probs = torch.tensor([[-1.0, padding, -2.0]], requires_grad=True)
    values = k3(log_probs, torch.tensor([[-1.5, 0.0, -1.0]]), mask=mask)
    values.sum().backward()
    assert values[0, 1] == 0
    assert log_probs.grad[0, 1] == 0
    assert (values[mask] > 0).all()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_gaussian_kl_equals_torch_distributions(reduction):
    generator = torch.Generator().manual_seed(0)
    mean, reference = (torch.randn(3, 2, 4, 4, generator=generator) for _ in range(2))
    step_std = torch.tensor([0.1, 0.5, 2.0])
    each = kl_divergence(Normal(mean, step_std.view(3, 1, 1, 1)), Normal(reference, step_std.view(3, 1, 1, 1))).flatten(1)
    expected = each.mean(1) if reduction == "mean" else each.sum(1)
    torch.testing.assert_close(gaussian_kl(mean, reference, step_std, reduction=reduction), expected)


def test_gaussian_kl_without_density_is_nan_and_can_be_masked_out():
    mean = torch.ones(2, 3, requires_grad=True)
    kl = gaussian_kl(mean, torch.zeros(2, 3), torch.tensor([0.0, 1.0]), reduction="mean")
    assert kl.isnan().tolist() == [True, False]
    kl.masked_fill(torch.tensor([True, False]), 0).sum().backward()
    torch.testing.assert_close(mean.grad, torch.tensor([[0.0] * 3, [1 / 3] * 3]))


def test_invalid_reduction_raises_with_the_valid_values():
    with pytest.raises((ValueError, TypeCheckError), match=r"'mean' or 'sum'|Type-check"):
        gaussian_kl(torch.ones(1, 2), torch.ones(1, 2), torch.ones(1), reduction="max")
