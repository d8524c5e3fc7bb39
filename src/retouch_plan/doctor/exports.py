"""Finds the run that will train weights that do not exist yet because it was not exported, and a base model of their size."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retouch.config.packaged import available, short_name
from retouch.recipe.recipe import Recipe, load, parse
from retouch.records.folder import RunFolder

EXPORT = "exported"
"""The folder that ``retouch export RUN --to RUN/exported`` writes, as the recipes name it."""


@dataclass(frozen=True, slots=True)
class FutureWeights:
    """Weights that a recipe names and that do not exist yet.

    ``base``: folder or Hugging Face id of a model of the same size; None if it is not known. ``text``: what is missing. ``fix``:
    the command that makes the weights, or an option of ``retouch doctor``; empty if they can be downloaded.
    """

    base: str | None
    text: str
    fix: str

    def substituted(self, recipe: Recipe) -> Recipe | None:
        """The recipe with the base in place of the weights; None if no base is known."""
        return None if self.base is None else parse(recipe.document(), [f"policy.model.path={self.base}"])


def future_weights(path: str, *, base: str | None = None, absent: bool = False) -> FutureWeights:
    """Describe the weights of ``policy.model.path``, which do not exist yet.

    ``absent``: the path has the form of a Hugging Face id; unless it is in the folder of a run, the weights exist elsewhere.

    The base is ``base`` if it is given; else, if ``path`` is in the folder of a run, the model that the run starts from; else, if
    ``path`` has the form RUN/exported, the model that the packaged recipe with the name of the run starts from.
    """
    run = _run(Path(path))
    if run is None and absent:
        reason, start, fix = "", None, ""
    elif run is None:
        reason, start, fix = "", None, "--base MODEL" if base is None else "train the model that this recipe starts from"
    elif RunFolder(run).recipe.exists():
        reason, start = f": the run {run} has not been exported", _start(RunFolder(run).read_recipe()["recipe"])
        fix = shlex.join(["retouch", "export", str(run), "--to", str(run / EXPORT)])
    else:
        reason, start, fix = f": there is no run {run}", None, "train and export that run, or give --base MODEL for its size"
        if (made := _maker(run.name)) is not None:
            name, recipe = made
            start, ranks = _start(recipe.document()), recipe.ranks or 1
            fix = shlex.join(["retouch", "launch", "--nproc", str(ranks), name] if ranks > 1 else ["retouch", "train", name])
    found = base or start
    rehearsed = "" if found is None else f". A step is rehearsed with a model of its size, {found}"
    elsewhere = f"the weights of {path} are not on this machine: they will be downloaded when training starts"
    return FutureWeights(found, f"{f'{path} does not exist yet{reason}' if fix else elsewhere}{rehearsed}", fix)


def _run(path: Path) -> Path | None:
    """The folder of the run that will be exported to ``path``."""
    for folder in path.parents:
        if RunFolder(folder).recipe.exists():
            return folder
    places = [place for place in (path, *path.parents) if place.name == EXPORT]
    return places[0].parent if places else None


def _maker(run: str) -> tuple[str, Recipe] | None:
    """The packaged recipe of this name, with its short name; None if there is none, or if it cannot be read."""
    for name in map(short_name, available()):
        if name.rpartition("/")[2] == run:
            try:
                return name, load(name)
            except ValueError:  # an environment variable that it reads is not set
                return None
    return None


def _start(document: Any) -> str | None:
    """Folder or Hugging Face id of the model that a recipe starts from. The recipe is not parsed: it may name classes to import."""
    path = document["policy"]["model"].get("path")
    return path if isinstance(path, str) else None
