"""Runs whose judge dies, or has no more to spend: every rank ends by itself with a checkpoint, and the run goes on from there."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from live_server import live
from retouch.records.folder import RunFolder
from retouch.training import checkpoint
from warm_python import python

TINY = {
    "tasks_per_step": 2,
    "group_size": 2,
    "microbatch": 4,
    "device": "cpu",
    "trackers": [],
    "ranks": 2,
    "rollout.chunk": 2,
    "rollout.num_steps": 3,
    "rollout.window": {"mode": "window", "size": 2, "high": 2},
    "eval.tasks": 4,
    "eval.best_of_k": 0,
    "samples.every": 0,
    "checkpoints.every": 1000,
}
DEADLINE = 8


@contextmanager
def training(out: Path, reward: dict[str, object], *, ranks: int, steps: int) -> Iterator["subprocess.Popen[str]"]:
    """A run of `playground/grpo` with another judge, made tiny, as a process."""
    settings = {**TINY, "name": "run", "out": str(out), "steps": steps, "reward": reward}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
    launch = ["launch", "--nproc", str(ranks)] if ranks > 1 else ["train"]
    command = [python(), "-W", "ignore", "-m", "retouch.cli", *launch, "recipes/playground/grpo.jsonnet", *words]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def steps_of(folder: RunFolder) -> int:
    file = folder.root / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def check_end(
    process: "subprocess.Popen[str]", folder: RunFolder, says: str, *, ranks: int, of_ranks: Callable[[Iterable[bool]], bool] = all
) -> None:
    """It ended with an error that says so on all ranks (or on any), and the newest checkpoint has every step that was taken."""
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 2, said
    logs = [said] if ranks == 1 else [(folder.root / "logs" / f"rank-{rank}.log").read_text() for rank in range(ranks)]
    assert of_ranks(says in log for log in logs), logs
    newest = checkpoint.latest(folder.checkpoints)
    assert newest is not None
    assert checkpoint.load(newest).step == steps_of(folder)


@contextmanager
def servers(ports: Sequence[int]) -> Iterator[list[str]]:
    with ExitStack() as stack:
        yield [stack.enter_context(live("playground", port=port)).url for port in ports]


def remote(urls: Sequence[str], **settings: object) -> dict[str, object]:
    return {"kind": "remote", "endpoints": urls, **settings, "combine": {"overall": 1}}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_when_all_servers_die_every_rank_ends_with_a_checkpoint_and_goes_on_when_they_are_back(tmp_path: Path, ranks: int) -> None:
    folder = RunFolder(tmp_path / "run")
    with ExitStack() as alive:
        urls = alive.enter_context(servers([0, 0]))
        reward = remote(urls, deadline=DEADLINE)
        with training(tmp_path, reward, ranks=ranks, steps=10_000) as process:
            while steps_of(folder) < 2:
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            alive.close()
            check_end(process, folder, "could not be judged, and the recipe allows", ranks=ranks)
    done = steps_of(folder)
    ports = [urlsplit(url).port or 0 for url in urls]
    with servers(ports), training(tmp_path, reward, ranks=ranks, steps=done + 1) as process:
        said, _ = process.communicate(timeout=600)
        assert process.returncode == 0, said
    assert steps_of(folder) == done + 1


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_spent_budget_ends_every_rank_with_a_checkpoint_and_a_larger_one_goes_on(tmp_path: Path, ranks: int) -> None:
    """Before the first step two calls a rank; a step has two in all. With seven more than before it the fourth is cut short."""
    folder = RunFolder(tmp_path / "run")
    with servers([0]) as urls:
        reward = remote(urls, calls=2 * ranks + 7, rate_file=str(tmp_path / "quota"))
        with training(tmp_path, reward, ranks=ranks, steps=4) as process:
            # The budget is shared, so the call over it may be that of any rank; the others refer to its log.
            check_end(process, folder, "raise its `calls` to continue", ranks=ranks, of_ranks=any)
        assert steps_of(folder) == 3
        with training(tmp_path, {**reward, "calls": 100}, ranks=ranks, steps=4) as process:
            said, _ = process.communicate(timeout=600)
            assert process.returncode == 0, said
    assert steps_of(folder) == 4
