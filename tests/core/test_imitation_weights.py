"""The weights of samples that a run imitates, against plain loops over groups."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retouch.core.advantages import best_of_group, exponential_weights

NAN = math.nan
properties = settings(deadline=None, max_examples=60, derandomize=True)
reward = st.integers(-4, 4).map(lambda n: n / 4)
rows = st.lists(st.tuples(reward | st.just(NAN), st.integers(-1, 2)), min_size=1, max_size=20)


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
@given(rows=rows)
def test_best_of_group_equals_a_loop_over_sorted_groups(keep, rows):
    rewards, group = [r for r, _ in rows], [g for _, g in rows]
    ours = best_of_group(torch.tensor(rewards), torch.tensor(group), keep=keep)
    torch.testing.assert_close(ours, best_by_hand(rewards, group, keep), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 5.0])
@properties
@given(rows=rows)
def test_exponential_weights_equal_a_loop_over_groups(temperature, rows):
    rewards, group = [r for r, _ in rows], [g for _, g in rows]
    ours = exponential_weights(torch.tensor(rewards), torch.tensor(group), temperature=temperature, eps=1e-3)
    torch.testing.assert_close(ours, exponential_by_hand(rewards, group, temperature, 1e-3), atol=1e-5, rtol=1e-5)


def test_invalid_keep_or_temperature_and_infinite_rewards_raise():
    rewards, group = torch.tensor([0.1, 0.2]), torch.tensor([0, 0])
    with pytest.raises(ValueError, match="keep 0"):
        best_of_group(rewards, group, keep=0)
    with pytest.raises(ValueError, match="temperature 0"):
        exponential_weights(rewards, group, temperature=0.0)
    for weigh in (best_of_group, exponential_weights):
        with pytest.raises(ValueError, match="infinite rewards"):
            weigh(torch.tensor([math.inf, 0.2]), group)
