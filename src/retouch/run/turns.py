"""Editing in several turns: each turn edits the image that the row has made in the turn before, and learns from its own return."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor

from retouch.core.advantages import turn_returns
from retouch.policies.rollout import EditingTurns
from retouch.protocols import Renderer
from retouch.rewards.judging import ScoredBatch
from retouch.run.step import PendingRollout, Run, chunks_of
from retouch.types import Batch, Sample, Task, Trajectory


@dataclass(frozen=True, slots=True, eq=False)
class PlayedTurn:
    """A turn of the rows of a batch. ``rows``: each with the task of this turn and its own source image. ``there``: the rows whose
    task has this turn; the others repeat their last turn for nothing, so that all ranks make equally many images."""

    rows: Batch
    trajectory: Trajectory
    images: Sequence[Image | None]
    there: Sequence[int]


def require_turns(tasks: Sequence[Task], *, most: int) -> None:
    """Raise ValueError if a task has no turns, or more than ``most``."""
    for task in tasks:
        if not 1 <= len(task.turns) <= most:
            raise ValueError(
                f"rollout.turns: task {task.id} has {len(task.turns)} turns, and 1 to {most} are needed; add a column `later` to "
                "your rows (data.turns on the playground), change rollout.turns.most, or remove rollout.turns and eval.turns"
            )


def play(act: Callable[[Batch], Any], renderer: Renderer, batch: Batch, *, most: int) -> Iterator[PlayedTurn]:
    """Yield the turns of the rows. ``act``: samples a batch. ``most``: the largest number of turns. Raises like ``require_turns``.

    The turn after one without an image edits the source image of that turn. Noise is keyed by the number of the task and the turn.
    """
    own = [batch.tasks[k] for k in batch.group]
    require_turns(own, most=most)
    sources = [task.images[0] if task.images else None for task in own]
    for turn in range(most):
        asked = [task.turns[min(turn, len(task.turns) - 1)] for task in own]
        rows = replace(
            batch,
            tasks=tuple(task if source is None else task.of_image(source) for task, source in zip(asked, sources, strict=True)),
            group_ids=tuple(batch.group_ids[k] * most + turn for k in batch.group),
            group=tuple(range(len(batch))),
        )
        made = act(rows)
        images = renderer(rows.tasks, made)
        yield PlayedTurn(rows, made, images, [row for row, task in enumerate(own) if turn < len(task.turns)])
        sources = [source if image is None else image for image, source in zip(images, sources, strict=True)]


def last_images(turns: Sequence[PlayedTurn]) -> list[Image | None]:
    """The image of the last turn of each row's task."""
    found = {row: turn.images[row] for turn in turns for row in turn.there}
    return [found[row] for row in sorted(found)]


def in_order(keys: Sequence[tuple[int, int]], *, most: int, minibatches: int) -> list[tuple[int, int]]:
    """The turns of all rows of a rank, as (row, turn). ``keys``: the (task, slot) of each row, minibatch after minibatch.

    A minibatch has all turns of its rows, and the samples of a turn of a task follow each other.
    """
    share = len(keys) // minibatches
    every = ((row, turn) for row in range(len(keys)) for turn in range(most))
    return sorted(every, key=lambda at: (at[0] // share, keys[at[0]][0], at[1], keys[at[0]][1]))


def begin_episodes(run: Run, batch: Batch, *, section: EditingTurns, minibatches: int) -> PendingRollout:
    """Play the episodes of these rows, and start scoring: each turn by its own task, and the last images by the whole tasks.

    The result has a row for each turn, in the order of ``in_order``. Turns that a task does not have are not scored or trained.
    """
    most, parts, pending = section.most, list[PlayedTurn](), []
    made, scored = list[tuple[int, int]](), list[tuple[int, int]]()  # (row, turn); turn ``most`` is the whole episode
    for chunk in chunks_of(batch, run.chunk):
        first, turns = len(made) // most, list[PlayedTurn]()
        with run.clock("rollout"):
            for turn in play(run.policy.rollout, run.renderer, chunk, most=most):
                made += [(first + row, len(turns)) for row in range(len(chunk))]
                scored += [(first + row, len(turns)) for row in turn.there]
                if turn.there:
                    samples = [Sample(turn.rows.tasks[row], turn.images[row]) for row in turn.there]
                    pending.append(run.judge(turn.rows.take(turn.there), samples))
                turns.append(turn)
        scored += [(first + row, most) for row in range(len(chunk))]
        whole = replace(chunk, group_ids=tuple(-1 - number for number in chunk.group_ids))  # the ledger needs other numbers
        tasks = (chunk.tasks[k] for k in chunk.group)
        pending.append(run.judge(whole, [Sample(*each) for each in zip(tasks, last_images(turns), strict=True)]))
        parts += turns
    keys = [(batch.group_ids[k], slot) for k, slot in zip(batch.group, batch.slot, strict=True)]
    order, places = in_order(keys, most=most, minibatches=minibatches), {at: place for place, at in enumerate(made)}
    index = [places[at] for at in order]
    lengths, (of, at) = torch.tensor([len(batch.tasks[k].turns) for k in batch.group]), torch.tensor(order).unbind(1)
    there = at < lengths[of]
    trajectory = type(parts[0].trajectory).concat([part.trajectory for part in parts])
    trajectory = trajectory.take(torch.tensor(index, device=trajectory.mask.device))
    asked = [task for part in parts for task in part.rows.tasks]
    images = [image for part in parts for image in part.images]
    images = [images[place] if exists else None for place, exists in zip(index, there.tolist(), strict=True)]

    def credit(judged: ScoredBatch) -> ScoredBatch:
        """The scores of the rows, with their returns as rewards, and the columns ``turn_1``, ..., ``episode``."""

        def table(column: Tensor) -> Tensor:  # (rows, turns and the whole)
            found = column.new_full((len(lengths), most + 1), math.nan)
            found[torch.tensor(scored).unbind(1)] = column
            return found

        rewards, scores = table(judged.rewards), {name: table(column)[of, at] for name, column in judged.scores.items()}
        returns = turn_returns(rewards[:, :-1], rewards[:, -1], lengths, discount=section.discount, end=section.end)
        scores |= {f"turn_{number + 1}": rewards[of, at].masked_fill(at != number, math.nan) for number in range(most)}
        scores["episode"] = rewards[of, -1].masked_fill(at != 0, math.nan)
        faults = sum(image is None for image, exists in zip(images, there.tolist(), strict=True) if exists)
        return ScoredBatch(scores, returns[of, at], faults, judged.last_fault, there)

    rows = replace(
        batch,
        tasks=tuple(asked[place] for place in index),
        group_ids=tuple(keys[row][0] * most + turn for row, turn in order),
        group=tuple(range(len(order))),
        slot=tuple(keys[row][1] for row, _ in order),
    )
    masked = replace(trajectory, mask=trajectory.mask & there.to(trajectory.mask.device)[:, None])
    return PendingRollout(rows, masked, images, pending, credit=credit)
