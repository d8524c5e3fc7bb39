"""Reads the folder of one run repeatedly, while the run may be writing to it."""

import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeAlias

from retouch.records import files
from retouch.records.control import read_requests
from retouch.records.folder import RunFolder
from retouch.records.ownership import current_owner
from retouch.rewards.ledger.database import JudgeUsage, ledger_files
from retouch.view.tail import LineTail, UsageTail

State: TypeAlias = Literal["running", "finished", "stopped", "alarm", "waiting", "unreadable"]
_REWARD = "reward/mean"
_POINTS = 80
_RECENT_STEPS = 20
_LOG_BYTES = 4096
_REQUESTS = 20


class LiveRun:
    """The files of a run. Methods may be called from several threads. A damaged file raises no error: its part of the result is
    empty.
    """

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root)
        self._lock = threading.Lock()
        self._metrics, self._timings = LineTail(self.folder.metrics), LineTail(self.folder.timings)
        self._evals, self._suites = LineTail(self.folder.evals), LineTail(self.folder.suites)
        self._ledgers: dict[Path, UsageTail] = {}
        self._samples: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        self._documents: dict[Path, tuple[tuple[int, int, int], Any, str | None]] = {}
        self._generation = 0

    def overview(self) -> dict[str, Any]:
        """Return the row of the run in the table of runs."""
        with self._lock:
            self._update()
            recipe, problem = self._recipe()
            lines, summary = self._metrics.lines, self._json(self.folder.summary)
            step, steps = _last_step(lines), _total_steps(recipe, summary)
            state, reason = self._state(step, steps, problem)
            seconds = self._step_seconds()
            remaining = None if steps is None or seconds is None or state != "running" else max(0, steps - step) * seconds
            return {
                "name": self.folder.name,
                "state": state,
                "reason": reason,
                "step": step,
                "steps": steps,
                "phase": lines[-1].get("phase") if lines else None,
                "reward": _number(lines[-1].get(_REWARD)) if lines else None,
                "rewards": _thin([_number(line.get(_REWARD)) for line in lines]),
                "seconds_per_step": seconds,
                "seconds_left": remaining,
                "judges": self._judges(),
                "changed": _changed(self.folder),
                "summary": summary,
                "damaged": self._metrics.damaged + self._timings.damaged,
            }

    def details(self) -> dict[str, Any]:
        """Return the content of the run's page: its row, recipe, checks, evaluations, benchmarks, alarm, and all metrics."""
        row = self.overview()
        with self._lock:
            return {
                **row,
                "recipe": self._recipe()[0],
                "preflight": self._json(self.folder.preflight) or [],
                "alarm": self._json(self.folder.alarm),
                "metrics": self._metrics.lines,
                "timings": self._timings.lines,
                "generation": self._generation,
                **self._results(),
            }

    def _results(self) -> dict[str, Any]:
        """Return what a run writes only at some steps: evaluations, suites, steps with samples, and control requests."""
        self._evals.update()
        self._suites.update()
        suites = [line for line in self._suites.lines if _is_suite(line)]
        requests = [asdict(request) for request in read_requests(self.folder).values()][-_REQUESTS:]
        return {
            "evals": list(self._evals.lines),
            "suites": suites,
            "sample_steps": self.folder.sample_steps(),
            "requests": requests,
        }

    def since(self, generation: int, metrics: int, timings: int) -> dict[str, Any]:
        """Return the lines after the first ``metrics`` and ``timings`` lines.

        If ``generation`` is not the current one, the files were replaced, and the lines start with the first.
        """
        row = self.overview()
        with self._lock:
            if generation != self._generation:
                metrics = timings = 0
            return {
                "generation": self._generation,
                "run": {**row, **self._results()},
                "metrics": self._metrics.lines[metrics:],
                "timings": self._timings.lines[timings:],
            }

    def samples(self, only: int | None = None) -> list[dict[str, Any]]:
        """Return the lines of all stored samples in the order of their steps, or only those of step ``only``."""
        with self._lock:
            found = []
            for step in self.folder.sample_steps():
                if only not in (None, step):
                    continue
                path = self.folder.samples(step) / "samples.jsonl"
                try:
                    stamp = path.stat().st_mtime_ns
                except OSError:
                    continue
                if self._samples.get(step, (0, []))[0] != stamp:
                    tail = LineTail(path)
                    tail.update()
                    self._samples[step] = stamp, [line for line in tail.lines if _is_sample(line, step)]
                found += self._samples[step][1]
            return found

    def _judges(self) -> dict[str, float | None] | None:
        """Return requests, tokens and cost of judges so far; None before the first request. ``cost``: dollars, None if unknown."""
        paths = ledger_files(self.folder.root)
        self._ledgers = {path: self._ledgers.get(path) or UsageTail(path) for path in paths}
        used = sum((tail.update() for tail in self._ledgers.values()), JudgeUsage())
        return {**asdict(used), "cost": used.known_cost} if used.requests else None

    def _update(self) -> None:
        again = [tail.update() for tail in (self._metrics, self._timings)]
        if any(again):
            self._generation += 1

    def _recipe(self) -> tuple[Mapping[str, Any], str | None]:
        """Return the resolved recipe (empty if unreadable), and the error of reading it, or None."""
        record, problem = self._read(self.folder.recipe, self.folder.read_recipe)
        return ({} if record is None else record["recipe"]), problem

    def _json(self, path: Path) -> Any:
        return self._read(path, lambda: files.read_record(path) if path.is_file() else None)[0]

    def _read(self, path: Path, read: Callable[[], Any]) -> tuple[Any, str | None]:
        """Return the content of a file, and the error of reading it, or None. The file is read again only after it has changed."""
        try:
            stat = path.stat()
            stamp = stat.st_ino, stat.st_mtime_ns, stat.st_size
        except OSError:
            stamp = (0, 0, 0)
        if self._documents.get(path, (None,))[0] != stamp:
            try:
                found, problem = read(), None
            except (OSError, ValueError, RecursionError) as error:
                found, problem = None, str(error)
            self._documents[path] = stamp, found, problem
        return self._documents[path][1:]

    def _state(self, step: int, steps: int | None, problem: str | None) -> tuple[State, str | None]:
        owner = current_owner(self.folder.root)
        if owner is not None:
            return "running", None
        if problem is not None:
            return "unreadable", problem
        alarm = self._json(self.folder.alarm)
        if isinstance(alarm, dict):
            texts = [str(each.get("text", "")) for each in alarm.get("alarms", ()) if isinstance(each, dict)]
            return "alarm", "; ".join(filter(None, texts)) or "a rule stopped the run"
        summary = self._json(self.folder.summary)
        ended = _number(summary.get("steps")) if isinstance(summary, dict) else None  # of fewer steps if `steps` was raised
        if steps is not None and step >= steps and ended is not None and ended >= step:
            return "finished", None
        return ("stopped" if step else "waiting"), self._last_words()

    def _last_words(self) -> str | None:
        """Return the last line of the log without its time; for a failed run, this is the error."""
        try:
            with files.open_file(self.folder.log()) as log:
                log.seek(max(0, log.seek(0, 2) - _LOG_BYTES))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:
            return None
        texts = [line.partition("  ")[2].strip() or line.strip() for line in lines]
        return next((text for text in reversed(texts) if text), None)

    def _step_seconds(self) -> float | None:
        recent = [_number(line.get("time/step")) for line in self._timings.lines[-_RECENT_STEPS:]]
        known = [value for value in recent if value is not None]
        return statistics.median(known) if known else None


def _is_sample(line: Mapping[str, Any], step: int) -> bool:
    return (
        line.get("step") == step
        and isinstance(line.get("scores"), dict)
        and all(isinstance(line.get(name), str) for name in ("set", "task", "instruction"))
        and all(isinstance(line.get(name), int) for name in ("group", "slot"))
    )


def _is_suite(line: Mapping[str, Any]) -> bool:
    table = line.get("table")
    return (
        isinstance(line.get("step"), int)
        and isinstance(line.get("suite"), str)
        and isinstance(table, dict)
        and all(isinstance(row, dict) for row in table.values())
    )


def _last_step(lines: Sequence[Mapping[str, Any]]) -> int:
    step = lines[-1].get("step") if lines else 0
    return step if isinstance(step, int) else 0


def _total_steps(recipe: Mapping[str, Any], summary: object) -> int | None:
    """Return the total number of steps; None if it depends on the data and the run has not ended yet."""
    phases = recipe.get("phases")
    counts = [phase.get("steps") if isinstance(phase, dict) else None for phase in phases] if isinstance(phases, list) else []
    known = [count for count in counts if isinstance(count, int)]
    if counts and len(known) == len(counts):
        return sum(known)
    found = recipe.get("steps") or (summary.get("steps") if isinstance(summary, dict) else None)
    return found if isinstance(found, int) else None


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _thin(values: Sequence[float | None]) -> list[float | None]:
    """Average consecutive values, so that at most ``_POINTS`` values remain."""
    size = max(1, -(-len(values) // _POINTS))
    parts = (values[start : start + size] for start in range(0, len(values), size))
    known = ([value for value in part if value is not None] for part in parts)
    return [statistics.fmean(part) if part else None for part in known]


def _changed(folder: RunFolder) -> float | None:
    """Return when the run last wrote a file, in seconds since 1970."""
    for path in (folder.metrics, folder.recipe, folder.root):
        try:
            return path.stat().st_mtime
        except OSError:
            continue
    return None
