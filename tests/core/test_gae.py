"""Advantages from values against the published sum and closed forms; the value loss; explained variance."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retouch.core.gae import clipped_value_loss, discounted_returns, explained_variance, gae, whiten

NAN = math.nan
number = st.integers(-40, 40).map(lambda n: n / 8)
share = st.sampled_from([0.0, 0.3, 0.9, 1.0])


@st.composite
def chains(draw):
    """Rewards, values and masks of a few rows; a row may have no unmasked action, and its reward may be missing."""
    length = draw(st.integers(1, 6))
    rows = draw(st.integers(1, 4))
    values = [[draw(number) for _ in range(length)] for _ in range(rows)]
    mask = [[draw(st.booleans()) for _ in range(length)] for _ in range(rows)]
    return [draw(number | st.just(NAN)) for _ in range(rows)], values, mask


def by_sum(reward, values, gamma, lam):
    """Equation 16 of the paper, for the unmasked actions of one row: sum over l of (gamma lam)^l delta_(k + l)."""
    last = len(values) - 1
    deltas = [(reward if k == last else gamma * values[k + 1]) - values[k] for k in range(len(values))]
    return [sum((gamma * lam) ** (later - k) * deltas[later] for later in range(k, len(values))) for k in range(len(values))]


@given(chain=chains(), gamma=share, lam=share)
def test_gae_equals_the_published_sum_over_the_unmasked_actions(chain, gamma, lam):
    rewards, values, mask = chain
    found = gae(torch.tensor(rewards), torch.tensor(values), torch.tensor(mask), gamma=gamma, lam=lam)
    for row, reward in enumerate(rewards):
        chosen = [k for k, there in enumerate(mask[row]) if there]
        wanted = [0.0] * len(values[row])
        if not math.isnan(reward):
            for k, advantage in zip(chosen, by_sum(reward, [values[row][k] for k in chosen], gamma, lam), strict=True):
                wanted[k] = advantage
        torch.testing.assert_close(found[row], torch.tensor(wanted), atol=1e-4, rtol=1e-5)


@given(chain=chains())
def test_gae_with_gamma_and_lambda_1_equals_reward_minus_value(chain):
    rewards, values, mask = (torch.tensor(part) for part in chain)
    found = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    wanted = (rewards[:, None] - values).masked_fill(~mask | rewards.isnan()[:, None], 0.0)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@given(chain=chains(), gamma=share, lam=share)
def test_masked_actions_do_not_change_gae_or_discounted_returns(chain, gamma, lam):
    """Moving the unmasked actions of every row to its start gives the same advantages; masked values do not matter."""
    rewards, values, mask = (torch.tensor(part) for part in chain)
    found = gae(rewards, values.masked_fill(~mask, NAN), mask, gamma=gamma, lam=lam)
    order = (~mask).int().argsort(dim=1, stable=True)
    pushed = gae(rewards, values.gather(1, order), mask.gather(1, order), gamma=gamma, lam=lam)
    torch.testing.assert_close(pushed, found.gather(1, order))
    together = discounted_returns(rewards.nan_to_num(0.0), mask.gather(1, order), gamma=gamma)
    torch.testing.assert_close(together, discounted_returns(rewards.nan_to_num(0.0), mask, gamma=gamma).gather(1, order))


def test_returns_are_discounted_once_per_later_unmasked_action():
    mask = torch.tensor([[True, False, True, True], [False, False, False, False]])
    found = discounted_returns(torch.tensor([8.0, 8.0]), mask, gamma=0.5)
    assert found.tolist() == [[2.0, 0.0, 4.0, 8.0], [0.0] * 4]


@pytest.mark.parametrize("options", [{"gamma": 1.1, "lam": 1.0}, {"gamma": 1.0, "lam": -0.1}])
def test_gamma_or_lambda_outside_0_to_1_raises(options):
    with pytest.raises(ValueError, match="both must be between 0 and 1"):
        gae(torch.zeros(1), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), **options)


def test_an_infinite_reward_is_refused():
    with pytest.raises(ValueError, match="infinite rewards"):
        gae(torch.tensor([math.inf]), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), gamma=1.0, lam=1.0)


# Whitening


def test_whitened_advantages_have_mean_0_and_std_1_over_counted_actions():
    advantages = torch.tensor([[1.0, 2.0, 90.0], [4.0, -70.0, 5.0]])
    counted = torch.tensor([[True, True, False], [True, False, True]])
    found = whiten(advantages, counted, eps=1e-9)
    assert found[~counted].abs().max() == 0
    torch.testing.assert_close(found[counted], torch.tensor([-2.0, -1.0, 1.0, 2.0]) / math.sqrt(2.5))
    assert whiten(torch.full((2, 2), 0.1), torch.ones(2, 2, dtype=torch.bool)).abs().max() == 0
    assert whiten(advantages, torch.zeros_like(counted)).abs().max() == 0


# The value loss


def loss_of(value, old, returned, clip):
    values = torch.tensor([[value]], requires_grad=True)
    loss = clipped_value_loss(values, torch.tensor([[old]]), torch.tensor([[returned]]), clip=clip, mask=torch.ones(1, 1).bool())
    loss.sum().backward()
    return loss.item(), values.grad.item()


@given(value=number, old=number, returned=number)
def test_value_loss_without_a_clip_is_half_the_squared_error(value, old, returned):
    assert loss_of(value, old, returned, None) == (pytest.approx(0.5 * (value - returned) ** 2), pytest.approx(value - returned))


@given(value=number, old=number, returned=number, clip=st.sampled_from([0.25, 1.0]))
def test_clipped_value_loss_is_the_larger_of_two_losses(value, old, returned, clip):
    held = old + max(-clip, min(clip, value - old))
    wanted = 0.5 * max((value - returned) ** 2, (held - returned) ** 2)
    assert loss_of(value, old, returned, clip)[0] == pytest.approx(wanted)


def test_value_gradient_is_0_beyond_the_clip_in_the_direction_of_the_return():
    assert loss_of(0.5, 0.0, 1.0, 0.2)[1] == 0
    assert loss_of(0.1, 0.0, 1.0, 0.2)[1] == pytest.approx(-0.9)
    assert loss_of(-0.5, 0.0, 1.0, 0.2)[1] == pytest.approx(-1.5)  # moved away from the return: not clipped


def test_masked_values_have_loss_0_and_gradient_0():
    values = torch.tensor([[math.nan, 1.0]], requires_grad=True)
    nans = torch.tensor([[math.nan, 0.0]])
    loss = clipped_value_loss(values, nans, nans, clip=9.0, mask=torch.tensor([[False, True]]))
    loss.sum().backward()
    assert loss.tolist() == [[0.0, 0.5]]
    assert values.grad.tolist() == [[0.0, 1.0]]


def test_a_clip_that_is_not_above_0_is_refused():
    with pytest.raises(ValueError, match="must be above 0"):
        loss_of(0.0, 0.0, 0.0, 0.0)


# Explained variance


def test_explained_variance_is_1_for_shifted_targets_and_0_for_a_constant():
    targets, counted = torch.tensor([[1.0, 2.0], [4.0, 100.0]]), torch.tensor([[True, True], [True, False]])
    assert explained_variance(targets, targets + 3, counted) == pytest.approx(1)  # an offset does not matter
    assert explained_variance(targets, torch.full_like(targets, 7.0), counted) == pytest.approx(0)
    assert explained_variance(targets, 2 * targets, counted) == pytest.approx(0)
    assert explained_variance(targets, -targets, counted) == pytest.approx(-3)
    assert explained_variance(targets, 0.5 * targets, counted) == pytest.approx(0.75)


def test_explained_variance_of_equal_targets_is_nan():
    targets = torch.ones(2, 2)
    assert math.isnan(explained_variance(targets, targets, torch.ones(2, 2, dtype=torch.bool)))
    assert math.isnan(explained_variance(targets, targets, torch.zeros(2, 2, dtype=torch.bool)))
