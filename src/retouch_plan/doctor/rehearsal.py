"""Memory, time and cost of a run, from a rehearsal of its step at full size (``retouch_plan.rehearsal``)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from retouch.config.imports import spawning
from retouch.data.examination import available_cpus
from retouch.distributed.placement import gpus_per_rank
from retouch.models.base import DiffusersModel
from retouch.models.language import PretrainedLanguageModel
from retouch.recipe.derived_facts import Calls
from retouch.recipe.keys import Devices
from retouch.recipe.recipe import Recipe
from retouch_plan.doctor.estimate import cost_of, ranks_of, time_of
from retouch_plan.doctor.findings import Finding, failed, gigabytes, note, ok
from retouch_plan.doctor.forecast import forecast_of
from retouch_plan.rehearsal.command import ERRORS, explained, smallest_changes
from retouch_plan.rehearsal.counting import machines
from retouch_plan.rehearsal.counting.machines import MACHINES, Machine
from retouch_plan.rehearsal.loading import UnknownConfiguration
from retouch_plan.rehearsal.parallel import quiet
from retouch_plan.rehearsal.report import fits, holders, hours, largest, needed, seconds, step_work
from retouch_plan.rehearsal.rewards import uncounted_rewards
from retouch_plan.rehearsal.step import Rehearsed, rehearse


def check_rehearsal(
    recipe: Recipe, machine: Machine, *, world: int, timed: bool, price: float | None, calls: Sequence[Calls]
) -> tuple[list[Finding], int | None]:
    """Rehearse the recipe's step as one of ``world`` ranks on ``machine``.

    Returns the findings about memory and, if ``timed``, about time and cost of the run; and the bytes of a checkpoint, which are
    None if the step could not be rehearsed. ``price``: dollars per hour of one GPU. ``calls``: the calls to all judges.

    This takes 15 to 74 s of CPU time for the recipes of this repository. It uses a process of its own: a rehearsal adds a fake
    device, and autograd knows only the devices that existed at the first backward pass of a process, such as the one of the trial
    step.
    """
    for section in (recipe.policy.model, recipe.image_model):
        if not isinstance(section, DiffusersModel | PretrainedLanguageModel):
            return [note("memory", f"not known: {section.source} is no model of this package, so it cannot be rehearsed")], None
    sys.stderr.write("rehearsing one step at full size, to find its memory and time; --no-rehearsal skips this\n")
    sys.stderr.flush()
    given = {"world": world, "timed": timed, "price": price, "calls": calls}
    with spawning() as context, ProcessPoolExecutor(1, mp_context=context) as process:
        return process.submit(_rehearsed, recipe, machine, given).result()


def _rehearsed(recipe: Recipe, machine: Machine, given: Mapping[str, Any]) -> tuple[list[Finding], int | None]:
    quiet()
    try:
        found = rehearse(recipe, machine, world=given["world"], processes=available_cpus())
    except UnknownConfiguration as error:
        return [note("memory", f"not known: {error}")], None
    except ERRORS as error:
        text, fix = explained(error)
        return [failed("rehearsal", text, fix=fix)], None
    return list(_findings(recipe, machine, found, **given)), found.checkpoint


def _findings(
    recipe: Recipe, machine: Machine, found: Rehearsed, *, world: int, timed: bool, price: float | None, calls: Sequence[Calls]
) -> Iterator[Finding]:
    yield memory_of(recipe, machine, found, world=world)
    if unknown := uncounted_rewards(recipe):
        yield note("memory", f"not counted, because their configuration is not known: the reward models {', '.join(unknown)}")
    if not timed:
        return
    yield time_of(found, machine)
    gpus = found.world * gpus_per_rank(recipe.devices or Devices())
    yield cost_of(hours(found, machine), gpus=gpus, price=price, calls=calls)
    last = seconds(step_work(found, len(found.phases) - 1), machine) / 3600
    yield forecast_of(recipe, last, ranks_of(found, machine))


def memory_of(recipe: Recipe, machine: Machine, found: Rehearsed, *, world: int) -> Finding:
    """Whether the rehearsed step and the weights of the reward models fit into the memory of ``machine``.

    If they do not, further rehearsals search for the settings with which they fit.
    """
    name, place, size = largest(found)
    on_each = f" on each of {world} ranks" if world > 1 else ""
    held = [f"  {each / 1e9:8.2f} GB  {holder}" for holder, each in holders(found, name, place)]
    text = f"{gigabytes(size)} of the {gigabytes(machine.memory)} of {machine.name}{on_each}, in {name}"
    lines = "\n".join([*held, *_other_devices(found, place), f"CPU memory of each rank: {gigabytes(found.host_peak)}"])
    if fits(found, machine):
        return ok("memory", f"needs {text}:\n{lines}")
    sys.stderr.write("the step does not fit; searching for settings with which it fits\n")
    sys.stderr.flush()
    changes = smallest_changes(recipe, machine, found, world=world)
    larger = [each for each in MACHINES.values() if machines.fits(size, each.memory)]
    fix = f"--device {min(larger, key=lambda each: each.memory).name}" if larger else "use more ranks, and sharding fsdp2"
    if changes is not None:
        fix = " ".join(f"--set {each}" for each in changes[0])
    return failed("memory", f"does not fit: needs {text}, and a tenth must stay free:\n{lines}", fix=fix)


def _other_devices(found: Rehearsed, largest_place: int) -> Iterator[str]:
    """The needs of the devices of this rank besides the one that needs most."""
    places = {place for stage in found.stages.values() for place in stage.peaks} | set(found.rewards)
    for place in sorted(places - {largest_place}):
        yield f"cuda:{place}: needs {gigabytes(needed(found, place))}"
