"""What a dry run finds: the report of ``--rehearse``, the doctor's memory, time and cost, and changes with which a recipe fits."""

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
from retouch.recipe.policy import AutoregressivePolicyKeys, DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe, parse
from retouch_judge.calls import Calls
from retouch_plan import machines
from retouch_plan.dry_run import DryRun, dry_run, in_own_process, quiet, uncounted_rewards
from retouch_plan.findings import Finding, duration, failed, gigabytes, note, ok
from retouch_plan.machines import DEFAULT_GPU, MACHINES, TFLOPS, Machine, find_machine
from retouch_plan.meter import PLAN, Work
from retouch_plan.models import UnknownConfiguration

_HOLDERS = 8
_HOLDERS_OF_OTHER_STAGES = 3
_WAITS = 6
_SHOWN = 5 * 10**6
"""Fewer bytes would be shown as 0.00 GB."""
LEAST_GAIN = 0.01
"""A change is kept if it lowers the peak of its stage by at least this fraction."""
MOST_CHANGES = 6
_FEWEST_LOGITS = 32
ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""The errors that a step may raise because of wrong shapes, devices or dtypes."""
CAUTION = "a forecast, not a measurement: runs of other seeds, data and code may differ by more than its range"


def fits(found: DryRun, machine: Machine) -> bool:
    """Return whether the step and the reward models leave enough of the machine's memory free."""
    return machines.fits(largest(found)[2], machine.memory)


def largest(found: DryRun, place: int | None = None) -> tuple[str, int, int]:
    """Return the stage and the device with the most bytes, with the weights of reward models, and these bytes. ``place``: look only
    at this device."""
    rewards = {each: weights.total() for each, weights in found.rewards.items()}
    held = [("rewards", each, size) for each, size in rewards.items()]
    for name, stage in found.stages.items():
        held += [(name, each, size + rewards.get(each, 0)) for each, (size, _) in stage.peaks.items()]
    return max((each for each in held if place in (None, each[1])), key=lambda each: each[2], default=("step", 0, 0))


def holders(found: DryRun, name: str, place: int) -> list[tuple[str, int]]:
    """Return what holds the most bytes on a device at the peak of a stage, the largest first, and the sum of the others. Holders
    with less than 0.005 GB are counted as others."""
    held = found.rewards.get(place, Counter()).copy()
    if name in found.stages:
        held.update(found.stages[name].peaks.get(place, (0, Counter()))[1])
    named = [each for each in held.most_common(_HOLDERS) if each[0] != "other" and each[1] >= _SHOWN]
    rest = held.total() - sum(size for _, size in named)
    return [*named, *([("other", rest)] if rest >= _SHOWN else [])]


def seconds(work: Work, machine: Machine) -> float:
    """Return the modelled seconds: the sum over the device's kernels, or the time of the host to launch them if that is longer."""
    return max(work.seconds.total(), work.counts["kernels"] * machine.launch)


def step_work(found: DryRun, index: int) -> Work:
    """Return the work of one step of a phase, without preflight, evaluation and checkpoints."""
    total = Work()
    for name in found.phases[index].stages:
        total.add(found.stages[name].work)
    return total


def hours(found: DryRun, machine: Machine) -> float:
    """Return the modelled hours of the whole run, with evaluations, without rewards."""
    stages = found.stages
    steps = sum(phase.steps * sum(seconds(stages[name].work, machine) for name in phase.stages) for phase in found.phases)
    evaluation = seconds(stages["evaluation"].work, machine) if "evaluation" in stages else 0.0
    return (steps + found.evaluations * evaluation) / 3600


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


def changes(recipe: Recipe, stage: str, *, held: Mapping[str, int], world: int) -> Iterator[str]:
    """Yield ``--set`` changes that may lower the peak of a stage and that the recipe allows, the cheapest in speed first.

    ``held``: the bytes of each holder at the peak. Parts that hold less than ``LEAST_GAIN`` of it are left where they are.
    ``world``: the number of ranks.
    """
    kind = stage.rpartition(": ")[2]
    policy, renderer, image_model = recipe.policy, recipe.renderer, recipe.image_model
    least = LEAST_GAIN * sum(held.values())
    moments, encoders, autoencoder = (
        sum(size for name, size in held.items() if name.startswith(part))
        for part in ("AdamW's moments", "weights: text_encoder", "weights: vae")
    )
    updates = kind not in ("encode", "rollout", "render", "evaluation")
    decodes = not updates or kind == "preflight"  # a preflight has a rollout and an update
    smaller_chunk = [f"rollout.chunk={recipe.rollout.chunk // 2}"] if recipe.phases is None and recipe.rollout.chunk > 1 else []
    # Fewer images at once while images are sampled, encoded or decoded
    if decodes and isinstance(image_model, DiffusersModel) and not image_model.vae_slicing:
        yield f"{recipe.image_model_key}.vae_slicing=true"
    if kind in ("render", "evaluation"):
        sizes = {key: getattr(renderer, key, 1) for key in ("batch", "encoder_batch")}
        yield from (f"renderer.{key}={size // 2}" for key, size in sizes.items() if size > 1)
    if kind in ("rollout", "render"):
        yield from smaller_chunk
    if kind == "evaluation" and recipe.eval.batch > 1:
        yield f"eval.batch={recipe.eval.batch // 2}"
    if moments >= least and recipe.optimizer.moments is None and recipe.sharding is None:
        yield "optimizer.moments=8bit"
    # Fewer activations at once in an update
    if updates and not policy.gradient_checkpointing:
        yield "policy.gradient_checkpointing=true"
    if recipe.microbatch > 1:
        yield f"microbatch={recipe.microbatch // 2}"
    if updates and isinstance(policy, AutoregressivePolicyKeys) and policy.logits_at_once > _FEWEST_LOGITS:
        yield f"policy.logits_at_once={policy.logits_at_once // 2}"
    if kind == "preflight":
        yield from smaller_chunk
    # Parts in CPU memory while they are not used, and decoding in tiles
    own = policy if isinstance(policy, DenoisingPolicyKeys) and isinstance(policy.model, DiffusersModel) else None
    if own is not None and own.prompt_embeddings == "live" and encoders >= least:
        yield "policy.prompt_embeddings=cached"
    if moments >= least and recipe.optimizer.moments != "cpu" and recipe.sharding in (None, "fsdp2"):
        yield "optimizer.moments=cpu"
    if decodes and isinstance(image_model, DiffusersModel) and not image_model.vae_tiling:
        yield f"{recipe.image_model_key}.vae_tiling=true"
    behind_writer = renderer is not None and renderer.image_model is not None
    frozen = own is not None and encoders + autoencoder >= least
    if (behind_writer or frozen) and not (recipe.devices and recipe.devices.offload):
        yield "devices.offload=true"
    if world > 1 and recipe.sharding != "fsdp2" and isinstance(policy, DenoisingPolicyKeys):
        yield "sharding=fsdp2"
    if world > 1 and recipe.sharding == "fsdp2" and (recipe.devices is None or recipe.devices.weights is None):
        yield "devices.weights=cpu"


def smallest_changes(
    recipe: Recipe, machine: Machine, found: DryRun, *, world: int | None, allow_imports: Sequence[str] = ()
) -> tuple[tuple[str, ...], int] | None:
    """Return ``--set`` changes with which the recipe fits, and its peak with them in bytes; None if no changes were found.

    Changes are added one at a time: the first change whose dry run lowers the peak of the stage with the largest peak. Changes
    that are not needed after later ones are dropped. ``allow_imports``: see ``parse``.
    """

    def tried(options: Sequence[str]) -> DryRun | None:
        try:
            changed = parse(recipe.document(), options, allow_imports=allow_imports)
            return dry_run(changed, machine, world=world, processes=available_cpus())
        except ERRORS:
            return None  # for example, the smaller chunk does not divide the groups

    settings: tuple[str, ...] = ()
    for _ in range(MOST_CHANGES):
        current = parse(recipe.document(), settings, allow_imports=allow_imports)
        stage = max(found.stages, key=lambda name: found.stages[name].peak)
        held = max((labels for _, labels in found.stages[stage].peaks.values()), key=lambda each: each.total())
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
                return changed, after.peak
            if after.stages[stage].peak <= (1 - LEAST_GAIN) * found.stages[stage].peak:
                settings, found = changed, after
                break
        else:
            return None
    return None


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


def error_line(error: BaseException) -> str:
    """Return the message of a dry run's error, and its location: the innermost line of Retouch or of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    placed = [frame for frame in frames if frame.filename[0] == "/" and "/site-packages/" not in frame.filename]
    frame = ([frame for frame in placed if not frame.filename.startswith(PLAN)] or frames)[-1]
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}\n  at {frame.filename}:{frame.lineno}, in {frame.name}"


# Time, cost and forecast


def time_of(found: DryRun, machine: Machine) -> Finding:
    """The modelled time of a step of each phase, and of the run."""
    each = []
    for index, phase in enumerate(found.phases):
        of_phase = f" of phase {phase.name}" if len(found.phases) > 1 else ""
        spent = seconds(step_work(found, index), machine)
        each.append(f"a step{of_phase} takes {duration(spent / 3600)}, and there are {phase.steps}")
    ranks = f"{found.world} x {machine.name}" if found.world > 1 else machine.name
    total = f"the run takes {duration(hours(found, machine))} with {found.evaluations} evaluations, on {ranks}"
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
        findings.append(time_of(found, machine))
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
