"""Score the samples of a run: call the reward, check its scores, record them, and combine them into one number per sample.

Each sample gets a number, the worst score (the policy made no image), or NaN (it could not be judged).
"""

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from retouch.config.imports import user_code_error
from retouch.protocols import AsyncReward, Reward
from retouch.records import files
from retouch.rewards.base import WIN_PROBABILITY, close, compares_groups
from retouch.rewards.combination import NO_COMBINATION, Combine, combination, weighted_scores
from retouch.rewards.identity import describe
from retouch.rewards.ledger.journal import Journal, JournalRow, Split, journal_rows, rows_to_score
from retouch.rewards.scoring import call_reward, checked, given_to, scores_of, with_images
from retouch.rewards.worker import WorkerThread, close_all
from retouch.types import Batch, Column, Sample, Scores, Task

CLOSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class ScoredBatch:
    """The scores of ``b`` samples. ``scores``: each column, (b,). ``rewards``: the combined number, (b,), NaN if it is missing.
    ``faults``: the number of samples without an image. ``last_fault``: see ``RewardScorer.last_fault``. ``there``: False for rows
    of turns that their task does not have; None if there are none."""

    scores: Scores
    rewards: Float[Tensor, " b"]
    faults: int
    last_fault: str = ""
    there: Bool[Tensor, " b"] | None = None

    @classmethod
    def concat(cls, parts: "Sequence[ScoredBatch]") -> "ScoredBatch":
        """Concatenate the rows of the parts, in order."""
        assert all(part.there is None for part in parts), "rows of turns are not concatenated"
        return cls(
            {name: torch.cat([part.scores[name] for part in parts]) for name in parts[0].scores},
            torch.cat([part.rewards for part in parts]),
            sum(part.faults for part in parts),
            parts[-1].last_fault,
        )


BatchScorer: TypeAlias = "Callable[[Batch, Sequence[Sample]], Future[ScoredBatch]]"

# The samples' rows in the journal (None without one), the scores from it, the indices of the samples that are scored now, the
# futures of their scores by reward, and when this began.
_Started: TypeAlias = tuple[list[JournalRow] | None, Scores, list[int], dict[str, Future[Scores]], float]


class RewardScorer:
    """A reward together with the combination of its columns: a weighted sum or a formula (``rewards/combination.py``).

    Columns that ``combine`` does not name are only logged. A sample without an image is never passed to the reward: it gets the
    worst value of each column (NaN for a diagnostic) and the lowest value of the combination. A reward without columns
    (``NoReward``) has an empty combination and scores nothing.

    A call of the scorer scores samples on the caller's thread. ``submit`` scores them in the background, in three stages that
    overlap:

    1. Start: one thread looks up the samples in the ``journal``, if there is one, and passes those that are not in it to the
       rewards; to a reward that compares the samples of a task, it passes their whole groups.
    2. Score: an ``AsyncReward`` receives each batch at once, even if other batches are in progress. Each other reward has its own
       thread, which scores one batch after the other, in order. The rewards of a ``CompositeReward`` run at the same time; if
       ``device`` is a GPU, each has its own CUDA stream.
    3. Finish: one thread waits for the rewards, and checks, records and combines their scores, one batch after the other, in order.

    Raises ValueError if ``combine`` does not fit the reward's columns.
    """

    def __init__(self, reward: Reward, combine: Combine, *, device: torch.device | None = None) -> None:
        self.reward = reward
        self.combination = combination(combine, reward.columns) if reward.columns else NO_COMBINATION
        self.journal: Journal | None = None
        # The rewards of a composite by name; a single reward has the empty name.
        self._parts: Mapping[str, Reward] = reward.rewards if isinstance(reward, CompositeReward) else {"": reward}
        waiting = [name for name, part in self._parts.items() if not isinstance(part, AsyncReward)]
        self._starting = WorkerThread("judge-start")
        self._scoring = {name: WorkerThread(f"judge-{name}", device=device) for name in waiting}
        self._finishing = WorkerThread("judge-finish")
        self._last_scored = 0.0

    def __call__(self, samples: Sequence[Sample]) -> ScoredBatch:
        """Score the samples on the caller's thread, without the journal."""
        return self._combined(samples, scores_of(self.reward, samples))

    def submit(self, samples: Sequence[Sample], *, rows: Callable[[], list[JournalRow]] | None = None) -> "Future[ScoredBatch]":
        """Score the samples in the background. The future raises the error of a reward, or ValueError for wrong scores.

        ``rows``: the samples' rows in the journal, computed in the background; None scores without the journal.
        """
        started = self._starting.submit(self._start, samples, rows)
        return self._finishing.submit(self._finish, samples, started)

    def for_split(self, split: Split, step: int | None = None) -> BatchScorer:
        """Return a function of (batch, samples) that scores in the background and uses the journal, if there is one.

        Scores from the journal are used again, also missing ones, so that a resumed run repeats the same bits. New scores are on
        the disk before the future returns them. ``step``: completed steps of the run, by default ``batch.step``.
        """

        def judge(batch: Batch, samples: Sequence[Sample]) -> "Future[ScoredBatch]":
            return self.submit(
                samples, rows=lambda: journal_rows(batch, samples, split=split, step=batch.step if step is None else step)
            )

        return judge

    def forget_missing(self, split: Split, step: int, *, column: str | None = None) -> None:
        """Remove the samples of a split and step from the journal if a combined column or ``column`` is missing, so that they are
        scored again the next time."""
        if self.journal is not None:
            wanted = [*self.combination.columns, *([] if column is None else [column])]
            self.journal.forget_missing(wanted, split=split, step=step)

    @property
    def last_fault(self) -> str:
        """A sentence for an error about missing scores, which quotes the judges' latest unusable answer; empty if there is none."""
        said = [fault for part in self._parts.values() if (fault := getattr(getattr(part, "reward", part), "last_fault", ""))]
        return f". The latest answer that could not be used: {'; '.join(said)}" if said else ""

    def close(self) -> None:
        """Cancel the batches that no reward has started, wait for the other batches, end the threads and close the reward.

        A reward that does not answer within ``CLOSE_SECONDS`` is abandoned and not closed.
        """
        if close_all([self._starting, *self._scoring.values(), self._finishing], seconds=CLOSE_SECONDS):
            closing = WorkerThread("judge-close")
            closed = closing.submit(close, self.reward)
            wait([closed], timeout=CLOSE_SECONDS)
            if close_all([closing], seconds=0.1):
                closed.result()

    def _start(self, samples: Sequence[Sample], rows: Callable[[], list[JournalRow]] | None) -> _Started:
        columns = self.reward.columns
        if self.journal is None or rows is None:
            found, new = None, list(range(len(samples)))
            scores = {name: torch.full((len(samples),), torch.nan, dtype=torch.float64) for name in columns}
        else:
            found = rows()
            known, scores = self.journal.recall(found, columns)
            new = rows_to_score(found, known.tolist(), whole_groups=compares_groups(self.reward))
        drawn = with_images([samples[index] for index in new])
        asked: dict[str, Future[Scores]] = {}
        for name, part in self._parts.items() if drawn else ():
            if isinstance(part, AsyncReward):
                asked[name] = part.submit(given_to(part, drawn))
            else:
                asked[name] = self._scoring[name].submit(call_reward, part, drawn, name)
        return found, scores, new, asked, time.monotonic()

    def _finish(self, samples: Sequence[Sample], future: Future[_Started]) -> ScoredBatch:
        rows, scores, new, asked, began = future.result()
        if new:
            fresh = checked(self.reward, [samples[index] for index in new], collect_scores(asked))
            now = time.monotonic()
            seconds, self._last_scored = now - max(began, self._last_scored), now
            for name, column in fresh.items():
                scores[name][new] = column
            if self.journal is not None and rows is not None:
                images = [samples[index].image for index in new]
                self.journal.record([rows[index] for index in new], fresh, images=images, seconds=seconds / len(new))
        return self._combined(samples, scores)

    def _combined(self, samples: Sequence[Sample], scores: Scores) -> ScoredBatch:
        faults = torch.tensor([sample.image is None for sample in samples], dtype=torch.bool)
        rewards = self.combination(scores).masked_fill(faults, self.combination.low)
        return ScoredBatch(scores, rewards, int(faults.sum()), self.last_fault)


class CompositeReward:
    """Several rewards as one. The column ``alignment`` of the reward ``judge`` is named ``judge/alignment``.

    ``rewards``: by name. ``combine``: the combination that is used when the scores are differentiated. Raises ValueError if there
    are no rewards.

    A call runs all rewards at the same time, each on its own thread. A ``RewardScorer`` calls the rewards itself, so that batches
    overlap as well.
    """

    kind: Literal["several"] = "several"
    reads_completions: Literal[True] = True  # each reward receives only what it may see

    def __init__(self, rewards: Mapping[str, Reward], *, combine: Combine | None = None) -> None:
        if not rewards:
            raise ValueError("rewards is empty; name at least one reward")
        self.rewards = dict(rewards)
        self.combine: Combine = {} if combine is None else combine
        self.columns: Mapping[str, Column] = {
            f"{name}/{own}": column for name, reward in self.rewards.items() for own, column in reward.columns.items()
        }
        self.compares_groups = any(compares_groups(reward) for reward in self.rewards.values())

    @property
    def fingerprint(self) -> str:
        """The descriptions of the rewards by name, as JSON (``retouch.rewards.identity.describe``)."""
        return json.dumps({name: describe(reward) for name, reward in self.rewards.items()}, sort_keys=True)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The columns of all rewards by full name, (b,) each. If rewards fail, raises the first error after all rewards have
        ended."""
        with ThreadPoolExecutor(max_workers=len(self.rewards), thread_name_prefix="reward") as threads:
            parts = {name: threads.submit(call_reward, reward, samples, name) for name, reward in self.rewards.items()}
        return collect_scores(parts)

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """The weighted sum of the rewards' scores of ``images``, values 0 to 1, with gradient in the images."""
        return weighted_scores(self.rewards, self.combine, images, tasks)

    def close(self) -> None:
        """Close every reward."""
        for reward in self.rewards.values():
            close(reward)


def collect_scores(parts: "Mapping[str, Future[Scores]]") -> Scores:
    """The columns of all parts of a reward by full name. Waits for all parts, then raises the first error, if there is one."""
    failed = {name: part.exception() for name, part in parts.items()}
    for name, error in failed.items():
        if error is not None and not isinstance(error, Exception):  # sys.exit in a reward that answers later
            raise user_code_error(error, f"reward {name}" if name else "the reward") or error
    return {f"{name}/{own}" if name else own: column for name, part in parts.items() for own, column in part.result().items()}


@dataclass(frozen=True, slots=True)
class Calibration:
    """The fitted map: the win probability at each of the ascending ``scores``, linear between them and constant outside.

    ``probability``, ``sd``: the win probability and its standard deviation over the bootstrap resamples. ``low``, ``high``: its
    95 % interval. ``votes``, ``tasks``: the number of votes and of tasks on which the map was fitted.
    """

    column: str
    scores: tuple[float, ...]
    probability: tuple[float, ...]
    sd: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    votes: int
    tasks: int

    def at(self, score: float) -> tuple[float, float]:
        """Return the win probability of a score, and its standard deviation; both are NaN if the score is NaN."""
        if math.isnan(score):
            return math.nan, math.nan
        return float(np.interp(score, self.scores, self.probability)), float(np.interp(score, self.scores, self.sd))

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "column": self.column,
            "votes": self.votes,
            "tasks": self.tasks,
            **{name: list(getattr(self, name)) for name in ("scores", "probability", "sd", "low", "high")},
        }

    def save(self, path: Path) -> None:
        """Write the map to a JSON file."""
        files.write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> "Calibration":
        """Read a map that ``save`` wrote. Raises ValueError if the file is missing, or does not contain a monotone map."""
        if not path.is_file():
            raise ValueError(f"no file {path}; create it with: retouch votes RUN calibrate COLUMN --to {path}")
        found = files.read_json(path)
        try:
            curves = {name: tuple(map(float, found[name])) for name in ("scores", "probability", "sd", "low", "high")}
            made = cls(column=str(found["column"]), votes=int(found["votes"]), tasks=int(found["tasks"]), **curves)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path} is not a calibration; create it with: retouch votes RUN calibrate COLUMN --to FILE") from None
        if (
            len({len(curve) for curve in curves.values()}) != 1
            or not made.scores
            or not all(math.isfinite(value) for curve in curves.values() for value in curve)
            or not all(0 <= value <= 1 for value in made.probability)
            or list(made.scores) != sorted(set(made.scores))
            or list(made.probability) != sorted(made.probability)
        ):
            raise ValueError(f"{path} is not a monotone map from scores to probabilities; create it again with retouch votes")
        return made


class CalibratedScores:
    """The scores of ``reward`` with the two added columns."""

    kind: Literal["calibrated"] = "calibrated"

    def __init__(self, reward: Reward, column: str, calibration: Calibration) -> None:
        if column not in reward.columns:
            raise ValueError(f"reward.column: the reward has no column {column!r}; its columns are {', '.join(reward.columns)}")
        self.reward, self.column, self.calibration = reward, column, calibration
        self.columns: Mapping[str, Column] = {**WIN_PROBABILITY, **reward.columns}
        self.reads_completions = bool(getattr(reward, "reads_completions", False))
        self.compares_groups = compares_groups(reward)

    @property
    def fingerprint(self) -> str:
        """The description of the wrapped reward, the mapped column and the map, as JSON."""
        return json.dumps([describe(self.reward), self.column, self.calibration.to_json()], sort_keys=True)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """All columns, (b,), float64; the two added columns are NaN if the mapped score is missing.

        The samples must have an image. Raises the errors of ``retouch.rewards.scoring.checked``.
        """
        scores = checked(self.reward, samples, call_reward(self.reward, samples))
        mapped = [self.calibration.at(value) for value in scores[self.column].tolist()]
        added = torch.tensor(mapped, dtype=torch.float64).view(-1, 2).unbind(dim=1)
        return {**dict(zip(WIN_PROBABILITY, added, strict=True)), **scores}

    def close(self) -> None:
        """Close the wrapped reward."""
        close(self.reward)
