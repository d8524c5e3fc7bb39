"""Which tasks a step has, and which of their samples a rank makes. Pure functions of the step: to resume needs no state.

A step's global order of rows is task by task: row ``i * group_size + s`` is sample ``s`` of the step's task ``i``. It is cut into
``minibatches`` equal contiguous parts, and each part into equal contiguous shares, one a rank. So every number of ranks sees the
same minibatches. Groups may span ranks, and stay whole where a part's tasks divide over them.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from retouch.core.random import generator
from retouch.types import Batch, Task


def tasks_for_step(*, seed: int, step: int, count: int, size: int) -> list[int]:
    """The ``count`` row numbers (of ``size``) that are the tasks of a step, counted from 0.

    The data set is passed over again and again without replacement, pass k in an order keyed by (seed, k). A step at the end of
    a pass goes on into the next, so it may hold one row twice; these are two groups.
    """
    import torch

    if size < 1 or count < 1:
        raise ValueError(f"{count} tasks a step from {size} rows: both must be at least 1")
    first = step * count
    rows: list[int] = []
    for turn in range(first // size, (first + count - 1) // size + 1):
        order = torch.randperm(size, generator=generator(seed, "tasks", turn))
        start = turn * size
        rows += order[max(first - start, 0) : first + count - start].tolist()
    return rows


def steps_for_passes(passes: float, *, size: int, count: int) -> int:
    """The steps of ``count`` tasks that ``passes`` over ``size`` rows take, rounded up."""
    if passes <= 0:
        raise ValueError(f"{passes} passes over the data must be above 0")
    return math.ceil(Fraction(str(passes)) * size / count)  # by its digits: 0.07 * 100 is above 7 in binary


def global_rows(*, rows: int, minibatches: int, rank: int, world: int) -> list[int]:
    """The numbers, in the step's global order of ``rows``, of this rank's rows, in the rank's own order (part after part).

    Minibatch m is this rank's m-th part of ``rows // (minibatches * world)`` rows.
    """
    assert rows % (minibatches * world) == 0, "check_arithmetic comes before"
    part = rows // minibatches
    share = part // world
    return [m * part + rank * share + i for m in range(minibatches) for i in range(share)]


def assign(*, seed: int, step: int, tasks: Sequence[Task], group_size: int, minibatches: int, rank: int, world: int) -> Batch:
    """This rank's rows of a step whose tasks are ``tasks``. Only the tasks that the rank acts on are loaded."""
    mine = global_rows(rows=len(tasks) * group_size, minibatches=minibatches, rank=rank, world=world)
    groups = sorted({row // group_size for row in mine})
    place = {group: k for k, group in enumerate(groups)}
    return Batch(
        seed=seed,
        step=step,
        tasks=tuple(tasks[group] for group in groups),
        group_ids=tuple(groups),
        group=tuple(place[row // group_size] for row in mine),
        slot=tuple(row % group_size for row in mine),
    )


def check_arithmetic(*, tasks_per_step: int, group_size: int, minibatches: int, world: int, microbatch: int | None = None) -> None:
    """ValueError, naming legal values nearby, where a step's rows do not divide over minibatches and ranks.

    ``microbatch``: the rows of one forward, of a rank's share of a minibatch; it must divide the share or hold all of it.
    """
    given = {"tasks_per_step": tasks_per_step, "group_size": group_size, "minibatches": minibatches, "world": world}
    if microbatch is not None:
        given["microbatch"] = microbatch
    for name, value in given.items():
        if value < 1:
            raise ValueError(f"{name} is {value}; use at least 1")
    rows, parts = tasks_per_step * group_size, minibatches * world
    if rows % parts:
        tasks = _multiples(parts // math.gcd(parts, group_size), tasks_per_step)
        groups = _multiples(parts // math.gcd(parts, tasks_per_step), group_size)
        fewer = [str(m) for m in range(1, minibatches + 1) if rows % (m * world) == 0]
        alone = f", or minibatches {' or '.join(fewer)}" if fewer else ""
        raise ValueError(
            f"tasks_per_step * group_size = {rows} rows do not divide over {_count(world, 'rank', 's')} in "
            f"{_count(minibatches, 'minibatch', 'es')}: use tasks_per_step {tasks}, or group_size {groups}{alone}"
        )
    share = rows // parts
    if microbatch is not None and microbatch < share and share % microbatch:
        legal = sorted((d for d in range(1, share + 1) if share % d == 0), key=lambda d: abs(d - microbatch))[:3]
        raise ValueError(
            f"a microbatch of {microbatch} rows does not divide a rank's {share} rows of a minibatch: "
            f"use {' or '.join(str(d) for d in sorted(legal))}"
        )


def _multiples(unit: int, near: int) -> str:
    """Three multiples of ``unit``, from the last that is not above ``near``."""
    first = max(near // unit, 1)
    return f"{first * unit}, {(first + 1) * unit} or {(first + 2) * unit}"


def _count(number: int, noun: str, plural: str) -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
