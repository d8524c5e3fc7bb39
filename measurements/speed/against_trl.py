"""Compares the library to TRL's GRPOTrainer: the same tiny Qwen2.5-VL, adapter, tasks, reward and settings, a step of each in turn.

Only the random numbers with which the tokens are sampled differ (see ``twin_writers.py``).
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from tempfile import TemporaryDirectory
from typing import Any

from transformers import TrainerCallback
from twin_writers import ROWS, Setting, library, trainer, twins

SETTINGS = (
    Setting("9 image tokens, 40 new", side=24, longest=40),
    Setting("196 image tokens, 40 new", side=112, longest=40),
    Setting("196 image tokens, 128 new", side=112, longest=128),
)

EDGE = 5  # steps at each end of a run whose rewards are averaged


@dataclass
class Laps:
    """The wall-clock seconds and the CPU seconds of each step."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    _began: tuple[float, float] = (0.0, 0.0)

    def begin(self) -> None:
        self._began = time.perf_counter(), time.process_time()

    def end(self) -> None:
        self.wall.append(time.perf_counter() - self._began[0])
        self.cpu.append(time.process_time() - self._began[1])


class InTurn(TrainerCallback):
    """After each step of TRL's trainer, makes a step of the library, and times both."""

    def __init__(self, ours: Callable[[int], float]) -> None:
        self.ours = ours
        self.our_laps, self.their_laps = Laps(), Laps()
        self.our_rewards: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.their_laps.begin()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.their_laps.end()
        self.our_laps.begin()
        self.our_rewards.append(self.ours(state.global_step - 1))
        self.our_laps.end()
        self.their_laps.begin()


@dataclass(frozen=True)
class AgainstTrl:
    """The comparison for one setting and seed.

    ``*_seconds``: medians over all steps but the first. ``ratio``: samples per second of the library over those of TRL, in
    wall-clock time; ``cpu_ratio``: the same in CPU time. ``spread``: lower and upper quartile of the ratios of single steps.
    ``*_rewards``: mean reward of each step.
    """

    setting: str
    seed: int
    trl_seconds: float
    library_seconds: float
    ratio: float
    spread: tuple[float, float]
    cpu_ratio: float
    trl_rewards: list[float]
    library_rewards: list[float]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def measure(setting: Setting, *, seed: int, steps: int) -> AgainstTrl:
    """Make both runs, a step of each in turn."""
    pair = twins(setting, seed=seed, steps=steps)
    turns = InTurn(library(pair, setting, seed=seed))
    with TemporaryDirectory() as folder:
        theirs, kept = trainer(pair, setting, seed=seed, folder=folder)
        theirs.add_callback(turns)
        theirs.train()
    ours, trl = turns.our_laps, turns.their_laps
    steady = list(zip(trl.wall[1:], ours.wall[1:], strict=True))
    quartiles = statistics.quantiles([a / b for a, b in steady], n=4)
    return AgainstTrl(
        setting=setting.name,
        seed=seed,
        trl_seconds=statistics.median(a for a, _ in steady),
        library_seconds=statistics.median(b for _, b in steady),
        ratio=statistics.median(a for a, _ in steady) / statistics.median(b for _, b in steady),
        spread=(quartiles[0], quartiles[2]),
        cpu_ratio=statistics.median(trl.cpu[1:]) / statistics.median(ours.cpu[1:]),
        trl_rewards=kept.means(),
        library_rewards=turns.our_rewards,
    )


def table(results: Sequence[AgainstTrl]) -> list[str]:
    """The results as lines of Markdown."""
    lines = [
        f"| steps of {ROWS} completions | seed | TRL, samples/s | library, samples/s | ratio (quartiles) | by CPU time |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for each in results:
        low, high = each.spread
        lines.append(
            f"| {each.setting} | {each.seed} | {ROWS / each.trl_seconds:.1f} | {ROWS / each.library_seconds:.1f} | "
            f"{each.ratio:.2f} ({low:.2f} to {high:.2f}) | {each.cpu_ratio:.2f} |"
        )
    lines += ["", "| rewards | seed | | first | last | mean of the run |", "| --- | --- | --- | --- | --- | --- |"]
    for each in results:
        for name, rewards in (("TRL", each.trl_rewards), ("library", each.library_rewards)):
            edge = min(EDGE, len(rewards))
            cells = (statistics.mean(rewards[:edge]), statistics.mean(rewards[-edge:]), statistics.mean(rewards))
            lines.append(f"| {each.setting} | {each.seed} | {name} | " + " | ".join(f"{cell:.3f}" for cell in cells) + " |")
    return lines
