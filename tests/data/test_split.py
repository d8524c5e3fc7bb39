"""Held-out rows, of which no source is on both sides; which rows a step and a rank get, and the messages of `check_arithmetic`."""

import json
import random
import re

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from retouch.data.base import DataContext
from retouch.data.sources.folder import FolderData
from retouch.data.sources.hub import HubData, TableData
from retouch.data.sources.stream import IterableData
from retouch.data.tasks import (
    assign,
    check_arithmetic,
    global_rows,
    grouped,
    limit,
    split_by_source,
    steps_for_passes,
    tasks_for_step,
)
from retouch.types import Task

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
        if isinstance(held_out, int) and held_out:  # a count is exceeded by less than one source
            assert len(split.held_out) >= held_out
            sizes = [names.count(source) for source in {names[row] for row in split.held_out}]
            assert len(split.held_out) - max(sizes) < held_out


def test_the_split_the_limit_and_the_tasks_of_a_step_equal_stored_values():
    """With another split, a newer run would train on rows that an older run held out; another order would change every run that
    resumes."""
    names = [f"images/{n}.png" for n in range(20)]
    assert split_by_source(names, held_out=0.2, seed=0).held_out == (1, 9, 11, 16)
    assert split_by_source(names, held_out=3, seed=0).held_out == (1, 9, 11)
    assert tasks_for_step(seed=0, step=0, count=4, size=10) == [3, 4, 1, 9]
    assert tasks_for_step(seed=0, step=2, count=4, size=10) == [7, 2, 8, 3]
    assert tasks_for_step(seed=1, step=0, count=4, size=10) != [3, 4, 1, 9]
    assert limit(range(100), n=10, seed=0) != limit(range(100), n=10, seed=1)
    with pytest.raises(ValueError, match="at least 1"):
        limit([1, 2], n=0, seed=0)


def test_invalid_held_out_values_and_empty_splits_raise():
    for names, held_out, message in (
        (["a"] * 10, 0.5, "leaves nothing to"),
        (["a"] * 10, 3, "nothing to train on: the 10 rows have 1 different source images"),
        (["a", "b"], 1e-9, r"nothing to hold out.*; add rows, or hold out a number of rows in place of a share, as held_out: 1"),
        (["a", "b"], 2, "nothing to train on.*; to evaluate on every row without training, set held_out: 'all'"),
        (["a", "b"], 1.0, "must be a share from 0 to below 1, a number of rows, or 'all' to only evaluate"),
        (["a", "b"], -1, "must be a share"),
    ):
        with pytest.raises(ValueError, match=message):
            split_by_source(names, held_out=held_out, seed=0)


@given(st.lists(st.integers(), unique=True, min_size=1, max_size=50), st.integers(1, 60), st.integers(0, 3))
def test_limit_keeps_the_order_and_a_smaller_limit_is_a_subset_of_a_larger_one(indices, n, seed):
    drawn = limit(indices, n=n, seed=seed)
    assert len(drawn) == min(n, len(indices))
    assert list(drawn) == [index for index in indices if index in set(drawn)]
    assert set(drawn) <= set(limit(indices, n=n + 1, seed=seed))


def image(number):
    return Image.frombytes("RGB", (16, 12), random.Random(number).randbytes(16 * 12 * 3))


def contents(tasks):
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


small = st.integers(1, 6)


def tasks(count):
    return [Task(id=str(n), instruction=f"task {n}") for n in range(count)]


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 50), st.integers(1, 20))
def test_every_pass_has_every_row_once(seed, size, count, passes):
    steps = -(-passes * size // count)
    drawn = [row for step in range(steps) for row in tasks_for_step(seed=seed, step=step, count=count, size=size)]
    for turn in range(passes):
        assert sorted(drawn[turn * size : (turn + 1) * size]) == list(range(size))


def test_steps_for_passes_rounds_up_in_decimal_arithmetic():
    assert steps_for_passes(1, size=10, count=4) == 3
    assert steps_for_passes(2, size=10, count=4) == 5
    assert steps_for_passes(0.07, size=100, count=1) == 7  # 0.07 * 100 > 7 in binary
    assert steps_for_passes(1e-3, size=10, count=4) == 1
    with pytest.raises(ValueError, match="passes"):
        steps_for_passes(0, size=10, count=4)


@st.composite
def steps(draw):
    """(tasks_per_step, group_size, minibatches, world) that divide."""
    minibatches, world, group_size = draw(small), draw(small), draw(small)
    count = draw(st.integers(1, 60).filter(lambda count: count * group_size % (minibatches * world) == 0))
    return count, group_size, minibatches, world


def rows_of(batch):
    return [(batch.group_ids[group], slot) for group, slot in zip(batch.group, batch.slot, strict=True)]


@given(steps())
def test_the_ranks_together_have_every_row_once(step):
    count, group_size, minibatches, world = step
    batches = [
        assign(seed=1, step=2, tasks=tasks(count), group_size=group_size, minibatches=minibatches, rank=rank, world=world)
        for rank in range(world)
    ]
    rows = [row for batch in batches for row in rows_of(batch)]
    assert sorted(rows) == [(group, slot) for group in range(count) for slot in range(group_size)]
    for rank, batch in enumerate(batches):
        assert len(batch) == count * group_size // world
        assert [task.id for task in batch.tasks] == [str(group) for group in batch.group_ids]
        assert set(batch.group) == set(range(len(batch.tasks)))  # every task of the rank has a row on this rank
        numbers = global_rows(rows=count * group_size, minibatches=minibatches, rank=rank, world=world)
        assert [group * group_size + slot for group, slot in rows_of(batch)] == numbers


@given(steps())
def test_minibatches_are_the_same_for_every_number_of_ranks(step):
    count, group_size, minibatches, world = step
    total = count * group_size
    alone = global_rows(rows=total, minibatches=minibatches, rank=0, world=1)
    part, share = total // minibatches, total // minibatches // world
    for m in range(minibatches):
        together = [
            row
            for rank in range(world)
            for row in global_rows(rows=total, minibatches=minibatches, rank=rank, world=world)[m * share : (m + 1) * share]
        ]
        assert together == alone[m * part : (m + 1) * part]


def test_only_the_ranks_own_tasks_are_loaded():
    asked = []

    class TrackedTasks(list):
        def __getitem__(self, index):
            asked.append(index)
            return super().__getitem__(index)

    assign(seed=0, step=0, tasks=TrackedTasks(tasks(8)), group_size=4, minibatches=2, rank=1, world=2)
    assert asked == [2, 3, 6, 7]


@given(st.integers(1, 40), small, small, small)
def test_check_arithmetic_rejects_indivisible_sizes_and_suggests_valid_ones(count, group_size, minibatches, world):
    fixed = {"minibatches": minibatches, "world": world}
    if count * group_size % (minibatches * world) == 0:
        check_arithmetic(tasks_per_step=count, group_size=group_size, **fixed)
        return
    with pytest.raises(ValueError, match="do not divide") as refused:
        check_arithmetic(tasks_per_step=count, group_size=group_size, **fixed)
    advice = str(refused.value).split("use ")[1].replace(" or ", ", ").replace(",,", ",").split(", ")
    name = ""
    legal = {"tasks_per_step": [], "group_size": [], "minibatches": []}
    for word in (word for part in advice for word in part.split()):
        name = word if word in legal else name
        legal[name] += [int(word)] if word.isdigit() else []
    assert len(legal["tasks_per_step"]) == len(legal["group_size"]) == 3
    for name, values in legal.items():
        for value in values:
            check_arithmetic(**{"tasks_per_step": count, "group_size": group_size, **fixed, name: value})


def test_check_arithmetic_raises_with_the_expected_messages():
    whole = (
        "tasks_per_step * group_size = 30 rows do not divide over 4 ranks in 1 minibatch: "
        "use tasks_per_step 4, 8 or 12, or group_size 4, 6 or 8"
    )
    with pytest.raises(ValueError, match=f"^{re.escape(whole)}$"):
        check_arithmetic(tasks_per_step=6, group_size=5, minibatches=1, world=4)
    with pytest.raises(ValueError, match=r"over 2 ranks in 4 minibatches: .*, or minibatches 1 or 3"):
        check_arithmetic(tasks_per_step=6, group_size=3, minibatches=4, world=2)
    with pytest.raises(ValueError, match="group_size is 0"):
        check_arithmetic(tasks_per_step=6, group_size=0, minibatches=2, world=1)
