"""The changes of a recipe that may lower the peak of a stage: ``--set`` options, the cheapest in speed first."""

from collections.abc import Iterator, Mapping

from retouch.models.base import DiffusersModel
from retouch.recipe.policy import AutoregressivePolicyKeys, DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe

LEAST_GAIN = 0.01
"""A change is kept if it lowers the peak of its stage by at least this fraction."""
_FEWEST_LOGITS = 32
_NO_UPDATE = ("encode", "rollout", "render", "evaluation")
_ENCODERS = "weights: text_encoder"
_AUTOENCODER = "weights: vae"
_FROZEN = "text encoders and autoencoder"
_MOMENTS = "AdamW's moments"


def changes(recipe: Recipe, stage: str, *, held: Mapping[str, int], world: int) -> Iterator[str]:
    """Yield changes that may lower the peak of a stage and that the recipe allows, the cheapest in speed first.

    ``held``: the bytes of each holder at the peak. Parts that hold less than ``LEAST_GAIN`` of it are left where they are.
    ``world``: the number of ranks.
    """
    kind = stage.rpartition(": ")[2]
    least = LEAST_GAIN * sum(held.values())
    sizes = {
        part: sum(size for name, size in held.items() if name.startswith(part)) for part in (_MOMENTS, _ENCODERS, _AUTOENCODER)
    }
    large = {part for part, size in sizes.items() if size >= least}
    if sizes[_ENCODERS] + sizes[_AUTOENCODER] >= least:
        large.add(_FROZEN)
    yield from _fewer_images(recipe, kind)
    if _MOMENTS in large and recipe.optimizer.moments is None and recipe.sharding is None:
        yield "optimizer.moments=8bit"
    yield from _smaller_update(recipe, kind)
    if kind == "preflight":
        yield from _smaller_chunk(recipe)  # a preflight has a rollout and an update
    yield from _parts_elsewhere(recipe, kind, large)
    yield from _shards(recipe, world)


def _smaller_chunk(recipe: Recipe) -> Iterator[str]:
    if recipe.phases is None and recipe.rollout.chunk > 1:
        yield f"rollout.chunk={recipe.rollout.chunk // 2}"


def _fewer_images(recipe: Recipe, kind: str) -> Iterator[str]:
    """Yield changes after which fewer images exist at once while images are sampled, encoded or decoded."""
    if kind in (*_NO_UPDATE, "preflight") and isinstance(recipe.image_model, DiffusersModel) and not recipe.image_model.vae_slicing:
        yield f"{recipe.image_model_key}.vae_slicing=true"
    if kind in ("render", "evaluation"):
        for key in ("batch", "encoder_batch"):
            value = getattr(recipe.renderer, key, 1)
            if value > 1:
                yield f"renderer.{key}={value // 2}"
    if kind in ("rollout", "render"):
        yield from _smaller_chunk(recipe)
    if kind == "evaluation" and recipe.eval.batch > 1:
        yield f"eval.batch={recipe.eval.batch // 2}"


def _smaller_update(recipe: Recipe, kind: str) -> Iterator[str]:
    """Yield changes after which fewer activations exist at once in an update."""
    trains = kind not in _NO_UPDATE
    if not recipe.policy.gradient_checkpointing and trains:
        yield "policy.gradient_checkpointing=true"
    if recipe.microbatch > 1:
        yield f"microbatch={recipe.microbatch // 2}"
    if trains and isinstance(recipe.policy, AutoregressivePolicyKeys) and recipe.policy.logits_at_once > _FEWEST_LOGITS:
        yield f"policy.logits_at_once={recipe.policy.logits_at_once // 2}"


def _parts_elsewhere(recipe: Recipe, kind: str, large: set[str]) -> Iterator[str]:
    """Yield changes after which parts are in CPU memory while they are not used, or the autoencoder computes in tiles."""
    policy = recipe.policy
    own = policy if isinstance(policy, DenoisingPolicyKeys) and isinstance(policy.model, DiffusersModel) else None
    if own is not None and own.prompt_embeddings == "live" and _ENCODERS in large:
        yield "policy.prompt_embeddings=cached"
    if _MOMENTS in large and recipe.optimizer.moments != "cpu" and recipe.sharding in (None, "fsdp2"):
        yield "optimizer.moments=cpu"
    if kind in (*_NO_UPDATE, "preflight") and isinstance(recipe.image_model, DiffusersModel) and not recipe.image_model.vae_tiling:
        yield f"{recipe.image_model_key}.vae_tiling=true"
    behind_writer = recipe.renderer is not None and recipe.renderer.image_model is not None
    if (behind_writer or (own is not None and _FROZEN in large)) and not (recipe.devices and recipe.devices.offload):
        yield "devices.offload=true"


def _shards(recipe: Recipe, world: int) -> Iterator[str]:
    if world > 1 and recipe.sharding != "fsdp2" and isinstance(recipe.policy, DenoisingPolicyKeys):
        yield "sharding=fsdp2"
    if world > 1 and recipe.sharding == "fsdp2" and (recipe.devices is None or recipe.devices.weights is None):
        yield "devices.weights=cpu"
