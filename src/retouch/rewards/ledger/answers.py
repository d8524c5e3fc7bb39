"""The cache of answers: what judges and reward servers said about a content, and every call that was made for it.

A usable answer is found again by its content, so no content is paid for twice, also after a restart. A call that failed is kept for
the record and never found, so it is made again.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Protocol, runtime_checkable

from retouch.rewards.ledger.database import Database, all_finite, decode_scores, encode_scores, encode_text
from retouch.rewards.vlm import credentials
from retouch.types import Sample, Scores

_MAX_NAMES = 500  # in one query


@dataclass(frozen=True, slots=True)
class RequestStats:
    """What it took to score one sample on a reward server.

    ``seconds``: total time, waiting included. ``faults``: why attempts failed, in order.
    """

    seconds: float
    faults: tuple[str, ...] = ()
    attempts: int = 1


@runtime_checkable
class ReportsRequestStats(Protocol):
    """A reward that can say what each sample took."""

    def submit_with_stats(self, samples: Sequence[Sample]) -> "Future[tuple[Scores, list[RequestStats]]]":
        """The scores as ``submit`` gives them, and the statistics of each sample."""
        ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class JudgeCall:
    """A question to a judge, or a sample sent to a reward server, and its answer.

    ``content``: the hash under which the answer is found again. ``image``: the hash of the judged image. ``judge``: who answered.
    ``scores``: None if the answer could not be used, and ``fault`` then says why. ``faults``: why earlier attempts failed.
    ``seconds``: total time. ``cost``: in the currency of the price list, None if no price is known.
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
    """An answer from the cache: scores by name, the judge's text and the seed with which it was asked."""

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
        """The cached answers to these contents, the oldest of each with finite scores; nothing inside ``bypass``."""
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
        """Store the calls; on the disk when this returns. API keys of the environment are removed from every text."""
        now, secrets = time.time(), list(credentials.secrets(os.environ).values())
        rows = [_row(call, fresh=self.bypassed, now=now, secrets=secrets) for call in calls]
        with self._database.writing() as connection:
            connection.executemany(f"INSERT INTO answers VALUES (NULL{', ?' * 17})", rows)

    @property
    def bypassed(self) -> bool:
        """Whether a ``bypass`` block is running, in any thread."""
        return self._bypasses > 0

    @contextmanager
    def bypass(self) -> Iterator[None]:
        """Inside the block, in all threads, every question goes to its judge; the answers are recorded and never found again.

        For canaries: they ask whether a judge still scores a known image as it did.
        """
        with self._lock:
            self._bypasses += 1
        try:
            yield
        finally:
            with self._lock:
                self._bypasses -= 1


def _row(call: JudgeCall, *, fresh: bool, now: float, secrets: Sequence[str]) -> tuple[object, ...]:
    def clean(words: str) -> str:
        for secret in secrets:
            words = credentials.redacted(words, secret)
        return encode_text(words)

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
