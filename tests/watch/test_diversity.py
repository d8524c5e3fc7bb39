"""Diversity within groups, against a direct computation of the distance of every pair."""

import itertools
import math

import numpy as np
import pytest
import torch
from PIL import Image

from retouch.distributed.ranks import Ranks
from retouch.run.watch import group_diversity
from retouch.types import Batch, Task
from tiny_loop import run_on_threads


def batch(groups, slots):
    tasks = tuple(Task(f"t{group}", "") for group in sorted(set(groups)))
    place = {group: number for number, group in enumerate(sorted(set(groups)))}
    return Batch(
        seed=0,
        step=0,
        tasks=tasks,
        group_ids=tuple(sorted(set(groups))),
        group=tuple(place[group] for group in groups),
        slot=tuple(slots),
    )


def picture(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8))


GROUPS, SLOTS = (0, 0, 0, 1, 1, 1, 1), (0, 1, 2, 0, 1, 2, 3)
PICTURES = [picture(seed) for seed in range(7)]


def pairs(pictures, groups):
    """The root mean square over all pairs within groups."""
    found = []
    for (one, left), (other, right) in itertools.combinations(zip(groups, pictures, strict=True), 2):
        if one == other and left is not None and right is not None:
            apart = (np.asarray(left, dtype=float) - np.asarray(right, dtype=float)) / 255
            found.append((apart**2).mean())
    return math.sqrt(np.mean(found))


def test_group_diversity_equals_the_rms_distance_of_pairs_within_groups():
    assert group_diversity(batch(GROUPS, SLOTS), PICTURES, Ranks()) == pytest.approx(pairs(PICTURES, GROUPS), rel=1e-9)
    holed = [None, *PICTURES[1:5], None, PICTURES[6]]
    assert group_diversity(batch(GROUPS, SLOTS), holed, Ranks()) == pytest.approx(pairs(holed, GROUPS), rel=1e-9)


def test_group_diversity_is_0_for_equal_images_and_nan_without_pairs():
    assert group_diversity(batch(GROUPS, SLOTS), [PICTURES[0]] * 7, Ranks()) == pytest.approx(0, abs=1e-7)
    assert math.isnan(group_diversity(batch(GROUPS, SLOTS), [None] * 7, Ranks()))
    assert math.isnan(group_diversity(batch((0, 1), (0, 0)), PICTURES[:2], Ranks()))


def test_group_diversity_of_groups_that_span_ranks_matches_one_rank():
    def one(ranks):
        rows = slice(0, 4) if ranks.rank == 0 else slice(4, 7)
        return group_diversity(batch(GROUPS[rows], SLOTS[rows]), PICTURES[rows], ranks)

    found = run_on_threads(2, one)
    assert found[0] == found[1] == pytest.approx(pairs(PICTURES, GROUPS), rel=1e-9)
    assert torch.get_default_dtype() == torch.float32
