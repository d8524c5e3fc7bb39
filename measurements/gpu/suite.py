"""Runs checks one after the other, each in a separate process, and keeps the measured values even if a check fails.

A process starts while the previous check still runs, so that the GPU does not wait for its imports. It waits until it is told to
go, and its time limit counts from that moment; a process that exceeds the limit is killed with all of its children.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from findings import FOUND, Finding, Result, table, verdict

WORKER = Path(__file__).with_name("worker.py")
LEAST_SECONDS = 10.0
"""No check is started if less time than this is left."""
RESERVED_SECONDS = 5.0
"""Time that is reserved at the end for writing the table."""


@dataclass(frozen=True)
class Check:
    """A check. ``function``: ``module:name`` of a function that takes the target and yields values. ``limit``: seconds.

    ``seconds``: how long it takes on an H100; it is not started if less time than this is left. ``groups``: names of groups.
    """

    name: str
    function: str
    limit: float
    seconds: float = 0.0
    groups: tuple[str, ...] = ()


class Process:
    """The process of a check. It imports the module of the check immediately, and runs the check when ``run`` is called."""

    def __init__(self, check: Check, folder: Path, *, dry_run: bool) -> None:
        self.check = check
        self.scratch = TemporaryDirectory(prefix="retouch-gpu-")
        with open(folder / "log.txt", "a", encoding="utf-8") as log:
            self.popen = subprocess.Popen(
                [sys.executable, str(WORKER), check.function, str(folder), self.scratch.name, *(["--dry-run"] if dry_run else [])],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # a group of its own, which can be killed as a whole
            )

    def run(self, limit: float) -> Result:
        """Run the check for at most ``limit`` seconds."""
        started = time.perf_counter()
        assert self.popen.stdin is not None
        with suppress(BrokenPipeError):  # the process failed during its imports
            self.popen.stdin.write(b"go\n")
            self.popen.stdin.close()
        code: int | None = None
        try:
            code = self.popen.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self.kill()
        seconds = time.perf_counter() - started
        lines = list(lines_of(Path(self.scratch.name)))
        ended = None
        if code is None:
            ended = f"stopped after its limit of {limit:.0f} s"
        elif code < 0:
            ended = f"killed by {signal.Signals(-code).name}" + (", for lack of memory?" if code == -signal.SIGKILL else "")
        elif code and not any("error" in line for line in lines):
            ended = f"ended with exit code {code}; see log.txt"
        return result_of(self.check.name, lines, ended=ended, seconds=seconds)

    def kill(self) -> None:
        """End the process with its children, and wait for it."""
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def close(self) -> None:
        """End the process if it still runs, and remove its files."""
        if self.popen.poll() is None:
            self.kill()
        assert self.popen.stdin is not None
        with suppress(BrokenPipeError):
            self.popen.stdin.close()
        self.scratch.cleanup()


def lines_of(scratch: Path) -> Iterator[dict[str, Any]]:
    """The lines that the process of a check wrote into ``scratch``, without an unfinished last line."""
    found = scratch / FOUND
    text = found.read_text(encoding="utf-8") if found.is_file() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def result_of(check: str, lines: Sequence[dict[str, Any]], *, ended: str | None, seconds: float) -> Result:
    """The result of a check that wrote these lines. ``ended``: how the process ended if the lines do not say it, else None."""
    findings = [Finding(**line["finding"]) for line in lines if "finding" in line]
    stopped = next((line["not run"] for line in lines if "not run" in line), None)
    if stopped is not None:
        return Result(check=check, status="not run", why=stopped, seconds=seconds, findings=tuple(findings))
    error = ended or next((line["error"] for line in lines if "error" in line), None)
    return verdict(check, findings, error=error, seconds=seconds)


def run_suite(checks: Sequence[Check], folder: Path, *, seconds: float, dry_run: bool) -> list[Result]:
    """Run the checks within ``seconds``. The last check may take all the time that is left.

    After each check, its result is printed and written to ``folder/results.jsonl`` as a line of JSON. At the end, the table is
    written to ``folder/table.md``.
    """
    folder.mkdir(parents=True, exist_ok=True)
    deadline = time.perf_counter() + seconds - RESERVED_SECONDS
    results: list[Result] = []
    upcoming = Process(checks[0], folder, dry_run=dry_run) if checks else None
    try:
        with open(folder / "results.jsonl", "w", encoding="utf-8") as file:
            for index, check in enumerate(checks):
                current, left = upcoming, deadline - time.perf_counter()
                assert current is not None
                following = checks[index + 1 : index + 2]
                upcoming = Process(following[0], folder, dry_run=dry_run) if following else None
                if left < max(LEAST_SECONDS, check.seconds):
                    result = Result(check=check.name, status="not run", why="the time was over", seconds=0.0)
                else:
                    result = current.run(min(check.limit, left) if following else left)
                current.close()
                results.append(result)
                line = json.dumps(result.to_json())
                for out in (file, sys.stdout):
                    out.write(line + "\n")
                    out.flush()
    finally:
        if upcoming is not None:
            upcoming.close()
        (folder / "table.md").write_text(table(results) + "\n", encoding="utf-8")
    return results
