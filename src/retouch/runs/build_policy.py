"""The policy that a recipe names, of either kind, and the models that it and its pictures need."""

from dataclasses import replace
from typing import Literal, TypeAlias

import torch

from retouch.policies.autoregressive import AutoregressivePolicy
from retouch.policies.decoding import Decoding
from retouch.policies.denoising import DenoisingPolicy
from retouch.policies.guidance import Guided
from retouch.policies.mismatch import Tolerance
from retouch.policies.weights import WeightCopies
from retouch.runs import recipe_policy
from retouch.runs.build_engine import Writing
from retouch.runs.build_learning import build_sampling
from retouch.runs.build_model import build_model
from retouch.runs.build_writer import build_writer
from retouch.runs.recipe import Recipe
from retouch.runs.recipe_renderer import ResponseRenderer
from retouch.runs.recipe_rollout import Rollout, TokenRollout
from retouch.types import AutoregressiveModel, DenoisingModel

TrainedPolicy: TypeAlias = DenoisingPolicy | AutoregressivePolicy


def build_models(recipe: Recipe, *, device: torch.device) -> tuple[DenoisingModel | AutoregressiveModel, DenoisingModel]:
    """What trains, and what makes the pictures: one and the same for a denoising policy."""
    policy, renderer = recipe.policy, recipe.renderer
    if isinstance(policy, recipe_policy.DenoisingPolicy):
        model = build_model(policy.model, device=device)
        return model, model
    assert renderer is not None, "the recipe's checks see to it"
    image_model = build_model(renderer.model, device=device if renderer.device is None else torch.device(renderer.device))
    before = image_model if isinstance(renderer, ResponseRenderer) else None
    return build_writer(policy, before=before, device=device), image_model


def build_policy(
    recipe: Recipe,
    rollout: Rollout,
    *,
    model: DenoisingModel | AutoregressiveModel,
    copies: WeightCopies,
    acting: Literal["current", "old"],
    keep_means: bool,
    writing: Writing | None = None,
) -> TrainedPolicy:
    """The policy acting as ``rollout`` says under the given weights; ``writing``: a writer's engine, None its own decoding."""
    if isinstance(rollout, TokenRollout):
        assert not isinstance(model, DenoisingModel)
        assert not isinstance(recipe.policy, recipe_policy.DenoisingPolicy)
        return AutoregressivePolicy(
            model,
            decoding=Decoding(
                max_new_tokens=rollout.max_new_tokens,
                temperature=rollout.temperature,
                top_k=rollout.top_k,
                top_p=rollout.top_p,
            ),
            microbatch=recipe.microbatch,
            copies=copies,
            chunk=recipe.policy.logits_at_once,
            mask_truncated=recipe.policy.mask_truncated,
            engine=None if writing is None else writing.engine,
            tolerance=Tolerance() if writing is None else writing.tolerance,
        )
    assert isinstance(model, DenoisingModel)
    return DenoisingPolicy(
        Guided(model, rollout.guidance_scale) if rollout.guidance_scale > 1 else model,
        sampling=replace(build_sampling(rollout), weights=acting),
        eval_steps=recipe.eval.num_steps or rollout.num_steps,
        microbatch=recipe.microbatch,
        copies=copies,
        keep_means=keep_means,
    )
