"""Advantages against a plain loop over groups, and properties that every advantage must have."""

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from retouch.core.advantages import batch_relative, group_relative, zero_std_groups

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


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 11])
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


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"eps": 0.0}, "above 0"),
        ({"clip": 0.0}, "None for no clamp"),
        ({"ddof": 2}, "0 .population. or 1"),
        ({"scale": "std"}, "'group', 'batch' or 'none'"),
        ({"baseline": "median"}, "'leave_one_out'"),
    ],
)
def test_invalid_options_raise_with_the_valid_values(change, says):
    with pytest.raises(REFUSED, match=f"{says}|Type-check"):
        group_relative(torch.tensor([0.0, 1.0]), torch.tensor([0, 0]), **change)


def test_bad_rewards_and_groups_are_refused():
    with pytest.raises(ValueError, match="infinite"):
        group_relative(torch.tensor([0.0, math.inf]), torch.tensor([0, 0]))
    with pytest.raises(REFUSED, match=r"one integer id per row|Type-check"):
        group_relative(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0]))
    with pytest.raises(REFUSED, match=r"one integer id per row|Type-check"):
        group_relative(torch.tensor([0.0, 1.0]), torch.tensor([0]))
