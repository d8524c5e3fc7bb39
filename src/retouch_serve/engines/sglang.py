"""SGLang-Diffusion as an engine of denoising chains: its server samples chains, and the policy computes their log-probabilities.

The interface is that of SGLang 0.5.23 (``sglang/multimodal_gen/runtime/entrypoints/post_training``). The policy's weights are
loaded into the server after each update. Rows are sampled with seeds keyed by (seed, step, group, slot), but the server draws its
noise on its GPU, so a resumed run does not have the same bits.
"""

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from retouch.policies.engine import EngineFault
from retouch.policies.rollout import ChainRequest, Chains
from retouch.types import Batch, Conditioning
from retouch_serve.engines.client import (
    Client,
    InvalidResponse,
    RequestRefused,
    TaskRows,
    WeightPublisher,
    concurrently,
    consecutive_rows,
    group_seed,
    json_object,
    on_all_ranks,
)
from retouch_serve.wire import unpack

GENERATE = "/rollout/generate"
SET_LORA, LIST_LORAS = "/v1/set_lora", "/v1/list_loras"
UPDATE, CHECKSUM = "/update_weights_from_disk", "/get_weights_checksum"
TRANSFORMER = "transformer"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SIGMA_TOLERANCE = 1e-5
_TIMESTEPS = 1000.0
_MAX_CONCURRENT = 4
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """``count`` images of one prompt; image k is sampled with ``seed + k``. ``negative``: the prompt of the unconditional branch.
    ``size``: (height, width) in pixels."""

    prompt: str
    negative: str
    seed: int
    count: int
    size: tuple[int, int]
    chain: ChainRequest

    @property
    def num_steps(self) -> int:
        return len(self.chain.sigmas) - 1

    @property
    def states(self) -> list[int]:
        """The numbers of the states that the server returns: the states before and after each action, and the last state."""
        actions = self.chain.actions
        return sorted({*range(actions.start, actions.stop + 1), self.num_steps})

    def body(self) -> dict[str, Any]:
        """The JSON body. Both names of the guidance scale are set, because model families read different names."""
        chain, (height, width) = self.chain, self.size
        return {
            "prompt": self.prompt,
            "negative_prompt": self.negative if chain.guidance_scale > 1 else None,
            "seed": self.seed,
            "generator_device": "cuda",
            "width": width,
            "height": height,
            "num_inference_steps": self.num_steps,
            "num_outputs_per_prompt": self.count,
            "guidance_scale": chain.guidance_scale,
            "true_cfg_scale": chain.guidance_scale,
            "rollout": True,
            "rollout_sde_type": chain.transition,
            "rollout_noise_level": chain.noise_level,
            # For cps, the policy's log-probability contains neither the variance nor the constants.
            "rollout_log_prob_no_const": chain.transition == "cps",
            "rollout_debug_mode": False,
            "rollout_return_denoising_env": False,
            "rollout_return_dit_trajectory": True,
            "rollout_sde_step_indices": list(chain.actions),
            "rollout_return_step_indices": self.states,
            "suppress_logs": True,
        }


@dataclass(frozen=True, slots=True, eq=False)
class ServedChain:
    """One row: the states (t + 1, ...) around its actions, its final latents, and the log-probabilities (t,) of its actions."""

    latents: Tensor
    output: Tensor
    log_probs: Tensor


def parse_rollout(body: bytes, request: RolloutRequest) -> list[ServedChain]:
    """The ``count`` chains, in order. Raises InvalidResponse for any fault."""
    try:
        rows = unpack(body, most=2**20)
    except ValueError as error:
        raise InvalidResponse(f"not MessagePack: {error}") from None
    if not isinstance(rows, list) or len(rows) != request.count:
        found = f"{len(rows)} images" if isinstance(rows, list) else "not a list of images"
        raise InvalidResponse(f"{found}, but {request.count} images were requested")
    chains = [_chain(row, request) for row in rows]
    if any(torch.equal(one.latents, other.latents) for one, other in combinations(chains, 2)):
        raise InvalidResponse("two images with the same states, although each has its own seed")
    return chains


def _chain(row: Any, request: RolloutRequest) -> ServedChain:
    if not isinstance(row, Mapping):
        raise InvalidResponse("an image that is not a map")
    if row.get("prompt") != request.prompt or row.get("seed") != request.seed:
        raise InvalidResponse("an image of another prompt or seed than was requested")
    trajectory = row.get("dit_trajectory")
    if not isinstance(trajectory, Mapping):
        raise InvalidResponse("no dit_trajectory; the server must be SGLang 0.5.23 or newer")
    states, chain = request.states, request.chain
    sigmas = _tensor(trajectory.get("sigmas"), "dit_trajectory.sigmas", (request.num_steps + 1,))
    expected = chain.sigmas.cpu()
    if (off := (sigmas - expected).abs().max().item()) > _SIGMA_TOLERANCE:
        raise InvalidResponse(
            f"its sigmas are off from the policy's by up to {off:.2g}: it has another scheduler_config.json or another flow shift"
        )
    times = _tensor(trajectory.get("timesteps"), "dit_trajectory.timesteps", (len(states),))
    if not torch.allclose(times, expected[states] * _TIMESTEPS, rtol=1e-4, atol=1e-2):
        raise InvalidResponse("states of other steps than were requested")
    latents = _tensor(trajectory.get("latents"), "dit_trajectory.latents", (len(states), *chain.shape))
    log_probs = _tensor(row.get("rollout_log_probs"), "rollout_log_probs", (request.num_steps,))
    stochastic = torch.zeros(request.num_steps, dtype=torch.bool)
    stochastic[list(chain.actions)] = True
    # The server reports exactly 0 for a deterministic step.
    if not torch.equal(log_probs != 0, stochastic):
        raise InvalidResponse("other steps than requested were stochastic")
    return ServedChain(latents[: len(chain.actions) + 1], latents[-1], log_probs[stochastic])


def _tensor(value: Any, name: str, shape: Sequence[int]) -> Tensor:
    """The tensor ``value`` in fp32. Raises InvalidResponse if it has another shape or a value that is not finite."""
    if not isinstance(value, Mapping) or not isinstance(value.get("data"), memoryview):
        raise InvalidResponse(f"no tensor {name}")
    try:
        tensor = load(bytes(value["data"]))["t"]
    except (SafetensorError, KeyError) as error:
        raise InvalidResponse(f"{name} is not a tensor: {type(error).__name__}") from None
    if tuple(tensor.shape) != tuple(shape):
        raise InvalidResponse(f"{name} has the shape {tuple(tensor.shape)}, but {tuple(shape)} was expected")
    if not tensor.is_floating_point() or not tensor.isfinite().all():
        raise InvalidResponse(f"{name} has a value that is not a finite number")
    return tensor.float()


class ConfirmedPublisher(WeightPublisher):
    """Publishes the policy's weights to a server that can be asked which weights it has.

    It is asked after each load, and again after each rollout. So a server that was restarted, or changed by another client, is
    detected before its samples are used.
    """

    def unload(self, client: Client, name: str) -> None:
        """Do nothing: the next weights replace these, and SGLang has no request that removes weights."""

    def has_lost(self, client: Client) -> bool:
        """Whether the server has other weights than were loaded last. Always False on all ranks but the first, which loads them."""
        assert self.loaded is not None, "the weights were published"
        return self._first and not self.confirms(client, self.loaded)

    def reload(self, client: Client) -> None:
        """Load the weights of the last ``publish`` again, if this rank loads weights. Raises EngineFault if this fails."""
        if self._first:
            self.restore(client)

    @abstractmethod
    def confirms(self, client: Client, name: str) -> bool:
        """Whether the server reports that it has exactly these weights. Raises EngineFault if it does not answer."""

    def _path(self, name: str) -> str:
        return str((self._folder / name).absolute())

    def _refused(self, client: Client, name: str, why: object) -> EngineFault:
        return EngineFault(
            f"{client.server} did not load {self._path(name)}: {why}. It must see that folder under the same path "
            "(rollout.engine.adapters)"
        )


class LoraPublisher(ConfirmedPublisher):
    """Keeps the server's adapter equal to the policy's. ``save`` writes PEFT's format.

    All adapters of a run have the same name, because the server frees an adapter only when another adapter with its name replaces
    it. The adapter is not merged into the base weights: in 16 bits, merging would round away most of a small update.
    """

    def load(self, client: Client, name: str) -> None:
        body = {
            "lora_nickname": self._prefix,
            "lora_path": self._path(name),
            "target": TRANSFORMER,
            "strength": 1.0,
            "merge_mode": "dynamic",
        }
        try:
            client.post(SET_LORA, body, tries_of_500=1)
        except RequestRefused as refused:
            raise self._refused(client, name, refused) from None
        if not self.confirms(client, name):
            raise EngineFault(f"{client.server} reports that it loaded {self._folder / name}, but then that it has other weights")

    def confirms(self, client: Client, name: str) -> bool:
        active = _ask(client, LIST_LORAS, None).get("active")
        if not isinstance(active, dict) or active.keys() != {TRANSFORMER} or not isinstance(active[TRANSFORMER], list):
            return False
        expected = {"nickname": self._prefix, "path": self._path(name), "strength": 1.0, "mode": "unmerged"}
        return [{key: each.get(key) for key in expected} for each in active[TRANSFORMER] if isinstance(each, dict)] == [expected]


class TransformerPublisher(ConfirmedPublisher):
    """Keeps all weights of the server's transformer equal to the policy's. ``save`` writes diffusers' layout into ``transformer``.

    The server's checksum depends on its own parameter names and number type, so it cannot be computed here. It is checked that the
    checksum changes with each update, and stays the same until the next update.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._checksums: dict[str, str] = {}

    def load(self, client: Client, name: str) -> None:
        body = {"model_path": self._path(name), "target_modules": [TRANSFORMER], "flush_cache": True}
        try:
            reply = _document(client, client.post(UPDATE, body, tries_of_500=1))
        except RequestRefused as refused:
            raise self._refused(client, name, refused) from None
        if reply.get("success") is not True:
            raise self._refused(client, name, reply.get("message"))
        checksum = self._checksum(client)
        if checksum in [known for weights, known in self._checksums.items() if weights != name]:
            raise EngineFault(f"{client.server} reports that it loaded {self._folder / name}, but its weights did not change")
        if self._checksums.get(name, checksum) != checksum:
            raise EngineFault(f"{client.server} loaded {self._folder / name} twice, but has other weights than the first time")
        self._checksums = {name: checksum}

    def confirms(self, client: Client, name: str) -> bool:
        return self._checksums.get(name) == self._checksum(client)

    def _checksum(self, client: Client) -> str:
        found = _ask(client, CHECKSUM, {"module_names": [TRANSFORMER]}).get(TRANSFORMER)
        if not isinstance(found, str) or not _SHA256.fullmatch(found):
            raise EngineFault(f"{client.server} returned no checksum of its transformer, but {found!r}")
        return found


def _ask(client: Client, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """The JSON object of a response. Raises EngineFault if the server refuses, or answers anything else."""
    try:
        return _document(client, client.get(path) if body is None else client.post(path, body))
    except RequestRefused as refused:
        raise EngineFault(f"{client.server} refuses {path}: {refused}") from None


def _document(client: Client, body: bytes) -> dict[str, Any]:
    document = json_object(body)
    if not document:
        raise EngineFault(f"{client.server} did not answer with a JSON object; it is not an SGLang-Diffusion server")
    return document


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
        return self._any_rank(self._on_all_ranks(lambda: self._weights.has_lost(client)))

    def _on_all_ranks(self, work: Callable[[], T]) -> T:
        return on_all_ranks(work, self._any_rank, otherwise="the SGLang server failed on another rank; see the log of that rank")
