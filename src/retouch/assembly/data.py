"""The tasks of a run: each phase's data source builds its own, told what the rest of the recipe needs."""

import sys
from collections.abc import Sequence

from retouch.data.base import DataContext, DataSets, DataSource
from retouch.data.requirements import RowRequirements
from retouch.data.sampler import steps_for_passes
from retouch.models.ip_adapter.section import IpAdapter
from retouch.recipe.phases import ResolvedPhase
from retouch.recipe.recipe import Recipe
from retouch.recipe.reward_checks import rewards_of


def sets_of(recipe: Recipe, phases: Sequence[ResolvedPhase], *, size: tuple[int, int] | None) -> list[DataSets]:
    """The tasks of each phase, as ``build_sets`` makes them. Data that several phases share are read once."""
    read: list[tuple[DataSource, DataSets]] = []
    for phase in phases:
        if all(phase.data != data for data, _ in read):
            read.append((phase.data, build_sets(recipe, phase.data, size=size)))
    return [next(sets for data, sets in read if data == phase.data) for phase in phases]


def build_sets(recipe: Recipe, data: DataSource, *, size: tuple[int, int] | None) -> DataSets:
    """The tasks of a data source and the held-out tasks of the run. ``size``: (height, width) in px that the model works at, if
    fixed.

    Raises ValueError if rows are unusable, where no task is left, and where a known test set would be trained on.
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
            required=_required(recipe),
        )
    )


def steps_of(phases: Sequence[ResolvedPhase], sets: Sequence[DataSets]) -> list[range]:
    """The steps of the run that each phase takes."""
    steps: list[range] = []
    for phase, data in zip(phases, sets, strict=True):
        length = phase.steps
        if length is None:
            assert phase.passes is not None
            length = steps_for_passes(phase.passes, size=len(data.train), count=phase.tasks_per_step)
        start = steps[-1].stop if steps else 0
        steps.append(range(start, start + length))
    return steps


def _required(recipe: Recipe) -> RowRequirements:
    """What the image model takes (a writer of prompts needs no images), and the text that the reward reads."""
    model = recipe.image_model
    takes = model.takes if recipe.renderer is None or recipe.renderer.uses_sources else None
    return RowRequirements(
        images=(0, sys.maxsize) if takes is None else takes.images,
        mask=takes is not None and takes.mask,
        reference=isinstance(recipe.policy.train, IpAdapter),
        text=any(part.reads_text for _, part in rewards_of(recipe)),
        model=model.kind,
        takes=str(takes),
    )
