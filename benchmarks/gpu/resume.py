"""The quickstart on the GPU: does a run that is killed and resumed, or repeated, end with the same bits as the first run?

With ``deterministic: true`` it must. Without this setting, the check measures whether it does.
"""

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from findings import Finding, at_most, measured
from target import Target

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "playground" / "grpo.jsonnet"
STEPS, SAVE_EVERY = 6, 2
POLL_SECONDS = 0.02
TENSORS = ("weights", "optimizer")
SETTINGS = (
    *(f"steps={STEPS}", f"checkpoints.every={SAVE_EVERY}", "tasks_per_step=4", "group_size=4", "microbatch=8"),
    *("eval.tasks=6", "eval.batch=6", "eval.best_of_k=2", "samples.tasks=1"),
)
"""Settings of every run. They make few rows, because only bits are compared."""


def run(target: Target) -> Iterator[Finding]:
    """Make the runs in parallel, and compare the hashes of their last checkpoints."""
    modes = (True,) if target.tiny else (True, False)
    runs = {
        (mode, name): _Training(target.scratch / f"{name}-{mode}", deterministic=mode, target=target)
        for mode in modes
        for name in ("whole", "killed", *([] if target.tiny else ["repeated"]))
    }
    for mode in modes:
        runs[mode, "killed"].kill_after(SAVE_EVERY)
    for training in runs.values():
        training.finish()
    hashes = {key: training.hash() for key, training in runs.items()}
    for mode in modes:
        kind = "deterministic" if mode else "default algorithms"
        for name in ("killed", *([] if target.tiny else ["repeated"])):
            different = float(hashes[mode, name] != hashes[mode, "whole"])
            text = f"{kind}: the {name} run ends with other bits (1) or the same (0)"
            yield at_most(text, different, 0) if mode else measured(text, different)


class _Training:
    """A background process of ``retouch train`` that works in ``folder``."""

    def __init__(self, folder: Path, *, deterministic: bool, target: Target) -> None:
        folder.mkdir()
        self.folder = folder
        settings = [*SETTINGS, f"deterministic={str(deterministic).lower()}", f"device={target.device.type}", "name=resumed"]
        self.command = [sys.executable, "-m", "retouch", "train", str(RECIPE), *_options(settings)]
        self.process = self._start()

    def kill_after(self, step: int) -> None:
        """Kill the process as soon as the checkpoint of ``step`` exists, and start it again."""
        while not self._checkpoint(step).is_dir():
            if self.process.poll() is not None:
                raise RuntimeError(f"the run ended with exit code {self.process.returncode} before step {step}; see log.txt")
            time.sleep(POLL_SECONDS)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        if self._checkpoint(STEPS).is_dir():
            raise RuntimeError("the run ended before it was killed")
        self.process = self._start()

    def finish(self) -> None:
        code = self.process.wait()
        if code:
            raise RuntimeError(f"{self.folder.name}: the run ended with exit code {code}; see log.txt")

    def hash(self) -> str:
        """The hash of the weights and of the optimizer state after the last step."""
        digest = hashlib.sha256()
        for name in TENSORS:
            digest.update((self._checkpoint(STEPS) / f"{name}.safetensors").read_bytes())
        return digest.hexdigest()

    def _checkpoint(self, step: int) -> Path:
        return self.folder / "runs" / "resumed" / "checkpoints" / f"step-{step:06d}"

    def _start(self) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(self.command, cwd=self.folder, stdin=subprocess.DEVNULL, env=dict(os.environ))


def _options(settings: Sequence[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]
