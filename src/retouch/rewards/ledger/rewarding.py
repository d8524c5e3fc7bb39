"""A reward that remembers: a sample that it was sent before is not sent again, and whatever is sent is recorded."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from retouch.protocols import Reward
from retouch.rewards import identity
from retouch.rewards.closing import close
from retouch.rewards.ledger import content, numbers
from retouch.rewards.ledger.answers import Answers, Call
from retouch.rewards.ledger.once import Once
from retouch.rewards.ledger.receipts import Receipt, Receipted
from retouch.types import Column, Sample, Scores

_AT_ONCE = 256  # threads that wait


class RememberingReward:
    """Sends ``reward`` the samples that ``answers`` does not hold; for rewards that are slow or cost money.

    It must judge each sample on its own (not one that compares the samples of a call). A sample that misses any column but a
    diagnostic is not remembered. Many batches are under way at once, so the reward must bear several threads.
    """

    def __init__(self, reward: Reward, answers: Answers) -> None:
        self.wrapped = reward
        self.answers = answers
        self.columns: Mapping[str, Column] = reward.columns
        self._judge = identity.fingerprint(reward)
        self._once: Once[dict[str, float]] = Once()
        self._pool = ThreadPoolExecutor(max_workers=_AT_ONCE, thread_name_prefix="remembering")

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column as (b,), float32."""
        pictures = content.Pictures()
        names = [content.of_sample(sample, self._judge, pictures) for sample in samples]
        by_name = dict(zip(names, samples, strict=True))

        def ask(wanted: Sequence[str]) -> list[dict[str, float]]:
            return self._asked(wanted, [by_name[name] for name in wanted], pictures)

        if self.answers.fresh:
            given = self._asked(names, samples, pictures)
        else:
            given = self._once.get(names, known=self._recalled, ask=ask)
        return {name: torch.tensor([scores[name] for scores in given], dtype=torch.float32) for name in self.columns}

    def submit(self, samples: Sequence[Sample]) -> "Future[Scores]":
        """Judge while the caller goes on; batches may overtake each other."""
        return self._pool.submit(self, samples)

    def close(self) -> None:
        """End the threads, and let go of what the reward holds."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        close(self.wrapped)

    def _recalled(self, names: Sequence[str]) -> dict[str, dict[str, float]]:
        return {name: found.scores for name, found in self.answers.recall(names).items()}

    def _asked(self, names: Sequence[str], samples: Sequence[Sample], pictures: content.Pictures) -> list[dict[str, float]]:
        scores, receipts = self._receipted(samples)
        columns = {name: scores[name].tolist() for name in self.columns}
        given = [{name: values[row] for name, values in columns.items()} for row in range(len(samples))]
        self.answers.record(
            self._call(name, pictures(sample.image), row, receipt)
            for name, sample, row, receipt in zip(names, samples, given, receipts, strict=True)
        )
        return given

    def _receipted(self, samples: Sequence[Sample]) -> tuple[Scores, Sequence[Receipt]]:
        if isinstance(self.wrapped, Receipted):
            return self.wrapped.submit_receipted(samples).result()
        began = time.monotonic()
        scores = self.wrapped(samples)
        return scores, [Receipt(time.monotonic() - began)] * len(samples)

    def _call(self, name: str, picture: str, scores: Mapping[str, float], receipt: Receipt) -> Call:
        missing = [column for column, value in scores.items() if value != value and not self.columns[column].diagnostic]
        return Call(
            content=name,
            picture=picture,
            judge=self._judge,
            scores=None if missing else scores,
            fault=f"missing {', '.join(missing)}" if missing else "",
            text=numbers.written(scores) if missing else "",
            attempts=receipt.attempts,
            faults=receipt.faults,
            seconds=receipt.seconds,
        )
