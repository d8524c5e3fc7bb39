"""Read the ledgers of a run: of all ranks, and of later rescorings. Read-only, also while the run continues."""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retouch.records.files import inside
from retouch.rewards.ledger.database import decode_scores, open_read_only

RESCORED = "rescored"
_SAMPLES = "SELECT split, step, group_id, slot, task, picture, written, judge, scores, seconds, at FROM samples"

_TYPES = (str, int, int, int, str, str, str | None, str, str, float, float)


@dataclass(frozen=True, slots=True, eq=False)
class LedgerSample:
    """A scored sample.

    ``step``: as in the metrics of the run: training starts at step 1; for held-out samples the number of steps before the
    evaluation. ``image``: the SHA-256 of the image, empty if the policy made none. ``judge``: the fingerprint of the reward.
    ``seconds``: the time to score the sample. ``at``: the time of the record, in seconds since 1970.
    """

    split: str
    step: int
    group: int
    slot: int
    task: str
    image: str
    completion: str | None
    judge: str
    scores: Mapping[str, float]
    seconds: float
    at: float

    @property
    def place(self) -> tuple[str, int, int, int]:
        """(split, step, group, slot)."""
        return self.split, self.step, self.group, self.slot


@dataclass(frozen=True, slots=True, eq=False)
class LedgerView:
    """The content of a run's ledgers.

    ``files``: one for each rank, in order. ``rescored``: the files of later rescorings, by name. ``samples``: ordered by split,
    step, group and slot; a column of the rescoring NAME is called NAME:COLUMN.
    """

    run: Path
    files: Sequence[Path]
    rescored: Mapping[str, Path]
    samples: Sequence[LedgerSample]

    @classmethod
    def open(cls, run: Path) -> "LedgerView":
        """Read the ledgers in the folder of a run. Raises ValueError if there is none."""
        files = sorted(run.glob("ledger*.sqlite"), key=lambda path: (len(path.name), path.name))
        if not files:
            raise ValueError(f"{run} has no ledger.sqlite: give the folder of a run that has scored samples")
        rescored = {path.stem: path for path in sorted(inside(run, RESCORED).glob("*.sqlite"))}
        # After a resume with another number of ranks, two files may have a row for the same position: the later row is used.
        found: dict[tuple[str, int, int, int], LedgerSample] = {}
        for sample in (sample for file in files for sample in _samples(file)):
            if sample.place not in found or found[sample.place].at < sample.at:
                found[sample.place] = sample
        for name, file in rescored.items():
            for again in _samples(file):
                first = found.get(again.place)
                if first is not None and first.image == again.image:
                    others = {f"{name}:{column}": value for column, value in again.scores.items()}
                    found[again.place] = replace(first, scores={**first.scores, **others})
        return cls(run, files, rescored, sorted(found.values(), key=lambda sample: sample.place))

    def query(self, sql: str) -> Iterator[dict[str, Any]]:
        """The rows of a query on all files, including rescorings."""
        for file in [*self.files, *self.rescored.values()]:
            with closing(open_read_only(file)) as connection:
                connection.row_factory = sqlite3.Row
                yield from (dict(row) for row in connection.execute(sql))


def select_samples(samples: Sequence[LedgerSample], *, split: str | None, steps: tuple[int, int] | None) -> list[LedgerSample]:
    """The samples of a split (None: all) and a range of steps, both ends included (None: all)."""
    low, high = steps or (0, 2**63)
    return [sample for sample in samples if split in (None, sample.split) and low <= sample.step <= high]


def _samples(file: Path) -> Iterator[LedgerSample]:
    with closing(open_read_only(file)) as connection:
        for row in connection.execute(_SAMPLES):
            if not all(map(isinstance, row, _TYPES)):
                raise ValueError(f"{file}: a value of a sample has another type; the file was changed by another program")
            split, step, group, slot, task, image, completion, judge, scores, seconds, at = row
            number = step + 1 if split == "train" else step
            yield LedgerSample(split, number, group, slot, task, image, completion, judge, decode_scores(scores), seconds, at)
