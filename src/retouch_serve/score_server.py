"""The reward of kind ``score-server``: servers of an IP-Adapter trainer (Calligrapher's RL fork), which score one image a request.

Their contract: ``POST /score`` with the image in base64 and the prompt, answered with ``vlm_score`` and ``ocr_confidence``. They
answer errors with status 200 and a list, and have no route that lists their columns, so a recipe declares the ranges.
"""

from __future__ import annotations

import base64
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from retouch.config.section import Count, Positive
from retouch.protocols import Reward
from retouch.records.files import png
from retouch.rewards.base import Address, JudgeClients, RewardSection, unchanged
from retouch.types import Column, Json, Sample, Scores
from retouch_serve.wire import Bound

if TYPE_CHECKING:
    import torch

_LOG = logging.getLogger("retouch.serve")


class ScoreServerReward(RewardSection):
    """Scores of servers with the ``/score`` contract of an IP-Adapter trainer (``vlm_score``, ``ocr_confidence``), so that a system
    that runs them can be moved piece by piece. Servers of ``retouch serve`` have the kind ``remote``.

    Example::

        >>> reward = retouch.rewards.ScoreServer(endpoints=("http://127.0.0.1:8700",))
        >>> list(reward.known_columns())
        ['vlm_score', 'ocr_confidence']
    """

    cli_key = "endpoints"
    changeable: ClassVar[frozenset[str]] = frozenset(("endpoints", "concurrency", "timeout", "attempts"))

    kind: Literal["score-server"] = "score-server"
    endpoints: Annotated[tuple[Address, ...], Field(min_length=1)]
    """Addresses of the instances. Requests go to them in turn."""
    declared: dict[str, tuple[Bound, Bound]] = Field(
        default={"vlm_score": (0.0, 5.0), "ocr_confidence": (0.0, 1.0)}, alias="columns", min_length=1
    )
    """The scores to read from an answer, with their lowest and highest value."""
    concurrency: Count = 1
    """Requests in flight to each instance; the servers handle one at a time."""
    timeout: Positive = 60.0
    """Seconds that one request may take."""
    attempts: Count = 3
    """Maximum number of requests for an image, each to the next instance. After the last, its scores are missing."""

    def known_columns(self) -> Mapping[str, Column]:
        """The declared columns."""
        return {name: Column(low, high) for name, (low, high) in self.declared.items()}

    def build(
        self,
        *,
        device: torch.device | str = "cpu",
        clients: JudgeClients | None = None,
        keep: Callable[[Reward], Reward] = unchanged,
    ) -> Reward:
        """Build the client. Raises ValueError if httpx is not installed."""
        if importlib.util.find_spec("httpx") is None:
            raise ValueError("asking reward servers needs httpx: pip install 'retouch[serve]'")
        return keep(ScoreServerClient(self))

    @classmethod
    def from_cli(cls, argument: str) -> Json:
        """The list with this one address."""
        return [argument]


class ScoreServerClient:
    """The client of a ``ScoreServerReward``."""

    kind = "score-server"

    def __init__(self, settings: ScoreServerReward) -> None:
        import httpx

        self._settings = settings
        self.columns = settings.known_columns()
        self._client = httpx.Client(timeout=settings.timeout, trust_env=False)
        self._turn = count()
        self._fault = ""
        self._threads = ThreadPoolExecutor(settings.concurrency * len(settings.endpoints), thread_name_prefix="score-server")

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column, (b,), float64; NaN for an image that no instance scored."""
        import torch

        found = list(self._threads.map(self._scores, samples))
        if missing := found.count(None):
            _LOG.warning("%d of %d images have no score; the last error: %s", missing, len(samples), self._fault)
        rows = [[float("nan")] * len(self.columns) if each is None else each for each in found]
        table = torch.tensor(rows, dtype=torch.float64).reshape(len(samples), len(self.columns))
        return dict(zip(self.columns, table.unbind(1), strict=True))

    def close(self) -> None:
        """End the threads and close the connections."""
        self._threads.shutdown(cancel_futures=True)
        self._client.close()

    def _scores(self, sample: Sample) -> list[float] | None:
        import httpx

        task, own = sample.task, self._settings
        images = {"image": sample.image, "mask_image": task.mask, "reference_image": task.reference}
        images |= {"source_image": task.images[0]} if task.images else {}
        asked: dict[str, Any] = {name: base64.b64encode(png(image)).decode() for name, image in images.items() if image is not None}
        asked |= {"prompt": task.instruction} | ({} if task.text is None else {"text": task.text})
        for _ in range(own.attempts):
            url = f"{own.endpoints[next(self._turn) % len(own.endpoints)]}/score"
            try:
                reply = self._client.post(url, json=asked).raise_for_status().json()
                scores = [float(reply[name]) for name in own.declared]
            except (httpx.HTTPError, ValueError, TypeError, KeyError) as error:
                self._fault = f"{url}: {error or type(error).__name__}"
                continue
            if all(low <= score <= high for score, (low, high) in zip(scores, own.declared.values(), strict=True)):
                return scores
            self._fault = f"{url}: {scores} are not in the ranges of {', '.join(own.declared)}"
        return None
