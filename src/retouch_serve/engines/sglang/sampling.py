"""Chains sampled by an SGLang-Diffusion server, into which the policy's weights are loaded after each update.

Rows are sampled with seeds keyed by (seed, step, group, slot), but the server draws its noise on its GPU, so a resumed run does not
have the same bits.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import torch

from retouch.policies.engine import ChainRequest, Chains, EngineFault
from retouch.types import Batch, Conditioning
from retouch_serve.engines.client import Client, RequestRefused
from retouch_serve.engines.rows import TaskRows, concurrently, consecutive_rows, group_seed
from retouch_serve.engines.sglang.weights import ConfirmedPublisher
from retouch_serve.engines.sglang.wire import GENERATE, RolloutRequest, ServedChain, parse_rollout
from retouch_serve.engines.wire import InvalidResponse

_MAX_CONCURRENT = 4
T = TypeVar("T")


@runtime_checkable
class Promptable(Protocol):
    """What a model must have so that a server can sample in its place. ``NEGATIVE``: the prompt of the unconditional branch."""

    NEGATIVE: str


class SglangSampling:
    """Requests the chains of a batch from a server, with at most ``images`` rows of one task per request (implements
    ``DenoisingEngine``).

    ``connect``: opens a new connection. ``weights``: loads the policy's weights into the server. ``any_rank``: tells whether a flag
    is true on at least one rank. ``release``: called by ``close``.
    """

    def __init__(
        self,
        model: Promptable,
        *,
        connect: Callable[[], Client],
        weights: ConfirmedPublisher,
        images: int,
        any_rank: Callable[[bool], bool] = bool,
        release: Callable[[], None] | None = None,
    ) -> None:
        self._negative = model.NEGATIVE
        self._connect = connect
        self._weights = weights
        self._images = images
        self._any_rank = any_rank
        self._release = release

    def sample_chains(self, batch: Batch, conditioning: Conditioning, request: ChainRequest) -> Chains:
        """Sample the chains. EngineFault on all ranks if the server fails, answers invalidly, or loses its weights twice."""

        def sample() -> list[ServedChain]:
            return concurrently(
                lambda rows: self._ask(client, batch, conditioning, request, rows),
                consecutive_rows(batch, most=self._images),
                most=_MAX_CONCURRENT,
            )

        with self._connect() as client:
            self._on_all_ranks(lambda: self._weights.publish(client))
            rows = self._on_all_ranks(sample)
            if self._has_lost(client):
                self._on_all_ranks(lambda: self._weights.reload(client))
                rows = self._on_all_ranks(sample)
                if self._has_lost(client):
                    raise EngineFault(f"{client.server} lost the weights again after they were reloaded; does another run use it?")
        return Chains(
            latents=torch.stack([row.latents for row in rows]),
            outputs=torch.stack([row.output for row in rows]),
            log_probs=torch.stack([row.log_probs for row in rows]),
        )

    def close(self) -> None:
        """Remove the folder of the run's weights. The next call writes and loads them again."""
        if self._release is not None:
            self._release()

    def _ask(
        self, client: Client, batch: Batch, conditioning: Conditioning, chain: ChainRequest, rows: TaskRows
    ) -> list[ServedChain]:
        request = RolloutRequest(
            prompt=batch.tasks[rows.task].instruction,
            negative=self._negative,
            seed=group_seed(batch, batch.group_ids[rows.task], "sglang") + rows.slot,
            count=rows.count,
            size=conditioning.shared["size"],
            chain=chain,
        )
        try:
            return parse_rollout(client.post(GENERATE, request.body()), request)
        except RequestRefused as refused:
            raise EngineFault(f"{client.server} refuses to sample: {refused}") from None
        except InvalidResponse as invalid:
            raise EngineFault(f"{client.server} gave an invalid response: {invalid}") from None

    def _has_lost(self, client: Client) -> bool:
        """Whether any rank finds that the server has other weights than the policy."""
        return self._any_rank(self._on_all_ranks(lambda: self._weights.has_lost(client)))

    def _on_all_ranks(self, work: Callable[[], T]) -> T:
        """The result of ``work``. Raises EngineFault on all ranks if ``work`` raised it on any rank. All ranks must call this."""
        fault: EngineFault | None = None
        try:
            result = work()
        except EngineFault as found:
            fault = found
        if self._any_rank(fault is not None):
            raise fault or EngineFault("the SGLang server failed on another rank; see the log of that rank")
        return result
