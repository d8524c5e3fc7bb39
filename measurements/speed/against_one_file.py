"""Compares the library to examples/one_file_flow_grpo.py: the same tiny SD3, LoRA, prompts, noise and settings.

A step of each is made in turn. The library uses recipes/tiny-sd3.jsonnet and its normal training loop; only the order of the
prompts is that of the example.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

from one_file_batches import one_file, one_file_batch
from opened import opened

from retouch.run.step import collect, update

EDGE = 6  # steps at each end of a run whose rewards are averaged


@dataclass(frozen=True)
class AgainstOneFile:
    """The comparison for one seed.

    ``*_seconds``: medians over the steps; ``ratio``: library over one file. ``spread``: lower and upper quartile of the ratios of
    single steps. ``*_rewards``: mean reward of each step; ``*_gain``: mean of the last steps minus mean of the first steps.
    """

    seed: int
    steps: int
    one_file_seconds: float
    library_seconds: float
    ratio: float
    spread: tuple[float, float]
    one_file_gain: float
    library_gain: float
    one_file_rewards: list[float]
    library_rewards: list[float]
    ratio_max_first: float

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def measure(*, seed: int, steps: int) -> AgainstOneFile:
    """Make both runs, a step of each in turn."""
    overrides = [f"seed={seed}", f"policy.model.args.seed={seed}"]
    theirs, ours, rewards, off = [], [], [], 0.0
    with opened("tiny-sd3.jsonnet", overrides) as ready:
        phase = replace(ready.phase, batch=partial(one_file_batch, seed))
        for step, row in enumerate(one_file.train(steps, seed)):
            theirs.append(row)
            began = time.perf_counter()
            collected = collect(ready.run, phase, step)
            metrics = update(ready.run, phase, step, collected)
            ours.append(time.perf_counter() - began)
            rewards.append(collected.metrics["reward/mean"])
            off = max(off, metrics["policy/ratio_max_first"])
    their_rewards = [row["reward"] for row in theirs]
    quartiles = statistics.quantiles([mine / row["seconds"] for mine, row in zip(ours, theirs, strict=True)], n=4)
    one, library = statistics.median(row["seconds"] for row in theirs), statistics.median(ours)
    return AgainstOneFile(
        seed=seed,
        steps=steps,
        one_file_seconds=one,
        library_seconds=library,
        ratio=library / one,
        spread=(quartiles[0], quartiles[2]),
        one_file_gain=_gain(their_rewards),
        library_gain=_gain(rewards),
        one_file_rewards=their_rewards,
        library_rewards=rewards,
        ratio_max_first=off,
    )


def _gain(rewards: Sequence[float]) -> float:
    edge = min(EDGE, len(rewards) // 2)
    return statistics.mean(rewards[-edge:]) - statistics.mean(rewards[:edge])


def table(results: Sequence[AgainstOneFile]) -> list[str]:
    """The results as lines of Markdown."""
    images = one_file.PROMPTS_PER_STEP * one_file.GROUP_SIZE
    lines = [
        f"| {results[0].steps} steps of {images} images | seed | s/step | images/s | first reward | last rewards | gain |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for each in results:
        for name, seconds, rewards, gain in (
            ("one file", each.one_file_seconds, each.one_file_rewards, each.one_file_gain),
            ("library", each.library_seconds, each.library_rewards, each.library_gain),
        ):
            last = statistics.mean(rewards[-EDGE:])
            lines.append(
                f"| {name} | {each.seed} | {seconds:.3f} | {images / seconds:.1f} | {rewards[0]:.4f} | {last:.4f} | {gain:+.4f} |"
            )
    for each in results:
        low, high = each.spread
        lines += ["", f"Library over one file, seconds a step, seed {each.seed}: {each.ratio:.3f} ({low:.3f} to {high:.3f})."]
    return lines
