"""Builds the phases of a run from its recipe: the tasks, the steps and the objective of each phase."""

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from retouch.data.base import DataContext, DataSets, DataSource
from retouch.data.requirements import RowRequirements
from retouch.data.sampler import (
    Drawable,
    Subset,
    UnindexedTasks,
    assign,
    further_tasks,
    global_rows,
    places_in_step,
    steps_for_passes,
    tasks_for_step,
)
from retouch.distributed.ranks import Ranks
from retouch.policies.weights import stale_copies
from retouch.protocols import AutoregressiveModel, DenoisingModel
from retouch.recipe.phases import ResolvedPhase
from retouch.recipe.recipe import Recipe
from retouch.recipe.reward_checks import rewards_of
from retouch.training.loop import Phase
from retouch.types import Batch, Task


def sets_of(
    recipe: Recipe, phases: Sequence[ResolvedPhase], *, size: tuple[int, int] | None, trains: bool = True
) -> list[DataSets]:
    """Return the tasks of each phase, built by ``build_sets``. Data that several phases share are read once."""
    read: list[tuple[DataSource, DataSets]] = []
    for phase in phases:
        if all(phase.data != data for data, _ in read):
            read.append((phase.data, build_sets(recipe, phase.data, size=size, trains=trains)))
    return [next(sets for data, sets in read if data == phase.data) for phase in phases]


def build_sets(recipe: Recipe, data: DataSource, *, size: tuple[int, int] | None, trains: bool = True) -> DataSets:
    """Build the training tasks of a data source and the held-out tasks of the run.

    ``size``: the (height, width) in px that the model works at, if fixed. ``trains``: False if the policy is only evaluated or
    used. Raises ValueError if rows are unusable, if no task is left, or if a known test set would be trained on.
    """
    given = recipe.eval
    return data.build(
        DataContext(
            seed=recipe.seed,
            size=size,
            eval_split=given.split,
            eval_tasks=given.tasks,
            eval_seed=given.seed,
            eval_source=recipe.eval_data(),
            required=required_rows(recipe, data),
            trains=trains,
        )
    )


def steps_of(phases: Sequence[ResolvedPhase], sets: Sequence[DataSets]) -> list[range]:
    """Return the range of the run's steps that each phase takes."""
    steps: list[range] = []
    for phase, data in zip(phases, sets, strict=True):
        length = phase.steps
        if length is None:
            assert phase.passes is not None
            if isinstance(data.train, UnindexedTasks):
                raise ValueError("passes: the number of rows of a stream is not known; give `steps` instead")
            length = steps_for_passes(phase.passes, size=max(1, len(data.train)), count=phase.tasks_per_step)
        start = steps[-1].stop if steps else 0
        steps.append(range(start, start + length))
    return steps


def required_rows(recipe: Recipe, data: DataSource) -> RowRequirements:
    """Return what the rows of ``data`` must contain: the images that the image model takes (any number if the renderer uses none),
    the text and the target image that the reward reads, and the pairs that an objective learns from."""
    model = recipe.image_model
    takes = model.takes if recipe.renderer is None or recipe.renderer.uses_sources else None
    return RowRequirements(
        images=(0, sys.maxsize) if takes is None else takes.images,
        mask=takes is not None and takes.mask,
        reference=recipe.policy.train.reads_reference,
        text=any(part.reads_text for _, part in rewards_of(recipe)),
        target=any(part.needs_target for _, part in rewards_of(recipe)),
        pairs=any(phase.objective.needs_pairs for phase in recipe.resolved_phases() if phase.data == data),
        model=model.kind,
        takes=str(takes),
    )


def build_phase(
    recipe: Recipe,
    phase: ResolvedPhase,
    *,
    steps: range,
    tasks: Drawable,
    ranks: Ranks,
    reward_range: tuple[float, float],
) -> Phase:
    """Build the phase that trains on ``tasks`` in ``steps`` of the run. ``reward_range``: the smallest and largest reward."""
    order = [
        row
        for rank in range(ranks.world)
        for row in global_rows(rows=phase.rows, minibatches=recipe.minibatches, rank=rank, world=ranks.world)
    ]

    count = phase.tasks_per_step
    share = {
        **{"group_size": phase.group_size, "minibatches": recipe.minibatches},
        **{"rank": ranks.rank, "world": ranks.world},
    }

    def batch(step: int) -> Batch:
        first = step - steps.start
        if isinstance(tasks, UnindexedTasks):
            drawn = tasks.at_step(first, count=count, places=places_in_step(count=count, **share))
        else:
            drawn = Subset(tasks, tasks_for_step(seed=recipe.seed, step=first, count=count, size=len(tasks)))
        return assign(seed=recipe.seed, step=step, tasks=drawn, **share)

    def further(step: int, turn: int) -> Sequence[Task]:
        assert not isinstance(tasks, UnindexedTasks), "refused below"
        drawn = further_tasks(seed=recipe.seed, step=step - steps.start, count=count, size=len(tasks), turn=turn)
        return Subset(tasks, drawn)

    source = None
    if phase.rollout.staleness and not phase.imitates:
        from retouch.training.staleness import collect_ahead

        source = partial(collect_ahead, staleness=phase.rollout.staleness, truncate_at=phase.rollout.truncate_at)
    if phase.rollout.refill is not None and not phase.imitates:
        from retouch.training.refill import collect_refilled

        if isinstance(tasks, UnindexedTasks):
            raise ValueError("rollout.refill: a stream has no further tasks for a step; remove it, or stream no data")
        source = partial(collect_refilled, rounds=phase.rollout.refill.rounds, further=further)
    objective = phase.objective
    entropy = recipe.policy.entropy
    return Phase(
        name=phase.name,
        steps=steps,
        objective=objective.build(entropy=entropy, value_head=None if phase.imitates else recipe.advantage.value_head),
        batch=batch,
        order=torch.tensor(order),
        group=torch.arange(phase.rows) // phase.group_size,
        advantage=None if phase.imitates else recipe.advantage,
        reward_range=reward_range,
        normalise=objective.loss_weights,
        max_length=phase.rollout.longest if objective.loss_weights == "dr_grpo" else None,
        epochs=recipe.epochs,
        minibatches=recipe.minibatches,
        learning_rate=recipe.optimizer.learning_rate(peak=phase.learning_rate, steps=steps),
        trained_kinds=lambda step: objective.trained_kinds(step - steps.start),
        source=source,
        demonstrate=objective.demonstrate,
    )


def copies_needed(recipe: Recipe) -> set[str]:
    """Return the names of the weight copies that the phases need besides the current weights."""
    needed = {"average"} if recipe.policy.ema is not None else set()
    if recipe.renderer is not None:
        needed |= recipe.renderer.weight_copies
    for phase in recipe.resolved_phases():
        needed |= phase.objective.weight_copies
    return needed | _stale_copies(recipe)


def copies_in_cpu_memory(recipe: Recipe) -> set[str]:
    """Return the names of the weight copies that are in CPU memory while they are not used.

    FSDP2 instead keeps all copies where the weights are.
    """
    reference = {"reference"} if recipe.devices is not None and recipe.devices.reference is not None else set()
    return _stale_copies(recipe) | reference


def _stale_copies(recipe: Recipe) -> set[str]:
    phases = recipe.resolved_phases()
    return {name for phase in phases if not phase.imitates for name in stale_copies(phase.rollout.staleness)}


def has_demonstration(model: DenoisingModel | AutoregressiveModel) -> Callable[[Task], bool]:
    """Return the function that says whether a task contains what the model imitates in supervised learning."""
    if isinstance(model, DenoisingModel):
        return _has_target
    from retouch.policies.autoregressive.demonstrations import TokenizesTargets, has_completion

    return _has_target if isinstance(model, TokenizesTargets) else has_completion


def _has_target(task: Task) -> bool:
    return task.target is not None
