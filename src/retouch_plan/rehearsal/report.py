"""The text report of a rehearsal: memory peaks and their holders, work, host waits, time, and errors with their location."""

import traceback
from collections import Counter
from collections.abc import Iterator

from retouch_plan.rehearsal.counting import machines
from retouch_plan.rehearsal.counting.machines import TFLOPS, Machine
from retouch_plan.rehearsal.counting.meter import OURS
from retouch_plan.rehearsal.counting.stages import Work
from retouch_plan.rehearsal.step import Rehearsed

_HOLDERS = 8
_HOLDERS_OF_OTHER_STAGES = 3
_WAITS = 6
_SHOWN = 5 * 10**6
"""Fewer bytes would be shown as 0.00 GB."""


def fits(found: Rehearsed, machine: Machine) -> bool:
    """Return whether the step and the reward models leave enough of the machine's memory free."""
    return machines.fits(needed(found), machine.memory)


def needed(found: Rehearsed, place: int | None = None) -> int:
    """Return the most bytes that the step and the weights of reward models need on a device; with None, on any device."""
    return largest(found, place)[2]


def largest(found: Rehearsed, place: int | None = None) -> tuple[str, int, int]:
    """Return the stage and the device with the most bytes, with the weights of reward models, and these bytes.

    ``place``: look only at this device.
    """
    rewards = {each: weights.total() for each, weights in found.rewards.items()}
    held = [("rewards", each, size) for each, size in rewards.items()]
    for name, stage in found.stages.items():
        held += [(name, each, size + rewards.get(each, 0)) for each, size in stage.peaks.items()]
    return max((each for each in held if place in (None, each[1])), key=lambda each: each[2], default=("step", 0, 0))


def holders(found: Rehearsed, name: str, place: int) -> list[tuple[str, int]]:
    """Return what holds the most bytes on a device at the peak of a stage, the largest first, and the sum of the others.

    Holders with less than 0.005 GB are counted as others.
    """
    held = found.rewards.get(place, Counter()).copy()
    held.update(found.stages[name].held.get(place, {}) if name in found.stages else {})
    named = [each for each in held.most_common(_HOLDERS) if each[0] != "other" and each[1] >= _SHOWN]
    rest = held.total() - sum(size for _, size in named)
    return [*named, *([("other", rest)] if rest >= _SHOWN else [])]


def peak(found: Rehearsed) -> int:
    """Return the largest peak of all stages and devices, in bytes, without reward models."""
    return max((stage_peak(found, name) for name in found.stages), default=0)


def stage_peak(found: Rehearsed, name: str) -> int:
    """Return the largest peak of a stage on any device, in bytes."""
    return found.stages[name].peak


def seconds(work: Work, machine: Machine) -> float:
    """Return the modelled seconds: the sum over the device's kernels, or the time of the host to launch them if that is longer."""
    return max(work.device_seconds, work.kernels * machine.launch)


def ideal_seconds(work: Work, machine: Machine) -> float:
    """Return the seconds of the FLOPs alone, at the machine's rate of 16-bit matrix products."""
    return sum(work.flops.values()) / machine.half


def step_work(found: Rehearsed, index: int) -> Work:
    """Return the work of one step of a phase, without preflight, evaluation and checkpoints."""
    total = Work()
    for name in found.phases[index].stages:
        total.add(found.stages[name].work)
    return total


def hours(found: Rehearsed, machine: Machine) -> float:
    """Return the modelled hours of the whole run, with evaluations, without rewards."""
    stages = found.stages
    steps = sum(phase.steps * sum(seconds(stages[name].work, machine) for name in phase.stages) for phase in found.phases)
    evaluation = seconds(stages["evaluation"].work, machine) if "evaluation" in stages else 0.0
    return (steps + found.evaluations * evaluation) / 3600


def lines(found: Rehearsed, machine: Machine) -> Iterator[str]:
    """Yield the lines of the report."""
    ranks = f"rank 0 of {found.world}" if found.world > 1 else "a single rank"
    yield f"rehearsed as {ranks} on {machine.name} ({machine.memory / 1e9:.1f} GB; rates: {machine.measured})"
    yield f"  {'stage':<24}{'peak GB':>9}{'TFLOP':>10}{'kernels':>11}{'waits':>8}{'modelled s':>12}{'ideal s':>9}"
    for name, stage in found.stages.items():
        work = stage.work
        if not work.counts:
            continue
        yield (
            f"  {name:<24}{stage.peak / 1e9:>9.2f}{sum(work.flops.values()) / TFLOPS:>10.1f}"
            f"{work.kernels:>11.0f}{sum(work.waits.values()):>8.0f}"
            f"{seconds(work, machine):>12.2f}{ideal_seconds(work, machine):>9.2f}"
        )
    yield from _memory(found, machine)
    yield from _time(found, machine)
    for unit, work in found.units.items():
        yield (
            f"a {unit} of the rollout: {work.kernels:.0f} kernels, {sum(work.waits.values()):.2g} waits of the host, "
            f"{1000 * seconds(work, machine):.1f} ms modelled, of which the GPU {1000 * work.device_seconds:.1f} ms"
        )
    yield from _waits(found)


def _memory(found: Rehearsed, machine: Machine) -> Iterator[str]:
    name, place, size = largest(found)
    share = size / machine.memory
    verdict = "fits" if fits(found, machine) else "does not fit"
    of = f"{share:.0%} of {machine.memory / 1e9:.1f} GB, of which a tenth must stay free"
    yield f"memory: at most {size / 1e9:.2f} GB on device {place}, in {name}: {verdict} ({of})"
    for holder, of_holder in holders(found, name, place):
        yield f"  {of_holder / 1e9:>8.2f} GB  {holder}"
    others = {other: stage for other, stage in found.stages.items() if other != name and stage.peak}
    if others:
        yield "largest tensors at the peaks of the other stages:"
    for other, stage in others.items():
        held = holders(found, other, max(stage.peaks, key=stage.peaks.__getitem__))[:_HOLDERS_OF_OTHER_STAGES]
        named = ", ".join(f"{size / 1e9:.2f} GB {holder}" for holder, size in held)
        yield f"  {other:<24}{named}"
    yield f"checkpoint: {found.checkpoint / 1e9:.2f} GB, in host memory at most {found.host_peak / 1e9:.2f} GB"


def _time(found: Rehearsed, machine: Machine) -> Iterator[str]:
    for index, phase in enumerate(found.phases):
        work = step_work(found, index)
        modelled = sum(seconds(found.stages[name].work, machine) for name in phase.stages)
        of_phase = f" of phase {phase.name}" if len(found.phases) > 1 else ""
        per_image = sum(work.flops.values()) / TFLOPS / phase.rows
        yield (
            f"step{of_phase}: {modelled:.2f} s modelled, {ideal_seconds(work, machine):.2f} s ideal, for {phase.rows} images of "
            f"this rank; {per_image:.1f} TFLOP per image"
        )
        named = ", ".join(f"{kind} {spent:.2f} s" for kind, spent in work.seconds.most_common(5))
        yield f"  {named}"
    yield f"run: {hours(found, machine):.1f} h modelled, with {found.evaluations} evaluations and without rewards"


def _waits(found: Rehearsed) -> Iterator[str]:
    total = Work()
    for name, stage in found.stages.items():
        if name.endswith(("rollout", "update")):
            total.add(stage.work)
    if total.waits:
        yield "the host waits for the device in rollout and update:"
        for where, count in total.waits.most_common(_WAITS):
            yield f"  {count:>8.0f}  {where}"


def error_line(error: BaseException) -> str:
    """Return the message of a rehearsal's error, and its location: the innermost line of Retouch or of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if "/site-packages/" not in frame.filename and "/retouch_plan/rehearsal/" not in frame.filename and frame.filename[0] == "/"
    ]
    ours = [frame for frame in own if frame.filename.startswith(OURS)]
    frame = (own or ours or frames)[-1]
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}\n  at {frame.filename}:{frame.lineno}, in {frame.name}"
