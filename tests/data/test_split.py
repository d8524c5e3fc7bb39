"""Held-out rows: no source is on both sides, and added rows do not move other rows to the other side."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retouch.data.split import limit, split_by_source

sources = st.lists(st.integers(0, 30).map(str), min_size=1, max_size=80)
held_out = st.floats(0, 0.99) | st.integers(0, 40)


def split_or_none(names, **options):
    try:
        return split_by_source(names, **options)
    except ValueError:
        return None


@given(sources, held_out, st.integers(0, 5))
def test_train_and_held_out_rows_are_a_partition_that_shares_no_source(names, held_out, seed):
    split = split_or_none(names, held_out=held_out, seed=seed)
    if split is not None:
        assert sorted(split.train + split.held_out) == list(range(len(names)))
        assert not {names[row] for row in split.train} & {names[row] for row in split.held_out}
        assert split.train


@given(sources, sources, st.floats(0.01, 0.99), st.integers(0, 5))
def test_adding_rows_does_not_move_other_rows_if_held_out_is_a_fraction(names, more, share, seed):
    before, after = (split_or_none(rows, held_out=share, seed=seed) for rows in (names, names + more))
    if before is not None and after is not None:
        assert [row for row in after.held_out if row < len(names)] == list(before.held_out)


@given(sources, st.integers(1, 40), st.integers(0, 5))
def test_a_held_out_count_is_reached_and_exceeded_by_less_than_one_source(names, count, seed):
    split = split_or_none(names, held_out=count, seed=seed)
    if split is not None:
        assert len(split.held_out) >= count
        sizes = [names.count(source) for source in {names[row] for row in split.held_out}]
        assert len(split.held_out) - max(sizes) < count


def test_a_held_out_fraction_is_met_and_seeds_hold_out_independent_rows():
    names = [str(n) for n in range(20_000)]
    splits = [split_by_source(names, held_out=0.1, seed=seed) for seed in range(2)]
    for split in splits:
        assert abs(len(split.held_out) - 2000) < 5 * (20_000 * 0.1 * 0.9) ** 0.5
    both = set(splits[0].held_out) & set(splits[1].held_out)
    assert abs(len(both) - 200) < 5 * 200**0.5


def test_the_split_equals_stored_row_numbers():
    """If the split changed, a newer run would train on rows that an older run held out."""
    names = [f"images/{n}.png" for n in range(20)]
    assert split_by_source(names, held_out=0.2, seed=0).held_out == (1, 9, 11, 16)
    assert split_by_source(names, held_out=3, seed=0).held_out == (1, 9, 11)


def test_held_out_0_holds_out_no_rows():
    for nothing in (0, 0.0):
        assert split_by_source(["a", "b"], held_out=nothing, seed=0).held_out == ()


@pytest.mark.parametrize(
    ("names", "held_out", "message"),
    [
        (["a"] * 10, 0.5, "leaves nothing to"),
        (["a"] * 10, 3, "nothing to train on: the 10 rows have 1 different source images"),
        (["a", "b"], 1e-9, r"nothing to hold out.*; add rows, or hold out a number of rows in place of a share, as held_out: 1"),
        (["a", "b"], 2, "nothing to train on.*; to evaluate on every row without training, set held_out: 'all'"),
        (["a", "b"], 1.0, "must be a share from 0 to below 1, a number of rows, or 'all' to only evaluate"),
        (["a", "b"], -1, "must be a share"),
    ],
)
def test_invalid_held_out_values_and_empty_splits_raise(names, held_out, message):
    with pytest.raises(ValueError, match=message):
        split_by_source(names, held_out=held_out, seed=0)


@given(st.lists(st.integers(), unique=True, min_size=1, max_size=50), st.integers(1, 60), st.integers(0, 3))
def test_limit_keeps_the_order_and_a_smaller_limit_is_a_subset_of_a_larger_one(indices, n, seed):
    drawn = limit(indices, n=n, seed=seed)
    assert len(drawn) == min(n, len(indices))
    assert list(drawn) == [index for index in indices if index in set(drawn)]
    assert set(drawn) <= set(limit(indices, n=n + 1, seed=seed))


def test_limit_depends_on_the_seed_and_a_limit_of_0_raises():
    assert len({limit(range(100), n=10, seed=seed) for seed in range(5)}) == 5
    with pytest.raises(ValueError, match="at least 1"):
        limit([1, 2], n=0, seed=0)
