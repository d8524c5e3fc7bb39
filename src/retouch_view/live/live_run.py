"""Reads the folder of one run repeatedly, while the run may be writing to it."""

import os
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal, TypeAlias

from retouch.records import files, shapes
from retouch.records.control import read_requests
from retouch.records.folder import RunFolder
from retouch.records.ownership import current_owner
from retouch.rewards.ledger.database import JudgeUsage, ledger_files
from retouch_view.live.tail import LineTail, UsageTail

State: TypeAlias = Literal["running", "finished", "stopped", "alarm", "waiting", "unreadable"]
_REWARD = "reward/mean"
_POINTS = 80
_RECENT_STEPS = 20
_LOG_BYTES = 4096
_REQUESTS = 20


class LiveRun:
    """The files of a run. Methods may be called from several threads.

    A damaged document or line is left out, and ``faults`` of the run's row says so. Other methods than ``overview`` raise OSError
    or ValueError if the folder cannot be read at all, for example because a pipe is in the place of a file.
    """

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root)
        self._lock = threading.Lock()
        self._metrics, self._timings = (LineTail(root / name, shapes.METRICS) for name in ("metrics.jsonl", "timings.jsonl"))
        self._evals = LineTail(root / "evals.jsonl", shapes.EVALUATION)
        self._suites = LineTail(root / "suites.jsonl", shapes.SUITE)
        self._ledgers: dict[Path, UsageTail] = {}
        self._samples: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        self._documents: dict[Path, tuple[tuple[int, int, int], Any, str | None]] = {}
        self._generation = 0

    def overview(self) -> dict[str, Any]:
        """Return the row of the run in the table of runs; if it cannot be read, the row has only its name and the reason."""
        try:
            return self._row()
        except (OSError, ValueError) as error:
            empty = dict.fromkeys(("steps", "phase", "reward", "seconds_per_step", "seconds_left", "judges", "changed", "summary"))
            name, reason = self.folder.root.name, str(error)
            return {**empty, "name": name, "state": "unreadable", "reason": reason, "faults": [reason], "step": 0, "rewards": []}

    def _row(self) -> dict[str, Any]:
        with self._lock:
            self._update()
            recipe, problem = self._recipe()
            lines, summary = self._metrics.lines, self._document("summary.json", shapes.SUMMARY)
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
                "faults": self._faults(),
            }

    def details(self) -> dict[str, Any]:
        """Return the content of the run's page: its row, recipe, checks, evaluations, benchmarks, alarm, and all metrics."""
        row = self._row()
        with self._lock:
            return {
                **row,
                "recipe": self._recipe()[0],
                "preflight": self._document("preflight.json", shapes.CHECKS) or [],
                "alarm": self._document("alarm.json", shapes.ALARM),
                "metrics": self._metrics.lines,
                "timings": self._timings.lines,
                "generation": self._generation,
                **self._results(),
            }

    def _results(self) -> dict[str, Any]:
        """Return what a run writes only at some steps: evaluations, suites, steps with samples, and control requests."""
        self._evals.update()
        self._suites.update()
        requests = [asdict(request) for request in read_requests(self.folder).values()][-_REQUESTS:]
        return {
            "evals": list(self._evals.lines),
            "suites": list(self._suites.lines),
            "faults": self._faults(),
            "sample_steps": self.folder.sample_steps(),
            "requests": requests,
        }

    def since(self, generation: int, metrics: int, timings: int) -> dict[str, Any]:
        """Return the lines after the first ``metrics`` and ``timings`` lines.

        If ``generation`` is not the current one, the files were replaced, and the lines start with the first.
        """
        row = self._row()
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
                    tail = LineTail(path, shapes.SAMPLE)
                    tail.update()
                    self._samples[step] = stamp, [line for line in tail.lines if line["step"] == step]
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

    def _faults(self) -> list[str]:
        """Return a sentence about each file with damage that was left out."""
        tails = {"metrics": self._metrics, "timings": self._timings, "evals": self._evals, "suites": self._suites}
        counted = [f"{name}.jsonl: {tail.damaged} damaged lines were skipped" for name, tail in tails.items() if tail.damaged]
        return [*counted, *(problem for _, _, problem in self._documents.values() if problem is not None)]

    def _recipe(self) -> tuple[Mapping[str, Any], str | None]:
        """Return the resolved recipe (empty if unreadable), and the error of reading it, or None."""
        record, problem = self._read(self.folder.root / "recipe.json", self.folder.read_recipe)
        return ({} if record is None else record["recipe"]), problem

    def _document(self, name: str, shape: shapes.Shape) -> Any:
        path = self.folder.root / name
        return self._read(path, lambda: files.read_record(path, shape) if os.path.lexists(path) else None)[0]

    def _read(self, path: Path, read: Callable[[], Any]) -> tuple[Any, str | None]:
        """Return the content of a file, and the error of reading it, or None. The file is read again only after it has changed."""
        try:
            stat = path.lstat()
            stamp = stat.st_ino, stat.st_mtime_ns, stat.st_size
        except OSError:
            stamp = (0, 0, 0)
        if self._documents.get(path, (None,))[0] != stamp:
            try:
                found, problem = read(), None
            except (OSError, ValueError) as error:
                found, problem = None, str(error)
            self._documents[path] = stamp, found, problem
        return self._documents[path][1:]

    def _state(self, step: int, steps: int | None, problem: str | None) -> tuple[State, str | None]:
        owner = current_owner(self.folder.root)
        if owner is not None:
            return "running", None
        if problem is not None:
            return "unreadable", problem
        alarm = self._document("alarm.json", shapes.ALARM)
        if alarm is not None:
            return "alarm", "; ".join(each["text"] for each in alarm["alarms"] if each["text"]) or "a rule stopped the run"
        summary = self._document("summary.json", shapes.SUMMARY)  # of fewer steps if `steps` was raised
        if steps is not None and step >= steps and summary is not None and summary["steps"] >= step:
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


def _last_step(lines: Sequence[Mapping[str, Any]]) -> int:
    return lines[-1]["step"] if lines else 0


def _total_steps(recipe: Mapping[str, Any], summary: Mapping[str, Any] | None) -> int | None:
    """Return the total number of steps; None if it depends on the data and the run has not ended yet."""
    phases = recipe.get("phases")
    counts = [phase.get("steps") if isinstance(phase, dict) else None for phase in phases] if isinstance(phases, list) else []
    known = [count for count in counts if isinstance(count, int)]
    if counts and len(known) == len(counts):
        return sum(known)
    found = recipe.get("steps") or (None if summary is None else summary["steps"])
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
