"""A run's folder, ``<out>/<name>/``: the paths in it, and the functions that write and read its files.

Step 0 is the state before training; step n is the state after the n-th step. ``metrics.jsonl`` contains no times, so that a resumed
run and an uninterrupted run write the same bytes; times are in ``timings.jsonl``. Only one rank writes. Records that a resumed run
may write again (evaluations, images) replace the earlier ones. With an ``owner``, every writer first checks that this process still
owns the folder, and raises ``NotOwner`` otherwise.
"""

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retouch.records import files, shapes
from retouch.records.libraries import versions
from retouch.records.ownership import FILE, Owner, shared_owner
from retouch.records.repair import keep_until, readable_steps, remove
from retouch.records.summary import Summary

if TYPE_CHECKING:
    from retouch.records.samples import SampleRecord, SampleSet

Number = float | int | None
Table = Mapping[str, Mapping[str, Number]]
Intervals = Mapping[str, Mapping[str, Sequence[Number]]]


@dataclass(frozen=True)
class FileOf:
    """Descriptor for the path of a file or folder in a run's folder. Raises OSError if it is a link."""

    name: str

    def __get__(self, folder: "RunFolder", owner: type) -> Path:
        return files.inside(folder.root, self.name)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths, writers and readers of one run's folder. Constructing it does not touch the disk; writers create what they need.

    ``root`` may be a link; below it nothing may be one. The paths raise OSError if they are links or lead through one.
    """

    root: Path
    owner: Owner | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        return self.root.resolve().name

    recipe = FileOf("recipe.json")
    identity = FileOf("identity.json")
    metrics = FileOf("metrics.jsonl")
    timings = FileOf("timings.jsonl")
    evals = FileOf("evals.jsonl")
    suites = FileOf("suites.jsonl")
    summary = FileOf("summary.json")
    preflight = FileOf("preflight.json")
    report = FileOf("report.html")
    checkpoints = FileOf("checkpoints")
    saved = FileOf("saved.json")
    watch = FileOf("watch")
    alarm = FileOf("alarm.json")
    tensorboard = FileOf("tensorboard")
    control = FileOf("control")

    def log(self, rank: int = 0) -> Path:
        """Return the path of a rank's log: ``train.log`` for rank 0, ``train.rank1.log`` for rank 1 and so on."""
        return files.inside(self.root, "train.log" if rank == 0 else f"train.rank{rank}.log")

    def samples(self, step: int) -> Path:
        return files.inside(self.root, "samples", f"step-{step:06d}")

    def evaluation(self, step: int) -> Path:
        """Return the path of the scores of every held-out task at an evaluation."""
        return files.inside(self.root, "evals", f"step-{step:06d}.json")

    def has_steps(self) -> bool:
        """Return whether the files in the folder show a finished step. Without one, another recipe may replace the run."""
        if self.metrics.exists() and self.metrics.stat().st_size:
            return True
        if self.saved.is_file() and b'"step": 0' not in files.read_bytes(self.saved):
            return True
        written = [path for name in ("checkpoints", "evals", "samples") for path in (self.root / name).glob("step-*")]
        return any(path.stem != "step-000000" for path in written)

    def discard_attempt(self) -> None:
        """Remove the files that a run wrote before its first step, except its logs, and the ledgers, whose scores cost money."""
        self.require_owner()
        results = (self.evals, self.suites, self.saved, self.alarm, self.summary, self.report, self.tensorboard, self.watch)
        steps = (*self.root.glob("suites/*/step-*"), *self.checkpoints.glob("step-*"))
        for path in (*results, self.root / "evals", self.root / "samples", *steps):
            remove(path)

    def require_owner(self) -> None:
        """Raise NotOwner if this process owned the folder and has lost it. Call it before anything in the folder is changed."""
        if self.owner is not None:
            self.owner.require()

    def require_plain(self) -> None:
        """Raise OSError if the folder contains a link, a pipe or a device. Inside ``wandb``, W&B itself makes links."""
        files.require_plain(self.root, except_below=("wandb",))

    def require_files(self) -> None:
        """Raise IsADirectoryError if a folder has the name of one of the run's files, before anything is changed."""
        for path in (*self.root.glob("*.json"), *self.root.glob("*.jsonl"), self.root / "report.html"):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "Is a directory", str(path))

    def create(self) -> None:
        """Create the folder and the checkpoints folder in it."""
        self.require_owner()
        self.checkpoints.mkdir(parents=True, exist_ok=True)

    def write_recipe(self, recipe: Mapping[str, Any]) -> None:
        """Store the resolved recipe and the library versions: ``{"recipe": ..., "versions": ...}``."""
        self.create()
        files.write_json(self.recipe, {"recipe": recipe, "versions": versions(Path.cwd())})

    def append_metrics(self, step: int, phase: str, values: Mapping[str, Number]) -> None:
        """Append the line of a step: step, phase, and the metrics sorted by name. Raises ValueError for ``time/`` metrics."""
        self.require_owner()
        timed = [name for name in values if name.startswith("time/")]
        if timed:
            raise ValueError(f"times differ between an uninterrupted and a resumed run: write {timed} with append_timings")
        files.append_line(self.metrics, {"step": step, "phase": phase, **dict(sorted(values.items()))})

    def append_timings(self, step: int, seconds: Mapping[str, float]) -> None:
        """Append the times and costs of a step.

        These are ``time/<stage>`` in seconds for stages that do not overlap, ``time/step`` for the whole step, peaks of memory, and
        ``judge/...``, the totals of requests to judges since the run began.
        """
        self.require_owner()
        files.append_line(self.timings, {"step": step, **dict(sorted(seconds.items()))}, durable=False)

    def write_eval(
        self,
        step: int,
        split: str,
        *,
        table: Table,
        ci95: Intervals,
        lower_is_better: Sequence[str] = (),
        missing: Mapping[str, int] | None = None,
    ) -> None:
        """Store an evaluation. It replaces an evaluation of the same step and split.

        ``table``: by row name, the column means and ``n``, the number of tasks. The rows are ``all`` and, for each tag by which
        results are broken down, ``tag=value``. ``ci95``: by row name and column, [low, high] of the mean; rows and columns may be
        missing. ``lower_is_better``: the columns in which a lower score is better. ``missing``: by column, the number of tasks
        without a score; the column's means are those of the other tasks.
        """
        self.require_owner()
        others = [line for line in self.read_evals() if (line["step"], line["split"]) != (step, split)]
        line = {"step": step, "split": split, "table": table, "ci95": ci95}
        if lower_is_better:
            line["lower_is_better"] = list(lower_is_better)
        if missing:
            line["missing"] = dict(missing)
        files.write_lines(self.evals, sorted([*others, line], key=lambda each: each["step"]))

    def write_suite(self, step: int, suite: str, result: Mapping[str, Any], *, alarm: str | None) -> None:
        """Store the result of a suite after a step. It replaces a result of the same step and suite.

        ``result``: ``headline`` and ``table``, see docs/benchmarks.md. ``alarm``: the text of an alarm, or None.
        """
        self.require_owner()
        others = [line for line in self.read_suites() if (line["step"], line["suite"]) != (step, suite)]
        line = {"step": step, "suite": suite, **result, "alarm": alarm}
        files.write_lines(self.suites, sorted([*others, line], key=lambda each: each["step"]))

    def write_samples(self, step: int, kind: "SampleSet", records: "Sequence[SampleRecord]") -> None:
        """Store samples of a step: ``heldout`` (the same tasks and seeds at each evaluation) or ``group`` (training samples).

        They replace the samples of the same step and kind. Images are written before the lines that name them.
        """
        from retouch.records.samples import write_images

        self.require_owner()
        folder = self.samples(step)
        folder.mkdir(parents=True, exist_ok=True)
        others = [line for line in self.read_samples(step) if line["set"] != kind]
        lines = write_images(folder, {"step": step, "set": kind}, records)
        files.write_lines(folder / "samples.jsonl", [*others, *lines])

    def write_summary(self, summary: Summary) -> None:
        self.require_owner()
        files.write_json(self.summary, summary.to_json())

    def write_preflight(self, checks: Sequence[Mapping[str, Any]]) -> None:
        """Store the checks of the preflight: ``name``, ``ok``, ``value`` and ``limit`` (or None), ``text``."""
        self.require_owner()
        files.write_json(self.preflight, list(checks))

    def read_summary(self) -> Summary | None:
        """Read the summary; None if the run has not finished yet."""
        return Summary.from_json(files.read_record(self.summary)) if self.summary.exists() else None

    def read_preflight(self) -> list[dict[str, Any]]:
        return files.read_record(self.preflight, shapes.CHECKS) if self.preflight.exists() else []

    def write_alarm(self, alarm: Mapping[str, Any]) -> None:
        """Store why alarms stopped the run: ``step``, ``back_to`` (or None), ``alarms`` with ``rule``, ``text``, ``response``."""
        self.require_owner()
        files.write_json(self.alarm, alarm)

    def read_alarm(self) -> dict[str, Any] | None:
        """Read the record of ``write_alarm``; None if no alarm stopped the run."""
        return files.read_record(self.alarm, shapes.ALARM) if self.alarm.exists() else None

    def read_recipe(self) -> dict[str, Any]:
        """Read the record of ``write_recipe``. Raises ValueError if this is not the folder of a run."""
        if not self.recipe.exists():
            raise ValueError(f"{self.root} is not the folder of a run: it has no recipe.json")
        record = files.read_record(self.recipe)
        if not isinstance(record, dict) or not all(isinstance(record.get(part), dict) for part in ("recipe", "versions")):
            raise ValueError(
                f"{self.recipe} was changed and holds no recipe: restore it from a backup, or start over with --fresh, which "
                "renames this folder"
            )
        return record

    def read_metrics(self) -> list[dict[str, Any]]:
        return files.read_lines(self.metrics, shapes.METRICS)

    def read_timings(self) -> list[dict[str, Any]]:
        return files.read_lines(self.timings, shapes.METRICS)

    def read_evals(self) -> list[dict[str, Any]]:
        return files.read_lines(self.evals, shapes.EVALUATION)

    def read_suites(self) -> list[dict[str, Any]]:
        """Read the lines of ``write_suite``."""
        return files.read_lines(self.suites, shapes.SUITE)

    def read_samples(self, step: int) -> list[dict[str, Any]]:
        """Read the lines about a step's samples; file names are relative to ``samples(step)``."""
        return files.read_lines(self.samples(step) / "samples.jsonl", shapes.SAMPLE)

    def sample_steps(self) -> list[int]:
        """Return the steps whose samples are completely stored, in order."""
        return sorted(_step(path.parent) for path in self.root.glob("samples/step-*/samples.jsonl") if _step(path.parent) >= 0)

    def truncate_after(self, step: int) -> list[str]:
        """Delete the records of later steps, and incomplete last lines; a resumed run writes them again.

        Also removes doubled and unreadable lines. Returns a note for the log about each problem in the files.
        """
        self.require_owner()
        for path in (self.metrics, self.timings, self.evals, self.suites):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        notes = [
            *keep_until(self.metrics, step, every_step=True),
            *keep_until(self.timings, step),
            *keep_until(self.evals, step, key=("step", "split")),
            *keep_until(self.suites, step, key=("step", "suite")),
        ]
        for folder in (*self.root.glob("samples/step-*"), *self.root.glob("suites/*/step-*")):
            if _step(folder) > step:
                remove(folder)
        return notes

    def write_saved(self, step: int) -> None:
        """Record that a checkpoint of this step was saved, so that its loss is noticed (``lost_checkpoints``)."""
        self.require_owner()
        files.write_json(self.saved, {"step": step})

    def lost_checkpoints(self, found: int | None, *, every: int) -> str | None:
        """Return a sentence about lost checkpoints; None if none is lost. Damaged checkpoints count as lost.

        ``found``: the step of the newest intact checkpoint, or None. ``every``: the number of steps between checkpoints, from which
        the last saved step is computed if the folder has no valid ``saved.json``.
        """
        try:
            record = files.read_record(self.saved)
        except (OSError, ValueError):  # an old folder has no such file, and the next checkpoint replaces a damaged one
            record = None
        saved = record.get("step") if isinstance(record, dict) else None
        if type(saved) is not int:
            last = max(readable_steps(self.metrics), default=0)
            saved = (last - 1) // every * every if every > 0 and last > every else None
        if saved is None or (found is not None and found >= saved):
            return None
        here = "there is none" if found is None else f"the newest intact one is of step {found}"
        return f"a checkpoint of step {saved} had been saved in {self.checkpoints}, and now {here}"

    def set_aside(self) -> Path:
        """Rename the folder to ``<name>.old-YYYYMMDD-HHMMSS`` and return the new path."""
        self.require_owner()
        base = self.root.with_name(f"{self.root.name}.old-{datetime.now():%Y%m%d-%H%M%S}")
        target, count = base, 1
        while target.exists():
            count += 1
            target = base.with_name(f"{base.name}-{count}")
        self.root.rename(target)
        files.fsync_folder(target.parent)
        return target


def find_run(name: str | Path) -> Path:
    """The folder of a run: the path itself, or, if it does not exist, the run of this name in the folder ``runs``."""
    path, named = Path(name), Path("runs", name)
    return named if not path.exists() and named.is_dir() else path


def own(root: Path, *, fresh: bool, environment: Mapping[str, str]) -> tuple[RunFolder, Path | None]:
    """Take the ownership of a run's folder, or share the ownership of this process's launcher (``environment``).

    ``fresh``: if the folder has content, rename it and own a new folder. Also returns the path of the renamed folder, or None.
    Raises NotOwner, with the owner's name, if another process owns the folder, and OSError, before anything is changed, if the
    folder contains a link, a pipe or a device.
    """
    shared = shared_owner(root, environment)
    if shared is not None:
        return RunFolder(root, shared), None
    if not fresh:
        RunFolder(root).require_plain()
    owner = Owner(root)
    if not fresh or all(path.name == FILE for path in root.iterdir()):
        return RunFolder(root, owner), None
    with closing(owner):
        aside = RunFolder(root, owner).set_aside()
        return RunFolder(root, Owner(root)), aside


def _step(folder: Path) -> int:
    """Return the step in a folder's name; -1 for another name."""
    digits = folder.name.removeprefix("step-")
    return int(digits) if digits.isascii() and digits.isdecimal() and len(digits) < 10 else -1
