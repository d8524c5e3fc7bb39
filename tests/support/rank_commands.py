"""Runs commands as several ranks on the CPU, with the support modules on the import path."""

import os
import sys
from pathlib import Path

from retouch.distributed.launching import rank_environments, run_ranks
from warm_python import python

SUPPORT = Path(__file__).parent


def on_ranks(count: int, command: list[str], logs: Path) -> None:
    """Run a command as ``count`` ranks on the CPU. AssertionError with the end of the logs if it fails."""
    logs.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join([str(SUPPORT), *sys.path])
    ranks = [{**one, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"} for one in rank_environments(count)]
    code = run_ranks([python(), "-W", "ignore", *command], ranks, logs=logs, grace=20.0)
    assert code == 0, "\n".join(log.read_text()[-3000:] for log in sorted(logs.glob("rank-*.log")))
