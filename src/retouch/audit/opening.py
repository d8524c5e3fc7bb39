"""A run's ledger, read: the files of all ranks and of what was scored again later. Nothing is written, and the run may go on."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retouch.rewards.ledger.database import decode_scores, open_read_only

RESCORED = "rescored"
_SAMPLES = "SELECT split, step, group_id, slot, task, picture, written, judge, scores, seconds, at FROM samples"


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """A sample that was judged. ``step``: as the run's metrics count it, so training begins with step 1; held-out samples have the
    number of steps before their evaluation.
    """

    split: str
    step: int
    group: int
    slot: int
    task: str
    picture: str
    written: str | None
    judge: str
    scores: Mapping[str, float]
    seconds: float
    at: float

    @property
    def place(self) -> tuple[str, int, int, int]:
        return self.split, self.step, self.group, self.slot


@dataclass(frozen=True, slots=True, eq=False)
class LedgerView:
    """``files``: of the ranks, the first one's first. ``rescored``: by name. ``samples``: in the run's order; a column that another
    judge gave afterwards is called NAME:COLUMN.
    """

    run: Path
    files: Sequence[Path]
    rescored: Mapping[str, Path]
    samples: Sequence[Scored]

    @classmethod
    def open(cls, run: Path) -> "LedgerView":
        """ValueError where the folder has no ledger."""
        files = sorted(run.glob("ledger*.sqlite"), key=lambda path: (len(path.name), path.name))
        if not files:
            raise ValueError(f"{run} has no ledger.sqlite: name the folder of a run that has judged something")
        rescored = {path.stem: path for path in sorted((run / RESCORED).glob("*.sqlite"))}
        # A run that went on with other ranks may have judged a place in two files: the later one counts.
        found: dict[tuple[str, int, int, int], Scored] = {}
        for sample in (sample for file in files for sample in _samples(file)):
            if sample.place not in found or found[sample.place].at < sample.at:
                found[sample.place] = sample
        for name, file in rescored.items():
            for again in _samples(file):
                first = found.get(again.place)
                if first is not None and first.picture == again.picture:
                    others = {f"{name}:{column}": value for column, value in again.scores.items()}
                    found[again.place] = replace(first, scores={**first.scores, **others})
        return cls(run, files, rescored, sorted(found.values(), key=lambda sample: sample.place))

    def columns(self) -> list[str]:
        """Every column that some sample has, in the order in which they were given."""
        return list(dict.fromkeys(name for sample in self.samples for name in sample.scores))

    def query(self, question: str) -> Iterator[dict[str, Any]]:
        """The rows of all files, those that were scored again included."""
        for file in [*self.files, *self.rescored.values()]:
            with closing(open_read_only(file)) as connection:
                connection.row_factory = sqlite3.Row
                yield from (dict(row) for row in connection.execute(question))


def chosen(samples: Sequence[Scored], *, split: str | None, steps: tuple[int, int] | None) -> list[Scored]:
    """Those of the split and within the steps, ends included."""
    low, high = steps or (0, 2**63)
    return [sample for sample in samples if split in (None, sample.split) and low <= sample.step <= high]


def _samples(file: Path) -> Iterator[Scored]:
    with closing(open_read_only(file)) as connection:
        for split, step, group, slot, task, picture, written, judge, scores, seconds, at in connection.execute(_SAMPLES):
            number = step + 1 if split == "train" else step
            yield Scored(split, number, group, slot, task, picture, written, judge, decode_scores(scores), seconds, at)
