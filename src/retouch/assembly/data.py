"""Tasks to train on and tasks to be judged on, from what a recipe says of its data."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeAlias, runtime_checkable

from jaxtyping import Int
from PIL.Image import Image
from torch import Tensor

from retouch.config.packaged import shipped
from retouch.data.check import accept
from retouch.data.fitting import FittingRows
from retouch.data.guard import refuse_test_sets
from retouch.data.images import Exact, Resize
from retouch.data.problems import Problem
from retouch.data.rows import Rows, sources
from retouch.data.sampler import steps_for_passes
from retouch.data.sources.complex_edit import read_complex_edit
from retouch.data.sources.folder import read_folder
from retouch.data.sources.hub import read_hub
from retouch.data.sources.prompts import read_prompts
from retouch.data.sources.tokens import DecodedTasks, TokenRows, mixed
from retouch.data.sources.triplets import TripletRows
from retouch.data.split import limit, split_by_source
from retouch.data.tasks import Subset, Tasks
from retouch.playground.world.changed import Changed
from retouch.playground.world.indirect import indirect
from retouch.playground.world.paintings import PaintingTasks
from retouch.playground.world.tasks import PlaygroundTasks
from retouch.playground.world.thoughts import thinking
from retouch.playground.world.unfinished import unfinished
from retouch.playground.world.words import WordTasks
from retouch.recipe.data import (
    ComplexEditData,
    Data,
    DrawnData,
    FolderData,
    HubData,
    IndirectPlaygroundData,
    PaintingData,
    PlaygroundData,
    PromptData,
    TokenData,
    TripletData,
    WordData,
)
from retouch.recipe.ip_adapter import IpAdapter
from retouch.recipe.phases import ResolvedPhase
from retouch.recipe.recipe import Recipe
from retouch.recipe.renderer import PromptRenderer
from retouch.recipe.reward_classes import parts_of_all
from retouch.recipe.reward_local import OcrReward
from retouch.types import Task

Stored: TypeAlias = FolderData | HubData | ComplexEditData | TripletData | PromptData


@runtime_checkable
class GridModel(Protocol):
    """A model whose pictures are grids of codes."""

    grid: tuple[int, int]
    codebook_size: int

    def decode_codes(self, codes: Int[Tensor, "r h w"]) -> list[Image]: ...


@dataclass(frozen=True)
class Sets:
    """``train`` and ``heldout`` share no source picture. ``test_sets``: known test sets that the recipe allows training on.

    ``problems``: what was found while reading, of rows that were left out too. ``tokens``: the files, where tasks bring tokens.
    """

    train: Sequence[Task]
    heldout: Sequence[Task]
    test_sets: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()
    tokens: TokenRows | None = None


def sets_of(recipe: Recipe, phases: Sequence[ResolvedPhase], *, size: tuple[int, int] | None) -> list[Sets]:
    """The sets of each phase. Data that phases share are read once, and what was wrong with them is said once."""
    read: list[tuple[Data, Sets]] = []
    for phase in phases:
        if all(phase.data != data for data, _ in read):
            read.append((phase.data, build_sets(recipe, phase.data, size=size)))
    return [next(sets for data, sets in read if data == phase.data) for phase in phases]


def build_sets(recipe: Recipe, data: Data, *, size: tuple[int, int] | None) -> Sets:
    """The tasks of a phase's data and the held-out ones of the run. ``size``: (height, width) that the model works at, if fixed.

    ValueError where rows cannot be used, where nothing is left, or where a known test set would be trained on.
    """
    if isinstance(data, DrawnData):
        asked = recipe.eval_data()
        assert isinstance(asked, DrawnData)
        train, heldout = playground_tasks(data), playground_tasks(asked, in_turn=True)
        refused = refuse_test_sets(["playground"], split=data.split, allow_test_sets=data.allow_test_sets)
        return Sets(train, heldout, tuple(str(test) for test in refused))
    if isinstance(data, TokenData):
        return _token_sets(recipe, data)
    split_name = data.split if isinstance(data, HubData | ComplexEditData) else None
    refused = refuse_test_sets([data.path], split=split_name, allow_test_sets=data.allow_test_sets)
    rows = _fitting(read_rows(data, seed=recipe.seed), recipe)
    on_bad_row = "refuse" if isinstance(data, PromptData) else data.on_bad_row
    good, found = accept(rows, on_bad_row=on_bad_row)
    split = split_by_source(sources(rows, good), held_out=data.held_out, seed=recipe.seed)
    train_rows, heldout_rows = ([good[k] for k in side] for side in (split.train, split.held_out))
    if data.limit is not None:
        train_rows = list(limit(train_rows, n=data.limit, seed=recipe.seed))
    if recipe.eval.split == "train":
        heldout_rows = train_rows
    if len(heldout_rows) > recipe.eval.tasks:
        heldout_rows = list(limit(heldout_rows, n=recipe.eval.tasks, seed=recipe.eval.seed))
    tasks = Tasks(rows, resize=_resize(data, size))
    allowed = tuple(str(test) for test in refused)
    return Sets(Subset(tasks, train_rows), Subset(tasks, heldout_rows), allowed, tuple(found))


def _fitting(rows: Rows, recipe: Recipe) -> Rows:
    """Rows are bad without what the image model is given (what a writer of prompts is shown is its own affair), or without what the
    reward reads."""
    model = recipe.image_model
    takes = None if isinstance(recipe.renderer, PromptRenderer) else model.takes
    shown = isinstance(recipe.policy.train, IpAdapter)
    reads = any(isinstance(part, OcrReward) for _, _, part in parts_of_all(recipe))
    pictures, mask = ((0, sys.maxsize), False) if takes is None else (takes.images, takes.mask)
    return FittingRows(rows, pictures=pictures, mask=mask, reference=shown, text=reads, model=model.kind, takes=str(takes))


def _token_sets(recipe: Recipe, data: TokenData) -> Sets:
    """Rows are split, and what is judged is taken out of what trains, before any is multiplied."""
    refused = refuse_test_sets(data.lists, allow_test_sets=data.allow_test_sets)
    rows = TokenRows([*data.lists, *data.validation_lists], trusted=data.trusted)
    good, found = accept(rows, on_bad_row=data.on_bad_row)
    place = dict(zip(good, sources(rows, good), strict=True))
    parts = [[index for index in part if index in place] for part in rows.parts]
    training, judged = parts[: len(data.lists)], parts[len(data.lists) :]
    if judged:
        pictures = {place[index] for part in judged for index in part}
        kept = [[index for index in part if place[index] not in pictures] for part in training]
        if lost := sum(map(len, training)) - sum(map(len, kept)):
            found.append(Problem(data.lists[0], 0, f"{lost} rows share a source picture with what is judged: left out", "note"))
        heldout = mixed(judged, data.validation_coefficients, seed=recipe.eval.seed)
    else:
        every = [index for part in training for index in part]
        split = split_by_source([place[index] for index in every], held_out=data.held_out, seed=recipe.seed)
        heldout = [every[k] for k in split.held_out]
        away = set(heldout)
        kept = [[index for index in part if index not in away] for part in training]
    train = mixed(kept, data.coefficients, seed=recipe.seed)
    if not train:
        raise ValueError("data: nothing is left to train on; give more rows, or larger coefficients")
    if data.limit is not None:
        train = list(limit(train, n=data.limit, seed=recipe.seed))
    if len(heldout) > recipe.eval.tasks:
        heldout = list(limit(heldout, n=recipe.eval.tasks, seed=recipe.eval.seed))
    tasks = Tasks(rows, resize=None)
    allowed = tuple(str(test) for test in refused)
    return Sets(Subset(tasks, train), Subset(tasks, heldout), allowed, tuple(found), rows)


def with_pictures(sets: Sets, model: object) -> Sets:
    """The same, whose tasks have the pictures that the model makes of the tokens they bring. ValueError where it cannot."""
    if sets.tokens is None:
        return sets
    if not isinstance(model, GridModel):
        raise ValueError(f"data.kind: tokens are for a model that writes pictures as tokens, which {type(model).__name__} does not")
    rows = range(len(sets.tokens))
    sets.tokens.require([row for row in rows if sets.tokens.known(row)], grid=model.grid, codes=model.codebook_size)
    return replace(sets, train=DecodedTasks(sets.train, model.decode_codes), heldout=DecodedTasks(sets.heldout, model.decode_codes))


def steps_of(phases: Sequence[ResolvedPhase], sets: Sequence[Sets]) -> list[range]:
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


def playground_tasks(data: DrawnData, *, in_turn: bool = False) -> Sequence[Task]:
    """``in_turn``: complexities of equal weights are taken in turn, so that the set holds equally many of each."""
    if isinstance(data, WordData):
        return WordTasks(seed=data.seed, count=data.count, split=data.split, slips=data.slips, apart=data.apart)
    assert isinstance(data, PlaygroundData | PaintingData)
    complexity = _in_turn(data.complexity) if in_turn else data.complexity
    if isinstance(data, PaintingData):
        return PaintingTasks(seed=data.seed, count=data.count, complexity=complexity, split=data.split, lazy=data.lazy)
    tasks = PlaygroundTasks(
        seed=data.seed, count=data.count, complexity=complexity, split=data.split, filler=data.filler, vain=data.vain
    )
    if isinstance(data, IndirectPlaygroundData):
        return Changed(tasks, partial(indirect, lazy=data.lazy))
    shown = Changed(tasks, partial(unfinished, share=data.unfinished)) if data.unfinished else tasks
    return Changed(shown, thinking) if data.thought else shown


def read_rows(data: Stored, *, seed: int) -> Rows:
    match data:
        case FolderData():
            return read_folder(data.path, columns=data.columns)
        case HubData():
            return read_hub(data.path, split=data.split, config=data.config, revision=data.revision, columns=data.columns)
        case ComplexEditData():
            return read_complex_edit(data.path, complexity=data.complexity, split=data.split, revision=data.revision)
        case TripletData():
            return TripletRows(data.path, reference=data.reference, seed=seed)
        case PromptData():
            return read_prompts(shipped(data.path))


def _resize(data: Stored, size: tuple[int, int] | None) -> Resize | None:
    wanted = size if isinstance(data, PromptData) or data.size is None else data.size
    return None if wanted is None else Exact(width=wanted[1], height=wanted[0])


def _in_turn(mixture: dict[int, float]) -> Sequence[int] | dict[int, float]:
    kept = {level: weight for level, weight in mixture.items() if weight > 0}
    return sorted(kept) if len({round(weight / math.fsum(kept.values()), 9) for weight in kept.values()}) == 1 else kept
