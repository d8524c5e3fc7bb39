"""What makes the full-size recipes faster or smaller, and how each improvement is turned off again: by settings or by a patch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from retouch.models.train import Lora
from retouch.policies.rollout import DenoisingRollout, TokenRollout
from retouch.recipe.policy import AutoregressivePolicyKeys, DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe, parse
from retouch_models.responses import ResponseRenderer

_ALL_LOGITS = 2**20
"""More tokens than a microbatch has."""


@contextmanager
def joint_guidance() -> Iterator[None]:
    """Compute both branches of the guidance in one forward pass, padded to the longer text, inside this context."""
    import torch

    from retouch.models.pipeline import Guided
    from retouch.types import Conditioning

    def velocity(model: Any, module: Any, x: Any, sigma: Any, conditioning: Any) -> Any:
        own = Conditioning(conditioning.tensors, conditioning.padded, conditioning.shared)
        both = Conditioning.concat([own, conditioning.negative])
        positive, negative = model.model.velocity(module, torch.cat([x, x]), torch.cat([sigma, sigma]), both).chunk(2)
        return model.combine(positive, negative, model.guidance_scale)

    with patch.object(Guided, "velocity", velocity):
        yield


@contextmanager
def prompts_per_row() -> Iterator[None]:
    """Read a prompt once for each of its rows, in rollout and update, instead of once for all of them, inside this context."""
    import torch

    from retouch.policies.autoregressive import AutoregressivePolicy
    from retouch.policies.decoding import CachedDecoding

    read_once, init = CachedDecoding._prefill, AutoregressivePolicy.__init__

    def prefill(decoder: Any, batch: Any, prompts: Any, *, room: int) -> Any:
        rows = prompts.take(torch.tensor(batch.group, device=prompts.ids.device))
        return read_once(decoder, replace(batch, group=tuple(range(len(batch)))), rows, room=room)

    def without_shared_prompts(policy: Any, model: Any, **options: Any) -> None:
        model.shares_prompts = False
        init(policy, model, **options)

    with (
        patch.object(CachedDecoding, "_prefill", prefill),
        patch.object(AutoregressivePolicy, "__init__", without_shared_prompts),
    ):
        yield


@contextmanager
def concatenated_cache() -> Iterator[None]:
    """Concatenate all keys and values of the cache for every new token, as transformers' DynamicCache does, inside this context."""
    from transformers.cache_utils import DynamicLayer

    from retouch.policies.decoding import CachedDecoding
    from retouch_models.causal import PreallocatedCacheLayer

    with (
        patch.object(PreallocatedCacheLayer, "update", DynamicLayer.update),
        patch.object(CachedDecoding, "is_static", lambda self, device: False),
    ):
        yield


def preflight_on_device() -> AbstractContextManager[Any]:
    """Keep the preflight's copies of the trained weights on their device, inside this context."""
    from retouch.distributed.optimizer import local_shard

    return patch("retouch.run.preflight._copy_in_cpu_memory", lambda parameter: local_shard(parameter).detach().clone())


@contextmanager
def gathered_on_device() -> Iterator[None]:
    """Gather all sharded tensors of a checkpoint on the device before the first one is copied to the host, inside this context."""
    import torch

    from retouch.distributed.optimizer import GatheredTensors, TensorShard

    init, whole = GatheredTensors.__init__, dict[TensorShard, Any]()

    def gather_all(state: Any, tensors: Any) -> None:
        init(state, tensors)
        for shard in tensors.values():
            if isinstance(shard, TensorShard) and shard not in whole:
                whole[shard] = torch.cat([piece.clone() for piece in shard.ranks.parts(shard.local, shard.counts)])

    with patch.object(GatheredTensors, "__init__", gather_all):
        yield


def own_text_encoder() -> AbstractContextManager[Any]:
    """Let an editor behind a writer keep its own text encoder on the device, inside this context."""
    from retouch.models.offloading import parts_of

    def only_move(editor: Any, *_: Any, device: Any, **__: Any) -> None:
        for part in parts_of(editor):
            part.to(device)

    return patch("retouch_models.qwen_image.responses.share_encoder", only_move)


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """An improvement of speed or memory that affects what a recipe learns only by rounding.

    ``title``: the improvement. ``without``: what a run does if it is turned off. ``off``: the settings that turn it off. ``patch``:
    opens a context in which it is off, for an improvement that no recipe key turns off. ``applies``: whether a recipe has it.
    """

    title: str
    without: str
    off: tuple[str, ...] = ()
    patch: Callable[[], AbstractContextManager[Any]] | None = None
    applies: Callable[[Recipe], bool]


_UNPADDED = ("qwen-image", "z-image")
"""The kinds of models whose prompts have different numbers of tokens start with these words."""


def _denoises_in_16_bits(recipe: Recipe) -> bool:
    return isinstance(recipe.policy, DenoisingPolicyKeys) and getattr(recipe.policy.model, "dtype", None) == "bfloat16"


def _guides_unequal_texts(recipe: Recipe) -> bool:
    model, rollout = recipe.policy.model, recipe.rollout
    guided = isinstance(rollout, DenoisingRollout) and rollout.guidance_scale > 1
    return guided and _denoises_in_16_bits(recipe) and model.kind.startswith(_UNPADDED)


def _has_lora(recipe: Recipe) -> bool:
    train = recipe.policy.train
    return isinstance(train, Lora) and train.weights == "base" and getattr(recipe.policy.model, "dtype", None) == "bfloat16"


def _has_equal_shapes(recipe: Recipe) -> bool:
    """Whether the rollout computes the steps that train in smaller forward passes than it would without equal shapes."""
    rollout, microbatch = recipe.rollout, recipe.microbatch
    if not isinstance(rollout, DenoisingRollout) or not rollout.transition.stochastic or not _denoises_in_16_bits(recipe):
        return False
    of_whole_rows = microbatch // rollout.longest * rollout.longest
    return rollout.equal_shapes and (of_whole_rows or microbatch) < rollout.chunk


def _limits_logits(recipe: Recipe) -> bool:
    policy = recipe.policy
    return isinstance(policy, AutoregressivePolicyKeys) and policy.logits_at_once < recipe.microbatch * recipe.rollout.longest


def _repeats_prompts(recipe: Recipe) -> bool:
    return recipe.policy.is_autoregressive and any(phase.group_size > 1 for phase in recipe.resolved_phases())


IMPROVEMENTS = {
    "guidance": Improvement(
        title="branches of guidance apart, without a mask",
        without="both branches of the policy's guidance are computed in one forward pass, padded to the longer text, with a mask",
        patch=joint_guidance,
        applies=_guides_unequal_texts,
    ),
    "lora": Improvement(
        title="LoRA computes in bf16",
        without="the LoRA of a bf16 model computes in fp32",
        off=('policy.train.weights="float32"',),
        applies=_has_lora,
    ),
    "shapes": Improvement(
        title="equal forward shapes in rollout and update",
        without="the rollout computes the steps that train in forward passes of `rollout.chunk` rows, and not of a microbatch",
        off=("rollout.equal_shapes=false",),
        applies=_has_equal_shapes,
    ),
    "adamw": Improvement(
        title="fused AdamW",
        without="AdamW has one kernel per operation, and temporary copies of the weights",
        off=('optimizer.fused="never"',),
        applies=lambda recipe: recipe.optimizer.moments is None and recipe.optimizer.fused != "never",
    ),
    "compile": Improvement(
        title="blocks compiled",
        without="no blocks are compiled",
        off=("policy.compile=null",),
        applies=lambda recipe: recipe.policy.compile is not None,
    ),
    "embeddings": Improvement(
        title="cached prompt embeddings",
        without="prompts are encoded in every rollout, and the text encoders stay on the GPU",
        off=('policy.prompt_embeddings="live"',),
        applies=lambda recipe: getattr(recipe.policy, "prompt_embeddings", None) == "cached",
    ),
    "slicing": Improvement(
        title="images encoded and decoded one by one",
        without="all images of a chunk are encoded and decoded at once",
        off=("policy.model.vae_slicing=false",),
        applies=lambda recipe: getattr(recipe.policy.model, "vae_slicing", False),
    ),
    "encoder": Improvement(
        title="writer and text encoder share weights",
        without="the image model behind a writer also keeps its own text encoder on the GPU",
        patch=own_text_encoder,
        applies=lambda recipe: isinstance(recipe.renderer, ResponseRenderer),
    ),
    "reference": Improvement(
        title="reference in CPU memory",
        without="the weights of the reference stay on the GPU",
        off=("devices.reference=null",),
        applies=lambda recipe: recipe.devices is not None and recipe.devices.reference == "cpu",
    ),
    "prompts": Improvement(
        title="each prompt read once for its group",
        without="a prompt is read once for each of its rows, in rollout and update",
        patch=prompts_per_row,
        applies=_repeats_prompts,
    ),
    "cache": Improvement(
        title="tokens as CUDA graphs, and a cache with room",
        without="the host launches every kernel, and all keys and values are copied for every token, as in DynamicCache",
        patch=concatenated_cache,
        applies=lambda recipe: isinstance(recipe.rollout, TokenRollout),
    ),
    "preflight": Improvement(
        title="preflight's copies in CPU memory",
        without="the preflight keeps a copy of the trained weights on the GPU",
        patch=preflight_on_device,
        applies=lambda recipe: True,
    ),
    "checkpoint": Improvement(
        title="checkpoints gathered one tensor at a time",
        without="all sharded tensors of a checkpoint are gathered on the GPU at once",
        patch=gathered_on_device,
        applies=lambda recipe: recipe.sharding is not None,
    ),
    "logits": Improvement(
        title="logits of few tokens at once",
        without="the logits of all tokens of a microbatch exist at once",
        off=(f"policy.logits_at_once={_ALL_LOGITS}",),
        applies=_limits_logits,
    ),
}
"""The improvements by name."""


def improvements_of(recipe: Recipe) -> list[str]:
    """The names of the improvements that a recipe has."""
    return [name for name, improvement in IMPROVEMENTS.items() if improvement.applies(recipe)]


def settings_of(names: Iterable[str]) -> list[str]:
    """The settings that turn these improvements off."""
    return [setting for name in names for setting in IMPROVEMENTS[name].off]


@contextmanager
def turned_off(recipe: Recipe, names: Sequence[str]) -> Iterator[Recipe]:
    """The recipe without these improvements. Those that no key turns off are off inside this context."""
    with ExitStack() as stack:
        for name in names:
            off = IMPROVEMENTS[name].patch
            if off is not None:
                stack.enter_context(off())
        yield parse(recipe.document(), settings_of(names))
