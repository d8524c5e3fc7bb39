"""The client of reward servers: one callable for many endpoints. A failed request never results in a number."""

import asyncio
import importlib.util
import logging
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from retouch.rewards.ledger.answers import RequestStats
from retouch.rewards.quota import event_loop
from retouch.types import Column, Sample, Scores
from retouch_serve.client.settings import RemoteSettings

if TYPE_CHECKING:
    from retouch_serve.client.session import Session

_LOG = logging.getLogger("retouch.rewards")


class RemoteClient:
    """A client of the servers that a ``RemoteReward`` names. ``columns``: the columns of the servers.

    Samples are sent in requests of ``batch`` samples, at most ``concurrency`` requests at once for each endpoint, to the endpoint
    with the fewest samples in flight. A failed request is sent again to another endpoint, at most ``attempts`` times in all
    (refused connections and "busy" do not count), after growing random pauses. Retries are limited to ``retry_share`` of all
    requests, plus ten per second. Samples without a valid score at the deadline are NaN. A reply is valid only if it has exactly
    the requested ids, each column is within its range, and the fingerprint of the judge is the same as at the start.
    ``samples_per_minute``, ``requests_per_minute`` and ``calls`` limit the sum over all processes that name the same ``rate_file``
    (``rewards/quota/quota.py::Quota``).

    Raises ValueError if no server answers, the servers have different rewards, or a server refuses the token.
    """

    kind = "remote"

    def __init__(self, settings: RemoteSettings) -> None:
        if importlib.util.find_spec("httpx") is None:
            raise ValueError("asking reward servers needs httpx: pip install 'retouch[serve]'")
        from retouch_serve.client.discovery import discover

        self._settings = settings
        self._quota = settings.open_quota()
        self._expected, most = event_loop.submit(discover(settings, wait=settings.wait)).result()
        self.columns: Mapping[str, Column] = self._expected.columns
        self._batch = min(settings.batch, most)
        self._sessions: "dict[int, Session]" = {}

    @property
    def fingerprint(self) -> str:
        """The fingerprints of the servers' rewards; a resumed run compares them with those at its start."""
        return ",".join(f"{name}={digest}" for name, digest in sorted(self._expected.judges.items()))

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column, (b,), float64; NaN for a sample that could not be judged.

        Raises BudgetSpent if the remaining ``calls`` are too few for these samples; then no request is sent.
        """
        return self.submit(samples).result()

    def submit(self, samples: Sequence[Sample]) -> "Future[Scores]":
        """Score in the background and return a future. Any number of calls, from any thread, may be in progress."""
        return event_loop.submit(self._scores(samples, time.monotonic()))

    def submit_with_stats(self, samples: Sequence[Sample]) -> "Future[tuple[Scores, list[RequestStats]]]":
        """Like ``submit``, with the time, faults and attempts of the request of each sample."""
        return event_loop.submit(self._score(samples, time.monotonic()))

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        event_loop.submit(self._close()).result()

    def stats(self) -> dict[str, float]:
        """The counts so far: all attempts as ``calls``, failed attempts as ``faults/<kind>``."""
        session = self._sessions.get(os.getpid())
        if session is None:
            return {"calls": 0.0}
        faults = {f"faults/{kind}": float(count) for kind, count in sorted(session.faults.items())}
        return {"calls": float(session.calls), **faults}

    async def _scores(self, samples: Sequence[Sample], begun: float) -> Scores:
        scores, _ = await self._score(samples, begun)
        return scores

    async def _score(self, samples: Sequence[Sample], begun: float) -> tuple[Scores, list[RequestStats]]:
        from retouch_serve.client.session import Chunk, Session

        # A forked process inherits the session of its parent, but cannot use the parent's event loop and connections.
        session = self._sessions.get(os.getpid())
        if session is None:
            session = self._sessions[os.getpid()] = Session(self._settings, self._expected, self._quota)
        chunks = [Chunk.of(samples[first : first + self._batch], begun) for first in range(0, len(samples), self._batch)]
        if self._quota is not None:
            await asyncio.to_thread(self._quota.claim, len(chunks))
        await asyncio.gather(*(session.score(chunk) for chunk in chunks))
        scores = [chunk.scores.get(name) for chunk in chunks for name in chunk.samples]
        unscored = sum(len(chunk.unscored) for chunk in chunks)
        if unscored:
            faults = ", ".join(f"{kind} {count}" for kind, count in session.faults.most_common())
            _LOG.warning(
                "%d of %d samples could not be judged; failed attempts of the run so far: %s", unscored, len(samples), faults
            )
        nan = float("nan")
        stats = [RequestStats(chunk.seconds, tuple(chunk.faults), chunk.attempts) for chunk in chunks for _ in chunk.samples]
        return {
            name: torch.tensor([nan if each is None else each.scores[name] for each in scores], dtype=torch.float64)
            for name in self.columns
        }, stats

    async def _close(self) -> None:
        session = self._sessions.pop(os.getpid(), None)
        if session is not None:
            await session.close()
