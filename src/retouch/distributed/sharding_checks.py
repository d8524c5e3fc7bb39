"""Checks that the recipe's sharding is possible and agrees with accelerate's configuration. The recipe decides."""

from collections.abc import Mapping

from retouch.distributed.zero import require_deepspeed
from retouch.recipe.checks import ZERO3
from retouch.recipe.recipe import Recipe

_SHIPPED = "recipes/accelerate/"


def check_sharding(recipe: Recipe, environment: Mapping[str, str]) -> None:
    """Raise ValueError if the sharding needs a library that is not installed, or contradicts ``accelerate launch``.

    ``environment``: the process's environment variables, in which ``accelerate launch`` describes its configuration. A
    configuration contradicts the recipe if it shards in another way, or in a way that is not supported.
    """
    if recipe.sharding == "zero2" and int(environment.get("WORLD_SIZE", "1")) > 1:
        require_deepspeed()
    launched = _sharding(environment)
    if launched is not None and launched != recipe.sharding:
        raise ValueError(
            f"accelerate's configuration has sharding {launched}, but the recipe has {recipe.sharding or 'none'}: "
            f"add --set sharding={launched}, or launch "
            + (f"with {_SHIPPED}{recipe.sharding}.yaml" if recipe.sharding else "with a configuration without sharding")
        )


def _sharding(environment: Mapping[str, str]) -> str | None:
    """The sharding that accelerate's configuration sets, named as in a recipe; None if it sets none."""
    if _enabled(environment, "ACCELERATE_USE_DEEPSPEED"):
        if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
            raise ValueError(f"accelerate's configuration names a DeepSpeed file, which is ignored; use {_SHIPPED}zero2.yaml")
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
        if stage == "3":
            raise ValueError(f"accelerate's configuration has zero_stage 3: {ZERO3}; use {_SHIPPED}zero2.yaml or fsdp2.yaml")
        if stage != "2":
            raise ValueError(f"accelerate's configuration has zero_stage {stage}; only 2 is supported, see {_SHIPPED}zero2.yaml")
        for part in ("OPTIMIZER", "PARAM"):
            if environment.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE", "none") != "none":
                raise ValueError(
                    f"accelerate's configuration offloads DeepSpeed's {part.lower()}, which is not supported; set it to none"
                )
        return "zero2"
    if _enabled(environment, "ACCELERATE_USE_FSDP"):
        if environment.get("FSDP_VERSION") != "2":
            raise ValueError(f"accelerate's configuration has fsdp_version 1; only 2 is supported, see {_SHIPPED}fsdp2.yaml")
        if _enabled(environment, "FSDP_OFFLOAD_PARAMS"):
            raise ValueError("accelerate's configuration offloads FSDP's parameters, which is not supported; set it to false")
        return "fsdp2"
    return None


def _enabled(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in ("true", "1")
