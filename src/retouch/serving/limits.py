"""The limits of a server: per request, per image, and for all callers together."""

from dataclasses import dataclass

from retouch.rewards.wire.schema import LimitsInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes in bytes and pixels, times in seconds. ValueError: a limit that is not above 0, or a batch larger than the queue.

    ``max_batch``: samples per call of a reward. A call waits up to ``window`` for a full batch, and up to a fifth of the last
    call's time (at most 100 ms) while more requests are arriving or expected. ``max_queue``: samples of all callers waiting or in
    progress. ``max_requests``: requests in progress. ``body_seconds``: for a body to arrive. ``deadline_seconds``: for a request.
    ``drain_seconds``: to complete the requests in progress before shutting down.
    """

    max_body_bytes: int = 64 * 2**20
    max_items: int = 256
    max_pixels: int = 4096 * 4096
    max_total_pixels: int = 4 * 4096 * 4096
    max_batch: int = 32
    window: float = 0.005
    max_queue: int = 1024
    max_requests: int = 128
    body_seconds: float = 30.0
    deadline_seconds: float = 300.0
    drain_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not (value >= 0 if name == "window" else value > 0):
                raise ValueError(f"{name} {value}: must be above 0")
        if self.max_batch > self.max_queue:
            raise ValueError(f"max_batch {self.max_batch} is more than max_queue {self.max_queue}: no batch would ever be full")

    def info(self) -> LimitsInfo:
        """The limits in ``GET /v1/info``."""
        return LimitsInfo(
            max_body_bytes=self.max_body_bytes,
            max_items=min(self.max_items, self.max_queue),
            max_pixels=self.max_pixels,
            max_total_pixels=self.max_total_pixels,
        )
