"""A policy to use, from a recipe (as it is before training) or from a run's folder (as it is after its newest checkpoint)."""

from collections.abc import Sequence
from pathlib import Path

from retouch.runs import checkpoint
from retouch.runs.assembly import Assembly, assemble
from retouch.runs.folder import RunFolder
from retouch.runs.quiet import quiet
from retouch.runs.ranks import join
from retouch.runs.recipe import Recipe, load, parse
from retouch.runs.recipe_overrides import apply
from retouch.runs.state import restore_weights


def open_target(target: str, overrides: Sequence[str] = ()) -> tuple[Assembly, int]:
    """The parts of a recipe or run, and the step whose weights they have (0: untrained)."""
    quiet()
    recipe, folder = _recipe(target, overrides)
    parts = assemble(recipe, join(recipe.device))
    found = None if folder is None else checkpoint.latest(folder.checkpoints)
    if folder is not None and found is None:
        raise ValueError(f"{folder.root} has no checkpoint yet; name its recipe to use the untrained policy")
    if found is None:
        return parts, 0
    state = checkpoint.load(found)
    restore_weights(parts, state)
    return parts, state.step


def _recipe(target: str, overrides: Sequence[str]) -> tuple[Recipe, RunFolder | None]:
    folder = RunFolder(Path(target))
    if folder.recipe.is_file():
        return parse(apply(folder.read_recipe()["recipe"], list(overrides))), folder
    return load(target, overrides), None
