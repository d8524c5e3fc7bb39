"""Chooses the sizes of batches, and what saves memory, so that a step fits into a GPU: by dry runs, before anything is loaded."""

import logging
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from retouch.data.checks import available_cpus
from retouch.models.base import DiffusersModel, PretrainedLanguageModel
from retouch.recipe.document import value_of
from retouch.recipe.recipe import Recipe, parse
from retouch_plan.dry_run import dry_run, in_own_process
from retouch_plan.estimate import ERRORS, error_line, fits, smallest_changes
from retouch_plan.machines import FREE_SHARE, Machine
from retouch_plan.system import check_device, machine_of

_log = logging.getLogger("retouch")
MOST_MICROBATCH, MOST_CHUNK = 16, 64
"""Larger batches are not faster on any GPU that was measured: these fill it."""


def fit_device(recipe: Recipe, device: str, *, allow_imports: Sequence[str] = ()) -> dict[str, Any]:
    """The keys with which a step of the recipe fits into a GPU, and their values; empty if no dry run of its model is possible.

    ``device``: a GPU's name, a GPU of this machine, or the file of a measured profile. ``allow_imports``: see ``parse``. Raises
    ValueError for an unknown device.
    """
    target, finding = check_device(device, device=None, weights_here=True)
    if target is None:
        raise ValueError(finding.text)
    if not all(isinstance(model, DiffusersModel | PretrainedLanguageModel) for model in (recipe.policy.model, recipe.image_model)):
        return {}
    sys.stderr.write(
        f"choosing sizes of batches for {target.name}, by dry runs of a step; set microbatch and rollout.chunk to skip it\n"
    )
    sys.stderr.flush()
    return in_own_process(fit, recipe, machine_of(target, device), allow_imports)


def fit(recipe: Recipe, machine: Machine, allow_imports: Sequence[str] = ()) -> dict[str, Any]:
    """The keys with which a step of the recipe fits into the memory of ``machine``, and their values.

    The peak of a stage is the largest of several quantities that are affine in the rows computed at once, so it is convex in them,
    and a line between two dry runs is never below it. If not even one row fits, what saves memory is added first, the cheapest in
    time first. Empty if no dry run is possible.
    """
    rows = recipe.tasks_per_step * recipe.group_size
    most = {True: min(MOST_MICROBATCH, rows), False: min(MOST_CHUNK, rows)}
    saving: tuple[str, ...] = ()

    def sized(microbatch: int, chunk: int) -> Recipe:
        sizes = [f"{key}={value}" for key, value in _sizes(recipe, microbatch, chunk).items()]
        return parse(recipe.document(), [*sizes, *saving], allow_imports=allow_imports)

    tried = partial(dry_run, machine=machine, world=1, processes=available_cpus())
    try:
        least = tried(sized(1, 1))
        if not fits(least, machine):
            found = smallest_changes(sized(1, 1), machine, least, world=1, allow_imports=allow_imports)
            saving = () if found is None else found[0]
            least = tried(sized(1, 1))
        more = tried(sized(most[True], most[False]))
    except ERRORS as error:
        _log.warning(
            "the sizes of batches are not chosen by the device's memory, because the dry run failed: %s", error_line(error)
        )
        return {}
    free = (1 - FREE_SHARE) * machine.memory - sum(weights.total() for weights in least.rewards.values())

    def largest(update: bool) -> int:
        """The largest power of two with which the stages with gradient, or those without, fit."""
        made = 1
        while 2 * made <= most[update] and all(
            stage.peak + (more.stages[name].peak - stage.peak) * (2 * made - 1) / (most[update] - 1) <= free
            for name, stage in least.stages.items()
            if (name.rpartition(": ")[2] in ("preflight", "update", "encode")) == update
        ):
            made *= 2
        return made

    microbatch = largest(True)
    sizes = _sizes(recipe, microbatch, max(microbatch, largest(False)))
    return {**sizes, **{key: value_of(text) for key, _, text in (change.partition("=") for change in saving)}}


def _sizes(recipe: Recipe, microbatch: int, chunk: int) -> dict[str, Any]:
    sizes = {"microbatch": microbatch, "rollout.chunk": chunk, "eval.batch": chunk}
    return sizes | ({"renderer.batch": chunk} if hasattr(recipe.renderer, "batch") else {})
