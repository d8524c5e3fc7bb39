"""What the doctor says about a dry run: the report of ``--rehearse``, and memory, time and cost of a run."""

import json
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from retouch.config.imports import is_user_error
from retouch.data.checks import available_cpus
from retouch.distributed.ranks import gpus_per_rank
from retouch.models.base import DiffusersModel, PretrainedLanguageModel
from retouch.recipe.document import value_at
from retouch.recipe.keys import Devices
from retouch.recipe.recipe import Recipe
from retouch_judge.calls import Calls
from retouch_plan import machines
from retouch_plan.dry_run import (
    ERRORS,
    DryRun,
    dry_run,
    error_line,
    fits,
    holders,
    hours,
    in_own_process,
    largest,
    quiet,
    seconds,
    step_work,
    uncounted_rewards,
)
from retouch_plan.findings import Finding, duration, failed, gigabytes, note, ok
from retouch_plan.fitting import smallest_changes, within_a_day
from retouch_plan.machines import DEFAULT_GPU, MACHINES, TFLOPS, Machine, find_machine
from retouch_plan.models import UnknownConfiguration

_HOLDERS_OF_OTHER_STAGES = 3
_WAITS = 6
CAUTION = "a forecast, not a measurement: runs of other seeds, data and code may differ by more than its range"


def lines(found: DryRun, machine: Machine) -> Iterator[str]:
    """Yield the lines of the report. Ideal seconds: the FLOPs alone, at the machine's rate of 16-bit matrix products."""
    ranks = f"rank 0 of {found.world}" if found.world > 1 else "a single rank"
    yield f"dry run as {ranks} on {machine.name} ({machine.memory / 1e9:.1f} GB; rates: {machine.measured})"
    yield f"  {'stage':<24}{'peak GB':>9}{'TFLOP':>10}{'kernels':>11}{'waits':>8}{'modelled s':>12}{'ideal s':>9}"
    for name, stage in found.stages.items():
        work, flops = stage.work, stage.work.flops.total()
        if work.counts:
            yield (
                f"  {name:<24}{stage.peak / 1e9:>9.2f}{flops / TFLOPS:>10.1f}{work.counts['kernels']:>11.0f}"
                f"{work.waits.total():>8.0f}{seconds(work, machine):>12.2f}{flops / machine.half:>9.2f}"
            )
    yield from _memory(found, machine)
    for index, phase in enumerate(found.phases):
        work = step_work(found, index)
        flops = work.flops.total()
        modelled = sum(seconds(found.stages[name].work, machine) for name in phase.stages)
        of_phase = f" of phase {phase.name}" if len(found.phases) > 1 else ""
        yield (
            f"step{of_phase}: {modelled:.2f} s modelled, {flops / machine.half:.2f} s ideal, for {phase.rows} images of "
            f"this rank; {flops / TFLOPS / phase.rows:.1f} TFLOP per image"
        )
        yield "  " + ", ".join(f"{kind} {spent:.2f} s" for kind, spent in work.seconds.most_common(5))
    yield f"run: {hours(found, machine):.1f} h modelled, with {found.evaluations} evaluations and without rewards"
    for unit, work in found.units.items():
        yield (
            f"a {unit} of the rollout: {work.counts['kernels']:.0f} kernels, {work.waits.total():.2g} waits of the host, "
            f"{1000 * seconds(work, machine):.1f} ms modelled, of which the GPU {1000 * work.seconds.total():.1f} ms"
        )
    waits: Counter[str] = Counter()
    for name, stage in found.stages.items():
        if name.endswith(("rollout", "update")):
            waits.update(stage.work.waits)
    if waits:
        yield "the host waits for the device in rollout and update:"
        yield from (f"  {count:>8.0f}  {where}" for where, count in waits.most_common(_WAITS))


def _memory(found: DryRun, machine: Machine) -> Iterator[str]:
    name, place, size = largest(found)
    verdict = "fits" if fits(found, machine) else "does not fit"
    of = f"{size / machine.memory:.0%} of {machine.memory / 1e9:.1f} GB, of which a tenth must stay free"
    yield f"memory: at most {size / 1e9:.2f} GB on device {place}, in {name}: {verdict} ({of})"
    for holder, of_holder in holders(found, name, place):
        yield f"  {of_holder / 1e9:>8.2f} GB  {holder}"
    others = {other: stage.peaks for other, stage in found.stages.items() if other != name and stage.peak}
    if others:
        yield "largest tensors at the peaks of the other stages:"
    for other, peaks in others.items():
        held = holders(found, other, max(peaks, key=lambda each: peaks[each][0]))[:_HOLDERS_OF_OTHER_STAGES]
        yield f"  {other:<24}" + ", ".join(f"{size / 1e9:.2f} GB {holder}" for holder, size in held)
    yield f"checkpoint: {found.checkpoint / 1e9:.2f} GB, in host memory at most {found.host_peak / 1e9:.2f} GB"


# Changes with which a recipe fits


# ``retouch doctor RECIPE --rehearse``


def print_dry_run(recipe: Recipe, *, machine: str | None, world: int | None, out: TextIO, full_depth: bool = False) -> int:
    """Make a dry run of a recipe's step and print the report. Returns the exit code: 0 if the step runs and fits, otherwise 1.

    ``machine``: a GPU's name, or the path of a profile; None: an H100. ``world``: the number of ranks; None: the recipe's.
    ``full_depth``: run all blocks of the models. Raises ValueError for an unknown machine.
    """
    quiet()
    target = find_machine(machine or DEFAULT_GPU)
    started = time.perf_counter()
    try:
        found = dry_run(recipe, target, world=world, full_depth=full_depth, processes=available_cpus())
    except ERRORS as error:
        out.write("FAILED dry run: {}\n  fix: {}\n".format(*explained(error)))
        return 1
    for line in lines(found, target):
        out.write(line + "\n")
    out.write(f"took {time.perf_counter() - started:.0f} s\n")
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
    """Return the text of an error that a dry run raised, and what to do about it. Only a message that this package wrote for the
    user speaks of the recipe. The traceback of another error is printed."""
    if is_user_error(error):
        return str(error), "correct the recipe as the message says"
    traceback.print_exception(error, file=sys.stderr)
    return error_line(error), (
        "the recipe is not the cause: report this error of Retouch with the traceback above, or correct your own class if it is "
        "there; --no-rehearsal skips the dry run"
    )


# Time, cost and forecast


def time_of(recipe: Recipe, found: DryRun, machine: Machine) -> Finding:
    """The modelled time of a step of each phase, and of the run; for a longer run, the settings with which it ends within a day."""
    each = []
    for index, phase in enumerate(found.phases):
        of_phase = f" of phase {phase.name}" if len(found.phases) > 1 else ""
        spent = seconds(step_work(found, index), machine)
        each.append(f"a step{of_phase} takes {duration(spent / 3600)}, and there are {phase.steps}")
    ranks = f"{found.world} x {machine.name}" if found.world > 1 else machine.name
    total = f"the run takes {duration(hours(found, machine))} with {found.evaluations} evaluations, on {ranks}"
    text = f"{'; '.join(each)}; {total} ({machine.measured}). The time of rewards is not included"
    if fewer := within_a_day(recipe, found, machine):
        text += f"\nit would end within a day with {' '.join(f'--set {key}={value}' for key, value in fewer.items())}"
    return note("time", text)


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
        lines.append(f"without a known price or number, and not counted: the calls to {', '.join(unpriced)}")
    if price is not None and priced:
        lines.append(f"together: ${run_hours * gpus * price + sum(priced):,.2f}")
    return note("cost", "\n".join(lines))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A score that a run has reached.

    ``where``: keys of a recipe's document, such as ``policy.model.path``, each with a pattern that is searched in the JSON of its
    value; a recipe has this target if all patterns are found. ``images``: the smallest and the largest number of images that
    training may have taken; ``rows``: images per training step. ``basis``: who reached the score, and what is not known.
    """

    target: str
    where: Mapping[str, str]
    images: tuple[float, float]
    rows: int
    basis: str

    def fits(self, recipe: Recipe) -> bool:
        """Whether the recipe trains this model with this algorithm on this task, in a single phase."""
        if recipe.phases is not None:
            return False
        document = recipe.document()
        return all(re.search(pattern, json.dumps(value_at(document, key))) for key, pattern in self.where.items())


TARGETS = (
    Target(
        target="OCR correctness of 0.90, from 0.59",
        where={
            "policy.model.path": r"stable-diffusion-3\.5-medium",
            "reward.kind": r"^.ocr.$",
            "objective.kind": "policy_gradient",
            "rollout.transition.kind": "sde",
        },
        images=(500 * 1152, 1000 * 1152),
        rows=1152,
        basis="Flow-GRPO (arXiv 2505.05470), whose authors name 1000 steps, and 16 hours on 24 A-series or 8 on 24 H-series GPUs "
        "(github.com/yifan123/flow_grpo/issues/96). Their code counts two optimizer steps for each rollout, so these are 500 or "
        "1000 of this recipe's steps. Issue 227 there reports that it was not reproduced on 8 H200",
    ),
    Target(
        target="VIEScore of 4.80 on six benchmarks, from 3.88",
        where={
            "policy.model.kind": "emu3",
            "policy.model.path": "sft[_-]s(imple)?(/|.$)",
            "policy.model.think": "false",
            "data.lists": "omniedit.*human-edit",
            "reward.kind": "viescore",
            "objective.kind": "policy_gradient",
        },
        images=(2000 * 128, 3000 * 128),
        rows=128,
        basis="EARL (arXiv 2508.01119), whose authors name 2000 to 3000 steps",
    ),
    Target(
        target="a quarter of the gap on the playground's compound edits",
        where={
            "policy.model.kind": r"^.playground.$",
            "policy.model.path": "null",
            "reward.kind": r"^.playground.$",
            "objective.kind": "policy_gradient",
            "rollout.transition.kind": "cps",
            "data.complexity": r'"[23]"',
        },
        images=(685, 3_942),
        rows=48,
        basis="the curve fitted in docs/scaling.md to runs of this network of 2.5 million parameters, with its interval. It was "
        "measured at no other size and does not carry over to one",
    ),
)


def forecast_of(recipe: Recipe, step_hours: float, ranks: str, *, targets: Sequence[Target] = TARGETS) -> Finding:
    """Hours to the recipe's target, or hours of 1000 steps if the recipe has no known target. ``step_hours``: the modelled time of
    a step of the last phase. ``ranks``: the GPUs that it was modelled for, as in "8 x h100"."""
    rows = recipe.resolved_phases()[-1].rows
    found = next((each for each in targets if each.fits(recipe)), None)
    if found is None:
        return note(
            "forecast",
            f"1000 steps take {duration(1000 * step_hours)} on {ranks}. How many steps a target takes is not known: there is no "
            "published or measured curve of this model, task and algorithm, and other curves do not carry over",
        )
    steps = [images / rows for images in found.images]
    span = " to ".join(duration(each * step_hours) for each in steps)
    refill = ", rounds of refill" if recipe.resolved_phases()[-1].rollout.refill is not None else ""
    lines = [
        f"{found.target}: {span} on {ranks} ({steps[0]:,.0f} to {steps[1]:,.0f} steps, without evaluations{refill} and rewards)",
        CAUTION,
        f"from {found.basis}",
    ]
    if rows != found.rows:
        lines.append(f"a step of that run has {found.rows:,} images, one of this recipe {rows:,}: images are compared, not steps")
    return note("forecast", "\n".join(lines))


# The checks of ``retouch doctor``


def check_dry_run(
    recipe: Recipe, machine: Machine, *, world: int, timed: bool, price: float | None, calls: Sequence[Calls]
) -> tuple[list[Finding], int | None]:
    """Make a dry run of the recipe's step as one of ``world`` ranks on ``machine``.

    Returns the findings about memory and, if ``timed``, about time and cost of the run; and the bytes of a checkpoint, which are
    None if the dry run failed. ``price``: dollars per hour of one GPU. ``calls``: the calls to all judges.

    This takes 15 to 74 s of CPU time for the recipes of this repository.
    """
    for section in (recipe.policy.model, recipe.image_model):
        if not isinstance(section, DiffusersModel | PretrainedLanguageModel):
            return [note("memory", f"not known: {section.source} is no model of this package, so no dry run is possible")], None
    sys.stderr.write("making a dry run of one step at full size, to find its memory and time; --no-rehearsal skips this\n")
    sys.stderr.flush()
    return in_own_process(_check, recipe, machine, world, timed, price, calls)


def _check(
    recipe: Recipe, machine: Machine, world: int, timed: bool, price: float | None, calls: Sequence[Calls]
) -> tuple[list[Finding], int | None]:
    try:
        found = dry_run(recipe, machine, world=world, processes=available_cpus())
    except UnknownConfiguration as error:
        return [note("memory", f"not known: {error}")], None
    except ERRORS as error:
        text, fix = explained(error)
        return [failed("dry run", text, fix=fix)], None
    findings = [memory_of(recipe, machine, found, world=world)]
    if unknown := uncounted_rewards(recipe):
        text = f"not counted, because their configuration is not known: the reward models {', '.join(unknown)}"
        findings.append(note("memory", text))
    if timed:
        gpus = found.world * gpus_per_rank(recipe.devices or Devices())
        last = seconds(step_work(found, len(found.phases) - 1), machine) / 3600
        ranks = f"{found.world} x {machine.name}" if found.world > 1 else machine.name
        findings.append(time_of(recipe, found, machine))
        findings.append(cost_of(hours(found, machine), gpus=gpus, price=price, calls=calls))
        findings.append(forecast_of(recipe, last, ranks))
    return findings, found.checkpoint


def memory_of(recipe: Recipe, machine: Machine, found: DryRun, *, world: int) -> Finding:
    """Whether the step and the weights of the reward models fit into the memory of ``machine``. If they do not, further dry runs
    search for the settings with which they fit."""
    name, place, size = largest(found)
    on_each = f" on each of {world} ranks" if world > 1 else ""
    held = [f"  {each / 1e9:8.2f} GB  {holder}" for holder, each in holders(found, name, place)]
    text = f"{gigabytes(size)} of the {gigabytes(machine.memory)} of {machine.name}{on_each}, in {name}"
    others = {other for stage in found.stages.values() for other in stage.peaks} | set(found.rewards)
    on_others = [f"cuda:{other}: needs {gigabytes(largest(found, other)[2])}" for other in sorted(others - {place})]
    lines = "\n".join([*held, *on_others, f"CPU memory of each rank: {gigabytes(found.host_peak)}"])
    if fits(found, machine):
        return ok("memory", f"needs {text}:\n{lines}")
    sys.stderr.write("the step does not fit; searching for settings with which it fits\n")
    sys.stderr.flush()
    changed = smallest_changes(recipe, machine, found, world=world)
    larger = [each for each in MACHINES.values() if machines.fits(size, each.memory)]
    fix = f"--device {min(larger, key=lambda each: each.memory).name}" if larger else "use more ranks, and sharding fsdp2"
    if changed is not None:
        fix = " ".join(f"--set {each}" for each in changed[0])
    return failed("memory", f"does not fit: needs {text}, and a tenth must stay free:\n{lines}", fix=fix)
