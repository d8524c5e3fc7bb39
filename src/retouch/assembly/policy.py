"""The policy that a recipe names, of either kind, and the models that it and its pictures need."""

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch

from retouch.assembly.image_model import move, share_encoder
from retouch.assembly.model import DTYPES
from retouch.assembly.writer import build_writer
from retouch.distributed.placement import Placement
from retouch.models import train as recipe_train
from retouch.models.base import DiffusersModel
from retouch.models.common.guidance import Guided
from retouch.models.ip_adapter.section import IpAdapter
from retouch.models.qwen_image.edit import QwenImageEdit
from retouch.policies.autoregressive.policy import AutoregressivePolicy
from retouch.policies.autoregressive.rollout import Engine, TokenRollout
from retouch.policies.denoising.policy import DenoisingPolicy
from retouch.policies.value_heads import LatentValues, TokenValues
from retouch.policies.weights import WeightCopies
from retouch.protocols import AutoregressiveModel, DenoisingModel
from retouch.recipe import policy as recipe_policy
from retouch.recipe.recipe import Recipe
from retouch.recipe.renderer import CodesRenderer, ResponseRenderer
from retouch.recipe.rollout import Rollout

_CPU = torch.device("cpu")
TrainedPolicy: TypeAlias = DenoisingPolicy | AutoregressivePolicy
TrainedModel: TypeAlias = DenoisingModel | AutoregressiveModel


def build_models(recipe: Recipe, placement: Placement) -> tuple[TrainedModel, TrainedModel]:
    """What trains, and what makes the pictures: one and the same but for writers of text. Weights that both need are held once."""
    policy, renderer = recipe.policy, recipe.renderer
    if isinstance(policy, recipe_policy.DenoisingPolicyKeys):
        model = _shown(policy, policy.model.build(device=placement.policy), placement)
        return model, model
    assert renderer is not None, "the recipe's checks see to it"
    if isinstance(renderer, CodesRenderer):
        drawing = build_writer(policy, before=None, device=placement.policy)
        return drawing, drawing
    rests = _CPU if placement.offload else placement.renderer
    if not isinstance(renderer, ResponseRenderer):
        image_model = renderer.model.build(device=rests)
        return build_writer(policy, before=None, device=placement.policy), image_model
    editor = renderer.model.build(device=_CPU)
    writer = build_writer(policy, before=editor, device=placement.policy)
    assert isinstance(editor, QwenImageEdit), "the recipe's checks see to it"
    share_encoder(
        editor, writer.module, policy_reads=renderer.encoder == "policy", base_stays=isinstance(policy.train, recipe_train.Lora)
    )
    move(editor, rests, but=writer.module)
    return writer, editor


def _shown(policy: recipe_policy.DenoisingPolicyKeys, model: DenoisingModel, placement: Placement) -> DenoisingModel:
    """The model, shown references where an IP-Adapter trains."""
    if not isinstance(policy.train, IpAdapter):
        return model
    assert isinstance(policy.model, DiffusersModel), "the recipe's checks ensure it"
    return policy.train.with_references(model, dtype=DTYPES[policy.model.dtype], device=placement.policy)


def build_policy(
    recipe: Recipe,
    rollout: Rollout,
    *,
    model: DenoisingModel | AutoregressiveModel,
    copies: WeightCopies,
    acting: Literal["current", "old"],
    keep_means: bool,
    engine: Engine | None = None,
    any_rank: Callable[[bool], bool] = bool,
    in_step: bool = False,
    head: LatentValues | TokenValues | None = None,
) -> TrainedPolicy:
    """The policy that samples as ``rollout`` says, under the weights ``acting``.

    ``engine``: what generates the completions of a policy of tokens; None is its own cache. ``any_rank``: whether a flag is true on
    at least one rank. ``in_step``: all ranks must call the model equally often. ``head``: a value head of this policy's kind.
    """
    if isinstance(rollout, TokenRollout):
        assert not isinstance(model, DenoisingModel)
        assert not isinstance(recipe.policy, recipe_policy.DenoisingPolicyKeys)
        assert not isinstance(head, LatentValues)
        return AutoregressivePolicy(
            model,
            sampling=rollout,
            microbatch=recipe.microbatch,
            copies=copies,
            logits_at_once=recipe.policy.logits_at_once,
            mask_truncated=recipe.policy.mask_truncated,
            engine=engine,
            any_rank=any_rank,
            in_step=in_step,
            head=head,
        )
    assert isinstance(model, DenoisingModel)
    assert not isinstance(head, TokenValues)
    train = recipe.policy.train
    return DenoisingPolicy(
        Guided(model, rollout.guidance_scale) if rollout.guidance_scale > 1 else model,
        sampling=rollout,
        acting=acting,
        eval_steps=recipe.eval.num_steps or rollout.num_steps,
        microbatch=recipe.microbatch,
        copies=copies,
        keep_means=keep_means,
        head=head,
        reference_dropout=train.dropout if isinstance(train, IpAdapter) else 0.0,
    )
