"""Advantages, the weights of imitated samples, and generalised advantage estimation, against plain loops and closed forms."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from retouch.core.advantages import batch_relative, best_of_group, decoupled, exponential_weights, group_relative, zero_std_groups
from retouch.core.gae import clipped_value_loss, discounted_returns, explained_variance, gae, whiten

# Advantages against a plain loop over groups, and properties that every advantage must have

NAN = math.nan
REFUSED = (ValueError, TypeCheckError)  # the second where annotations are checked at run time
properties = settings(deadline=None, max_examples=60, derandomize=True)
reward = st.integers(-100, 100).map(lambda n: n / 8)
rows = st.lists(st.tuples(reward | st.just(NAN), st.integers(-2, 3)), min_size=1, max_size=24)


def spread(values: list[float], ddof: int) -> float:
    if len(values) < 2:
        return 0.0
    return statistics.pstdev(values) if ddof == 0 else statistics.stdev(values)


def by_hand(rewards, group, *, baseline, scale, ddof, eps, clip):
    result = []
    everything = [r for r in rewards if not math.isnan(r)]
    for i, (r, g) in enumerate(zip(rewards, group, strict=True)):
        members = [s for s, h in zip(rewards, group, strict=True) if h == g and not math.isnan(s)]
        others = [s for j, (s, h) in enumerate(zip(rewards, group, strict=True)) if h == g and j != i and not math.isnan(s)]
        if math.isnan(r) or not others:
            result.append(0.0)
            continue
        advantage = r - statistics.fmean(members if baseline == "mean" else others)
        if scale == "group":
            advantage /= spread(members, ddof) + eps
        if scale == "batch":
            advantage /= spread(everything, ddof) + eps
        result.append(max(-clip, min(clip, advantage)))
    return torch.tensor(result)


@settings(properties, max_examples=30)
@given(rows=st.lists(st.tuples(reward | st.just(NAN), reward | st.just(NAN), st.integers(-2, 3)), min_size=1, max_size=24))
def test_decoupled_advantages_equal_a_loop_over_columns_and_groups(rows):
    """Also if a column is missing in some rows, which are in no mean of the other column either."""
    whole = [row for row in rows if not any(map(math.isnan, row))]
    sums = []
    for row in whole:
        total = 0.0
        for column, weight in ((0, 2.0), (1, -0.5)):
            members = [other[column] for other in whole if other[2] == row[2]]
            total += weight * (row[column] - statistics.fmean(members)) / (spread(members, 1) + 1e-3)
        sums.append(total)
    wanted = iter([max(-2.0, min(2.0, (each - statistics.fmean(sums)) / (spread(sums, 1) + 1e-3))) for each in sums])
    expected = [0.0 if any(map(math.isnan, row)) else next(wanted) for row in rows]
    *scores, group = (torch.tensor(column) for column in zip(*rows, strict=True))
    ours = decoupled(scores, [2.0, -0.5], group, eps=1e-3, clip=2.0)
    torch.testing.assert_close(ours, torch.tensor(expected), atol=1e-4, rtol=1e-4)


def test_decoupled_advantages_of_a_small_column_are_as_large_as_those_of_a_large_one():
    scores = [torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 100.0, 0.0])]
    for kept in (scores, scores[::-1]):
        ours = decoupled(kept, [1.0, 1.0], torch.zeros(3, dtype=torch.long), eps=1e-9)
        torch.testing.assert_close(ours, torch.tensor([1.0, 1.0, -2.0]) / math.sqrt(3))


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@settings(properties, max_examples=30)
@given(rows=rows)
def test_group_relative_equals_a_loop_over_groups(baseline, scale, ddof, rows):
    rewards, group = [r for r, _ in rows], [g for _, g in rows]
    options = {"baseline": baseline, "scale": scale, "ddof": ddof, "eps": 1e-3, "clip": 2.0}
    ours = group_relative(torch.tensor(rewards), torch.tensor(group), **options)
    torch.testing.assert_close(ours, by_hand(rewards, group, **options), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("size", "scale", "baseline"),
    [(2, "group", "mean"), (3, "batch", "leave_one_out"), (7, "none", "mean"), (11, "group", "leave_one_out")],
)
def test_equal_rewards_give_exactly_zero(size, scale, baseline):
    for k in range(1, 40):
        rewards = torch.cat([torch.full((size,), 0.1 * k), torch.tensor([0.0, 1.0])])
        group = torch.tensor([5] * size + [9, 9])
        advantages = group_relative(rewards, group, scale=scale, baseline=baseline)
        assert (advantages[:size] == 0).all()
        assert (advantages[size:] != 0).all()
        assert (batch_relative(rewards[:size]) == 0).all()


def test_batch_relative_is_the_z_score_of_valid_rewards():
    rewards = torch.tensor([0.5, NAN, 2.0, -1.0, 0.25])
    valid = rewards[~rewards.isnan()]
    for ddof in (0, 1):
        expected = (valid - valid.mean()) / (valid.std(correction=ddof) + 1e-4)
        torch.testing.assert_close(batch_relative(rewards, ddof=ddof)[[0, 2, 3, 4]], expected)
    assert batch_relative(torch.tensor([0.0] * 99 + [1.0])).max() == 5
    assert batch_relative(torch.tensor([0.0] * 99 + [1.0]), clip=None).max() > 9


def test_zero_std_groups_counts_only_groups_with_at_least_two_valid_rewards():
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.2, 0.9, NAN, 0.5, 0.5, NAN])
    group = torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3])
    assert zero_std_groups(rewards, group) == 0.5
    assert zero_std_groups(rewards[:5], group[:5]) == 0.5
    assert zero_std_groups(rewards[:3], group[:3]) == 1
    assert math.isnan(zero_std_groups(rewards[5:7], group[5:7]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_advantages_of_any_float_dtype_are_computed_in_fp32(dtype):
    rewards = torch.tensor([0.5, 1.5, 0.25, 0.75], dtype=dtype)
    ours = group_relative(rewards, torch.tensor([0, 0, 1, 1]))
    assert ours.dtype == torch.float32
    assert ours.tolist() == group_relative(rewards.float(), torch.tensor([0, 0, 1, 1])).tolist()


PAIR, ONES = torch.tensor([0.0, 1.0]), torch.ones(1, 1, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: group_relative(PAIR, torch.tensor([0, 0]), eps=0.0), "above 0"),
        (lambda: group_relative(PAIR, torch.tensor([0, 0]), clip=0.0), "None for no clamp"),
        (lambda: group_relative(PAIR, torch.tensor([0, 0]), ddof=2), "0 .population. or 1"),
        (lambda: group_relative(PAIR, torch.tensor([0, 0]), scale="std"), "'group', 'batch' or 'none'"),
        (lambda: group_relative(PAIR, torch.tensor([0, 0]), baseline="median"), "'leave_one_out'"),
        (lambda: group_relative(torch.tensor([0.0, math.inf]), torch.tensor([0, 0])), "infinite"),
        (lambda: group_relative(PAIR, torch.tensor([0.0, 0.0])), "one integer id per row"),
        (lambda: group_relative(PAIR, torch.tensor([0])), "one integer id per row"),
        (lambda: best_of_group(PAIR, torch.tensor([0, 0]), keep=0), "keep 0"),
        (lambda: best_of_group(torch.tensor([math.inf, 0.2]), torch.tensor([0, 0])), "infinite rewards"),
        (lambda: exponential_weights(PAIR, torch.tensor([0, 0]), temperature=0.0), "temperature 0"),
        (lambda: exponential_weights(torch.tensor([math.inf, 0.2]), torch.tensor([0, 0])), "infinite rewards"),
        (lambda: gae(torch.zeros(1), torch.zeros(1, 1), ONES, gamma=1.1, lam=1.0), "both must be between 0 and 1"),
        (lambda: gae(torch.zeros(1), torch.zeros(1, 1), ONES, gamma=1.0, lam=-0.1), "both must be between 0 and 1"),
        (lambda: gae(torch.tensor([math.inf]), torch.zeros(1, 1), ONES, gamma=1.0, lam=1.0), "infinite rewards"),
        (lambda: loss_of(0.0, 0.0, 0.0, 0.0), "must be above 0"),
    ],
)
def test_invalid_options_rewards_and_groups_raise_with_the_valid_values(call, says):
    with pytest.raises(REFUSED, match=f"{says}|Type-check"):
        call()


# The weights of samples that a run imitates, against plain loops over groups

tied = st.integers(-4, 4).map(lambda n: n / 4)
rows_with_ties = st.lists(st.tuples(tied | st.just(NAN), st.integers(-1, 2)), min_size=1, max_size=20)


def groups_of(rewards, group):
    """The valid rewards of each group, and the rows that have them."""
    for number in set(group):
        members = [row for row, of in enumerate(group) if of == number and not math.isnan(rewards[row])]
        yield members, [rewards[row] for row in members]


def best_by_hand(rewards, group, keep):
    """Fill ``keep`` places from the best score down; those who tie for the last places share them."""
    weights = [0.0] * len(rewards)
    for members, scores in groups_of(rewards, group):
        if len(members) <= keep or len(set(scores)) == 1:
            continue
        places = float(keep)
        for score in sorted(set(scores), reverse=True):
            tied = [row for row in members if rewards[row] == score]
            for row in tied:
                weights[row] = min(places, len(tied)) / len(tied) * len(members) / keep
            places = max(0.0, places - len(tied))
    return torch.tensor(weights)


def exponential_by_hand(rewards, group, temperature, eps):
    weights = [0.0] * len(rewards)
    for members, scores in groups_of(rewards, group):
        if len(set(scores)) < 2:
            continue
        mean = math.fsum(scores) / len(scores)
        std = math.sqrt(math.fsum((score - mean) ** 2 for score in scores) / len(scores))
        powers = [math.exp((score - mean) / (std + eps) / temperature) for score in scores]
        for row, power in zip(members, powers, strict=True):
            weights[row] = len(members) * power / math.fsum(powers)
    return torch.tensor(weights)


@pytest.mark.parametrize("keep", [1, 2, 3])
@properties
@given(rows=rows_with_ties)
def test_best_of_group_equals_a_loop_over_sorted_groups(keep, rows):
    rewards, group = [r for r, _ in rows], [g for _, g in rows]
    ours = best_of_group(torch.tensor(rewards), torch.tensor(group), keep=keep)
    torch.testing.assert_close(ours, best_by_hand(rewards, group, keep), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@properties
@given(rows=rows_with_ties)
def test_exponential_weights_equal_a_loop_over_groups(temperature, rows):
    rewards, group = [r for r, _ in rows], [g for _, g in rows]
    ours = exponential_weights(torch.tensor(rewards), torch.tensor(group), temperature=temperature, eps=1e-3)
    torch.testing.assert_close(ours, exponential_by_hand(rewards, group, temperature, 1e-3), atol=1e-5, rtol=1e-5)


# Advantages from values against the published sum and closed forms; the value loss; explained variance

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


def test_whitened_advantages_have_mean_0_and_std_1_over_counted_actions():
    advantages = torch.tensor([[1.0, 2.0, 90.0], [4.0, -70.0, 5.0]])
    counted = torch.tensor([[True, True, False], [True, False, True]])
    found = whiten(advantages, counted, eps=1e-9)
    assert found[~counted].abs().max() == 0
    torch.testing.assert_close(found[counted], torch.tensor([-2.0, -1.0, 1.0, 2.0]) / math.sqrt(2.5))
    assert whiten(torch.full((2, 2), 0.1), torch.ones(2, 2, dtype=torch.bool)).abs().max() == 0
    assert whiten(advantages, torch.zeros_like(counted)).abs().max() == 0


def loss_of(value, old, returned, clip):
    values = torch.tensor([[value]], requires_grad=True)
    loss = clipped_value_loss(values, torch.tensor([[old]]), torch.tensor([[returned]]), clip=clip, mask=torch.ones(1, 1).bool())
    loss.sum().backward()
    return loss.item(), values.grad.item()


@given(value=number, old=number, returned=number, clip=st.sampled_from([None, 0.25, 1.0]))
def test_value_loss_is_half_the_squared_error_or_with_a_clip_the_larger_of_two(value, old, returned, clip):
    loss, slope = loss_of(value, old, returned, clip)
    if clip is None:
        assert (loss, slope) == (pytest.approx(0.5 * (value - returned) ** 2), pytest.approx(value - returned))
    else:
        held = old + max(-clip, min(clip, value - old))
        assert loss == pytest.approx(0.5 * max((value - returned) ** 2, (held - returned) ** 2))


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


def test_explained_variance_is_1_for_shifted_targets_0_for_a_constant_and_nan_for_equal_targets():
    targets, counted = torch.tensor([[1.0, 2.0], [4.0, 100.0]]), torch.tensor([[True, True], [True, False]])
    constant = torch.full_like(targets, 7.0)
    for values, expected in ((targets + 3, 1), (constant, 0), (2 * targets, 0), (-targets, -3), (0.5 * targets, 0.75)):
        assert explained_variance(targets, values, counted) == pytest.approx(expected)
    assert math.isnan(explained_variance(constant, constant, counted))
    assert math.isnan(explained_variance(constant, constant, torch.zeros_like(counted)))


def test_groups_are_identified_by_id_and_not_by_content():
    apart = group_relative(torch.tensor([0.0, 1.0, 10.0, 11.0]), torch.tensor([7, 7, -3, -3]))
    torch.testing.assert_close(apart, torch.tensor([-1.0, 1.0, -1.0, 1.0]), atol=1e-3, rtol=0)
    interleaved = group_relative(torch.tensor([0.0, 10.0, 1.0, 11.0]), torch.tensor([7, -3, 7, -3]))
    assert interleaved.tolist() == apart[[0, 2, 1, 3]].tolist()
    twice = group_relative(torch.tensor([0.0, 1.0, 2.0] * 2), torch.tensor([0, 0, 0, 1, 1, 1]), ddof=1)
    alone = group_relative(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0, 0, 0]), ddof=1)
    assert twice.tolist() == alone.tolist() * 2


@properties
@given(rows=rows, scale=st.sampled_from(["group", "batch", "none"]))
def test_missing_rewards_get_advantage_0_and_do_not_change_other_rows(rows, scale):
    rewards, group = torch.tensor([r for r, _ in rows]), torch.tensor([g for _, g in rows])
    valid = ~rewards.isnan()
    advantages = group_relative(rewards, group, scale=scale)
    assert (advantages[~valid] == 0).all()
    torch.testing.assert_close(advantages[valid], group_relative(rewards[valid], group[valid], scale=scale))


def test_low_temperature_keeps_the_best_sample_and_high_gives_equal_weights():
    rewards, group = torch.tensor([0.3, 0.1, 0.2, 0.8, 0.9]), torch.tensor([0, 0, 0, 1, 1])
    torch.testing.assert_close(exponential_weights(rewards, group, temperature=0.01), best_of_group(rewards, group))
    torch.testing.assert_close(exponential_weights(rewards, group, temperature=1e5), torch.ones(5), atol=1e-3, rtol=0)
