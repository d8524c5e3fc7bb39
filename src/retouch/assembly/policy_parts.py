"""The models of a run, with which a policy samples and makes images. Inference builds them without data and judge."""

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from retouch.assembly.phases import copies_in_cpu_memory, copies_needed
from retouch.distributed.placement import Placement, plan_placement
from retouch.distributed.ranks import Ranks
from retouch.policies.context import FirstGradientStep, PolicyContext
from retouch.policies.engines.base import DenoisingEngine, Engine
from retouch.policies.value_heads import LatentValues, TokenValues
from retouch.policies.weights import WeightCopies
from retouch.protocols import AutoregressiveModel, DenoisingModel, Renderer
from retouch.recipe.phases import Rollout
from retouch.recipe.policy import AutoregressivePolicyKeys, DenoisingPolicyKeys
from retouch.recipe.recipe import Recipe
from retouch.renderers.decoders import LatentRenderer

if TYPE_CHECKING:
    from retouch.policies.autoregressive.policy import AutoregressivePolicy
    from retouch.policies.denoising.policy import DenoisingPolicy

_CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class PolicyParts:
    """The models of a run: they sample and make images.

    ``placement``: the devices of the parts. ``model``: the model that is trained. ``image_model``: the model that makes images; the
    same as ``model``, except for policies that write text. ``copies``: weight copies besides the current weights. ``head``: the
    value head that is trained with the policy, if there is one.
    """

    recipe: Recipe
    ranks: Ranks
    placement: Placement
    model: DenoisingModel | AutoregressiveModel
    image_model: DenoisingModel | AutoregressiveModel
    copies: WeightCopies
    head: LatentValues | TokenValues | None = None

    def policy(
        self,
        rollout: Rollout,
        *,
        acting: Literal["current", "old"] = "current",
        keep_means: bool = False,
        engine: Engine | DenoisingEngine | None = None,
        first_gradient_step: FirstGradientStep | None = None,
    ) -> "DenoisingPolicy | AutoregressivePolicy":
        """Build a policy that samples as ``rollout`` says. All policies of a run share their weights.

        ``acting``: the weights that sample in rollouts. ``engine``: samples the completions or the denoising chains of a rollout;
        None: the policy's own model. ``first_gradient_step``: from the objective, if its loss needs a state of the chain.
        """
        context = PolicyContext(
            copies=self.copies,
            microbatch=self.recipe.microbatch,
            eval_steps=self.recipe.eval.num_steps,
            acting=acting,
            keep_means=keep_means,
            engine=engine,
            any_rank=self.ranks.any,
            in_step=self.in_step,
            head=self.head,
            first_gradient_step=first_gradient_step,
        )
        return self.recipe.policy.build(rollout, self.model, context)

    @property
    def in_step(self) -> bool:
        """Whether all ranks must call the trained model the same number of times."""
        return self.recipe.sharding == "fsdp2" and self.ranks.world > 1

    def renderer(self, *, num_steps: int | None = None) -> Renderer:
        """Build the renderer of trajectories. ``num_steps``: denoising steps for the image of a completion; None: the recipe's."""
        if isinstance(self.model, DenoisingModel):
            return LatentRenderer(self.model)
        assert self.recipe.renderer is not None, "the recipe's checks ensure it"
        published = partial(self.copies.using, "reference") if "reference" in self.copies.copies else None
        section = self.recipe.renderer.with_num_steps(num_steps)
        renderer = section.build(self.image_model, self.model, published=published, sharded=self.in_step)
        if not self.placement.offload:
            return renderer
        from retouch.models.offloading.on_device import on_device, page_lock, parts_of
        from retouch.renderers.wrappers import RendererInContext

        assert isinstance(self.image_model, DenoisingModel), "the recipe's checks ensure it"
        parts = [part for part in parts_of(self.image_model) if part is not self.model.module]
        page_lock(parts, self.placement.renderer)
        return RendererInContext(renderer, partial(on_device, self.placement.renderer, parts))

    def users_renderer(self) -> Renderer:
        """Build the renderer for the policy's ``sample``. If the policy encodes responses, it uses its averaged weights too."""
        renderer, section = self.renderer(num_steps=self.recipe.eval.num_steps), self.recipe.renderer
        if section is not None and section.policy_encodes and "average" in self.copies.copies:
            from retouch.renderers.wrappers import RendererInContext

            return RendererInContext(renderer, partial(self.copies.using, "average"))
        return renderer


def assemble_policy(recipe: Recipe, ranks: Ranks) -> PolicyParts:
    """Build the models of a run, without data and judge. Weights that the policy and the image model share are loaded once."""
    placement, policy, renderer = plan_placement(recipe, ranks), recipe.policy, recipe.renderer
    model: DenoisingModel | AutoregressiveModel
    image_model: DenoisingModel | AutoregressiveModel
    if renderer is None:
        assert isinstance(policy, DenoisingPolicyKeys), "the recipe's checks ensure it"
        model = image_model = policy.build_model(device=placement.policy, offload=placement.offload)
    else:
        assert isinstance(policy, AutoregressivePolicyKeys), "the recipe's checks ensure it"
        model, image_model = renderer.load(
            partial(policy.build_model, device=placement.policy),
            device=_CPU if placement.offload else placement.renderer,
            base_frozen=policy.train.reference_is_base,
        )
    policy.make_trainable(model.module, seed=recipe.seed)
    copies = WeightCopies(model.module, devices=dict.fromkeys(copies_in_cpu_memory(recipe), _CPU))
    if recipe.sharding == "fsdp2" and ranks.world > 1:
        from retouch.distributed.fsdp import shard
        from retouch.distributed.sharded_copies import ShardedCopies

        shard(model.module, ranks, weights_on_cpu=placement.weights_on_cpu)
        copies = ShardedCopies(model.module, ranks)
    names = copies_needed(recipe)
    if renderer is not None and not renderer.policy_encodes and model.module in getattr(image_model, "parts", ()):
        names |= {"reference"} if image_model is not model else set()  # for a frozen encoder that shares the policy's base weights
    for name in sorted(names):
        if name == "reference" and policy.train.reference_is_base:
            copies.snapshot_without_adapter(name)
        else:
            copies.snapshot(name)
    return PolicyParts(recipe=recipe, ranks=ranks, placement=placement, model=model, image_model=image_model, copies=copies)
