"""``retouch doctor RECIPE --rehearse``: rehearses a step, prints the report, and suggests changes that make a recipe fit."""

import sys
import time
import traceback
from collections.abc import Sequence
from typing import TextIO

from retouch.config.imports import is_user_error
from retouch.data.examination import available_cpus
from retouch.recipe.recipe import Recipe, parse
from retouch_plan.rehearsal.changes import LEAST_GAIN, changes
from retouch_plan.rehearsal.counting.machines import DEFAULT_GPU, Machine, find_machine
from retouch_plan.rehearsal.parallel import quiet
from retouch_plan.rehearsal.report import error_line, fits, lines, peak, stage_peak
from retouch_plan.rehearsal.step import Rehearsed, rehearse

ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""The errors that a step may raise because of wrong shapes, devices or dtypes."""
MOST_CHANGES = 6


def run_rehearsal(recipe: Recipe, *, machine: str | None, world: int | None, out: TextIO, full_depth: bool = False) -> int:
    """Rehearse a recipe's step and print the report. Returns the exit code: 0 if the step runs and fits, otherwise 1.

    ``machine``: a GPU's name, or the path of a profile; None: an H100. ``world``: the number of ranks; None: the recipe's.
    ``full_depth``: run all blocks of the models. Raises ValueError for an unknown machine.
    """
    quiet()
    target = find_machine(machine or DEFAULT_GPU)
    started = time.perf_counter()
    try:
        found = rehearse(recipe, target, world=world, full_depth=full_depth, processes=available_cpus())
    except ERRORS as error:
        out.write("FAILED rehearsal: {}\n  fix: {}\n".format(*explained(error)))
        return 1
    for line in lines(found, target):
        out.write(line + "\n")
    out.write(f"rehearsed in {time.perf_counter() - started:.0f} s\n")
    if fits(found, target):
        return 0
    suggested = smallest_changes(recipe, target, found, world=world)
    if suggested is None:
        out.write("no change that was tried makes the recipe fit; use a GPU with more memory, or shard over more ranks\n")
    else:
        settings, size = suggested
        out.write(f"it fits with {size / 1e9:.2f} GB after: {' '.join(f'--set {each}' for each in settings)}\n")
    return 1


def explained(error: Exception) -> tuple[str, str]:
    """Return the text of an error that a rehearsal raised, and what to do about it.

    Only a message that this package wrote for the user speaks of the recipe. The traceback of another error is printed.
    """
    if is_user_error(error):
        return str(error), "correct the recipe as the message says"
    traceback.print_exception(error, file=sys.stderr)
    return error_line(error), (
        "the recipe is not the cause: report this error of Retouch with the traceback above, or correct your own class if it is "
        "there; --no-rehearsal skips the rehearsal"
    )


def smallest_changes(
    recipe: Recipe, machine: Machine, found: Rehearsed, *, world: int | None, allow_imports: Sequence[str] = ()
) -> tuple[tuple[str, ...], int] | None:
    """Return ``--set`` changes with which the recipe fits, and its peak with them in bytes; None if no changes were found.

    Changes are added one at a time: the first change whose rehearsal lowers the peak of the stage with the largest peak. Changes
    that are not needed after later ones are dropped. ``allow_imports``: see ``parse``.
    """

    def tried(options: Sequence[str]) -> Rehearsed | None:
        try:
            changed = parse(recipe.document(), options, allow_imports=allow_imports)
            return rehearse(changed, machine, world=world, processes=available_cpus())
        except ERRORS:
            return None  # for example, the smaller chunk does not divide the groups

    settings: tuple[str, ...] = ()
    for _ in range(MOST_CHANGES):
        current = parse(recipe.document(), settings, allow_imports=allow_imports)
        stage = max(found.stages, key=lambda name: stage_peak(found, name))
        held = max(found.stages[stage].held.values(), key=lambda each: each.total())
        for change in changes(current, stage, held=held, world=world or recipe.ranks or 1):
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
