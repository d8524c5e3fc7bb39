"""The limits of a server: per request, per image, and for all callers together."""

from dataclasses import dataclass, fields

from retouch_serve.front.connections import FrontLimits
from retouch_serve.front.memory import BYTES_PER_PIXEL, DECODING_BYTES
from retouch_serve.wire.schema import LimitsInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(FrontLimits):
    """Sizes are in bytes and pixels, times in seconds. The limits of connections and bodies are those of ``FrontLimits``.

    ``max_batch``: samples per call of a reward. A call waits up to ``window`` for a full batch, and up to a fifth of the last
    call's time (at most 100 ms) while more requests are arriving or expected. ``max_queue``: samples of all callers that wait or
    are in progress. ``max_requests``: requests in progress, from the end of their bodies on. ``max_memory_bytes``: bodies and
    decoded images of all requests together. ``deadline_seconds``: time limit of a request; a replica is replaced if a call of a
    reward takes longer. ``stall_seconds``: duration of a call after which the server is not ready, if a request has missed its
    deadline and recent calls took less than a quarter of the time. ``drain_seconds``: time to complete the requests in progress
    before shutting down.

    Raises ValueError if a limit is not above 0 (``window`` may be 0), a batch is larger than the queue, or a request is larger than
    the memory.
    """

    max_body_bytes: int = 64 * 2**20
    max_items: int = 256
    max_pixels: int = 4096 * 4096
    max_total_pixels: int = 4 * 4096 * 4096
    max_batch: int = 32
    window: float = 0.005
    max_queue: int = 1024
    max_requests: int = 128
    stall_seconds: float = 10.0
    deadline_seconds: float = 300.0
    drain_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if not (value >= 0 if name == "window" else value > 0):
                raise ValueError(f"{name} {value}: must be above 0")
        if self.max_batch > self.max_queue:
            raise ValueError(f"max_batch {self.max_batch} is larger than max_queue {self.max_queue}: no batch would ever be full")

        largest = 4 * self.max_body_bytes + BYTES_PER_PIXEL * self.max_total_pixels + DECODING_BYTES * self.max_pixels
        if largest > self.max_memory_bytes:
            raise ValueError(f"max_memory_bytes {self.max_memory_bytes} is less than one request may take, {largest}")

    def info(self) -> LimitsInfo:
        """Return the limits in ``GET /v1/info``."""
        return LimitsInfo(
            max_body_bytes=self.max_body_bytes,
            max_items=min(self.max_items, self.max_queue),
            max_pixels=self.max_pixels,
            max_total_pixels=self.max_total_pixels,
        )
