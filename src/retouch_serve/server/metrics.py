"""The metrics of ``GET /metrics``, in the text format of Prometheus. Each server has its own registry."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics:
    """The metrics of one server; durations are in seconds, sizes in samples."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("retouch_requests", "Requests by page and status", ["page", "status"], registry=self.registry)
        self.seconds = Histogram(
            "retouch_request_seconds", "From a request's headers to its reply", ["page"], buckets=_SECONDS, registry=self.registry
        )
        self.in_flight = Gauge("retouch_requests_in_flight", "Requests in progress", registry=self.registry)
        self.items = Counter("retouch_items", "Items by reward and outcome", ["reward", "outcome"], registry=self.registry)
        self.waiting = Gauge("retouch_queue_items", "Samples that wait or are being scored", ["reward"], registry=self.registry)
        self.batches = Histogram(
            "retouch_batch_items",
            "Samples per call of a reward",
            ["reward"],
            buckets=_SIZES,
            registry=self.registry,
        )
        self.scoring = Histogram(
            "retouch_reward_seconds", "Duration of one call of a reward", ["reward"], buckets=_SECONDS, registry=self.registry
        )

    def text(self) -> bytes:
        """Return the body of the reply of ``GET /metrics``."""
        return generate_latest(self.registry)
