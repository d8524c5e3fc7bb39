"""Checks of a recipe's models: the policy against rollouts and renderer, the image model against the data, and the IP-Adapter
against both."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from retouch.models.base import DiffusersModel, ImageModel
from retouch.models.ip_adapter.section import IpAdapter
from retouch.models.train import FullWeights
from retouch.policies.autoregressive.rollout import TokenRollout
from retouch.policies.denoising.rollout import DenoisingRollout
from retouch.recipe.phases import ResolvedPhase, Rollout
from retouch.recipe.policy import DenoisingPolicyKeys

if TYPE_CHECKING:
    from retouch.recipe.keys import RecipeKeys


def parts_problems(recipe: "RecipeKeys") -> Iterator[str]:
    """Check that policy, rollouts and renderer fit together; if they do not, nothing else can be checked."""
    policy, renderer = recipe.policy, recipe.renderer
    tokens = policy.is_autoregressive
    if tokens and renderer is None:
        yield (
            'renderer: missing; a language-model policy needs one: {"kind": "response"} for an image editor, {"kind": "prompt"} '
            'for another image model, {"kind": "codes"} if the policy writes image tokens'
        )
    if not tokens and renderer is not None:
        yield "renderer: a denoising policy makes its own images; remove it, or use policy.kind autoregressive"
    images = policy.model.uses_image_tokens
    if tokens and renderer is not None and images is not None and images != (renderer.reads == "vision"):
        why = "writes image tokens: use renderer.kind codes" if images else "writes text, and codes are image tokens"
        yield f"renderer.kind: {policy.model.kind} {why}"
    for at, rollout in _rollouts(recipe):
        if tokens and not rollout.is_autoregressive:
            yield f'{at}.kind: missing; a language-model policy needs {{"kind": "tokens", "max_new_tokens": 100}}, not denoising'
        if not tokens and rollout.is_autoregressive:
            yield f"{at}.kind: 'tokens' is for language-model policies; remove it and set num_steps and transition"


def engine_problems(recipe: "RecipeKeys") -> Iterator[str]:
    """Check that the engines can generate the samples that the policy learns from."""
    policy = recipe.policy
    for at, rollout in _rollouts(recipe):
        if isinstance(rollout, DenoisingRollout) and rollout.engine is not None and isinstance(policy, DenoisingPolicyKeys):
            yield from rollout.engine_problems(at, model=policy.model, train=policy.train)
        if not isinstance(rollout, TokenRollout) or rollout.engine is None or isinstance(policy, DenoisingPolicyKeys):
            continue
        full_weights, image_grammar = isinstance(policy.train, FullWeights), policy.model.image_grammar
        for problem in rollout.engine.problems(rollout, full_weights=full_weights, image_grammar=image_grammar):
            yield f"{at}.{problem}"


def image_model_problems(recipe: "RecipeKeys") -> Iterator[str]:
    """Check the image model: the size of its images is known, its parts are known if some of them are moved off the device, it can
    train in its dtype, and it can render the output of the policy."""
    model = recipe.image_model
    if isinstance(recipe.policy, DenoisingPolicyKeys) and getattr(model, "dtype", None) == "float16":
        yield (
            "policy.model.dtype: float16 is only for frozen image models, as most gradients would underflow to 0; use bfloat16 or "
            "float32"
        )
    if isinstance(model, DiffusersModel) and not model.has_size:
        yield f"{recipe.image_model_key}.size: missing; {model.kind} has no source image that determines it; set [height, width]"
    if isinstance(recipe.policy, DenoisingPolicyKeys) and not isinstance(model, DiffusersModel):
        known = "is only for models in the layout of a diffusers pipeline"
        if recipe.policy.prompt_embeddings == "cached":
            yield f"policy.prompt_embeddings: cached {known}; use live"
        if recipe.devices is not None and recipe.devices.offload:
            yield f"devices.offload: it {known}; remove it"
    if recipe.renderer is not None and not isinstance(recipe.policy, DenoisingPolicyKeys):
        yield from recipe.renderer.problems(recipe.policy.model)


def source_image_problems(recipe: "RecipeKeys", phase: ResolvedPhase, at: str) -> Iterator[str]:
    """Check that the tasks of a phase have the images that the model takes. ``at``: the key of the data section. If rows differ,
    each row is checked when it is read."""
    data, model = phase.data, recipe.image_model
    takes, size = model.takes, recipe.image_size
    has, own = data.contents(), data.image_size
    if has.tokens:
        if model.uses_image_tokens is False:
            yield f"{at}.kind: tokens are for a policy that generates image tokens, for example emu3, and not for {model.kind}"
        return
    if None not in (own, size) and own != size:
        yield f"{at}.size: {list(own or ())} and {recipe.image_model_key}.size: {list(size or ())} differ; set only one of them"
    if takes is None:
        return
    if has.images is False and takes.images[0] > 0:
        others = "triplets, folder or hub" if takes.mask else "folder or hub"
        yield f"{at}.kind: {data.label} have no source image, which {model.kind} edits; use {others} data"
    elif has.mask is False and takes.mask:
        yield f"{at}.kind: {data.label} has no masks, and {model.kind} takes {takes}; use triplets, folder or hub data"
    if has.images and not recipe.policy.is_autoregressive and takes.images[1] == 0:
        yield f"{at}.kind: {data.label} has source images, which {model.kind} does not take; use prompts, or folder or hub data"


def kernel_problems(recipe: "RecipeKeys") -> Iterator[str]:
    """Check that the policy's kernels support what the recipe needs."""
    policy = recipe.policy
    if isinstance(policy, DenoisingPolicyKeys):
        if recipe.deterministic and policy.attention is not None and not policy.attention.lstrip("_").startswith("native"):
            yield f"policy.attention: whether {policy.attention} is deterministic is not known; use null, or native kernels"
    elif policy.compile is not None and not policy.gradient_checkpointing:
        yield "policy.compile: only layers that are recomputed in the update are compiled; set gradient_checkpointing, or use null"


def ip_adapter_problems(recipe: "RecipeKeys") -> Iterator[str]:
    """Check that the model supports an IP-Adapter, and that the tasks have reference images."""
    train, model = recipe.policy.train, recipe.policy.model
    if not isinstance(train, IpAdapter):
        return
    assert isinstance(model, ImageModel)
    if not model.ip_adapter_blocks:
        yield f"policy.train.kind: ip-adapter is for models of Flux and Qwen-Image, not for {model.kind}; use lora"
    elif train.blocks not in model.ip_adapter_blocks:
        yield "policy.train.blocks: Qwen-Image has only double blocks; use double"
    phases = recipe.resolved_phases()
    if train.dropout > 0 and not any(phase.imitates for phase in phases):
        yield "policy.train.dropout: it applies to supervised phases only, and there is none; use 0"
    for index, phase in enumerate(phases):
        at = recipe.phase_key(index, "data")
        if phase.data.contents().reference is not False:
            continue  # a row of a folder without a reference is reported when it is read
        if "columns" in type(phase.data).model_fields:
            yield f"{at}.columns: an IP-Adapter needs a reference image; name the column of `reference`"
        else:
            yield f"{at}.kind: {phase.data.label} have no reference image, which an IP-Adapter needs; use triplets, folder or hub"


def _rollouts(recipe: "RecipeKeys") -> Iterator[tuple[str, Rollout]]:
    """Each rollout of the recipe with its key."""
    yield "rollout", recipe.rollout
    for index, phase in enumerate(recipe.phases or ()):
        if phase.rollout is not None:
            yield f"phases.{index}.rollout", phase.rollout
