"""Does GRPO learn? Stable Diffusion 3.5 Medium with random weights makes brighter images, in a run that is killed and resumed.

The reward is the mean luminance of an image. The run writes checkpoints of the LoRA, kills itself in the step after the first one,
and is started again.
"""

import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path

from cases import LEARNS
from findings import Finding, at_least, at_most, measured
from resume import Training
from safetensors import safe_open
from target import Target

STEPS, SAVED, COMPARED = 20, 10, 5
LEAST = 4.0
"""The smallest gain, in standard errors of the difference between the means of the first and the last `COMPARED` steps. Every step
has other prompts and noise, so its mean reward is a sample of its own; what is learnt meanwhile only makes the spread larger. Even
with 4 degrees of freedom, chance exceeds it in less than one of a hundred runs."""
PREPARE = """
import sys, torch
from pathlib import Path
sys.path.insert(0, {folder!r})
from cases import random_weights
from target import Target
weights = random_weights(Target(torch.device({device!r}), tiny={tiny}, folder=Path(), scratch=Path()), std=None)
weights.__enter__()
"""
"""Builds all models of the process with random weights."""


def run(target: Target) -> Iterator[Finding]:
    """Train, and compare the rewards of the first and the last steps."""
    target.require_memory(60e9)
    path, settings = LEARNS.write(target.scratch, tiny=target.tiny)
    prepare = PREPARE.format(folder=str(Path(__file__).parent), device=str(target.device), tiny=target.tiny)
    recipe = path, [*settings, f"device={target.device.type}"]
    training = Training(target.scratch / "learns", recipe, dies_after=SAVED, prepare=prepare)
    training.restart()
    training.finish()
    metrics, timings = (_lines(training.run / f"{name}.jsonl") for name in ("metrics", "timings"))
    steps = [line["step"] for line in metrics]
    wrong = sum(steps.count(step) != 1 for step in range(1, STEPS + 1))
    yield at_most("steps that are missing or recorded twice", wrong, 0)
    rewards = [line["reward/mean"] for line in metrics]
    first, last = rewards[:COMPARED], rewards[-COMPARED:]
    gain = statistics.mean(last) - statistics.mean(first)
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / COMPARED)
    yield measured(f"mean reward of the first {COMPARED} steps", statistics.mean(first))
    yield measured(f"mean reward of the last {COMPARED} steps", statistics.mean(last))
    yield at_least("gain in standard errors", gain / error, LEAST)
    files = list(training.checkpoint(SAVED).glob("*.safetensors"))
    names = [name for file in files if file.stem != "random" for name in _names(file)]
    yield at_most("tensors of the checkpoint that are not the LoRA's", sum("lora_" not in name for name in names), 0)
    yield measured("checkpoint", sum(file.stat().st_size for file in files) / 1e6, "MB")
    yield measured("time of a step", statistics.median(line["time/step"] for line in timings), "s")


def _lines(path: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())
