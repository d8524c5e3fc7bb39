"""The client of reward servers: one callable for many endpoints. A failed request never results in a number."""

import asyncio
import logging
import math
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx
import torch
from pydantic import ValidationError

from retouch.core.random import backoff_pause, generator
from retouch.types import Column, Sample, Scores
from retouch_judge.cache import RequestStats
from retouch_judge.quota import ProgressSemaphore, Quota, Turns, submit
from retouch_serve.http import client_options
from retouch_serve.settings import RemoteSettings
from retouch_serve.wire import (
    ExpectedReply,
    ImageEncoding,
    InvalidReply,
    ItemScores,
    ServerInfo,
    encode_body,
    is_loopback,
    pack,
    read_reply,
)

MAX_REPLY_BYTES, MAX_INFO_BYTES = 16 * 2**20, 2**20
_CONNECT_SECONDS = 5.0
_ASK_SECONDS = 2.0  # time limit for a server's description
_PROBE_SECONDS, _PROBE_PAUSE = 2.0, 0.5  # time limit of a probe, and the time between the probes of an excluded server
_PATIENCE = 0.5  # share of the time limit; a request that ends earlier without a reply says nothing about its server
_POLL, _DISCOVERY_POLL = 0.02, 0.2
_FIRST_PAUSE, _MAX_PAUSE = 0.02, 2.0  # seconds between attempts
_FINAL_STATUSES = frozenset({400, 401, 403, 404, 405, 411, 413, 414, 415, 421, 422, 431})
_LOG = logging.getLogger("retouch.rewards")


@dataclass(slots=True, eq=False)
class RequestFault(Exception):
    """The reason why a request returned no scores.

    ``kind``: a short code. ``final``: a retry cannot help. ``tried``: the server may have worked on the request, so it counts as an
    attempt. ``blames_server``: the server is excluded until it is ready, unless it is the last one. ``retry_after``: seconds to
    wait, as the server asked. ``slow``: the request used up its whole time limit, so even the last server is excluded.
    """

    kind: str
    final: bool = False
    tried: bool = True
    blames_server: bool = True
    retry_after: float = 0.0
    slow: bool = field(init=False)

    def __post_init__(self) -> None:
        self.slow = self.kind in ("timeout", "deadline")
        Exception.__init__(self, self.kind)


def fault_of_status(status: int, retry_after: float) -> RequestFault:
    """The fault of a reply with a status other than 200."""
    if status == 429:
        return RequestFault("busy", tried=False, blames_server=False, retry_after=max(retry_after, 0.05))
    if status == 503:
        return RequestFault("unavailable", tried=False, retry_after=retry_after)
    if status == 504:
        return RequestFault("deadline", blames_server=False)
    return RequestFault(f"http_{status}", final=status in _FINAL_STATUSES)


def _open(token: str | None, connections: int) -> httpx.AsyncClient:
    # Without time limits of its own: each exchange has one.
    return httpx.AsyncClient(
        **client_options(token, timeout=httpx.Timeout(None, connect=_CONNECT_SECONDS), connections=connections)
    )


async def _exchange(
    http: httpx.AsyncClient, method: str, url: str, *, seconds: float, most: int = MAX_INFO_BYTES, **content: Any
) -> bytes:
    """The body of the reply, at most ``most`` bytes, within ``seconds``. Raises RequestFault if there is no valid reply."""
    try:
        async with asyncio.timeout(seconds), http.stream(method, url, **content) as response:
            headers = response.headers
            if response.status_code != 200:
                raise fault_of_status(response.status_code, _seconds(headers.get("retry-after")))
            is_json = headers.get("content-type", "").partition(";")[0].strip().lower() == "application/json"
            if not is_json or headers.get("content-encoding", "identity") != "identity":
                raise RequestFault("wrong_type")
            body = bytearray()
            async for part in response.aiter_raw():
                body += part
                if len(body) > most:
                    raise RequestFault("too_large")
            return bytes(body)
    except TimeoutError:
        raise RequestFault("timeout") from None
    except (httpx.ConnectError, httpx.ConnectTimeout):
        raise RequestFault("unreachable", tried=False) from None
    except (httpx.HTTPError, httpx.StreamError):
        raise RequestFault("broken") from None


def _seconds(text: str | None) -> float:
    try:
        seconds = float(text or 0)
    except ValueError:
        return 0.0
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


# Which rewards the servers host. All servers that reply before the first request must host the same rewards.


async def _discover(settings: RemoteSettings) -> tuple[ExpectedReply, int]:
    """What a valid reply contains, and the largest number of items per request, from the servers that reply first. A line is logged
    if the first attempt fails. Raises ValueError if no server replies within ``settings.wait`` seconds, a server refuses the token
    or is not a reward server, the servers have different rewards, or a reward does not exist."""
    until = time.monotonic() + settings.wait
    places, announced = " or ".join(settings.endpoints), False
    async with _open(settings.token, 1) as http:
        while True:
            found = await asyncio.gather(*(_try_info(http, url) for url in settings.endpoints))
            known = {url: info for url, info in zip(settings.endpoints, found, strict=True) if info is not None}
            if known:
                break
            if time.monotonic() > until:
                raise ValueError(
                    f"no reward server replies at {places} within {settings.wait:g} s (`wait` of the remote reward); start one "
                    "with `retouch serve`"
                )
            if not announced:
                _LOG.warning("waiting for the reward server at %s (up to %g s)", places, settings.wait)
                announced = True
            await asyncio.sleep(_DISCOVERY_POLL)
    (first_url, first), *rest = known.items()
    expected = _expected(first, settings.rewards)
    for url, info in rest:
        if _expected(info, settings.rewards) != expected:
            raise ValueError(f"{url} has other rewards than {first_url}; serve the same rewards, code and arguments at both")
    return expected, min(info.limits.max_items for info in known.values())


async def _try_info(http: httpx.AsyncClient, url: str) -> ServerInfo | None:
    """The server's info; None if the server cannot be reached. Raises ValueError if it refuses the token or is no reward server."""
    try:
        return await _read_info(http, url, seconds=_ASK_SECONDS)
    except RequestFault as fault:
        if fault.kind == "http_401":
            raise ValueError(f"{url} requires another token: set RETOUCH_TOKEN to the server's token") from None
        if fault.final or fault.kind in ("wrong_shape", "wrong_type", "too_large"):
            raise ValueError(f"{url} is not a reward server of Retouch: {fault.kind} for /v1/info") from None
        return None


async def _read_info(http: httpx.AsyncClient, url: str, *, seconds: float) -> ServerInfo:
    try:
        return ServerInfo.model_validate_json(await _exchange(http, "GET", f"{url}/v1/info", seconds=seconds))
    except ValidationError:
        raise RequestFault("wrong_shape") from None


def _expected(info: ServerInfo, rewards: Collection[str] | None) -> ExpectedReply:
    names = [each.name for each in info.rewards]
    if unknown := [name for name in rewards or () if name not in names]:
        raise ValueError(f"the servers have no reward {', '.join(unknown)}; they have {', '.join(names)}")
    asked = [each for each in info.rewards if rewards is None or each.name in rewards]
    return ExpectedReply(
        columns={name: Column(**column.model_dump()) for each in asked for name, column in each.columns.items()},
        owner={name: each.name for each in asked for name in each.columns},
        judges={each.name: each.fingerprint for each in asked},
    )


@dataclass(slots=True, eq=False)
class EndpointState:
    """A server and its recent behaviour.

    ``in_progress``: number of samples that were sent and are not answered. ``excluded``: whether it failed, and no probe has shown
    since that it is back; the next probe is due at ``probe_at``. ``paused_until``: the end of the pause that the server's
    Retry-After header asked for. Times are those of the pool's clock.
    """

    url: str
    in_progress: int = 0
    excluded: bool = False
    probe_at: float = 0.0
    paused_until: float = 0.0


class EndpointPool:
    """The servers of one client, used on one event loop. ``clock``: returns seconds."""

    def __init__(self, urls: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.endpoints = [EndpointState(url) for url in urls]
        self._clock = clock
        self._ties = generator("remote", "ties", *urls)

    def choose(self, avoid: Collection[EndpointState] = ()) -> EndpointState | None:
        """The server for the next request, if possible none of ``avoid``; ties are broken at random. None if all are excluded or
        paused."""
        now = self._clock()
        available = [each for each in self.endpoints if not each.excluded and each.paused_until <= now]
        preferred = [each for each in available if each not in avoid] or available
        if not preferred:
            return None
        least = min(each.in_progress for each in preferred)
        equal = [each for each in preferred if each.in_progress == least]
        return equal[int(torch.randint(len(equal), (), generator=self._ties))]

    def failed(self, endpoint: EndpointState, fault: RequestFault) -> None:
        """Record a failed request."""
        now = self._clock()
        if fault.retry_after:
            endpoint.paused_until = now + min(fault.retry_after, 10.0)
        others = any(not each.excluded for each in self.endpoints if each is not endpoint)
        # The last server stays in use, because a failing one is better than none. A slow one does not: a probe shows within seconds
        # whether it is back, but a request may take its full time-out.
        if fault.slow or (fault.blames_server and others):
            endpoint.excluded, endpoint.probe_at = True, now + _PROBE_PAUSE

    def probes_due(self) -> list[EndpointState]:
        """The excluded servers that should be probed now."""
        now = self._clock()
        return [each for each in self.endpoints if each.excluded and now >= each.probe_at]

    def probed(self, endpoint: EndpointState, *, succeeded: bool) -> None:
        """Record the result of a probe."""
        endpoint.excluded = not succeeded
        endpoint.probe_at = self._clock() + _PROBE_PAUSE
        if succeeded:
            endpoint.paused_until = 0.0


@dataclass(slots=True)
class RetryBudget:
    """Limits retries to a share of the first ones, plus a fixed rate.

    ``share``: retries per first request. ``per_second``: further retries per second. ``max_saved``: the largest number of unused
    retries that are kept for later. Without this budget, clients would multiply the load of servers that
    are already overloaded. Source: Beyer et al., "Site Reliability Engineering" (2016), chapter "Handling Overload".
    """

    share: float
    per_second: float
    max_saved: float
    saved: float = field(init=False)
    counted_until: float | None = field(default=None)

    def __post_init__(self) -> None:
        self.saved = self.max_saved

    def first_request(self) -> None:
        """Count a first request."""
        self.saved = min(self.max_saved, self.saved + self.share)

    def take(self, now: float) -> bool:
        """Whether one retry may be made now; if so, it is counted."""
        if self.counted_until is not None:
            self.saved = min(self.max_saved, self.saved + (now - self.counted_until) * self.per_second)
        self.counted_until = now
        if self.saved < 1:
            return False
        self.saved -= 1
        return True


@dataclass(slots=True, eq=False)
class _Chunk:
    """Samples that are sent together, by id, and their scores so far. ``began`` and ``expires``: times of ``time.monotonic``.
    ``bodies``: the request body for each encoding, with the ids that it contains. ``faults``: the reasons of failed attempts, in
    order. ``seconds``: the time of all attempts, including waiting."""

    samples: dict[str, Sample]
    began: float
    expires: float = 0.0
    scores: dict[str, ItemScores] = field(default_factory=dict)
    bodies: dict[ImageEncoding, tuple[list[str], bytes, str]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    attempts: int = 0
    seconds: float = 0.0

    @property
    def unscored(self) -> list[str]:
        """The ids without scores, and those for which a reward failed."""
        return [name for name in self.samples if name not in self.scores or self.scores[name].failed]

    def body(self, encoding: ImageEncoding, rewards: Sequence[str] | None) -> tuple[bytes, str]:
        """The request body for the unscored samples and its content type; a body is reused while the same samples are unscored."""
        ids = self.unscored
        if encoding not in self.bodies or self.bodies[encoding][0] != ids:
            document, blobs = pack([self.samples[name] for name in ids], ids, encoding=encoding, rewards=rewards)
            self.bodies[encoding] = ids, *encode_body(document, blobs)
        return self.bodies[encoding][1:]


class _Session:
    """Sends chunks to one of the servers, with retries; the state of a client in one process, used on one event loop. ``faults``:
    number of failed attempts by kind. ``calls``: number of all attempts."""

    def __init__(self, settings: RemoteSettings, expected: ExpectedReply, quota: Quota | None) -> None:
        self.faults: Counter[str] = Counter()
        self.calls = 0
        self._settings, self._expected = settings, expected
        self._pool = EndpointPool(settings.endpoints)
        places = settings.concurrency * len(settings.endpoints)
        self._http = _open(settings.token, places)
        self._line = ProgressSemaphore(places, patience=settings.deadline)
        self._retries = RetryBudget(share=settings.retry_share, per_second=10.0, max_saved=20.0)
        self._quota = quota
        self._turns = None if quota is None else Turns(quota)
        self._probing: dict[EndpointState, asyncio.Task[None]] = {}

    async def score(self, chunk: _Chunk) -> None:
        """Fill in the chunk's scores. Samples that are unscored at its deadline stay unscored."""
        began = time.monotonic()
        try:
            chunk.expires = await self._line.enter(since=chunk.began)
            try:
                async with asyncio.timeout(chunk.expires - time.monotonic()):
                    await self._retry_until_scored(chunk)
            finally:
                self._line.leave()
        except TimeoutError:
            self.faults["out_of_time"] += 1
            chunk.faults.append("out_of_time")
        chunk.seconds = time.monotonic() - began

    async def close(self) -> None:
        """Cancel the probes and close the connections."""
        for probe in self._probing.values():
            probe.cancel()
        await asyncio.gather(*self._probing.values(), return_exceptions=True)
        await self._http.aclose()

    async def _retry_until_scored(self, chunk: _Chunk) -> None:
        self._retries.first_request()
        failed: list[EndpointState] = []
        attempts = 0
        while chunk.unscored and attempts < self._settings.attempts:
            if chunk.attempts and not self._retries.take(time.monotonic()):
                await asyncio.sleep(_POLL)
                continue
            # The caller has claimed the first attempt; each further one takes another call from the quota.
            if self._quota is not None and self._turns is not None:
                if chunk.attempts and not await asyncio.to_thread(self._quota.claim_another):
                    self.faults["budget"] += 1
                    return
                if await self._turns.next(len(chunk.unscored), latest=chunk.expires) is None:
                    self.faults["rate_limit"] += 1
                    return
            while True:
                for due in self._pool.probes_due():
                    if due not in self._probing:
                        self._probing[due] = asyncio.create_task(self._probe(due))
                if (endpoint := self._pool.choose(failed)) is not None:
                    break
                await asyncio.sleep(_POLL)
            chunk.attempts += 1
            try:
                chunk.scores |= await self._ask(endpoint, chunk)
                if not chunk.unscored:
                    return
                attempts += 1
                chunk.faults.append("reward_failed")
            except RequestFault as fault:
                chunk.faults.append(fault.kind)
                if fault.final:
                    return
                attempts += fault.tried
            others = len(self._settings.endpoints) - 1
            failed = [*failed, endpoint][-others:] if others else []
            key = next(iter(chunk.samples))
            await asyncio.sleep(
                backoff_pause("remote", "pause", key, attempt=chunk.attempts, base=_FIRST_PAUSE, longest=_MAX_PAUSE)
            )

    async def _probe(self, endpoint: EndpointState) -> None:
        try:
            await _exchange(self._http, "GET", f"{endpoint.url}/readyz", seconds=_PROBE_SECONDS)
            info = await _read_info(self._http, endpoint.url, seconds=_PROBE_SECONDS)
            asked = self._settings.rewards
            judges = {each.name: each.fingerprint for each in info.rewards if asked is None or each.name in asked}
            succeeded = judges == self._expected.judges
            if not succeeded:
                _LOG.warning("%s has other rewards than at the start of this run; it is not used", endpoint.url)
        except RequestFault:
            succeeded = False
        self._pool.probed(endpoint, succeeded=succeeded)
        del self._probing[endpoint]

    async def _ask(self, endpoint: EndpointState, chunk: _Chunk) -> dict[str, ItemScores]:
        ids, settings = chunk.unscored, self._settings
        endpoint.in_progress += len(ids)  # before the first wait, so that the next choice of a server includes it
        self.calls += 1
        patience = _PATIENCE * min(settings.timeout, settings.deadline)
        started = math.inf
        try:
            encoding: ImageEncoding
            if settings.encoding == "auto":  # on this machine, sending raw pixels is faster than compressing them
                encoding = "raw" if is_loopback(urlsplit(endpoint.url).hostname or "") else "webp"
            else:
                encoding = settings.encoding
            body, kind = await asyncio.to_thread(chunk.body, encoding, settings.rewards)
            started = time.monotonic()
            seconds = max(0.001, min(settings.timeout, chunk.expires - started))
            headers = {"Content-Type": kind, "X-Deadline-Seconds": f"{seconds:.3f}"}
            url = f"{endpoint.url}/v1/score"
            reply = await _exchange(self._http, "POST", url, seconds=seconds, most=MAX_REPLY_BYTES, content=body, headers=headers)
            scores = read_reply(reply, ids, self._expected)
            self._line.answered()
        except (RequestFault, InvalidReply) as error:
            fault = error if isinstance(error, RequestFault) else RequestFault(str(error))
            self.faults[fault.kind] += 1
            fault.slow = fault.slow and time.monotonic() - started >= patience
            self._pool.failed(endpoint, fault)
            raise fault from None
        except asyncio.CancelledError:
            if time.monotonic() - started >= patience:  # the whole chunk is out of time
                self._pool.failed(endpoint, RequestFault("timeout"))
            raise
        finally:
            endpoint.in_progress -= len(ids)
        if any(each.failed for each in scores.values()):
            self.faults["reward_failed"] += 1
        return scores


class RemoteClient:
    """A client of the servers that a ``RemoteReward`` names. ``columns``: the columns of the servers.

    Samples are sent in requests of ``batch`` samples, at most ``concurrency`` requests at once for each endpoint, to the endpoint
    with the fewest samples in flight. A failed request is sent again to another endpoint, at most ``attempts`` times in all
    (refused connections and "busy" do not count), after growing random pauses. Retries are limited to ``retry_share`` of all
    requests, plus ten per second. Samples without a valid score at the deadline are NaN. A reply is valid only if it has exactly
    the requested ids, each column is within its range, and the fingerprint of the judge is the same as at the start.
    ``samples_per_minute``, ``requests_per_minute`` and ``calls`` limit the sum over all processes that name the same ``rate_file``
    (``retouch_judge/quota.py::Quota``).

    Raises ValueError if no server answers, the servers have different rewards, a server refuses the token, or a request has more
    samples than are allowed per minute.
    """

    kind = "remote"

    def __init__(self, settings: RemoteSettings) -> None:
        self._settings = settings
        self._quota: Quota | None = None
        if settings.is_limited:
            self._quota = Quota(
                requests_per_minute=settings.requests_per_minute,
                units_per_minute=settings.samples_per_minute,
                largest=settings.batch,
                calls=settings.calls,
                file=settings.rate_file,
            )
        self._expected, most = submit(_discover(settings)).result()
        self.columns: Mapping[str, Column] = self._expected.columns
        self._batch = min(settings.batch, most)
        # By process: a forked one inherits the session of its parent, but cannot use the parent's event loop and connections.
        self._sessions: dict[int, _Session] = {}

    @property
    def fingerprint(self) -> str:
        """The fingerprints of the servers' rewards; a resumed run compares them with those at its start."""
        return ",".join(f"{name}={digest}" for name, digest in sorted(self._expected.judges.items()))

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column, (b,), float64; NaN for a sample that could not be judged. Raises BudgetSpent if the remaining ``calls`` are
        too few for these samples; then no request is sent."""
        return self.submit(samples).result()

    def submit(self, samples: Sequence[Sample]) -> "Future[Scores]":
        """Score in the background and return a future. Any number of calls, from any thread, may be in progress."""

        async def scores(began: float) -> Scores:
            return (await self._score(samples, began))[0]

        return submit(scores(time.monotonic()))

    def submit_with_stats(self, samples: Sequence[Sample]) -> "Future[tuple[Scores, list[RequestStats]]]":
        """Like ``submit``, with the time, faults and attempts of the request of each sample."""
        return submit(self._score(samples, time.monotonic()))

    def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        session = self._sessions.pop(os.getpid(), None)
        if session is not None:
            submit(session.close()).result()

    def stats(self) -> dict[str, float]:
        """The counts so far: all attempts as ``calls``, failed attempts as ``faults/<kind>``."""
        session = self._sessions.get(os.getpid())
        if session is None:
            return {"calls": 0.0}
        faults = {f"faults/{kind}": float(count) for kind, count in sorted(session.faults.items())}
        return {"calls": float(session.calls), **faults}

    async def _score(self, samples: Sequence[Sample], began: float) -> tuple[Scores, list[RequestStats]]:
        session = self._sessions.get(os.getpid())
        if session is None:
            session = self._sessions[os.getpid()] = _Session(self._settings, self._expected, self._quota)
        chunks = []
        for first in range(0, len(samples), self._batch):
            name = secrets.token_hex(6)
            members = samples[first : first + self._batch]
            chunks.append(_Chunk({f"{name}-{number}": sample for number, sample in enumerate(members)}, began))
        if self._quota is not None:
            await asyncio.to_thread(self._quota.claim, len(chunks))
        await asyncio.gather(*(session.score(chunk) for chunk in chunks))
        if unscored := sum(len(chunk.unscored) for chunk in chunks):
            faults = ", ".join(f"{kind} {count}" for kind, count in session.faults.most_common())
            _LOG.warning(
                "%d of %d samples could not be judged; failed attempts of the run so far: %s", unscored, len(samples), faults
            )
        nan = float("nan")
        scores = [chunk.scores.get(name) for chunk in chunks for name in chunk.samples]
        stats = [RequestStats(chunk.seconds, tuple(chunk.faults), chunk.attempts) for chunk in chunks for _ in chunk.samples]
        return {
            name: torch.tensor([nan if each is None else each.scores[name] for each in scores], dtype=torch.float64)
            for name in self.columns
        }, stats
