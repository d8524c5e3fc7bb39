"""What a reward server does, apart from HTTP: it admits requests, asks the rewards, drains, and swaps a reward for a new one."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from retouch import __version__
from retouch.rewards.wire.errors import ErrorCode, RequestError
from retouch.rewards.wire.schema import ServerInfo
from retouch.serving.batching import Batcher, Verdicts
from retouch.serving.decoding import Decoded, decode
from retouch.serving.hosted import Hosted, Order, rebuild
from retouch.serving.limits import Limits
from retouch.serving.metrics import Metrics
from retouch.types import Sample

_LOG = logging.getLogger("retouch.serving")
_DECODERS = 4


@dataclass(frozen=True, slots=True)
class Result:
    """One item: its columns, and the code of what went wrong by reward."""

    id: str
    scores: Mapping[str, float | None]
    errors: Mapping[str, ErrorCode]


@dataclass(frozen=True, slots=True)
class Results:
    """A request's items in its order; ``judges``: the fingerprints under which each reward judged them."""

    judges: Mapping[str, Sequence[str]]
    items: Sequence[Result]


class Service:
    """The rewards of one server. ``start`` it on a running event loop; everything but decoding and judging happens there."""

    def __init__(self, hosted: Sequence[Hosted], limits: Limits, metrics: Metrics) -> None:
        self.limits, self.metrics = limits, metrics
        self.draining = False
        self._requests = self._coming = 0
        self._batchers = {each.name: Batcher(each, limits, metrics, coming=lambda: self._coming) for each in hosted}
        self._working: list[asyncio.Task[None]] = []
        self._decoders = ThreadPoolExecutor(max_workers=_DECODERS, thread_name_prefix="decode")

    def start(self) -> None:
        """Begin to judge."""
        self._working = [asyncio.get_running_loop().create_task(batcher.run()) for batcher in self._batchers.values()]

    async def broken(self) -> None:
        """Return when a reward's queue has stopped working, which only a fault of this package can do."""
        await asyncio.wait(self._working, return_when=asyncio.FIRST_COMPLETED)

    @property
    def working(self) -> bool:
        """Whether every reward's queue is worked at."""
        return bool(self._working) and not any(task.done() for task in self._working)

    @property
    def ready(self) -> bool:
        """Whether a request would be taken."""
        return self.working and not self.draining and all(batcher.room(1) for batcher in self._batchers.values())

    @property
    def idle(self) -> bool:
        """Whether no request is in hand."""
        return self._requests == 0

    @property
    def hosted(self) -> list[Hosted]:
        return [batcher.hosted for batcher in self._batchers.values()]

    def info(self) -> ServerInfo:
        """What callers are told of this server."""
        rewards = [each.info() for each in self.hosted]
        return ServerInfo(service="retouch", version=__version__, rewards=rewards, limits=self.limits.info())

    def admit(self) -> "Admission":
        """A place in hand, before the body is read. RequestError: stopping, or full."""
        if self.draining:
            raise RequestError("draining")
        if self._requests >= self.limits.max_requests or not all(batcher.room(1) for batcher in self._batchers.values()):
            raise RequestError("busy")
        return Admission(self)

    async def score(self, body: bytes, content_type: str, *, seconds: float, admission: "Admission") -> Results:
        """Decode and judge a batch. RequestError where it cannot be used, is too much at once, or takes longer than ``seconds``."""
        loop = asyncio.get_running_loop()
        decoded = await loop.run_in_executor(self._decoders, decode, body, content_type, self.limits)
        asked = list(self._batchers) if decoded.rewards is None else list(dict.fromkeys(decoded.rewards))
        if not set(asked) <= self._batchers.keys():
            raise RequestError("bad_batch")
        samples = [sample for sample in decoded.samples if isinstance(sample, Sample)]
        verdicts = await self.judge(samples, asked, seconds=seconds, admission=admission)
        return _joined(decoded, verdicts)

    async def judge(
        self, samples: Sequence[Sample], asked: Sequence[str], *, seconds: float, admission: "Admission"
    ) -> dict[str, Verdicts]:
        """Each reward's verdicts on the samples. RequestError: no room, or longer than ``seconds``."""
        batchers = [self._batchers[name] for name in asked]
        if not all(batcher.room(len(samples)) for batcher in batchers):
            raise RequestError("busy")
        expires = time.monotonic() + seconds
        waiting = [batcher.submit(samples, expires=expires) for batcher in batchers]
        admission.queued()
        try:
            async with asyncio.timeout(seconds):
                verdicts = await asyncio.gather(*waiting)
        except TimeoutError:
            raise RequestError("deadline") from None
        finally:
            for verdict in waiting:
                verdict.cancel()
        return dict(zip(asked, verdicts, strict=True))

    async def reload(self, orders: Sequence[Order]) -> None:
        """Build every reward anew beside the old one and swap it in between two batches; where that fails the old one goes on."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="reload") as pool:
            for order in orders:
                batcher = self._batchers[order.name]
                future = pool.submit(rebuild, order, batcher.hosted)
                await asyncio.wait([asyncio.wrap_future(future)])
                error = future.exception()
                if error is not None:
                    _LOG.error("reload of %s failed; the old one goes on", order.name, exc_info=error)
                    continue
                batcher.hosted = future.result()
                _LOG.warning("reloaded %s, fingerprint %s", order.name, batcher.hosted.fingerprint)

    async def close(self) -> None:
        """Stop judging."""
        for task in self._working:
            task.cancel()
        await asyncio.gather(*self._working, return_exceptions=True)
        for batcher in self._batchers.values():
            batcher.close()
        self._decoders.shutdown(wait=False, cancel_futures=True)


class Admission:
    """A request in hand, for the length of a ``with`` block; it is coming until it is ``queued``."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._coming = False

    def __enter__(self) -> "Admission":
        self._service._requests += 1
        self._service._coming += 1
        self._coming = True
        return self

    def __exit__(self, *error: object) -> None:
        self.queued()
        self._service._requests -= 1

    def queued(self) -> None:
        """Its samples wait for their rewards."""
        self._service._coming -= self._coming
        self._coming = False


def _joined(decoded: Decoded, verdicts: Mapping[str, Verdicts]) -> Results:
    """The rewards' verdicts by item. Items that could not be decoded have that as every reward's error."""
    rows = {name: iter(given.rows) for name, given in verdicts.items()}
    items = []
    for name, sample in zip(decoded.ids, decoded.samples, strict=True):
        scores: dict[str, float | None] = {}
        errors: dict[str, ErrorCode] = {}
        for reward, row in rows.items():
            verdict = next(row) if isinstance(sample, Sample) else sample
            if isinstance(verdict, str):
                errors[reward] = verdict
            else:
                scores |= verdict
        items.append(Result(name, scores, errors))
    return Results({name: list(given.fingerprints) for name, given in verdicts.items()}, items)
