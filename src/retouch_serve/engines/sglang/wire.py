"""Requests to an SGLang-Diffusion server (``POST /rollout/generate``) and the validation of its responses.

The interface is that of SGLang 0.5.23 (``sglang/multimodal_gen/runtime/entrypoints/post_training``). A request sets every sampling
parameter for which the server might have another default. A response with any fault is rejected as a whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from retouch.policies.engine import ChainRequest
from retouch_serve.engines.sglang.msgpack import unpack
from retouch_serve.engines.wire import InvalidResponse

GENERATE = "/rollout/generate"
TRANSITIONS = ("sde", "cps")
_SIGMA_TOLERANCE = 1e-5
_TIMESTEPS = 1000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRequest:
    """``count`` images of one prompt; image k is sampled with ``seed + k``. ``negative``: the prompt of the unconditional branch.

    ``size``: (height, width) in pixels.
    """

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
        rows = unpack(body)
    except (ValueError, RecursionError) as error:
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
