"""A reward server without HTTP: it admits requests, passes samples to the rewards, reloads rewards and shuts down."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import TypeVar

from starlette.requests import Request

from retouch.types import Sample
from retouch_serve.front.bodies import Bodies, Body
from retouch_serve.server.batching import Batcher, RewardResult
from retouch_serve.server.hosted_rewards import HostedReward, RewardSpec, rebuild
from retouch_serve.server.metrics import Metrics
from retouch_serve.server.request_bodies import Decoded, Limits, decode
from retouch_serve.wire.errors import ErrorCode, RequestError
from retouch_serve.wire.schema import SERVICE, ServerInfo

_LOG = logging.getLogger("retouch.serving")
_DECODING_THREADS = 4
_TRIM_SECONDS = 0.5
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ItemResult:
    """The result of one item: its columns, and an error code for each reward that failed on it."""

    id: str
    scores: Mapping[str, float | None]
    errors: Mapping[str, ErrorCode]


@dataclass(frozen=True, slots=True)
class BatchResult:
    """The results of a request's items, in order. ``judges``: the fingerprints of each reward that scored the items."""

    judges: Mapping[str, Sequence[str]]
    items: Sequence[ItemResult]


class Service:
    """The rewards of one server. ``start`` it on a running event loop; only decoding and scoring use other threads."""

    def __init__(self, hosted: Sequence[HostedReward], limits: Limits, metrics: Metrics) -> None:
        self.limits, self.metrics = limits, metrics
        self.draining = False
        self._requests = self._arriving = 0
        self._batchers = {each.name: Batcher(each, limits, metrics, arriving=lambda: self._arriving) for each in hosted}
        self._workers: list[asyncio.Task[None]] = []
        self._trimming: asyncio.Task[None] | None = None
        self._decoders = ThreadPoolExecutor(max_workers=_DECODING_THREADS, thread_name_prefix="decode")
        self.bodies = Bodies(limits)
        self.memory = self.bodies.memory

    def start(self) -> None:
        """Start the tasks that score and trim memory."""
        loop = asyncio.get_running_loop()
        self._workers = [loop.create_task(batcher.run()) for batcher in self._batchers.values()]
        self._trimming = loop.create_task(self._trim())

    async def wait_until_failed(self) -> None:
        """Return when the task of a reward's queue has ended, which only a bug in this package can cause."""
        await asyncio.wait(self._workers, return_when=asyncio.FIRST_COMPLETED)

    @property
    def working(self) -> bool:
        """Whether every reward's queue is being processed."""
        return bool(self._workers) and not any(task.done() for task in self._workers)

    @property
    def ready(self) -> bool:
        """Whether a request would be accepted."""
        batchers = self._batchers.values()
        return self.working and not self.draining and all(batcher.has_room(1) and not batcher.stalled for batcher in batchers)

    @property
    def scoring(self) -> bool:
        """Whether a call of a reward is running."""
        return any(batcher.call_seconds > 0 for batcher in self._batchers.values())

    @property
    def stuck(self) -> bool:
        """Whether a call of a reward takes longer than any request may wait, so that only a new process can help."""
        return any(batcher.call_seconds > self.limits.deadline_seconds for batcher in self._batchers.values())

    @property
    def idle(self) -> bool:
        """Whether no request is in progress or is arriving at once."""
        return self._requests + self._arriving == 0

    @property
    def hosted(self) -> list[HostedReward]:
        """The current rewards; a reload replaces them."""
        return [batcher.hosted for batcher in self._batchers.values()]

    def info(self) -> ServerInfo:
        """Return the reply of ``GET /v1/info``."""
        rewards = [each.info() for each in self.hosted]
        return ServerInfo(service=SERVICE, version=version("retouch"), rewards=rewards, limits=self.limits.info())

    def admit(self) -> "Admission":
        """Admit a request before its body is read. Raises RequestError if the server is shutting down, full or stalled."""
        if self.draining:
            raise RequestError("draining")
        self.require_room()
        return Admission(self)

    def require_room(self) -> None:
        """Raise RequestError if the server is full or stalled."""
        if self._requests >= self.limits.max_requests or not all(batcher.has_room(1) for batcher in self._batchers.values()):
            raise RequestError("busy")
        if any(batcher.stalled for batcher in self._batchers.values()):
            raise RequestError("stalled")

    async def _trim(self) -> None:
        while True:
            await asyncio.sleep(_TRIM_SECONDS)
            await asyncio.to_thread(self.memory.trim)

    async def score(self, body: bytes, content_type: str, *, seconds: float, admission: "Admission") -> BatchResult:
        """Decode and score a batch.

        Raises RequestError if the batch is invalid, is too large for the queue, or takes longer than ``seconds``.
        """
        decoded = await self.decode(partial(decode, content_type=content_type), body, admission=admission)
        del body
        asked = list(self._batchers) if decoded.rewards is None else list(dict.fromkeys(decoded.rewards))
        if not set(asked) <= self._batchers.keys():
            raise RequestError("bad_batch")
        samples = [sample for sample in decoded.samples if isinstance(sample, Sample)]
        results = await self.score_samples(samples, asked, seconds=seconds, admission=admission)
        return _by_item(decoded, results)

    async def decode(self, decoder: Callable[..., T], body: bytes, *, admission: "Admission") -> T:
        """Decode a body in another thread, with ``decoder(body, limits=..., memory=...)``. Raises RequestError if this fails."""
        loop = asyncio.get_running_loop()
        with self.memory.holding(3 * len(body)):  # decoded texts and base64 need additional memory
            call = partial(decoder, body, limits=self.limits, memory=self.memory)
            del body
            decoded = await loop.run_in_executor(self._decoders, call)
        admission.release()
        return decoded

    async def score_samples(
        self, samples: Sequence[Sample], asked: Sequence[str], *, seconds: float, admission: "Admission"
    ) -> dict[str, RewardResult]:
        """Return the results of each reward in ``asked``. Raises RequestError if a queue is full, or after ``seconds``."""
        batchers = [self._batchers[name] for name in asked]
        if not all(batcher.has_room(len(samples)) for batcher in batchers):
            raise RequestError("busy")
        expires = time.monotonic() + seconds
        waiting = [batcher.submit(samples, expires=expires) for batcher in batchers]
        admission.arrived()
        try:
            async with asyncio.timeout(seconds):
                results = await asyncio.gather(*waiting)
        except TimeoutError:
            for batcher, future in zip(batchers, waiting, strict=True):
                if not future.done() or future.cancelled():
                    batcher.expired()
            raise RequestError("deadline") from None
        finally:
            for future in waiting:
                future.cancel()
        return dict(zip(asked, results, strict=True))

    async def reload(self, specs: Sequence[RewardSpec]) -> None:
        """Build every reward again and replace the old one between two batches. If the build fails, the old one stays in use."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="reload") as pool:
            for spec in specs:
                batcher = self._batchers[spec.name]
                future = pool.submit(rebuild, spec, batcher.hosted)
                await asyncio.wait([asyncio.wrap_future(future)])
                error = future.exception()
                if error is not None:
                    _LOG.error("reloading %s failed; the old reward stays in use", spec.name, exc_info=error)
                    continue
                batcher.hosted = future.result()
                _LOG.warning("reloaded %s, fingerprint %s", spec.name, batcher.hosted.fingerprint)

    async def close(self) -> None:
        """Stop scoring."""
        tasks = [*self._workers, *([] if self._trimming is None else [self._trimming])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for batcher in self._batchers.values():
            batcher.close()
        self._decoders.shutdown(wait=False, cancel_futures=True)


class Admission(Body):
    """A request, for the duration of a ``with`` block. It is in progress after its body has arrived.

    It counts as arriving until its samples are in the queues, but not while its body arrives slowly.
    """

    def __init__(self, service: Service) -> None:
        super().__init__(service.bodies)
        self._service = service
        self._arriving = self._in_progress = False

    def __enter__(self) -> "Admission":
        self._service._arriving += 1
        self._arriving = True
        return self

    def __exit__(self, *error: object) -> None:
        self.arrived()
        self.release()
        self._service._requests -= self._in_progress

    async def receive(self, request: Request) -> bytes:
        """Read the body. Raises RequestError if it cannot be read, or if the server is full now."""
        body = await self.read(request, max_bytes=self._service.limits.max_body_bytes)
        self._service.require_room()
        self._service._requests += 1
        self._in_progress = True
        return body

    def becomes_slow(self, deadline: asyncio.Timeout) -> None:
        super().becomes_slow(deadline)
        self.arrived()

    def arrived(self) -> None:
        """Record that the request's samples are in the rewards' queues."""
        self._service._arriving -= self._arriving
        self._arriving = False


def _by_item(decoded: Decoded, results: Mapping[str, RewardResult]) -> BatchResult:
    """Sort the rewards' results by item. For an item that could not be decoded, every reward gets the item's error code."""
    rows = {name: iter(given.rows) for name, given in results.items()}
    items = []
    for name, sample in zip(decoded.ids, decoded.samples, strict=True):
        scores: dict[str, float | None] = {}
        errors: dict[str, ErrorCode] = {}
        for reward, row in rows.items():
            result = next(row) if isinstance(sample, Sample) else sample
            if isinstance(result, str):
                errors[reward] = result
            else:
                scores |= result
        items.append(ItemResult(name, scores, errors))
    return BatchResult({name: list(given.fingerprints) for name, given in results.items()}, items)
