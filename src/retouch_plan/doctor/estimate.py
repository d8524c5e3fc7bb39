"""Time and cost of a run: hours on a kind of GPU, from a rehearsal of its step at full size, their price, and paid judge calls."""

from __future__ import annotations

from collections.abc import Sequence

from retouch.recipe.derived_facts import Calls
from retouch_plan.doctor.findings import Finding, duration, note
from retouch_plan.rehearsal.counting.machines import Machine
from retouch_plan.rehearsal.report import hours, seconds, step_work
from retouch_plan.rehearsal.step import Rehearsed


def time_of(found: Rehearsed, machine: Machine) -> Finding:
    """The modelled time of a step of each phase, and of the run."""
    each = []
    for index, phase in enumerate(found.phases):
        of_phase = f" of phase {phase.name}" if len(found.phases) > 1 else ""
        spent = seconds(step_work(found, index), machine)
        each.append(f"a step{of_phase} takes {duration(spent / 3600)}, and there are {phase.steps}")
    total = f"the run takes {duration(hours(found, machine))} with {found.evaluations} evaluations, on {ranks_of(found, machine)}"
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


def ranks_of(found: Rehearsed, machine: Machine) -> str:
    """The number and kind of the GPUs, as in "8 x h100"."""
    return f"{found.world} x {machine.name}" if found.world > 1 else machine.name
