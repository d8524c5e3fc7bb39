"""Put judges and reward servers behind the cache of answers: an answered question is not asked again, and each call is recorded.

Judges are cached by question, reward servers by sample. A reward that computes in the process of the run is not cached: it is
called again, unless the journal has its scores.
"""

import math
import secrets
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import is_dataclass
from typing import Protocol, runtime_checkable

import torch

from retouch.protocols import Reward
from retouch.rewards import identity
from retouch.rewards.base import close
from retouch.rewards.judges.rubrics import Panel, fingerprint
from retouch.rewards.ledger.answers import AnswerCache, JudgeCall, ReportsRequestStats, RequestStats, SingleFlight
from retouch.rewards.ledger.database import ImageHasher, encode_scores, json_hash, sample_hash
from retouch.rewards.vlm.questions import Answer, JudgeClient, Question
from retouch.types import Column, Json, Sample, Scores

_MAX_BATCHES = 256  # batches that wait at the same time, each on its own thread


@runtime_checkable
class _HasPanel(Protocol):
    panel: Panel


def with_cache(reward: Reward, cache: AnswerCache) -> Reward:
    """Put a reward behind the cache. For a judge, the client of its panel is replaced in place by a cached client; a reward that
    asks servers is wrapped in a ``CachedReward``.

    Rewards that ask neither judges nor servers are returned unchanged.
    """
    if isinstance(reward, _HasPanel) and isinstance(reward.panel, Panel):
        client = reward.panel.client
        reward.panel.client = CachedJudgeClient(client.client if isinstance(client, CachedJudgeClient) else client, cache)
    return CachedReward(reward, cache) if isinstance(reward, ReportsRequestStats) else reward


class CachedJudgeClient:
    """Asks ``client`` only the questions that are not answered in ``cache``. A cached answer counts no attempts, seconds or
    tokens."""

    def __init__(self, client: JudgeClient, cache: AnswerCache) -> None:
        self.client = client
        self.cache = cache
        self.identity = client.identity
        self._flights: SingleFlight[Answer] = SingleFlight()

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """The answers to the questions, in order; equal questions share one answer."""
        hasher = ImageHasher()
        keys = [question_hash(question, self.identity, hasher) for question in questions]
        if self.cache.bypassed:
            return self._ask(keys, questions, hasher)
        by_key = dict(zip(keys, questions, strict=True))
        return self._flights.get(
            keys,
            recall=lambda wanted: self._recall(wanted, by_key),
            ask=lambda wanted: self._ask(wanted, [by_key[key] for key in wanted], hasher),
        )

    def close(self) -> None:
        """Close the wrapped client."""
        close(self.client)

    def _recall(self, keys: Sequence[str], questions: Mapping[str, Question]) -> dict[str, Answer]:
        return {
            key: Answer(scores=cached.scores, text=cached.text, seed=cached.seed, temperature=questions[key].temperature)
            for key, cached in self.cache.recall(keys).items()
        }

    def _ask(self, keys: Sequence[str], questions: Sequence[Question], hasher: ImageHasher) -> list[Answer]:
        answers = self.client.ask(questions)
        asked = zip(keys, questions, answers, strict=True)
        self.cache.record([_question_call(*each, judge=self.identity, hasher=hasher) for each in asked])
        return answers


class CachedReward:
    """Sends ``reward`` only the samples without scores in ``cache``; for rewards that are slow or cost money.

    The reward must be thread-safe and must score each sample independently of the other samples of the call. A sample with a
    missing score, except for diagnostics, is sent again the next time.
    """

    def __init__(self, reward: Reward, cache: AnswerCache) -> None:
        self.wrapped = reward
        self.cache = cache
        self.columns: Mapping[str, Column] = reward.columns
        self._judge = identity.fingerprint(reward)
        self._flights: SingleFlight[dict[str, float]] = SingleFlight()
        self._threads = ThreadPoolExecutor(max_workers=_MAX_BATCHES, thread_name_prefix="cached-reward")

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column, (b,), float64."""
        hasher = ImageHasher()
        keys = [sample_hash(sample, self._judge, hasher) for sample in samples]
        by_key = dict(zip(keys, samples, strict=True))

        def ask(wanted: Sequence[str]) -> list[dict[str, float]]:
            return self._score(wanted, [by_key[key] for key in wanted], hasher)

        given = self._score(keys, samples, hasher) if self.cache.bypassed else self._flights.get(keys, recall=self._recall, ask=ask)
        return {name: torch.tensor([scores[name] for scores in given], dtype=torch.float64) for name in self.columns}

    def submit(self, samples: Sequence[Sample]) -> "Future[Scores]":
        """Score in the background; batches may finish in another order."""
        return self._threads.submit(self, samples)

    def close(self) -> None:
        """End the threads and close the wrapped reward."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        close(self.wrapped)

    def _recall(self, keys: Sequence[str]) -> dict[str, dict[str, float]]:
        return {key: cached.scores for key, cached in self.cache.recall(keys).items() if self._fits(cached.scores)}

    def _fits(self, scores: Mapping[str, float]) -> bool:
        """Whether the cached scores are valid for the columns of the reward; if not, the sample is sent again."""
        known = [(scores.get(name, math.inf), column) for name, column in self.columns.items()]
        return all(value != value or column.contains(value) for value, column in known)

    def _score(self, keys: Sequence[str], samples: Sequence[Sample], hasher: ImageHasher) -> list[dict[str, float]]:
        scores, stats = self._with_stats(samples)
        columns = {name: scores[name].tolist() for name in self.columns}
        given = [{name: values[row] for name, values in columns.items()} for row in range(len(samples))]
        self.cache.record(
            self._sample_call(key, hasher(sample.image), row, each)
            for key, sample, row, each in zip(keys, samples, given, stats, strict=True)
        )
        return given

    def _with_stats(self, samples: Sequence[Sample]) -> tuple[Scores, Sequence[RequestStats]]:
        if isinstance(self.wrapped, ReportsRequestStats):
            return self.wrapped.submit_with_stats(samples).result()
        began = time.monotonic()
        scores = self.wrapped(samples)
        return scores, [RequestStats(time.monotonic() - began)] * len(samples)

    def _sample_call(self, key: str, image: str, scores: Mapping[str, float], stats: RequestStats) -> JudgeCall:
        missing = [column for column, value in scores.items() if value != value and not self.columns[column].diagnostic]
        return JudgeCall(
            content=key,
            image=image,
            judge=self._judge,
            scores=None if missing else scores,
            fault=f"missing {', '.join(missing)}" if missing else "",
            text=encode_scores(scores) if missing else "",
            attempts=stats.attempts,
            faults=stats.faults,
            seconds=stats.seconds,
        )


def question_hash(question: Question, judge: str, hasher: ImageHasher) -> str:
    """A hash of everything that decides the answer: the judge, the question, the form of the answer, the temperature and the seed.

    A form that is not a dataclass cannot be compared with another one, so its question gets a random hash and is never found again.
    """
    if not is_dataclass(question.form):
        return secrets.token_hex(32)
    parts: list[Json] = [part if isinstance(part, str) else {"picture": hasher(part)} for part in question.parts]
    form = getattr(question.form, "ledger_name", f"{type(question.form).__module__}.{question.form!r}")
    return json_hash([judge, question.rubric, parts, form, question.temperature, question.seed])


def _question_call(key: str, question: Question, answer: Answer, *, judge: str, hasher: ImageHasher) -> JudgeCall:
    judged = next((part for part in reversed(question.parts) if not isinstance(part, str)), None)
    return JudgeCall(
        content=key,
        image=hasher(judged),
        judge=judge,
        scores=answer.scores or None,
        rubric=fingerprint(question.rubric),
        seed=answer.seed,
        temperature=answer.temperature,
        fault=answer.fault,
        text=answer.text,
        attempts=answer.attempts,
        faults=answer.faults,
        seconds=answer.seconds,
        input_tokens=answer.input_tokens,
        output_tokens=answer.output_tokens,
        cost=answer.cost,
    )
