"""Saves checkpoints in child processes that are killed. The test runs this program: ``kill_saves.py FOLDER SEED POINTS TIMES``.

Each child saves step after step and reports to the parent which step is saved. It is killed at a given disk access of Python
(an audit event), or after a random time. The parent then reads the files that are left, and exits with 1 at the first error.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from retouch.records.folder import remove_leftovers
from retouch.run import checkpoint
from retouch.run.checkpoint import TrainState

DISK = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "shutil.rmtree", "pathlib.Path.glob"}


def state(step: int) -> TrainState:
    """Return the state of a step; it differs from step to step."""
    generator = torch.Generator().manual_seed(step)
    weights = {f"layer.{index}": torch.randn(64, 97, generator=generator) for index in range(8)}
    return TrainState(step, {"weights": weights, "optimizer": {"step": torch.tensor(float(step))}}, {"seen": [step, f"{step}"]})


def states_equal(one: TrainState, other: TrainState) -> bool:
    """Whether the two states are equal to the bit."""
    if one.step != other.step or one.numbers != other.numbers or one.tensors.keys() != other.tensors.keys():
        return False
    return all(
        tensors.keys() == other.tensors[group].keys()
        and all(torch.equal(tensor, other.tensors[group][name]) for name, tensor in tensors.items())
        for group, tensors in one.tensors.items()
    )


def child(folder: Path, first: int, told: int, after: int | None) -> None:
    """Save steps from ``first`` on, until the process kills itself at disk access number ``after`` or the parent kills it."""
    touches = 0

    def count(event: str, arguments: object) -> None:
        nonlocal touches
        if event in DISK:
            touches += 1
            if touches == after:
                os.kill(os.getpid(), signal.SIGKILL)

    if after is not None:
        sys.addaudithook(count)
    for step in range(first, first + 10_000):
        remove_leftovers(folder)
        checkpoint.save(folder, state(step))
        os.write(told, step.to_bytes(4, "big"))
        checkpoint.prune(folder, 2)


def kill_once(folder: Path, first: int, after: int | None, wait: float) -> int:
    """Start a child, kill it, and return the last step that it reported as saved (-1: none)."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(folder, first, writing, after)
        os._exit(3)
    os.close(writing)
    if after is None:
        time.sleep(wait)
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, f"the child ended by itself: {status}"
    said = b""
    while part := os.read(reading, 1 << 16):
        said += part
    os.close(reading)
    return int.from_bytes(said[-4:], "big") if said else -1


def main(folder: Path, seed: int, points: int, times: int) -> None:
    """Kill at each of the first ``points`` disk accesses, then ``times`` times after a random time."""
    draw = random.Random(seed)
    safe, inside = -1, 0
    for index in range(points + times):
        told = kill_once(folder, safe + 1, index + 1 if index < points else None, draw.uniform(0.0, 0.06))
        inside += any(folder.glob(".tmp-*"))
        safe = max(safe, told)
        found = checkpoint.latest(folder)
        step = -1 if found is None else checkpoint.load(found).step
        assert safe <= step <= safe + 1, f"kill {index}: step {safe} was saved, but the newest checkpoint is {found}"
        assert found is None or states_equal(checkpoint.load(found), state(step)), f"kill {index}: {found} has wrong contents"
        safe = step
    remove_leftovers(folder)
    left = sorted(path.name for path in folder.iterdir())
    assert all(name.startswith("step-") for name in left), f"left behind: {left}"
    assert inside > points // 2, f"only {inside} kills interrupted a save"


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
