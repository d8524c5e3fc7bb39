"""The quickstart on the GPU: does a run that is killed and resumed, or repeated, end with the same bits as the first run?

With ``deterministic: true`` it must. Without this setting, the check measures whether it does.
"""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from findings import Finding, at_most, measured
from target import Target

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "playground" / "grpo.jsonnet"
NAME = "resumed"
STEPS, SAVE_EVERY = 6, 2
TENSORS = ("weights", "optimizer")
SETTINGS = (
    *(f"steps={STEPS}", f"checkpoints.every={SAVE_EVERY}", "tasks_per_step=4", "group_size=4", "microbatch=8"),
    *("eval.tasks=6", "eval.batch=6", "eval.best_of_k=2", "samples.tasks=1"),
)
"""Settings of every run. They make few rows, because only bits are compared."""

RUNS = """
import runpy
runpy.run_module("retouch", run_name="__main__", alter_sys=True)
"""
DIES = """
import os, pathlib, runpy, signal, sys
from retouch.distributed.optimizer import ReplicatedStepper
checkpoint, take = pathlib.Path(sys.argv.pop(1)), ReplicatedStepper.step
def step(self, learning_rate):
    if checkpoint.is_dir():
        os.kill(os.getpid(), signal.SIGKILL)
    return take(self, learning_rate)
ReplicatedStepper.step = step
runpy.run_module("retouch", run_name="__main__", alter_sys=True)
"""
"""``retouch``, which kills itself at the first optimizer step after the checkpoint that is its first argument: a process that is
killed from outside may have ended before, on a fast machine."""


def run(target: Target) -> Iterator[Finding]:
    """Make the runs in parallel, and compare the hashes of their last checkpoints."""
    modes = (True,) if target.tiny else (True, False)
    runs = {
        (mode, name): Training(
            target.scratch / f"{name}-{mode}",
            (str(RECIPE), [*SETTINGS, f"deterministic={str(mode).lower()}", f"device={target.device.type}"]),
            dies_after=SAVE_EVERY if name == "killed" else None,
        )
        for mode in modes
        for name in ("whole", "killed", *([] if target.tiny else ["repeated"]))
    }
    for mode in modes:
        runs[mode, "killed"].restart()
    for training in runs.values():
        training.finish()
    hashes = {key: training.hash() for key, training in runs.items()}
    for mode in modes:
        kind = "deterministic" if mode else "default algorithms"
        for name in ("killed", *([] if target.tiny else ["repeated"])):
            different = float(hashes[mode, name] != hashes[mode, "whole"])
            text = f"{kind}: the {name} run ends with other bits (1) or the same (0)"
            yield at_most(text, different, 0) if mode else measured(text, different)


class Training:
    """A background process of ``retouch train`` with a recipe and its settings, which works in ``folder``.

    ``dies_after``: it kills itself in the step after this one, whose checkpoint exists. ``prepare``: code that the process runs
    first.
    """

    def __init__(self, folder: Path, recipe: tuple[str, Sequence[str]], *, dies_after: int | None, prepare: str = "") -> None:
        folder.mkdir()
        self.folder = folder
        self.prepare = prepare
        self.words = ["train", recipe[0], *_options([*recipe[1], f"name={NAME}"])]
        self.process = self._start(*((DIES, str(self.checkpoint(dies_after))) if dies_after is not None else (RUNS,)))

    def restart(self) -> None:
        """Wait until the process has killed itself, and start the run again. RuntimeError if it ended in another way."""
        if (code := self.process.wait()) != -signal.SIGKILL:
            raise RuntimeError(f"{self.folder.name}: the run ended with exit code {code}, and was not killed; see log.txt")
        self.process = self._start(RUNS)

    def finish(self) -> None:
        code = self.process.wait()
        if code:
            raise RuntimeError(f"{self.folder.name}: the run ended with exit code {code}; see log.txt")

    def hash(self) -> str:
        """The hash of the weights and of the optimizer state after the last step."""
        digest = hashlib.sha256()
        for name in TENSORS:
            digest.update((self.checkpoint(STEPS) / f"{name}.safetensors").read_bytes())
        return digest.hexdigest()

    def checkpoint(self, step: int) -> Path:
        return self.run / "checkpoints" / f"step-{step:06d}"

    @property
    def run(self) -> Path:
        """The folder of the run."""
        return self.folder / "runs" / NAME

    def _start(self, program: str, *words: str) -> "subprocess.Popen[bytes]":
        command = [sys.executable, "-c", self.prepare + program, *words, *self.words]
        return subprocess.Popen(command, cwd=self.folder, stdin=subprocess.DEVNULL, env=dict(os.environ))


def _options(settings: Sequence[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]
