"""Which rows a step and a rank get: properties for all sizes, and the messages of `check_arithmetic`."""

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retouch.data.sampler import assign, check_arithmetic, global_rows, steps_for_passes, tasks_for_step
from retouch.types import Task

small = st.integers(1, 6)


def tasks(count: int) -> list[Task]:
    return [Task(id=str(n), instruction=f"task {n}") for n in range(count)]


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 50), st.integers(1, 20))
def test_every_pass_has_every_row_once(seed, size, count, passes):
    steps = -(-passes * size // count)
    drawn = [row for step in range(steps) for row in tasks_for_step(seed=seed, step=step, count=count, size=size)]
    for turn in range(passes):
        assert sorted(drawn[turn * size : (turn + 1) * size]) == list(range(size))


def test_passes_and_seeds_differ_in_order():
    orders = {tuple(tasks_for_step(seed=seed, step=turn, count=30, size=30)) for seed in range(3) for turn in range(3)}
    assert len(orders) == 9


def test_the_rows_of_a_step_do_not_depend_on_earlier_calls():
    forward = [tasks_for_step(seed=5, step=step, count=7, size=11) for step in range(9)]
    backward = [tasks_for_step(seed=5, step=step, count=7, size=11) for step in reversed(range(9))]
    assert forward == backward[::-1]


def test_the_tasks_of_a_step_equal_stored_values():
    """Another order would change every run that resumes."""
    assert tasks_for_step(seed=0, step=0, count=4, size=10) == [3, 4, 1, 9]
    assert tasks_for_step(seed=0, step=2, count=4, size=10) == [7, 2, 8, 3]


def test_rows_that_a_small_data_set_repeats_in_a_step_are_separate_groups():
    rows = tasks_for_step(seed=0, step=0, count=5, size=2)
    assert len(rows) == 5
    assert {2, 3} == set(Counter(rows).values())
    batch = assign(seed=0, step=0, tasks=[tasks(2)[row] for row in rows], group_size=2, minibatches=1, rank=0, world=1)
    assert batch.group_ids == (0, 1, 2, 3, 4)


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


def rows_of(batch) -> list[tuple[int, int]]:
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


@given(small, small, small, small)
def test_groups_are_not_split_if_the_tasks_of_a_minibatch_divide_over_ranks(per_rank, group_size, minibatches, world):
    count = per_rank * minibatches * world
    for rank in range(world):
        batch = assign(seed=0, step=0, tasks=tasks(count), group_size=group_size, minibatches=minibatches, rank=rank, world=world)
        rows = rows_of(batch)
        groups = [group for group, _ in rows[::group_size]]
        assert rows == [(group, slot) for group in groups for slot in range(group_size)]
        assert len(set(groups)) == len(groups)


def test_a_group_can_span_ranks():
    batch = assign(seed=0, step=0, tasks=tasks(2), group_size=8, minibatches=1, rank=1, world=8)
    assert rows_of(batch) == [(0, 2), (0, 3)]
    assert [task.id for task in batch.tasks] == ["0"]


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
