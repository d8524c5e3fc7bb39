"""A run's folder, ``<out>/<name>/``: the paths in it, and the functions that write and read its files.

Step 0 is the state before training; step n is the state after the n-th step. ``metrics.jsonl`` contains no times, so that a resumed
run and an uninterrupted run write the same bytes; times are in ``timings.jsonl``. Only one rank writes. Records that a resumed run
may write again (evaluations, images) replace the earlier ones. With an ``owner``, every writer first checks that this process still
owns the folder, and raises ``NotOwner`` otherwise.
"""

import dataclasses
import errno
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from PIL.Image import Image
from pydantic import BeforeValidator, Field, TypeAdapter
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from retouch.records import files
from retouch.records.libraries import versions
from retouch.records.ownership import FILE, Owner, shared_owner
from retouch.types import Json, Sample

# The shapes of the records in a run's folder: which keys a reader may rely on, with which types. The page of runs and the report
# can compute with what they accept: numbers within 1e100, so that no sum of squares overflows, and steps from 0 to 2**53. Further
# keys are allowed.

_Count = Annotated[int, Field(ge=0, le=2**53)]
_Number = Annotated[float, Field(ge=-1e100, le=1e100)]
_Value = _Number | None
_Pair = Annotated[list[_Value], Field(min_length=2, max_length=2)]


def _with_step(line: Any) -> Any:
    if isinstance(line, dict) and type(line.get("step")) is int and 0 <= line["step"] <= 2**53:
        return line
    raise ValueError("step should be a whole number from 0 to 2**53")


class _Alarm(TypedDict):
    text: str
    rule: NotRequired[str]


class _AlarmStop(TypedDict):
    step: _Count
    back_to: _Count | None
    alarms: list[_Alarm]


class _Check(TypedDict):
    name: str
    ok: bool
    text: NotRequired[str | None]


class _Evaluation(TypedDict):
    step: _Count
    split: str
    table: dict[str, dict[str, _Value]]
    ci95: dict[str, dict[str, _Pair]]
    lower_is_better: NotRequired[list[str]]
    missing: NotRequired[dict[str, _Count]]


class _Cell(TypedDict):
    mean: _Value
    low: _Value
    high: _Value
    n: NotRequired[_Count]


class _Suite(TypedDict):
    step: _Count
    suite: str
    headline: str
    table: dict[str, dict[str, _Cell]]
    missing: _Count
    alarm: str | None


class _Sample(TypedDict):
    step: _Count
    set: str
    task: str
    instruction: str
    group: _Count
    slot: _Count
    image: str | None
    source: str | None
    target: str | None
    scores: dict[str, _Value]
    reward: _Value
    advantage: _Value
    tags: dict[str, Any]
    text: NotRequired[str | None]


class _Summary(TypedDict):
    column: str
    on: str
    before: _Number
    after: _Number
    steps: _Count
    ceiling: NotRequired[_Value]
    best_of_k: NotRequired[_Value]
    k: NotRequired[_Count | None]
    others: NotRequired[dict[str, _Number]]
    gain_ci95: NotRequired[Annotated[list[_Number], Field(min_length=2, max_length=2)] | None]
    independent_tasks: NotRequired[_Count | None]
    needed_tasks: NotRequired[_Count | None]
    lower_is_better: NotRequired[bool]
    cost: NotRequired[dict[str, Any]]


class _Scores(TypedDict):
    tasks: list[str]
    rewards: list[_Value]
    scores: dict[str, list[_Value]]
    sources: NotRequired[list[str]]


METRICS: files.Shape = TypeAdapter(Annotated[dict[str, _Value | str], BeforeValidator(_with_step)])
"""A line of the metrics or timings."""
ALARM: files.Shape = TypeAdapter(_AlarmStop)
CHECKS: files.Shape = TypeAdapter(list[_Check])
EVALUATION: files.Shape = TypeAdapter(_Evaluation)
SUITE: files.Shape = TypeAdapter(_Suite)
SAMPLE: files.Shape = TypeAdapter(_Sample)
SUMMARY: files.Shape = TypeAdapter(_Summary)
SCORES: files.Shape = TypeAdapter(_Scores)


def split_label(split: str) -> str:
    """Return the name of the tasks on which a run is evaluated, given its ``eval.split``: "trained-on" or "held-out"."""
    return "trained-on" if split == "train" else "held-out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The mean score before and after training, and the numbers to compare it with.

    ``column``: the name of the score ("overall"). ``on``: a description of the tasks ("held-out tasks of complexity 2 and 3"). All
    scores are in the column's unit. ``before``, ``after``: means over the tasks with a score both before and after training.
    ``ceiling``: the score of the tasks' targets. ``best_of_k``: the mean over tasks of the best of ``k`` samples of the base
    policy. ``others``: its scores by other means without training ("edit by edit", "guided by the reward"). ``gain_ci95``: the
    95 % confidence interval of after - before, as (low, high). ``independent_tasks``: the number of these tasks, where tasks with
    the same source image count once; ``needed_tasks``: how many it would take for an interval that excludes 0, if the gain and its
    spread between tasks stayed the same. None means not measured.
    ``lower_is_better``: whether a lower score is better, so that a negative gain is an improvement. ``cost``: amounts by name, for
    people to read.
    """

    column: str
    on: str
    before: float
    after: float
    steps: int
    ceiling: float | None = None
    best_of_k: float | None = None
    k: int | None = None
    others: Mapping[str, float] = field(default_factory=dict)
    gain_ci95: tuple[float, float] | None = None
    independent_tasks: int | None = None
    needed_tasks: int | None = None
    lower_is_better: bool = False
    cost: Mapping[str, Json] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def gap_closed(self) -> float | None:
        """(after - before) / (ceiling - before); None without a ceiling that is better than ``before``."""
        if self.ceiling is None or not self.is_better(self.ceiling, self.before):
            return None
        return self.gain / (self.ceiling - self.before)

    def is_better(self, score: float, other: float) -> bool:
        """Whether ``score`` is better than ``other`` in this column."""
        return score < other if self.lower_is_better else score > other

    def to_json(self) -> dict[str, object]:
        """Return the fields, together with ``gain`` and ``gap_closed``."""
        return {**dataclasses.asdict(self), "gain": self.gain, "gap_closed": self.gap_closed}

    @classmethod
    def from_json(cls, record: Mapping[str, object]) -> "Summary":
        """Read the result of ``to_json``. Raises ValueError if fields are missing, unknown or of other types."""
        if not isinstance(record, Mapping):
            raise ValueError(f"summary.json contains {type(record).__name__} and no object")
        names = {item.name for item in dataclasses.fields(cls)}
        given = {name: value for name, value in record.items() if name not in ("gain", "gap_closed")}
        missing = [name for name in ("column", "on", "before", "after", "steps") if given.get(name) is None]
        unknown = sorted(set(given) - names)
        if missing or unknown:
            raise ValueError(f"summary.json does not match this version of retouch: missing {missing}, unknown {unknown}")
        interval = files.checked(SUMMARY, given, "summary.json").pop("gain_ci95", None)
        given["gain_ci95"] = None if interval is None else (interval[0], interval[1])
        return cls(**given)  # type: ignore[arg-type]


SampleSet = Literal["heldout", "group"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class SampleRecord:
    """A sample with its scores, stored for people to look at.

    ``group`` and ``slot``: the number of the group, and of the sample in the group (for held-out tasks: the index of the task, and
    slot 0). NaN in ``scores`` or ``reward`` means that the sample could not be scored. ``advantage``: None for held-out tasks.
    ``text``: the completion that the policy wrote for the image, or None. ``tokens``: the sampled tokens of the completion with
    their log-probabilities in nats. ``states``: images of the denoising states of the sample.
    """

    sample: Sample
    group: int
    slot: int
    scores: Mapping[str, float]
    reward: float
    advantage: float | None = None
    text: str | None = None
    tokens: Sequence[tuple[str, float]] | None = None
    states: Sequence[Image] = ()


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
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))

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
        self.require_owner()
        folder = self.samples(step)
        folder.mkdir(parents=True, exist_ok=True)
        others = [line for line in self.read_samples(step) if line["set"] != kind]
        saved: set[str] = set()
        lines: list[dict[str, Any]] = []
        for record in records:
            task, stem = record.sample.task, f"{kind}-{record.group:04d}"  # the task's own images are written once per group
            own, source = f"{stem}-{record.slot:03d}", task.images[0] if task.images else None
            lines.append(
                {
                    "step": step,
                    "set": kind,
                    "task": task.id,
                    "instruction": task.instruction,
                    "group": record.group,
                    "slot": record.slot,
                    "image": _write_image(folder / f"{own}.png", record.sample.image, saved=saved),
                    "source": _write_image(folder / f"{stem}-source.png", source, saved=saved),
                    "target": _write_image(folder / f"{stem}-target.png", task.target, saved=saved),
                    "scores": dict(record.scores),
                    "reward": record.reward,
                    "advantage": record.advantage,
                    "tags": dict(task.tags),
                    **({} if record.text is None else {"text": record.text}),
                    **({} if record.tokens is None else {"tokens": record.tokens}),
                }
            )
            if record.states:
                paths = (folder / f"{own}-state{place:02d}.png" for place in range(len(record.states)))
                lines[-1]["states"] = [_write_image(*pair, saved=saved) for pair in zip(paths, record.states, strict=True)]
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
        return files.read_record(self.preflight, CHECKS) if self.preflight.exists() else []

    def write_alarm(self, alarm: Mapping[str, Any]) -> None:
        """Store why alarms stopped the run: ``step``, ``back_to`` (or None), ``alarms`` with ``rule``, ``text``, ``response``."""
        self.require_owner()
        files.write_json(self.alarm, alarm)

    def read_alarm(self) -> dict[str, Any] | None:
        """Read the record of ``write_alarm``; None if no alarm stopped the run."""
        return files.read_record(self.alarm, ALARM) if self.alarm.exists() else None

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
        return files.read_lines(self.metrics, METRICS)

    def read_timings(self) -> list[dict[str, Any]]:
        return files.read_lines(self.timings, METRICS)

    def read_evals(self) -> list[dict[str, Any]]:
        return files.read_lines(self.evals, EVALUATION)

    def read_suites(self) -> list[dict[str, Any]]:
        """Read the lines of ``write_suite``."""
        return files.read_lines(self.suites, SUITE)

    def read_scores(self, step: int) -> dict[str, dict[str, float]]:
        """Read the scores of an evaluation: by column, the score of each task by id, without missing scores. "reward" is the
        combined reward. Empty if the scores of this evaluation are not stored."""
        if not self.evaluation(step).exists():
            return {}
        record = files.read_record(self.evaluation(step), SCORES)
        columns = {"reward": record["rewards"], **{name: values for name, values in record["scores"].items() if name != "reward"}}
        return {
            name: {
                task: value
                for task, value in zip(record["tasks"], values, strict=True)
                if value is not None and not math.isnan(value)
            }
            for name, values in columns.items()
        }

    def read_sources(self, step: int) -> dict[str, str]:
        """Read the source of each task of an evaluation, by task id. Empty if no tasks share a source."""
        path = self.evaluation(step)
        record = files.read_record(path, SCORES) if path.exists() else {}
        return dict(zip(record["tasks"], record["sources"], strict=True)) if "sources" in record else {}

    def read_samples(self, step: int) -> list[dict[str, Any]]:
        """Read the lines about a step's samples; file names are relative to ``samples(step)``."""
        return files.read_lines(self.samples(step) / "samples.jsonl", SAMPLE)

    def sample_steps(self) -> list[int]:
        """Return the steps whose samples are completely stored, in order."""
        return sorted(_step(path.parent) for path in self.root.glob("samples/step-*/samples.jsonl") if _step(path.parent) >= 0)

    def truncate_after(self, step: int) -> list[str]:
        """Delete the records of later steps, and incomplete last lines; a resumed run writes them again.

        Also removes doubled and unreadable lines. Returns a note for the log about each problem in the files.
        """
        self.require_owner()
        self.require_files()
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


def keep_until(path: Path, step: int, *, key: Sequence[str] = ("step",), every_step: bool = False) -> list[str]:
    """Keep the lines up to ``step``, with each ``key`` once and in the order of steps. Returns a note about each problem.

    If lines with the same key differ, the last one is kept. ``every_step``: whether every step from 1 to ``step`` should have a
    line. Later lines and an incomplete last line are normal after a crash, and are removed without a note.
    """
    if not path.exists():
        return [f"{path.name} is missing: its lines about steps 1 to {step} are lost"] if every_step and step else []
    before = files.read_bytes(path)
    kept: dict[tuple[Any, ...], bytes] = {}
    unreadable = doubled = contradicting = 0
    order: list[int] = []
    for line in before.split(b"\n")[:-1]:
        found = _key(line, key)
        if found is None:
            unreadable += 1
            continue
        if found[0] > step:
            continue
        doubled += found in kept
        contradicting += found in kept and kept[found] != line
        kept[found] = line
        order.append(found[0])
    notes = [
        f"{path.name}: {count} {what}"
        for count, what in (
            (unreadable, "unreadable lines were removed"),
            (doubled - contradicting, "duplicate lines were removed"),
            (contradicting, "lines contradicted a line of the same step; the last one was kept"),
            (int(order != sorted(order)), "break in the order of steps; the lines were sorted"),
        )
        if count
    ]
    if notes:
        copy = path.with_name(f"{path.name}.damaged-{datetime.now():%Y%m%d-%H%M%S-%f}")
        files.write_atomic(copy, before)
        notes.append(f"a copy of the damaged file: {copy.name}")
    if every_step and (missing := sorted(set(range(1, step + 1)) - {found[0] for found in kept})):
        notes.append(f"{path.name}: the lines of {_ranges(missing)} are missing and cannot be restored")
    after = b"".join(kept[found] + b"\n" for found in sorted(kept, key=lambda found: found[0]))
    if after != before:
        files.write_atomic(path, after)
    return notes


def readable_steps(path: Path) -> list[int]:
    """Return the step of each readable line; other lines of a damaged file are skipped."""
    lines = files.read_bytes(path).split(b"\n")[:-1] if path.exists() else []
    return [found[0] for line in lines if (found := _key(line, ("step",))) is not None]


def remove(path: Path) -> None:
    """Delete a file, or a folder with its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(root: Path) -> None:
    """Remove the temporary files and folders below ``root`` that a killed process left. Only the writing process may call it."""
    for path in [*root.rglob(f"{files.TEMPORARY}*")]:
        remove(path)


def _key(line: bytes, names: Sequence[str]) -> tuple[Any, ...] | None:
    """Return the values that identify a line, the step first; None if the line cannot belong to this file."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        return None
    if not all(isinstance(value.get(name), str) for name in names[1:]):
        return None
    return tuple(value[name] for name in names)


def _ranges(steps: Sequence[int]) -> str:
    """Format step numbers, with ranges for consecutive ones: "step 4" or "steps 4 to 6, 9"."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1][1:] = [step]
        else:
            parts.append([step])
    words = ", ".join(" to ".join(map(str, part)) for part in parts)
    return f"step{'s' * (len(steps) > 1)} {words}"


def _write_image(path: Path, image: Image | None, *, saved: set[str]) -> str | None:
    """Write the image unless ``written`` contains it, and return its file name; None if there is no image."""
    if image is None:
        return None
    if path.name not in saved:
        files.write_png(path, image)
        saved.add(path.name)
    return path.name
