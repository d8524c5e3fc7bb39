"""Held-out rows: no source is on both sides, and added rows do not move other rows to the other side."""

import json
import random

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from retouch.data.base import DataContext
from retouch.data.sources.folder import FolderData
from retouch.data.sources.hub import HubData
from retouch.data.sources.stream import IterableData
from retouch.data.sources.table import TableData
from retouch.data.split import grouped, limit, split_by_source

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


def image(number: int) -> Image.Image:
    return Image.frombytes("RGB", (16, 12), random.Random(number).randbytes(16 * 12 * 3))


def contents(tasks) -> list[set[bytes]]:
    """The pixels of the images of each task, except its mask."""
    images = [(*task.images, task.target, task.reference, task.chosen, task.rejected) for task in tasks]
    return [{each.tobytes() for each in row if each is not None} for row in images]


# Rows in which two rows have an image in common; a number stands for an image.
SHARING = {
    "the same source image": [{"image": n // 2} for n in range(24)],
    "two sources, in both orders": [{"image": [n // 2 * 2 + n % 2, n // 2 * 2 + 1 - n % 2]} for n in range(24)],
    "edits in turns": [{"image": n, "target": n + 1} if n % 2 == 0 else {"image": n} for n in range(24)],
    "a target of two sources": [{"image": n, "target": 100 + n // 2} for n in range(24)],
    "a style reference": [{"image": n, "reference": 100 + n // 3} for n in range(24)],
    "a rejected image of two pairs": [{"image": n, "chosen": 100 + n, "rejected": 200 + n // 2} for n in range(24)],
    "sources of one's own that differ": [{"image": n // 2, "source": f"photo {n}"} for n in range(24)],
}


@pytest.mark.parametrize("case", SHARING)
@pytest.mark.parametrize("kind", ["table", "folder", "hub"])
def test_point_1_7_rows_that_share_any_image_are_on_one_side_of_the_split(case, kind, tmp_path):
    def stored(value, name):
        if isinstance(value, list):
            return [stored(each, f"{name}-{place}") for place, each in enumerate(value)]
        if not isinstance(value, int) or kind != "folder":
            return value if isinstance(value, str) else image(value)
        # Equal images under different names, and compressed differently.
        image(value).save(tmp_path / f"{name}.png", compress_level=1 + len(name) % 9)
        return f"{name}.png"

    rows = [
        {"prompt": f"edit {n}", **{field: stored(value, f"{field}-{n}") for field, value in row.items()}}
        for n, row in enumerate(SHARING[case])
    ]
    if kind == "table":
        data = TableData.of(rows, held_out=6)
    elif kind == "folder":
        (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = FolderData(path=str(tmp_path), held_out=6)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
        columns = {"instruction": "prompt", "image": "image"}
        data = HubData(path=str(tmp_path / "saved"), columns=columns, held_out=6)
    sets = data.build(DataContext(eval_tasks=1000))
    trained = set().union(*contents(sets.train))
    assert len(sets.heldout) >= 6
    assert len(sets.train) + len(sets.heldout) == 24
    assert not [row for row in contents(sets.heldout) if row & trained]


def test_point_1_7_a_stream_leaves_out_rows_with_a_target_of_a_held_out_row():
    rows = [{"prompt": f"edit {n}", "image": image(n), "target": image(100 + n % 5)} for n in range(20)]
    stream = datasets.Dataset.from_list(rows).to_iterable_dataset()
    sets = IterableData.of(stream, held_out=3, ahead=0).build(DataContext())
    away = set().union(*contents(sets.heldout))
    trained = [task for step in range(4) for task in sets.train.at_step(step, count=4, places=range(4))]
    assert len(sets.heldout) == 3
    assert not [row for row in contents(trained) if row & away]


@given(st.lists(st.tuples(st.integers(0, 9), st.lists(st.integers(0, 12), max_size=3)), max_size=30))
def test_grouped_rows_have_one_source_if_and_only_if_shared_keys_connect_them(rows):
    found = grouped([str(source) for source, _ in rows], [[str(key) for key in keys] for _, keys in rows])
    links = [{("source", source), *(("key", key) for key in keys)} for source, keys in rows]
    for start in range(len(rows)):
        reached, grown = set(links[start]), True
        while grown:
            more = reached.union(*(each for each in links if each & reached))
            grown, reached = more != reached, more
        assert [found[other] == found[start] for other in range(len(rows))] == [bool(each & reached) for each in links]
