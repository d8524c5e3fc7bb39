"""The answers of judges in the ledger; a question that is being asked is not asked twice.

The cache of answers: the answers of judges and reward servers for a content, and a record of each call.

A usable answer is looked up by its content, so no content is paid for twice, also after a restart. A failed call is stored as a
record, but it is never returned as an answer, so the call is made again.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Generic, Protocol, TypeVar, runtime_checkable

from retouch.config.keys import redacted
from retouch.rewards.ledger.database import Database, all_finite, decode_scores, encode_scores, encode_text
from retouch.types import Sample, Scores

_MAX_NAMES = 500  # per query


@dataclass(frozen=True, slots=True)
class RequestStats:
    """Statistics of the request that scored a sample on a reward server.

    ``seconds``: total time, including waiting. ``faults``: the reasons of failed attempts, in order.
    """

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
        """Inside the block, in all threads, each question is sent to its judge; the answers are recorded but never reused.

        Canaries use it to check whether a judge still gives a known image the same score.
        """
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
