"""The runs of a folder, each read repeatedly while it may be writing, and which of their files may be served.

The name of a run in a request is only compared with the names that were found on the disk; no path is built from it.
"""

import io
import os
import re
import sqlite3
import statistics
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, astuple, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias

from PIL import Image

from retouch.records.control import read_requests
from retouch.records.files import LONGEST_LINE, MOST_BYTES, Shape, checked, inside, open_file, read_record, strict_json
from retouch.records.folder import ALARM, CHECKS, EVALUATION, METRICS, SAMPLE, SUITE, SUMMARY, RunFolder, Summary, split_label
from retouch.records.ownership import current_owner
from retouch.rewards.ledger.database import UNREADABLE, JudgeUsage, ledger_files, open_read_only, read_usage
from retouch_view.report.tables import about, last_words, result_so_far, verdict

State: TypeAlias = Literal["running", "finished", "stopped", "failed", "alarm", "waiting", "unreadable"]
_POINTS = 80
_RECENT_STEPS = 20
_REQUESTS = 20
_LEDGER_SECONDS = 2.0
_MOST_USAGE = 1e15
_THUMBNAIL_EDGE = 192
_THUMBNAIL_BYTES = 64 * 2**20
_FIELDS = frozenset(field.name for field in fields(Summary))
_FIRST_IMAGE = "heldout-0000-000.png"
_MARKS = ("recipe.json", "metrics.jsonl", "owner.json", "train.log")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,100}\.png", re.ASCII)


class LineTail:
    """Reads the objects of a JSON Lines file; each update reads only the lines that were appended since.

    A run that resumes replaces its files by shorter ones; the file is then read from the beginning. ``lines``: all objects so far.
    ``damaged``: the number of complete lines that are not strict JSON objects of the ``shape``, or have more than 16 MiB; they are
    skipped.
    """

    def __init__(self, path: Path, shape: Shape | None = None) -> None:
        self._path, self._shape = path, shape
        self._begin(None)

    def _begin(self, inode: int | None) -> None:
        self._inode, self._offset = inode, 0
        self.lines: list[dict[str, Any]] = []
        self.damaged = 0

    def update(self) -> bool:
        """Read the new lines. Returns whether the file was replaced or removed, so that the lines from before are not valid. Raises
        OSError if the file exists and cannot be read, and ValueError if it has more than 1 GiB."""
        try:
            file = open_file(self._path)
        except FileNotFoundError:  # not written yet, or removed
            again = self._inode is not None
            self._begin(None)
            return again
        with file:
            stat = os.fstat(file.fileno())
            if stat.st_size > MOST_BYTES:
                raise ValueError(f"{self._path} has more than {MOST_BYTES} bytes")
            again = self._inode is not None and (stat.st_ino != self._inode or stat.st_size < self._offset)
            if again or self._inode is None:
                self._begin(stat.st_ino)
            file.seek(self._offset)
            while line := file.readline(LONGEST_LINE):
                if line.endswith(b"\n"):
                    try:
                        found = strict_json(line)
                        if not isinstance(found, dict):
                            raise ValueError("not an object")
                        self.lines.append(found if self._shape is None else checked(self._shape, found, str(self._path)))
                    except ValueError:
                        self.damaged += 1
                elif len(line) < LONGEST_LINE:
                    break  # it is being written
                self._offset += len(line)
        return again


class UsageTail:
    """Sums the usage of the answers in a ledger; each update reads only the new answers. If the ledger cannot be read, the sum
    stays the same, and the next update tries again. Impossible amounts are left out."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: list[tuple[int, int, int]] = []
        self._inode = 0
        self._last = 0
        self._used = JudgeUsage()

    def update(self) -> JudgeUsage:
        """Return the usage of all answers so far."""
        stamp = [_stamp(path, follow=True) for path in (self._path, self._path.with_name(f"{self._path.name}-wal"))]
        if stamp != self._stamp:
            if stamp[0][0] != self._inode:  # the file was replaced
                self._inode, self._last, self._used = stamp[0][0], 0, JudgeUsage()
            try:
                with closing(open_read_only(self._path, seconds=_LEDGER_SECONDS)) as connection:
                    used, self._last = read_usage(connection, after=self._last)
            except sqlite3.Error as error:
                if str(error) == "interrupted":  # it took too long, and would again
                    self._stamp = stamp
                return self._used
            except (OSError, ValueError):
                return self._used
            self._stamp = stamp
            if all(0 <= amount < _MOST_USAGE for amount in astuple(used)):
                self._used += used
        return self._used


def _stamp(path: Path, *, follow: bool) -> tuple[int, int, int]:
    try:
        stat = path.stat(follow_symlinks=follow)
    except OSError:
        return 0, 0, 0
    return stat.st_ino, stat.st_mtime_ns, stat.st_size


class LiveRun:
    """The files of a run. Methods may be called from several threads.

    A damaged document or line is left out, and ``faults`` of the run's row says so. Other methods than ``overview`` raise OSError
    or ValueError if the folder cannot be read at all, for example because a pipe is in the place of a file.
    """

    def __init__(self, root: Path) -> None:
        self.folder = RunFolder(root)
        self._lock = threading.Lock()
        self._metrics, self._timings = (LineTail(root / name, METRICS) for name in ("metrics.jsonl", "timings.jsonl"))
        self._evals = LineTail(root / "evals.jsonl", EVALUATION)
        self._suites = LineTail(root / "suites.jsonl", SUITE)
        self._ledgers: dict[Path, UsageTail] = {}
        self._samples: dict[int, tuple[int, list[dict[str, Any]]]] = {}
        self._documents: dict[Path, tuple[tuple[int, int, int], Any, str | None]] = {}
        self._generation = 0

    def overview(self) -> dict[str, Any]:
        """Return the row of the run in the table of runs; if it cannot be read, the row has only its name and the reason."""
        try:
            return self._row()
        except (OSError, ValueError) as error:
            empty = dict.fromkeys(
                ("steps", "phase", "reward", "seconds_per_step", "seconds_left", "judges", "changed", "summary", "verdict", "image")
            )
            name, reason = self.folder.root.name, str(error)
            return {
                **empty,
                "about": {},
                "name": name,
                "state": "unreadable",
                "reason": reason,
                "faults": [reason],
                "step": 0,
                "rewards": [],
            }

    def _row(self) -> dict[str, Any]:
        with self._lock:
            if any([self._metrics.update(), self._timings.update()]):
                self._generation += 1
            self._evals.update()
            recipe, problem = self._recipe()
            lines, summary = self._metrics.lines, self._document("summary.json", SUMMARY)
            step, steps = lines[-1]["step"] if lines else 0, _total_steps(recipe, summary)
            rewards = [_number(line.get("reward/mean")) for line in lines]
            state, reason = self._state(step, steps, problem)
            recent = [_number(line.get("time/step")) for line in self._timings.lines[-_RECENT_STEPS:]]
            known = [value for value in recent if value is not None]
            paths = ledger_files(self.folder.root)
            self._ledgers = {path: self._ledgers.get(path) or UsageTail(path) for path in paths}
            used = sum((tail.update() for tail in self._ledgers.values()), JudgeUsage())
            seconds = statistics.median(known) if known else None
            remaining = None if steps is None or seconds is None or state != "running" else max(0, steps - step) * seconds
            return {
                "name": self.folder.name,
                "state": state,
                "reason": reason,
                "step": step,
                "steps": steps,
                "phase": lines[-1].get("phase") if lines else None,
                "reward": rewards[-1] if rewards else None,
                "rewards": _thin(rewards),
                "seconds_per_step": seconds,
                "seconds_left": remaining,
                "judges": {**asdict(used), "cost": used.known_cost} if used.requests else None,  # cost: dollars, None if unknown
                "changed": _changed(self.folder),
                "summary": summary,
                "about": about(recipe, (summary or {}).get("cost", {})),
                "verdict": self._verdict(recipe, summary),
                "image": self._newest_image(),
                "faults": self._faults(),
            }

    def _verdict(self, recipe: Mapping[str, Any], summary: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Return the result of the run, or of its evaluations so far, in words, with the means and what they are of."""
        if summary is not None:
            found = Summary.from_json({name: value for name, value in summary.items() if name in _FIELDS})
        else:
            last, section = (self._evals.lines[-1]["step"] if self._evals.lines else 0), recipe.get("eval")
            split = split_label(section.get("split", "test") if isinstance(section, Mapping) else "test")
            path = self.folder.evaluation(last)
            found = self._read(path, lambda: result_so_far(self.folder, self._evals.lines, split))[0]
        if found is None:
            return None
        where = {"before": found.before, "after": found.after, "column": found.column, "on": found.on}
        return {**where, **asdict(verdict(found, so_far=summary is None))}

    def _newest_image(self) -> tuple[int, str] | None:
        """Return the step and the file of the first held-out image of the newest step that has it."""
        for step in reversed(self.folder.sample_steps()):
            path = self.folder.samples(step) / _FIRST_IMAGE
            if path.is_file():
                return None if self._read(path, partial(_require_image, path))[1] else (step, _FIRST_IMAGE)
        return None

    def details(self) -> dict[str, Any]:
        """Return the content of the run's page: its row, recipe, checks, evaluations, benchmarks, alarm, and all metrics."""
        row = self._row()
        with self._lock:
            return {
                **row,
                "recipe": self._recipe()[0],
                "preflight": self._document("preflight.json", CHECKS) or [],
                "alarm": self._document("alarm.json", ALARM),
                "metrics": self._metrics.lines,
                "timings": self._timings.lines,
                "generation": self._generation,
                **self._results(),
            }

    def _results(self) -> dict[str, Any]:
        """Return what a run writes only at some steps: evaluations, suites, steps with samples, and control requests."""
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
        """Return the lines after the first ``metrics`` and ``timings`` lines. If ``generation`` is not the current one, the files
        were replaced, and the lines start with the first."""
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
                    tail = LineTail(path, SAMPLE)
                    tail.update()
                    self._samples[step] = stamp, [line for line in tail.lines if line["step"] == step]
                found += self._samples[step][1]
            return found

    def _faults(self) -> list[str]:
        tails = {"metrics": self._metrics, "timings": self._timings, "evals": self._evals, "suites": self._suites}
        counted = [f"{name}.jsonl: {tail.damaged} damaged lines were skipped" for name, tail in tails.items() if tail.damaged]
        return [*counted, *(problem for _, _, problem in self._documents.values() if problem is not None)]

    def _recipe(self) -> tuple[Mapping[str, Any], str | None]:
        """Return the resolved recipe (empty if unreadable), and the error of reading it, or None."""
        record, problem = self._read(self.folder.root / "recipe.json", self.folder.read_recipe)
        return ({} if record is None else record["recipe"]), problem

    def _document(self, name: str, shape: Shape) -> Any:
        path = self.folder.root / name
        return self._read(path, lambda: read_record(path, shape) if os.path.lexists(path) else None)[0]

    def _read(self, path: Path, read: Callable[[], Any]) -> tuple[Any, str | None]:
        """Return the content of a file, and the error of reading it, or None. The file is read again only after it has changed."""
        stamp = _stamp(path, follow=False)
        if self._documents.get(path, (None,))[0] != stamp:
            try:
                found, problem = read(), None
            except (OSError, ValueError) as error:
                found, problem = None, str(error)
            self._documents[path] = stamp, found, problem
        return self._documents[path][1:]

    def _state(self, step: int, steps: int | None, problem: str | None) -> tuple[State, str | None]:
        if current_owner(self.folder.root) is not None:
            return "running", None
        if problem is not None:
            return "unreadable", problem
        alarm = self._document("alarm.json", ALARM)
        if alarm is not None:
            return "alarm", "; ".join(each["text"] for each in alarm["alarms"] if each["text"]) or "a rule stopped the run"
        summary = self._document("summary.json", SUMMARY)  # of fewer steps if `steps` was raised
        if steps is not None and step >= steps and summary is not None and summary["steps"] >= step:
            return "finished", None
        words, failed = self._read(self.folder.root / "train.log", partial(last_words, self.folder))[0] or (None, False)
        return ("failed" if failed else "stopped" if step else "waiting"), words


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


def _require_image(path: Path) -> None:
    try:
        with open_file(path) as file, Image.open(file) as opened:
            opened.verify()
    except UNREADABLE:
        raise ValueError(f"{path} is not an image") from None


class Catalogue:
    """The runs directly in ``root``, or ``root`` itself if it is the folder of a run. Each call of ``runs`` finds new runs."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()
        self._runs: dict[str, LiveRun] = {}
        self._lock = threading.Lock()

    def runs(self) -> dict[str, LiveRun]:
        """Return all runs by name, sorted by name."""
        with self._lock:
            try:
                alone = _is_run(self.root)
                found = {path.name: path for path in ([self.root] if alone else self.root.iterdir()) if alone or _is_run(path)}
            except OSError:  # the folder was not created yet, or was removed
                found = {}
            self._runs = {name: self._runs.get(name) or LiveRun(path) for name, path in sorted(found.items())}
            return dict(self._runs)

    def run(self, name: str) -> LiveRun | None:
        """Return the run with this name; None if there is none."""
        with self._lock:
            known = self._runs.get(name)
        if known is not None and known.folder.root.is_dir():
            return known
        return self.runs().get(name)

    def image(self, name: str, step: int, file: str) -> Path | None:
        """Return the path of a stored image; None if there is none, or if it is a link or is behind one."""
        run = self.run(name)
        if run is None or _IMAGE.fullmatch(file) is None:
            return None
        try:
            path = inside(run.folder.samples(step), file)
        except OSError:
            return None
        return path if path.is_file() else None


def _is_run(path: Path) -> bool:
    return not path.is_symlink() and any((path / mark).is_file() for mark in _MARKS)


class Thumbnails:
    """A cache of PNG thumbnails with edges of at most 192 pixels; above 64 MiB, the least recently used ones are dropped."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[Path, int], bytes] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, path: Path) -> bytes | None:
        """Return the thumbnail of an image; None if the file is not an image."""
        try:
            key = path, path.stat().st_mtime_ns
            with self._lock:
                if key in self._kept:
                    self._kept.move_to_end(key)
                    return self._kept[key]
            with open_file(path) as file, Image.open(file) as opened:
                opened.draft("RGB", (_THUMBNAIL_EDGE, _THUMBNAIL_EDGE))
                opened.thumbnail((_THUMBNAIL_EDGE, _THUMBNAIL_EDGE))
                content = io.BytesIO()
                opened.convert("RGB").save(content, "PNG", compress_level=1)
        except UNREADABLE:
            return None
        made = content.getvalue()
        with self._lock:
            self._bytes += 0 if key in self._kept else len(made)
            self._kept[key] = made
            while self._bytes > _THUMBNAIL_BYTES:
                self._bytes -= len(self._kept.popitem(last=False)[1])
        return made
