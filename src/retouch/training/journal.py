"""The journal of scores: what the judge said of every picture of a run, kept so that a resumed run does not ask again.

A row is a sample, found by its page (which part of the run, and the step) and its place there (group, slot). Missing scores are
kept as missing, and only the very picture that was judged, by the same judge, is answered from it. Each rank has a file of its own.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool
from PIL.Image import Image
from torch import Tensor

from retouch.records.kept_images import KeptPictures
from retouch.rewards.judging import Judge, Judged
from retouch.rewards.ledger import content, numbers
from retouch.rewards.ledger.database import Database, text
from retouch.types import Batch, Sample, Scores

JudgeBatch: TypeAlias = "Callable[[Batch, Sequence[Sample]], Future[Judged]]"
Split: TypeAlias = Literal["train", "heldout", "ceiling", "best", "watch", "canary"]


class Page(NamedTuple):
    """What a sample was judged for, and after how many steps of the run."""

    split: Split
    step: int


class Seen(NamedTuple):
    """What was judged: a task, the picture made for it (its SHA-256, empty where there was none), and what the policy wrote."""

    task: str
    picture: str
    written: str | None

    @classmethod
    def of(cls, samples: Iterable[Sample]) -> "list[Seen]":
        """Of each sample."""
        pictures = content.Pictures()
        return [
            cls(text(sample.task.id), pictures(sample.image), None if sample.completion is None else text(sample.completion))
            for sample in samples
        ]


class Journal:
    """Scores of samples by page, group and slot, as ``judge`` (a fingerprint) gave them; every call is one transaction."""

    def __init__(self, database: Database, *, judge: str = "") -> None:
        self.database = database
        self.judge = judge

    def recall(self, page: Page, batch: Batch, seen: Sequence[Seen], columns: Iterable[str]) -> tuple[Bool[Tensor, " b"], Scores]:
        """Which rows have every column for the same task and picture, and their scores (NaN where missing, and where not known)."""
        names = list(columns)
        scores = {name: torch.full((len(seen),), float("nan")) for name in names}
        kept, known = self._kept(page, batch), []
        for row, (place, sight) in enumerate(zip(_places(batch), seen, strict=True)):
            signed, given = kept.get(place, (None, {}))
            known.append(signed == (*sight, self.judge) and given.keys() >= set(names))
            if known[-1]:
                for name in names:
                    scores[name][row] = given[name]
        return torch.tensor(known, dtype=torch.bool), scores

    def record(self, page: Page, batch: Batch, seen: Sequence[Seen], scores: Scores, *, seconds: float = 0.0) -> None:
        """Keep every row's scores, over what stood there before; all or none, and on the disk when this returns.

        ``seconds``: what judging took, for each sample. Of rows with one place (evaluations fill up with the last task) the first
        is kept, as it is the one that counts.
        """
        now = time.time()
        columns = {name: column.tolist() for name, column in scores.items()}
        rows: dict[tuple[int, int], tuple[object, ...]] = {}
        for row, (place, sight) in enumerate(zip(_places(batch), seen, strict=True)):
            given = numbers.written({name: values[row] for name, values in columns.items()})
            rows.setdefault(place, (*page, *place, *sight, self.judge, given, seconds, now))
        with self.database.writing() as connection:
            connection.executemany(f"INSERT OR REPLACE INTO samples VALUES (?{', ?' * 10})", rows.values())

    def forget_missing(self, page: Page, columns: Iterable[str]) -> None:
        """Forget the rows of a page that miss one of these columns, so that they are judged anew."""
        names = list(columns)
        with self.database.writing() as connection:
            kept = connection.execute("SELECT group_id, slot, scores FROM samples WHERE split = ? AND step = ?", page).fetchall()
            missing = [(*page, group, slot) for group, slot, given in kept if _misses(numbers.read(given), names)]
            connection.executemany("DELETE FROM samples WHERE split = ? AND step = ? AND group_id = ? AND slot = ?", missing)

    def _kept(self, page: Page, batch: Batch) -> dict[tuple[int, int], tuple[tuple[str | None, ...], dict[str, float]]]:
        """What stands on the page for the batch's groups: (group, slot) to ((task, picture, written, judge), scores)."""
        if not batch.group_ids:
            return {}
        query = (
            "SELECT group_id, slot, task, picture, written, judge, scores FROM samples "
            "WHERE split = ? AND step = ? AND group_id BETWEEN ? AND ?"
        )
        with self.database.reading() as connection:
            rows = connection.execute(query, (*page, min(batch.group_ids), max(batch.group_ids))).fetchall()
        return {(group, slot): (tuple(signed), numbers.read(given)) for group, slot, *signed, given in rows}


class JournaledJudge:
    """A judge that is asked only for what the journal does not hold. Called as the loop calls it; batches keep their order.

    What a failing judge left missing is replayed as missing, so that a killed run goes on to the same bits. When the run stops
    because too much was missing, call ``forget_missing`` with that step, and the next start asks again. ``pictures``: where all
    that is judged is kept to look at.
    """

    def __init__(self, judge: Judge, journal: Journal, *, pictures: KeptPictures | None = None) -> None:
        self.judge = judge
        self.journal = journal
        self.pictures = pictures
        self._asking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal-ask")
        self._keeping = ThreadPoolExecutor(max_workers=1, thread_name_prefix="journal-keep")
        self._finished = 0.0

    def __call__(self, batch: Batch, samples: Sequence[Sample]) -> "Future[Judged]":
        """Judge a training step's samples while the caller goes on. The scores are in the journal before the future gives them."""
        return self._on(Page("train", batch.step), batch, samples)

    def on(self, split: Split, step: int) -> JudgeBatch:
        """The same for another page of the journal, an evaluation after ``step`` steps say."""
        return lambda batch, samples: self._on(Page(split, step), batch, samples)

    def forget_missing(self, step: int, *, split: Split = "train", column: str | None = None) -> None:
        """Ask again, the next time, for what could not be judged in this step, or misses this column too."""
        wanted = [*self.judge.combination.columns, *([] if column is None else [column])]
        self.journal.forget_missing(Page(split, step), wanted)

    def close(self) -> None:
        """End the judging threads."""
        for pool in (self._asking, self._keeping):
            pool.shutdown(wait=True, cancel_futures=True)

    def _on(self, page: Page, batch: Batch, samples: Sequence[Sample]) -> "Future[Judged]":
        asked = self._asking.submit(self._ask, page, batch, samples)
        return self._keeping.submit(self._keep, page, batch, samples, asked)

    def _ask(self, page: Page, batch: Batch, samples: Sequence[Sample]) -> "_Asked":
        seen = Seen.of(samples)
        known, scores = self.journal.recall(page, batch, seen, self.judge.reward.columns)
        new = (~known).nonzero().flatten().tolist()
        answer = self.judge.submit([samples[row] for row in new]) if new else None
        return _Asked(seen, scores, new, time.monotonic(), answer)

    def _keep(self, page: Page, batch: Batch, samples: Sequence[Sample], asked: "Future[_Asked]") -> Judged:
        seen, scores, new, began, answer = asked.result()
        if answer is not None:
            fresh = answer.result()
            now = time.monotonic()
            seconds, self._finished = now - max(began, self._finished), now
            for name, column in fresh.scores.items():
                scores[name][new] = column
            self._keep_pictures([(seen[row].picture, samples[row].image) for row in new])
            self.journal.record(page, rows_of(batch, new), [seen[row] for row in new], fresh.scores, seconds=seconds / len(new))
        return self.judge.judged(samples, scores)

    def _keep_pictures(self, named: Iterable[tuple[str, Image | None]]) -> None:
        for name, image in named:
            if self.pictures is not None and image is not None:
                self.pictures.keep(name, image)


class _Asked(NamedTuple):
    """What was seen, the scores that the journal knew, and the other rows, for which the judge was asked then (None: there are
    none)."""

    seen: list[Seen]
    scores: Scores
    new: list[int]
    began: float
    answer: "Future[Judged] | None"


def rows_of(batch: Batch, rows: Sequence[int]) -> Batch:
    """The batch with these rows alone; the tasks stay."""
    return Batch(
        seed=batch.seed,
        step=batch.step,
        tasks=batch.tasks,
        group_ids=batch.group_ids,
        group=tuple(batch.group[row] for row in rows),
        slot=tuple(batch.slot[row] for row in rows),
    )


def unkept(judge: Judge) -> JudgeBatch:
    """The judge as the loop calls it, with nothing kept."""
    return lambda batch, samples: judge.submit(samples)


def _places(batch: Batch) -> list[tuple[int, int]]:
    """Each row's group in the step's global order, and its slot."""
    return [(batch.group_ids[group], slot) for group, slot in zip(batch.group, batch.slot, strict=True)]


def _misses(scores: Mapping[str, float], names: Iterable[str]) -> bool:
    return any(name in scores and scores[name] != scores[name] for name in names)
