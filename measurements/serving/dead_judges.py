"""Kills all replicas of a run's judge during training. How long until every rank has ended, and which checkpoint is left?

python measurements/serving/dead_judges.py [--deadline 20] [--ranks 1 2]
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from servers import Ours, serving

from retouch.run import checkpoint

ROOT = Path(__file__).parents[2]
SETTINGS = {
    "name": "run",
    "steps": 100_000,
    "tasks_per_step": 4,
    "group_size": 4,
    "microbatch": 16,
    "device": "cpu",
    "ranks": 2,
    "trackers": [],
    "rollout.chunk": 4,
    "eval.tasks": 8,
    "eval.best_of_k": 0,
    "samples.every": 0,
    "checkpoints.every": 100_000,
}


def measure(server: Ours, *, ranks: int, deadline: float) -> dict[str, object]:
    """Measure one run.

    Returns the seconds from the kill to the checkpoint and to the end of the last process, the exit code, the number of steps, and
    the number of steps in the checkpoint.
    """
    with TemporaryDirectory() as out:
        reward = {"kind": "remote", "endpoints": server.urls, "deadline": deadline, "combine": {"overall": 1}}
        settings = {**SETTINGS, "out": out, "reward": reward}
        words = [word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}")]
        launch = ["launch", "--nproc", str(ranks)] if ranks > 1 else ["train"]
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "retouch.cli",
            *launch,
            str(ROOT / "recipes/playground/grpo.jsonnet"),
            *words,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        run = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        metrics = Path(out) / "run" / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") >= 3):
            if run.poll() is not None:
                raise SystemExit("the run ended before its judges were killed")
            time.sleep(0.05)
        for pid in (server.supervisor, *server.pids().values()):
            os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        saved = None
        while run.poll() is None:
            if saved is None and checkpoint.latest(Path(out) / "run" / "checkpoints") is not None:
                saved = time.monotonic() - killed
            time.sleep(0.05)
        seconds = time.monotonic() - killed
        newest = checkpoint.latest(Path(out) / "run" / "checkpoints")
        kept = None if newest is None else checkpoint.load(newest).step
        figures = {"exit_code": run.returncode, "steps": metrics.read_text().count("\n"), "steps_kept": kept}
        return {"saved_after": saved and round(saved, 1), "ended_after": round(seconds, 1), **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deadline", type=float, default=20.0)
    parser.add_argument("--ranks", type=int, nargs="*", default=[1, 2])
    arguments = parser.parse_args()
    for ranks in arguments.ranks:
        with serving("playground", replicas=3) as server:
            print(f"{ranks} ranks: {json.dumps(measure(server, ranks=ranks, deadline=arguments.deadline))}", flush=True)


if __name__ == "__main__":
    main()
