"""``retouch doctor RECIPE --rehearse``: rehearses a step, prints the report, and suggests changes that make a recipe fit."""

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import TextIO

from retouch.recipe.policy import AutoregressivePolicyKeys, DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe, parse
from retouch.records.libraries import silence_libraries
from retouch.rehearsal.machines import Machine, find_machine
from retouch.rehearsal.report import error_line, fits, lines, peak, stage_peak
from retouch.rehearsal.step import Rehearsed, rehearse

DEFAULT = "h100"
ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""The errors that a step may raise because of wrong shapes, devices or dtypes."""
MOST_CHANGES = 6
_FEWEST_LOGITS = 32
LEAST_GAIN = 0.01
"""A change is kept if it lowers the peak of its stage by at least this fraction."""


def run_rehearsal(recipe: Recipe, *, machine: str | None, world: int | None, out: TextIO, full_depth: bool = False) -> int:
    """Rehearse a recipe's step and print the report. Returns the exit code: 0 if the step runs and fits, otherwise 1.

    ``machine``: a GPU's name, or the path of a profile; None: an H100. ``world``: the number of ranks; None: the recipe's.
    ``full_depth``: run all blocks of the models. Raises ValueError for an unknown machine.
    """
    silence_libraries()
    warnings.filterwarnings("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    target = find_machine(machine or DEFAULT)
    started = time.perf_counter()
    try:
        found = rehearse(recipe, target, world=world, full_depth=full_depth)
    except ERRORS as error:
        out.write(f"FAILED rehearsal: {error_line(error)}\n")
        return 1
    for line in lines(found, target):
        out.write(line + "\n")
    out.write(f"rehearsed in {time.perf_counter() - started:.0f} s\n")
    if fits(found, target):
        return 0
    changes = smallest_changes(recipe, target, found, world=world)
    if changes is None:
        out.write("no change that was tried makes the recipe fit; use a GPU with more memory, or shard over more ranks\n")
    else:
        settings, size = changes
        out.write(f"it fits with {size / 1e9:.2f} GB after: {' '.join(f'--set {each}' for each in settings)}\n")
    return 1


def smallest_changes(
    recipe: Recipe, machine: Machine, found: Rehearsed, *, world: int | None, allow_imports: Sequence[str] = ()
) -> tuple[tuple[str, ...], int] | None:
    """Return ``--set`` changes with which the recipe fits, and its peak with them in bytes; None if no changes were found.

    Changes are added one at a time: the first change whose rehearsal lowers the peak of the stage with the largest peak. Changes
    that are not needed after later ones are dropped. ``allow_imports``: see ``parse``.
    """

    def tried(changes: Sequence[str]) -> Rehearsed | None:
        try:
            return rehearse(parse(recipe.document(), changes, allow_imports=allow_imports), machine, world=world)
        except ERRORS:
            return None  # for example, the smaller chunk does not divide the groups

    settings: tuple[str, ...] = ()
    for _ in range(MOST_CHANGES):
        current = parse(recipe.document(), settings, allow_imports=allow_imports)
        stage = max(found.stages, key=lambda name: stage_peak(found, name))
        for change in _changes(current, stage, world=world or recipe.ranks or 1):
            changed = (*(each for each in settings if each.partition("=")[0] != change.partition("=")[0]), change)
            after = tried(changed)
            if after is None:
                continue
            if fits(after, machine):
                for each in changed[:-1]:
                    fewer = tuple(kept for kept in changed if kept != each)
                    found_fewer = tried(fewer)
                    if found_fewer is not None and fits(found_fewer, machine):
                        changed, after = fewer, found_fewer
                return changed, peak(after)
            if stage_peak(after, stage) <= (1 - LEAST_GAIN) * stage_peak(found, stage):
                settings, found = changed, after
                break
        else:
            return None
    return None


def _changes(recipe: Recipe, stage: str, *, world: int) -> Iterator[str]:
    """Yield changes that may lower the peak of a stage, the cheapest first."""
    kind = stage.rpartition(": ")[2]
    samples, trains = kind in ("rollout", "render"), kind not in ("rollout", "render", "evaluation")
    chunk = [f"rollout.chunk={recipe.rollout.chunk // 2}"] if recipe.phases is None and recipe.rollout.chunk > 1 else []
    if kind in ("render", "evaluation"):
        for key in ("batch", "encoder_batch"):
            value = getattr(recipe.renderer, key, 1)
            if value > 1:
                yield f"renderer.{key}={value // 2}"
    if samples:
        yield from chunk
    if kind == "evaluation" and recipe.eval.batch > 1:
        yield f"eval.batch={recipe.eval.batch // 2}"
    if not recipe.policy.gradient_checkpointing and trains:
        yield "policy.gradient_checkpointing=true"
    if recipe.microbatch > 1:
        yield f"microbatch={recipe.microbatch // 2}"
    if trains and isinstance(recipe.policy, AutoregressivePolicyKeys) and recipe.policy.logits_at_once > _FEWEST_LOGITS:
        yield f"policy.logits_at_once={recipe.policy.logits_at_once // 2}"
    if kind == "preflight":
        yield from chunk  # a preflight has a rollout and an update
    if recipe.renderer is not None and recipe.renderer.image_model is not None and not (recipe.devices and recipe.devices.offload):
        yield "devices.offload=true"
    if world > 1 and recipe.sharding != "fsdp2" and isinstance(recipe.policy, DenoisingPolicyKeys):
        yield "sharding=fsdp2"
    if world > 1 and recipe.sharding == "fsdp2" and (recipe.devices is None or recipe.devices.weights is None):
        yield "devices.weights=cpu"
