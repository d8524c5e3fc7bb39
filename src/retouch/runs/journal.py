"""The journal of scores: what the judge said of every picture of a run, kept so that a resumed run does not ask again.

SQLite in write-ahead mode, one file per rank (``ledger.sqlite``, ``ledger.rank1.sqlite`` and so on), so each has one writer and
anyone may read. A row is (step, group, slot, column); NULL means "could not be judged", and only the very picture that was judged
is answered from it. Evaluations are not kept here.
"""

import hashlib
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from jaxtyping import Bool
from PIL.Image import Image
from torch import Tensor

from retouch.rewards.judging import Judge, Judged
from retouch.types import Batch, Sample, Scores

FORMAT = 1
# ``value`` has no type on purpose: SQLite turns -0.0 into 0 in a column of type REAL.
_TABLE = """
CREATE TABLE IF NOT EXISTS scores (
    step INTEGER NOT NULL, group_id INTEGER NOT NULL, slot INTEGER NOT NULL, "column" TEXT NOT NULL,
    task TEXT NOT NULL, picture TEXT NOT NULL, value,
    PRIMARY KEY (step, group_id, slot, "column")
) WITHOUT ROWID
"""


class Journal:
    """Scores by (step, group, slot, column), in a file. May be used from several threads; every call is one transaction.

    ValueError where the file is damaged, full or another version's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._explained():
            self._database = sqlite3.connect(path, timeout=60.0, isolation_level=None, check_same_thread=False)
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = FULL")
            found = self._database.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, FORMAT):
                self._database.close()
                raise ValueError(
                    f"{path} has format {found}; this version of Retouch reads {FORMAT}: use the version that wrote it"
                )
            self._database.execute(_TABLE)
            self._database.execute(f"PRAGMA user_version = {FORMAT}")

    def recall(self, batch: Batch, samples: Sequence[Sample], columns: Iterable[str]) -> tuple[Bool[Tensor, " b"], Scores]:
        """Which rows have every column for the same task and picture, and their scores (NaN where missing, and where not known)."""
        names = list(columns)
        scores = {name: torch.full((len(samples),), float("nan")) for name in names}
        kept = self._kept(batch)
        known = []
        for row, (key, sample) in enumerate(zip(_keys(batch), samples, strict=True)):
            signed = (_text(sample.task.id), fingerprint(sample.image))
            found = [kept.get((*key, name)) for name in names]
            known.append(all(entry is not None and entry[:2] == signed for entry in found))
            for name, entry in zip(names, found, strict=True):
                if known[-1] and entry is not None and entry[2] is not None:
                    scores[name][row] = entry[2]
        return torch.tensor(known, dtype=torch.bool), scores

    def record(self, batch: Batch, samples: Sequence[Sample], scores: Scores) -> None:
        """Keep every row's scores, over what stood there before; all or none, and on the disk when this returns."""
        rows = []
        for row, (key, sample) in enumerate(zip(_keys(batch), samples, strict=True)):
            picture = fingerprint(sample.image)
            for name, column in scores.items():
                value = float(column[row])
                rows.append((batch.step, *key, name, _text(sample.task.id), picture, None if value != value else value))
        with self._lock, self._explained():
            self._database.execute("BEGIN IMMEDIATE")
            try:
                self._database.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
                self._database.execute("COMMIT")
            finally:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")

    def forget_missing(self, step: int, columns: Iterable[str]) -> None:
        """Forget the rows of a step that miss one of these columns, so that they are judged anew."""
        names = list(columns)
        missing = (
            f'SELECT group_id, slot FROM scores WHERE step = ? AND value IS NULL AND "column" IN ({", ".join("?" * len(names))})'
        )
        with self._lock, self._explained():
            self._database.execute(f"DELETE FROM scores WHERE step = ? AND (group_id, slot) IN ({missing})", (step, step, *names))

    def close(self) -> None:
        """Fold the write-ahead log into the file and let go of it."""
        with self._lock, self._explained():
            self._database.close()

    def _kept(self, batch: Batch) -> dict[tuple[int, int, str], tuple[str, str, float | None]]:
        """What stands there for the batch's step and groups: (group, slot, column) to (task, picture, value)."""
        if not batch.group_ids:
            return {}
        bounds = (batch.step, min(batch.group_ids), max(batch.group_ids))
        query = 'SELECT group_id, slot, "column", task, picture, value FROM scores WHERE step = ? AND group_id BETWEEN ? AND ?'
        with self._lock, self._explained():
            return {
                (group, slot, name): (task, picture, value)
                for group, slot, name, task, picture, value in self._database.execute(query, bounds)
            }

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise ValueError(
                f"the journal of scores {self.path} cannot be used: {error}. If the disk is full, free some space; if the file "
                "is damaged, move it away (the judge is then asked again for what it held) and start the run again"
            ) from error


class JournaledJudge:
    """A judge that is asked only for what the journal does not hold. Called as the loop calls it; works on one thread, in order.

    What a failing judge left missing is replayed as missing, so that a killed run goes on to the same bits. When the run stops
    because too much was missing, call ``forget_missing`` with that step, and the next start asks again.
    """

    def __init__(self, judge: Judge, journal: Journal) -> None:
        self.judge = judge
        self.journal = journal
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal")

    def __call__(self, batch: Batch, samples: Sequence[Sample]) -> "Future[Judged]":
        """Judge while the caller goes on. The scores are in the journal before the future gives them."""
        return self._pool.submit(self._judged, batch, samples)

    def forget_missing(self, step: int) -> None:
        """Ask again, the next time, for what could not be judged in this step."""
        self.journal.forget_missing(step, self.judge.combination.columns)

    def close(self) -> None:
        """End the judging thread and close the journal."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.journal.close()

    def _judged(self, batch: Batch, samples: Sequence[Sample]) -> Judged:
        known, scores = self.journal.recall(batch, samples, self.judge.reward.columns)
        if not known.all():
            fresh = self.judge([sample for sample, answered in zip(samples, known.tolist(), strict=True) if not answered])
            for name, column in fresh.scores.items():
                scores[name][~known] = column
            self.journal.record(batch, samples, scores)
        return self.judge.judged(samples, scores)


def fingerprint(image: Image | None) -> str:
    """SHA-256 of a picture's mode, size and pixels; empty where there is none."""
    if image is None:
        return ""
    digest = hashlib.sha256(f"{image.mode} {image.width}x{image.height}\n".encode())
    digest.update(image.tobytes())
    return digest.hexdigest()


def journal_path(run: Path, rank: int) -> Path:
    """Where a rank keeps its journal in a run's folder."""
    return run / ("ledger.sqlite" if rank == 0 else f"ledger.rank{rank}.sqlite")


def _keys(batch: Batch) -> list[tuple[int, int]]:
    """Each row's group in the step's global order, and its slot."""
    return [(batch.group_ids[group], slot) for group, slot in zip(batch.group, batch.slot, strict=True)]


def _text(identity: str) -> str:
    """Text that SQLite takes: half of a surrogate pair has no UTF-8."""
    return identity.encode("utf-8", "backslashreplace").decode()
