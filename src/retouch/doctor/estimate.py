"""Time and cost of a run: hours on a kind of GPU, from a rehearsal of its step at full size, their price, and paid judge calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from retouch.data.examination import available_cpus
from retouch.distributed.placement import gpus_per_rank
from retouch.doctor.findings import Finding, duration, failed, gigabytes, note, ok
from retouch.doctor.forecast import forecast_of
from retouch.doctor.memory import FREE
from retouch.recipe.derived.judge_calls import Calls
from retouch.recipe.devices import Devices
from retouch.recipe.recipe import Recipe
from retouch.rehearsal.command import ERRORS, smallest_changes
from retouch.rehearsal.machines import Machine
from retouch.rehearsal.parallel import quiet
from retouch.rehearsal.report import error_line, fits, hours, peak, seconds, step_work
from retouch.rehearsal.step import Rehearsed, rehearse


def check_estimate(
    recipe: Recipe, machine: Machine, *, world: int, price: float | None, calls: Sequence[Calls], planned_to_fit: bool
) -> list[Finding]:
    """Rehearse the recipe's step as one of ``world`` ranks on ``machine``; report time and cost of the run, and whether it fits.

    This takes half a minute to some minutes of CPU time, in a process of its own: a rehearsal adds a fake device, and autograd
    knows only the devices that existed at the first backward pass of a process, such as the one of the trial step. ``price``:
    dollars per hour of one GPU. ``calls``: the calls to all judges. ``planned_to_fit``: whether the recipe fits according to the
    memory plan; if it does not, no changes are searched for again.
    """
    given = {"world": world, "price": price, "calls": calls, "planned_to_fit": planned_to_fit}
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(_findings, recipe, machine, given).result()


def _findings(recipe: Recipe, machine: Machine, given: Mapping[str, Any]) -> list[Finding]:
    return list(_estimate(recipe, machine, **given))


def _estimate(
    recipe: Recipe, machine: Machine, *, world: int, price: float | None, calls: Sequence[Calls], planned_to_fit: bool
) -> Iterator[Finding]:
    quiet()
    try:
        found = rehearse(recipe, machine, world=world, processes=available_cpus())
    except ERRORS as error:
        yield note("time", f"not estimated, because the step cannot be rehearsed: {error_line(error)}")
        return
    needed = f"the rehearsed step needs {gigabytes(peak(found))} of the {gigabytes(machine.memory)} of {machine.name}"
    if fits(found, machine):
        yield ok("memory", f"{needed}, so it fits")
    elif planned_to_fit:
        changes = smallest_changes(recipe, machine, found, world=world)
        fix = "use a GPU with more memory, or more ranks" if changes is None else " ".join(f"--set {each}" for each in changes[0])
        yield failed("memory", f"{needed}{FREE}", fix=fix)
    yield time_of(found, machine)
    gpus = found.world * gpus_per_rank(recipe.devices or Devices())
    yield cost_of(hours(found, machine), gpus=gpus, price=price, calls=calls)
    last = seconds(step_work(found, len(found.phases) - 1), machine) / 3600
    yield forecast_of(recipe, last, _ranks(found, machine))


def time_of(found: Rehearsed, machine: Machine) -> Finding:
    """The modelled time of a step of each phase, and of the run."""
    each = []
    for index, phase in enumerate(found.phases):
        of_phase = f" of phase {phase.name}" if len(found.phases) > 1 else ""
        spent = seconds(step_work(found, index), machine)
        each.append(f"a step{of_phase} takes {duration(spent / 3600)}, and there are {phase.steps}")
    total = f"the run takes {duration(hours(found, machine))} with {found.evaluations} evaluations, on {_ranks(found, machine)}"
    return note("time", f"{'; '.join(each)}; {total} ({machine.measured}). The time of rewards is not included")


def cost_of(run_hours: float, *, gpus: int, price: float | None, calls: Sequence[Calls]) -> Finding:
    """GPU hours, their price, and the price of the calls to judges. ``price``: dollars per hour of one GPU."""
    devices = "GPU" if gpus == 1 else "GPUs"
    priced = [each.dollars for each in calls if each.dollars is not None]
    lines = [f"{run_hours * gpus:,.1f} GPU hours"]
    if price is None:
        lines[0] += "; --price-per-hour DOLLARS gives their price"
    else:
        lines[0] += f": {run_hours:,.1f} h x {gpus} {devices} x ${price:,.2f} = ${run_hours * gpus * price:,.2f}"
    if priced:
        lines.append(f"judges: ${sum(priced):,.2f}")
    if unpriced := [each.path for each in calls if each.dollars is None]:
        lines.append(f"without a price in the recipe, and not counted: the calls to {', '.join(unpriced)}")
    if price is not None and priced:
        lines.append(f"together: ${run_hours * gpus * price + sum(priced):,.2f}")
    return note("cost", "\n".join(lines))


def _ranks(found: Rehearsed, machine: Machine) -> str:
    return f"{found.world} x {machine.name}" if found.world > 1 else machine.name
