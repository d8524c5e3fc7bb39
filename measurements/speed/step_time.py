"""Compares a step of the library to a plain loop of its model calls, in turn in one run.

A round has three parts: a step through the normal training loop (tasks, rollout, images, judge, update) whose model calls are
recorded; the same step again, timed, with the journal of scores; and the recorded calls in a plain loop, timed. The ratio is the
median step over the median loop.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from model_calls import Recorder
from opened import Opened, opened

from retouch.run.step import collect, update

STAGES = ("rollout", "render", "judge", "update")


@dataclass(frozen=True)
class StepTime:
    """Medians over the rounds, in seconds.

    ``library``: a step of the library; ``stages``: its stages, and the rest of the step is the loop itself. ``bare``: the plain
    loop of model calls; ``calls``: its stages, where ``encode`` belongs to the rollout of the library. ``spread``: lower and upper
    quartile of the ratios of single rounds.
    """

    name: str
    rounds: int
    library: float
    bare: float
    ratio: float
    spread: tuple[float, float]
    samples_per_second: float
    stages: dict[str, float]
    calls: dict[str, float]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def measure(name: str, recipe: str, *, rounds: int, overrides: Sequence[str] = ()) -> StepTime:
    """Measure the step time of a recipe."""
    with opened(recipe, overrides) as ready:
        recorder = Recorder(ready.parts.model, ready.run)
        library, bare, stages, calls = [], [], [], []
        for step in range(rounds + 1):  # the first step is a warm-up
            with recorder.recording() as (watched, made):
                # The scores of this step stay out of the journal, or the timed step could find them there.
                watched = replace(watched, judge=lambda _, samples: ready.parts.judge.submit(samples))
                update(watched, ready.phase, step, collect(watched, ready.phase, step))
            seconds, by_stage = _timed(ready, step)
            again, by_call = made.make()
            if step:
                library.append(seconds)
                bare.append(again)
                stages.append(by_stage)
                calls.append(by_call)
        rows = len(ready.phase.batch(0))
    quartiles = statistics.quantiles([a / b for a, b in zip(library, bare, strict=True)], n=4)
    middle = statistics.median(library)
    return StepTime(
        name=name,
        rounds=rounds,
        library=middle,
        bare=statistics.median(bare),
        ratio=middle / statistics.median(bare),
        spread=(quartiles[0], quartiles[2]),
        samples_per_second=rows / middle,
        stages={stage: statistics.median(each.get(f"time/{stage}", 0.0) for each in stages) for stage in STAGES},
        calls={stage: statistics.median(each.get(stage, 0.0) for each in calls) for stage in ("encode", *STAGES)},
    )


def _timed(ready: Opened, step: int) -> tuple[float, dict[str, float]]:
    ready.parts.clock.take()
    began = time.perf_counter()
    update(ready.run, ready.phase, step, collect(ready.run, ready.phase, step))
    return time.perf_counter() - began, ready.parts.clock.take()


def table(results: Sequence[StepTime]) -> list[str]:
    """The results as lines of Markdown."""
    lines = [
        "| step of | seconds | bare calls | ratio (quartiles) | samples/s | rollout | render | judge | update | loop |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in results:
        shares = [each.stages[stage] / each.library for stage in STAGES]
        shares.append(max(0.0, 1 - sum(shares)))
        low, high = each.spread
        lines.append(
            f"| {each.name} | {each.library:.3f} | {each.bare:.3f} | {each.ratio:.3f} ({low:.3f} to {high:.3f}) | "
            f"{each.samples_per_second:.1f} | " + " | ".join(f"{share:.1%}" for share in shares) + " |"
        )
    lines += ["", "| bare calls of | encode | rollout | render | update |", "| --- | --- | --- | --- | --- |"]
    for each in results:
        cells = [f"{each.calls[stage]:.3f}" for stage in ("encode", "rollout", "render", "update")]
        lines.append(f"| {each.name} | " + " | ".join(cells) + " |")
    return lines
