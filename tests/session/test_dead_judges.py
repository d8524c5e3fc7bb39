"""Runs whose reward servers die or whose budget is spent: every rank ends by itself with a checkpoint, and the run can resume."""

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
from retouch.run import checkpoint
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
    """A process that trains a tiny version of `playground/grpo` with the given reward."""
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
    """Check that all ranks (or any) ended with this error, and that the newest checkpoint includes every step of the metrics."""
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


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_death_of_all_reward_servers_ends_every_rank_with_a_checkpoint_and_the_run_resumes(tmp_path: Path, ranks: int) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_spent_budget_ends_every_rank_with_a_checkpoint_and_a_larger_budget_resumes(tmp_path: Path, ranks: int) -> None:
    """Each rank makes two calls before the first step; a step makes two in total. With seven more calls, the fourth step fails."""
    folder = RunFolder(tmp_path / "run")
    with servers([0]) as urls:
        reward = remote(urls, calls=2 * ranks + 7, rate_file=str(tmp_path / "quota"))
        with training(tmp_path, reward, ranks=ranks, steps=4) as process:
            # The budget is shared, so any rank may make the call that exceeds it; the other ranks refer to the log of that rank.
            check_end(process, folder, "raise its `calls` to continue", ranks=ranks, of_ranks=any)
        assert steps_of(folder) == 3
        with training(tmp_path, {**reward, "calls": 100}, ranks=ranks, steps=4) as process:
            said, _ = process.communicate(timeout=600)
            assert process.returncode == 0, said
    assert steps_of(folder) == 4
