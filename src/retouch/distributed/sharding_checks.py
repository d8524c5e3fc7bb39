"""Whether ranks can share as a recipe says; accelerate's configuration must say the same, since the recipe is followed."""

from collections.abc import Mapping

from retouch.distributed.zero import require_deepspeed
from retouch.recipe.checks import ZERO3
from retouch.recipe.recipe import Recipe

_SHIPPED = "recipes/accelerate/"


def check_sharding(recipe: Recipe, environment: Mapping[str, str]) -> None:
    """ValueError where ranks are to share by a library that is not installed, and where ``accelerate launch`` was told to shard
    otherwise than the recipe does, or in a way that is not followed.
    """
    if recipe.sharding == "zero2" and int(environment.get("WORLD_SIZE", "1")) > 1:
        require_deepspeed()
    told = _sharding(environment)
    if told is not None and told != recipe.sharding:
        said = "nothing" if recipe.sharding is None else recipe.sharding
        raise ValueError(
            f"accelerate's configuration says {told}, and the recipe's `sharding` {said}: say --set sharding={told}, or launch "
            + (f"with {_SHIPPED}{recipe.sharding}.yaml" if recipe.sharding else "with a configuration that shards nothing")
        )


def _sharding(environment: Mapping[str, str]) -> str | None:
    """As the recipe's key would say it; None where the launcher says nothing."""
    if _yes(environment, "ACCELERATE_USE_DEEPSPEED"):
        if environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE"):
            raise ValueError(f"accelerate's configuration names a DeepSpeed file, which is not read; take {_SHIPPED}zero2.yaml")
        stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
        if stage == "3":
            raise ValueError(f"accelerate's configuration says zero_stage 3: {ZERO3}; take {_SHIPPED}zero2.yaml or fsdp2.yaml")
        if stage != "2":
            raise ValueError(f"accelerate's configuration says zero_stage {stage}; 2 is there, as in {_SHIPPED}zero2.yaml")
        for part in ("OPTIMIZER", "PARAM"):
            if environment.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{part}_DEVICE", "none") != "none":
                raise ValueError(
                    f"accelerate's configuration offloads DeepSpeed's {part.lower()}, which is not done here; say none"
                )
        return "zero2"
    if _yes(environment, "ACCELERATE_USE_FSDP"):
        if environment.get("FSDP_VERSION") != "2":
            raise ValueError(f"accelerate's configuration says fsdp_version 1; 2 is there, as in {_SHIPPED}fsdp2.yaml")
        if _yes(environment, "FSDP_OFFLOAD_PARAMS"):
            raise ValueError("accelerate's configuration offloads FSDP's parameters, which is not done here; say false")
        return "fsdp2"
    return None


def _yes(environment: Mapping[str, str], name: str) -> bool:
    return environment.get(name, "false").lower() in ("true", "1")
