"""From samples to rewards: ask the reward, check the scores that it returns, combine them into one number a sample, keep them.

Each sample has one of three outcomes: a number, the worst score (the policy made no image), or NaN (it could not be judged).
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.protocols import AsyncReward, Reward
from retouch.rewards.closing import close
from retouch.rewards.combine.combination import Combine, combination
from retouch.rewards.combine.composite import gathered, parts_of
from retouch.rewards.ledger.journal import Journal, JournalRow, Split, journal_rows
from retouch.rewards.text.written import shown
from retouch.types import Batch, Column, Sample, Scores


@dataclass(frozen=True, slots=True, eq=False)
class Judged:
    """``scores``: every column (b,). ``rewards``: the combined number (b,), NaN where the sample is missing.

    ``faults``: how many samples have no image.
    """

    scores: Scores
    rewards: Float[Tensor, " b"]
    faults: int

    @classmethod
    def concat(cls, parts: "Sequence[Judged]") -> "Judged":
        """The rows of the parts, in order."""
        return cls(
            {name: torch.cat([part.scores[name] for part in parts]) for name in parts[0].scores},
            torch.cat([part.rewards for part in parts]),
            sum(part.faults for part in parts),
        )


JudgeBatch: TypeAlias = "Callable[[Batch, Sequence[Sample]], Future[Judged]]"


class Judge:
    """A reward, and how its columns combine into one number: a weighted sum or a formula (``combine/combination.py``).

    Columns that ``combine`` does not name are logged and decide nothing. Samples without an image never reach the reward: each
    column scores its worst (NaN for a diagnostic), and the combination its lowest.

    Calling a judge scores samples on the caller's thread. ``submit`` scores them in the background, in three stages that overlap:
    1. one thread looks samples up in the ``journal``, where there is one, and hands the others to the rewards;
    2. an ``AsyncReward`` has each batch at once, however many are under way; every other reward has a thread of its own and takes
       batch after batch, in the order in which they came. The rewards of a ``CompositeReward`` run at the same time;
    3. one thread waits for the rewards, checks and records their scores, and combines them: batch after batch, in that order too.

    ValueError where ``combine`` does not go with the reward's columns.
    """

    def __init__(self, reward: Reward, combine: Combine) -> None:
        self.reward = reward
        self.combination = combination(combine, reward.columns)
        self.journal: Journal | None = None
        self._starting = _thread("start")
        self._scoring = {name: _thread(name) for name, part in parts_of(reward).items() if not isinstance(part, AsyncReward)}
        self._finishing = _thread("finish")
        self._last_scored = 0.0

    def __call__(self, samples: Sequence[Sample]) -> Judged:
        """Score now, on this thread, without the journal."""
        return self._combined(samples, scores_of(self.reward, samples))

    def submit(self, samples: Sequence[Sample]) -> "Future[Judged]":
        """Score in the background, without the journal. What a reward raises, or gets wrong, is raised by the future."""
        return self._submit(samples, rows=None)

    def for_split(self, split: Split, step: int | None = None) -> JudgeBatch:
        """``submit`` as training and evaluations call it, with (batch, samples), and with the journal, where there is one.

        What the journal knows is not scored again, not even scores that were missing, so that a resumed run goes on to the same
        bits. New scores are on the disk before the future gives them. ``step``: steps of the run so far, by default ``batch.step``.
        """

        def judge(batch: Batch, samples: Sequence[Sample]) -> "Future[Judged]":
            return self._submit(
                samples, rows=lambda: journal_rows(batch, samples, split=split, step=batch.step if step is None else step)
            )

        return judge

    def forget_missing(self, split: Split, step: int, *, column: str | None = None) -> None:
        """Score again, the next time, what misses a column of the combination in this split and step, or this ``column``."""
        if self.journal is not None:
            wanted = [*self.combination.columns, *([] if column is None else [column])]
            self.journal.forget_missing(wanted, split=split, step=step)

    def close(self) -> None:
        """Drop the batches that nobody began to score, wait for the others, end the threads and close the reward."""
        for thread in (self._starting, *self._scoring.values(), self._finishing):
            thread.shutdown(wait=True, cancel_futures=True)
        close(self.reward)

    def _submit(self, samples: Sequence[Sample], *, rows: Callable[[], list[JournalRow]] | None) -> "Future[Judged]":
        started = self._starting.submit(self._start, samples, rows)
        return self._finishing.submit(self._finish, samples, started)

    def _start(self, samples: Sequence[Sample], rows: Callable[[], list[JournalRow]] | None) -> "_Started":
        columns = self.reward.columns
        if self.journal is None or rows is None:
            found, new = None, list(range(len(samples)))
            scores = {name: torch.full((len(samples),), torch.nan) for name in columns}
        else:
            found = rows()
            known, scores = self.journal.recall(found, columns)
            new = (~known).nonzero().flatten().tolist()
        return _Started(found, scores, new, self._ask([samples[index] for index in new]), time.monotonic())

    def _ask(self, samples: Sequence[Sample]) -> "dict[str, Future[Scores]]":
        """Hand the samples to every reward; an empty dictionary where none of them has an image."""
        drawn = _drawn(samples)
        asked: dict[str, Future[Scores]] = {}
        for name, part in parts_of(self.reward).items() if drawn else ():
            visible = shown(drawn, part)
            asked[name] = part.submit(visible) if isinstance(part, AsyncReward) else self._scoring[name].submit(part, visible)
        return asked

    def _finish(self, samples: Sequence[Sample], future: "Future[_Started]") -> Judged:
        rows, scores, new, asked, began = future.result()
        if new:
            fresh = self._collect([samples[index] for index in new], asked)
            now = time.monotonic()
            seconds, self._last_scored = now - max(began, self._last_scored), now
            for name, column in fresh.items():
                scores[name][new] = column
            if self.journal is not None and rows is not None:
                images = [samples[index].image for index in new]
                self.journal.record([rows[index] for index in new], fresh, images=images, seconds=seconds / len(new))
        return self._combined(samples, scores)

    def _collect(self, samples: Sequence[Sample], asked: "dict[str, Future[Scores]]") -> Scores:
        return _checked(self.reward, samples, gathered(asked))

    def _combined(self, samples: Sequence[Sample], scores: Scores) -> Judged:
        faults = torch.tensor([sample.image is None for sample in samples], dtype=torch.bool)
        rewards = self.combination(scores).masked_fill(faults, self.combination.low)
        return Judged(scores, rewards, int(faults.sum()))


class _Started(NamedTuple):
    """``rows``: the samples' journal rows, None without a journal. ``scores``: what the journal knew, NaN elsewhere. ``new``: the
    indices of the other samples, and ``asked``: their scores to come. ``began``: when the rewards were asked, in seconds.
    """

    rows: list[JournalRow] | None
    scores: Scores
    new: list[int]
    asked: "dict[str, Future[Scores]]"
    began: float


def scores_of(reward: Reward, samples: Sequence[Sample]) -> Scores:
    """Every column that the reward declares, (b,), float32, scored on this thread: what it gave, or its worst where there is no
    image.

    ValueError: a column that the reward did not return, of another shape, or outside its declared range.
    """
    drawn = _drawn(samples)
    return _checked(reward, samples, reward(shown(drawn, reward)) if drawn else {})


def _thread(name: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"judge-{name}")


def _drawn(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample.image is not None]


def _checked(reward: Reward, samples: Sequence[Sample], returned: Scores) -> Scores:
    """The declared columns of all samples, from what the reward ``returned`` for those that have an image."""
    drawn = torch.tensor([sample.image is not None for sample in samples], dtype=torch.bool)
    count = int(drawn.sum())
    scores: Scores = {}
    for name, column in reward.columns.items():
        fault = float("nan") if column.diagnostic else column.worst
        scores[name] = torch.full((len(samples),), fault, dtype=torch.float32)
        if count:
            scores[name][drawn] = _checked_column(name, column, returned, count)
    return scores


def _checked_column(name: str, column: Column, returned: Scores, count: int) -> Float[Tensor, " b"]:
    if name not in returned:
        raise ValueError(
            f"the reward declares the column {name!r} and did not return it; it returned {', '.join(returned) or 'nothing'}"
        )
    values = torch.as_tensor(returned[name], dtype=torch.float32).cpu()
    if values.shape != (count,):
        raise ValueError(
            f"column {name!r} has shape {tuple(values.shape)} for {count} samples; return one a sample, NaN where missing"
        )
    outside = ~torch.isnan(values) & ~((values >= column.low) & (values <= column.high))
    if outside.any():
        wrong = values[outside][0].item()
        raise ValueError(
            f"column {name!r} gave {wrong}, outside its declared range {column.low} to {column.high}; declare the true range"
        )
    return values
