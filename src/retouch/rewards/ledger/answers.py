"""The content cache: what judges and reward servers said of a content, and every call that was made for it.

An answer that could be used is found again by content, so the same content is paid for once, also after a restart. One that could
not is kept for the record and never found: what failed is asked again.
"""

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock

from retouch.rewards.ledger import numbers
from retouch.rewards.ledger.database import Database, text
from retouch.rewards.vlm import credentials

_MOST = 500  # names in one query


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Call:
    """A question that a judge was asked, or a sample that a reward server was sent, and what came of it.

    ``content``: the name under which the answer is found again; ``picture``: that of the picture that was judged. ``scores``: None
    where nothing could be used, and ``fault`` then says why. ``faults``: why earlier attempts failed. ``cost``: None where no price
    is known.
    """

    content: str
    picture: str
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
class Found:
    """A kept answer."""

    scores: dict[str, float]
    text: str
    seed: int


class Answers:
    """The answers in a ledger. May be used from several threads."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._lock = Lock()
        self._bypassing = 0

    def recall(self, contents: Iterable[str]) -> dict[str, Found]:
        """The kept answers among these contents; the oldest of each. Nothing while bypassed."""
        if self.fresh:
            return {}
        wanted, found = list(dict.fromkeys(contents)), {}
        with self._database.reading() as connection:
            for first in range(0, len(wanted), _MOST):
                part = wanted[first : first + _MOST]
                query = (
                    "SELECT content, scores, text, seed FROM answers WHERE scores IS NOT NULL AND NOT fresh "
                    f"AND content IN ({', '.join('?' * len(part))}) ORDER BY number DESC"
                )
                for content, scores, words, seed in connection.execute(query, part):
                    found[content] = Found(numbers.read(scores), words, seed)
        return found

    def record(self, calls: Iterable[Call]) -> None:
        """Keep the calls; on the disk when this returns. No key of the environment is written, whoever answered with it."""
        now, secrets = time.time(), list(credentials.secrets(os.environ).values())
        rows = [_row(call, fresh=self.fresh, now=now, secrets=secrets) for call in calls]
        with self._database.writing() as connection:
            connection.executemany(f"INSERT INTO answers VALUES (NULL{', ?' * 17})", rows)

    @property
    def fresh(self) -> bool:
        """Whether judges are asked anew just now."""
        return self._bypassing > 0

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """While this lasts every question goes to its judge: for canaries, which ask whether the judge is what it was.

        What is said meanwhile is recorded and never found again. It holds for all threads.
        """
        with self._lock:
            self._bypassing += 1
        try:
            yield
        finally:
            with self._lock:
                self._bypassing -= 1


def _row(call: Call, *, fresh: bool, now: float, secrets: Sequence[str]) -> tuple[object, ...]:
    def clean(words: str) -> str:
        for secret in secrets:
            words = credentials.redacted(words, secret)
        return text(words)

    return (
        call.content,
        call.picture,
        clean(call.judge),
        call.rubric,
        call.seed,
        call.temperature,
        None if call.scores is None else numbers.written(call.scores),
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
