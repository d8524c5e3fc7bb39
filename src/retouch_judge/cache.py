"""The answers of judges and reward servers in the ledger: no content is paid for twice, also after a restart.

Judges are cached by question, reward servers by sample; a question that is being asked is not asked twice. A failed call is stored
as a record, but it is never returned as an answer, so the call is made again. A reward that computes in the process of the run is
not cached: it is called again, unless the journal has its scores.
"""

import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from threading import Lock
from typing import Generic, Protocol, TypeVar, runtime_checkable

import torch

from retouch.config.keys import redacted
from retouch.protocols import Reward
from retouch.rewards import identity
from retouch.rewards.base import close
from retouch.rewards.ledger.database import (
    Database,
    ImageHasher,
    all_finite,
    decode_scores,
    encode_scores,
    encode_text,
    json_hash,
    sample_hash,
)
from retouch.types import Column, Json, Sample, Scores
from retouch_judge.base import Panel, fingerprint
from retouch_judge.questions import Answer, JudgeClient, Question

_MAX_NAMES = 500  # per query


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Statistics of the request that scored a sample on a reward server. ``seconds``: total time, including waiting. ``faults``:
    the reasons of failed attempts, in order."""

    seconds: float
    faults: tuple[str, ...] = ()
    attempts: int = 1


@runtime_checkable
class ReportsRequestStats(Protocol):
    """A reward that reports statistics for each sample."""

    def submit_with_stats(self, samples: Sequence[Sample]) -> "Future[tuple[Scores, list[RequestStats]]]":
        """The scores as ``submit`` returns them, and the statistics of each sample."""
        ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class JudgeCall:
    """A question to a judge, or a sample sent to a reward server, and its answer.

    ``content``: the hash by which the answer is looked up. ``image``: the hash of the judged image. ``judge``: the identity of
    the judge, or the fingerprint of the reward on a server. ``scores``: None if the answer could not be used; ``fault`` is then the
    reason. ``faults``: the reasons of earlier failed attempts. ``seconds``: total time. ``cost``: in the currency of the price
    list, None if no price is known.
    """

    content: str
    image: str
    judge: str
    scores: Mapping[str, float] | None
    rubric: str = ""
    seed: int = 0
    temperature: float = 0.0
    fault: str = ""
    text: str = ""
    attempts: int = 1
    faults: Sequence[str] = ()
    seconds: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    cost: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CachedAnswer:
    """An answer from the cache: the scores by name, the text of the judge, and the seed of the question."""

    scores: dict[str, float]
    text: str
    seed: int


class AnswerCache:
    """The answers in a ledger. May be used from several threads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = Lock()
        self._bypasses = 0

    def recall(self, contents: Iterable[str]) -> dict[str, CachedAnswer]:
        """The cached answers by content: for each content the oldest answer with finite scores. Empty inside ``bypass``."""
        if self.bypassed:
            return {}
        wanted, found = list(dict.fromkeys(contents)), {}
        with self._database.reading() as connection:
            for first in range(0, len(wanted), _MAX_NAMES):
                part = wanted[first : first + _MAX_NAMES]
                query = (
                    "SELECT content, scores, text, seed FROM answers WHERE scores IS NOT NULL AND NOT fresh "
                    f"AND content IN ({', '.join('?' * len(part))}) ORDER BY number DESC"
                )
                for content, given, text, seed in connection.execute(query, part):
                    scores = decode_scores(given)
                    if all_finite(scores):
                        found[content] = CachedAnswer(scores, text, seed)
        return found

    def record(self, calls: Iterable[JudgeCall]) -> None:
        """Store the calls; they are on the disk when this returns. Keys are removed from each text."""
        now = time.time()
        rows = [_row(call, fresh=self.bypassed, now=now) for call in calls]
        with self._database.writing() as connection:
            connection.executemany(f"INSERT INTO answers VALUES (NULL{', ?' * 17})", rows)

    @property
    def bypassed(self) -> bool:
        """Whether a ``bypass`` block is running, in any thread."""
        return self._bypasses > 0

    @contextmanager
    def bypass(self) -> Iterator[None]:
        """Inside the block, in all threads, each question is sent to its judge; the answers are recorded but never reused. Canaries
        use it to check whether a judge still gives a known image the same score."""
        with self._lock:
            self._bypasses += 1
        try:
            yield
        finally:
            with self._lock:
                self._bypasses -= 1


def _row(call: JudgeCall, *, fresh: bool, now: float) -> tuple[object, ...]:
    def clean(words: str) -> str:
        return encode_text(redacted(words))

    return (
        call.content,
        call.image,
        clean(call.judge),
        call.rubric,
        call.seed,
        call.temperature,
        None if call.scores is None else encode_scores(call.scores),
        clean(call.fault),
        clean(call.text),
        call.attempts,
        clean(json.dumps(list(call.faults))),
        call.seconds,
        call.input_tokens,
        call.output_tokens,
        call.cost,
        int(fresh),
        now,
    )


T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Answers by key. While one caller asks for a key, the other callers wait for its answer."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._in_flight: dict[str, Future[T]] = {}

    def get(
        self, keys: Sequence[str], *, recall: Callable[[Sequence[str]], dict[str, T]], ask: Callable[[Sequence[str]], Sequence[T]]
    ) -> list[T]:
        """An answer for each key, in order: from ``recall``, from another caller that is asking for the key, or from ``ask``.

        ``ask`` is called once, with the remaining keys, and must store its answers where ``recall`` finds them. If it raises an
        error, the error is raised for each caller that waits for one of these keys.
        """
        with self._lock:
            found = recall(list(dict.fromkeys(keys)))
            waiting = {key: self._in_flight[key] for key in keys if key in self._in_flight and key not in found}
            mine = [key for key in dict.fromkeys(keys) if key not in found and key not in waiting]
            promised: dict[str, Future[T]] = {key: Future() for key in mine}
            self._in_flight |= promised
        try:
            if mine:
                found |= zip(mine, ask(mine), strict=True)
        except BaseException as error:
            for promise in promised.values():
                promise.set_exception(error)
            raise
        finally:
            with self._lock:
                for key in mine:
                    del self._in_flight[key]
        for key in mine:
            promised[key].set_result(found[key])
        found |= {key: future.result() for key, future in waiting.items()}
        return [found[key] for key in keys]


_MAX_BATCHES = 256  # batches that wait at the same time, each on its own thread


def with_cache(reward: Reward, cache: AnswerCache) -> Reward:
    """Put a reward behind the cache. For a judge, the client of its panel is replaced in place by a cached client; a reward that
    asks servers is wrapped in a ``CachedReward``. Rewards that ask neither judges nor servers are returned unchanged."""
    panel = getattr(reward, "panel", None)
    if isinstance(panel, Panel):
        client = panel.client
        panel.client = CachedJudgeClient(client.client if isinstance(client, CachedJudgeClient) else client, cache)
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
        calls = []
        for key, question, answer in zip(keys, questions, answers, strict=True):
            judged = next((part for part in reversed(question.parts) if not isinstance(part, str)), None)
            calls.append(
                JudgeCall(
                    content=key,
                    image=hasher(judged),
                    judge=self.identity,
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
            )
        self.cache.record(calls)
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
        if self.cache.bypassed:
            given = self._score(keys, samples, hasher)
        else:
            given = self._flights.get(
                keys,
                recall=self._recall,
                ask=lambda wanted: self._score(wanted, [by_key[key] for key in wanted], hasher),
            )
        return {name: torch.tensor([scores[name] for scores in given], dtype=torch.float64) for name in self.columns}

    def submit(self, samples: Sequence[Sample]) -> "Future[Scores]":
        """Score in the background; batches may finish in another order."""
        return self._threads.submit(self, samples)

    def close(self) -> None:
        """End the threads and close the wrapped reward."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        close(self.wrapped)

    def _recall(self, keys: Sequence[str]) -> dict[str, dict[str, float]]:
        found = {}
        for key, cached in self.cache.recall(keys).items():
            # A sample whose cached scores are not valid for the columns of the reward is sent again.
            known = [(cached.scores.get(name, math.inf), column) for name, column in self.columns.items()]
            if all(value != value or column.contains(value) for value, column in known):
                found[key] = cached.scores
        return found

    def _score(self, keys: Sequence[str], samples: Sequence[Sample], hasher: ImageHasher) -> list[dict[str, float]]:
        began = time.monotonic()
        if isinstance(self.wrapped, ReportsRequestStats):
            scores, stats = self.wrapped.submit_with_stats(samples).result()
        else:
            scores = self.wrapped(samples)
            stats = [RequestStats(time.monotonic() - began)] * len(samples)
        columns = {name: scores[name].tolist() for name in self.columns}
        given = [{name: values[row] for name, values in columns.items()} for row in range(len(samples))]
        calls = []
        for key, sample, row, each in zip(keys, samples, given, stats, strict=True):
            missing = [column for column, value in row.items() if value != value and not self.columns[column].diagnostic]
            calls.append(
                JudgeCall(
                    content=key,
                    image=hasher(sample.image),
                    judge=self._judge,
                    scores=None if missing else row,
                    fault=f"missing {', '.join(missing)}" if missing else "",
                    text=encode_scores(row) if missing else "",
                    attempts=each.attempts,
                    faults=each.faults,
                    seconds=each.seconds,
                )
            )
        self.cache.record(calls)
        return given


def question_hash(question: Question, judge: str, hasher: ImageHasher) -> str:
    """A hash of everything that decides the answer: the judge, the question, the form of the answer, the temperature and the seed.

    A form that is not a dataclass cannot be compared with another one, so its question gets a random hash and is never found again.
    """
    if not is_dataclass(question.form):
        return secrets.token_hex(32)
    parts: list[Json] = [part if isinstance(part, str) else {"picture": hasher(part)} for part in question.parts]
    form = getattr(question.form, "ledger_name", f"{type(question.form).__module__}.{question.form!r}")
    return json_hash([judge, question.rubric, parts, form, question.temperature, question.seed])
