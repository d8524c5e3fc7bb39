"""What the values of a writer's recipe mean in rows and tokens on one rank, for a plan of memory."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from retouch.assembly.model import DTYPES, lora_targets
from retouch.assembly.phases import copies_needed
from retouch.memory.plan import LoraShape
from retouch.memory.tokens import Writing
from retouch.models import train as recipe_train
from retouch.models.base import INSTRUCTION_TOKENS, Described, DiffusersModel, ImageBatch, ImportedModel
from retouch.playground.world.scenes import SIZE
from retouch.policies.autoregressive.rollout import TokenRollout
from retouch.recipe.emu3 import TokenModel
from retouch.recipe.recipe import Recipe
from retouch.recipe.renderer import CodesRenderer, ResponseRenderer
from retouch.recipe.writer import AutoregressivePolicy

_TEMPLATE_TOKENS = 128
_FORM_TOKENS = 16


def writing_setup(recipe: Recipe, policy: AutoregressivePolicy, described: Described) -> Writing:
    """How the language model is used on one rank."""
    rollouts = [phase.rollout for phase in recipe.resolved_phases() if isinstance(phase.rollout, TokenRollout)]
    share = rank_rows(recipe)
    update = min(recipe.microbatch, max(1, share // recipe.minibatches))
    at_once = min(max(rollout.chunk for rollout in rollouts), share)
    model, train = policy.model, policy.train
    assert not isinstance(model, ImportedModel)
    dtype = DTYPES[model.dtype]
    return Writing(
        lora=LoraShape(train.rank, tuple(lora_targets(policy))) if isinstance(train, recipe_train.Lora) else None,
        prompt=_prompt_tokens(recipe, described),
        completion=max(rollout.max_new_tokens for rollout in rollouts),
        update=(_tasks(recipe, update), update),
        rollout=(_tasks(recipe, at_once), at_once),
        evaluation=held_out_rows(recipe),
        logits_at_once=policy.logits_at_once,
        dtype=dtype,
        trained_dtype=torch.float32 if isinstance(train, recipe_train.Lora) else dtype,
        copies=len(copies_needed(recipe)),
        waiting=recipe.devices is not None and recipe.devices.reference is not None and "reference" in copies_needed(recipe),
        gradient_checkpointing=policy.gradient_checkpointing,
        attention=model.attention,
        sets=2 if isinstance(model, TokenModel) else 1,
        ranks=recipe.ranks or 1,
        sharding="replicated" if recipe.sharding is None else "zero2" if recipe.sharding == "zero2" else "fsdp2",
    )


def rank_rows(recipe: Recipe) -> int:
    """A rank's samples of a step, at most."""
    return math.ceil(max(phase.rows for phase in recipe.resolved_phases()) / (recipe.ranks or 1))


def held_out_rows(recipe: Recipe) -> int:
    """Held-out tasks that a rank takes up at once."""
    return min(recipe.eval.batch, math.ceil(recipe.eval.tasks / (recipe.ranks or 1)))


def _tasks(recipe: Recipe, rows: int) -> int:
    return math.ceil(rows / max(phase.group_size for phase in recipe.resolved_phases()))


def _prompt_tokens(recipe: Recipe, described: Described) -> int:
    """Template, instruction, and a picture where the writer stands before an editor, or reads it as tokens."""
    if isinstance(recipe.policy.model, TokenModel):
        height, width = _grid(recipe.policy.model, described["autoencoder"])
        return height * (width + 1) + _FORM_TOKENS + INSTRUCTION_TOKENS
    text = _TEMPLATE_TOKENS + INSTRUCTION_TOKENS
    if not isinstance(recipe.renderer, ResponseRenderer):
        return text
    model = recipe.renderer.model
    assert isinstance(model, DiffusersModel)
    return text + model.condition_tokens(described)


def drawing_setup(recipe: Recipe, described: Described, setup: Writing) -> ImageBatch:
    """How the image model behind it draws on one rank."""
    assert recipe.renderer is not None
    assert not isinstance(recipe.renderer, CodesRenderer), "it draws with the policy itself"
    model = recipe.renderer.model
    assert isinstance(model, DiffusersModel)
    return ImageBatch(
        rows=min(recipe.renderer.batch, max(rank_rows(recipe), held_out_rows(recipe))),
        size=model.size or model.planned_size,
        source=model.planned_size,
        sources=int(isinstance(recipe.renderer, ResponseRenderer)),
        text=model.text_tokens or setup.prompt + setup.completion,
        dtype=image_dtype(recipe),
    )


def codes_setup(recipe: Recipe, policy: AutoregressivePolicy) -> dict[str, Any]:
    """Pictures that are made of codes at once, those of which codes are made, and their size."""
    assert isinstance(recipe.renderer, CodesRenderer)
    assert isinstance(policy.model, TokenModel)
    rows = max(rank_rows(recipe), held_out_rows(recipe))
    at_once = [phase.rollout.chunk for phase in recipe.resolved_phases() if isinstance(phase.rollout, TokenRollout)]
    tokenized = recipe.data.contents().tokens
    read = 1 if tokenized else max(_tasks(recipe, min(max(at_once), rank_rows(recipe))), held_out_rows(recipe))
    return {"rows": min(recipe.renderer.batch, rows), "read": read, "size": _pixels(policy.model)}


def _grid(model: TokenModel, autoencoder: Mapping[str, Any]) -> tuple[int, int]:
    side = 2 ** (len(autoencoder["config"]["channel_multiplier"]) - 1)
    height, width = _pixels(model)
    return height // side, width // side


def _pixels(model: TokenModel) -> tuple[int, int]:
    return (model.size[0], model.size[1]) if model.size is not None else (SIZE, SIZE)


def image_dtype(recipe: Recipe) -> torch.dtype:
    """Of the image model."""
    model = recipe.image_model
    assert isinstance(model, DiffusersModel | TokenModel)
    return DTYPES[model.dtype]
