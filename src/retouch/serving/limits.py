"""How much a server takes: of one request, of one picture, and of all callers together."""

from dataclasses import dataclass

from retouch.rewards.wire.schema import LimitsInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Sizes in bytes and pixels, times in seconds.

    ``max_batch``: samples that a reward is called with at once. It waits ``window`` for so many, and a fifth of its last call
    (100 ms at most) while further requests come in or are expected back. ``max_queue``: samples of all callers that wait or are
    being judged. ``max_requests``: requests in hand.
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
            raise ValueError(f"max_batch {self.max_batch} is more than max_queue {self.max_queue}: no batch would ever fill")

    def info(self) -> LimitsInfo:
        """What callers are told."""
        return LimitsInfo(
            max_body_bytes=self.max_body_bytes,
            max_items=min(self.max_items, self.max_queue),
            max_pixels=self.max_pixels,
            max_total_pixels=self.max_total_pixels,
        )
