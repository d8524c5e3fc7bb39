"""Direct reward backpropagation: the gradient of a differentiable reward, through the decoder and the last steps of the chain.

The rollout samples whole chains without gradient, and the recipe's ``reward`` scores their images as for any objective. The loss
then computes the last steps of each chain again, with gradient, decodes the result, and scores it with ``objective.reward``. So a
training step costs the network evaluations of the rollout, and a forward and a backward pass for each denoising step with gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, PrivateAttr

from retouch.config.imports import is_foreign
from retouch.config.section import Count, Kinds, Section
from retouch.core.random import generator
from retouch.objectives.base import Objective, ObjectiveContext
from retouch.protocols import DifferentiableReward, ImageGradientPolicy
from retouch.types import Loss, Minibatch

if TYPE_CHECKING:
    import torch

DIFFERENTIABLE_REWARDS = Kinds(
    "reward",
    {
        "target": "retouch.rewards.pixels:TargetReward",
        "share": "retouch.rewards.pixels:ShareReward",
        "grade": "retouch.rewards.pixels:GradeReward",
        "several": "retouch.rewards.several:SeveralRewards",
    },
    with_wings="differentiable_reward",
)
"""The rewards with a gradient in the image (``retouch.protocols.DifferentiableReward``), and ``several`` of them."""


def _with_gradient(section: Section) -> Section:
    """Return the section. Raises ValueError if the reward has no gradient, or if keys are set that a single score does not need."""
    if not isinstance(section, DifferentiableReward):
        known = ", ".join(kind for kind in DIFFERENTIABLE_REWARDS.paths)
        raise ValueError(f"{type(section).__name__} has no gradient in the image (no method score_tensors); use {known}")
    keys = ["combine", "max_missing"]
    if (require := getattr(section, "require_gradient", None)) is not None:  # several rewards, whose gradients are combined
        require()
        keys.remove("combine")
    for key in keys:
        if (field := type(section).model_fields.get(key)) is not None and getattr(section, key) != field.default:
            raise ValueError(f"{key}: the loss differentiates a single score, which is never missing; remove this key")
    return section


class RewardGradient(Objective):
    """An objective whose loss is minus the score of ``reward``, which it differentiates. It uses no advantages."""

    reward: Annotated[Section, DIFFERENTIABLE_REWARDS, AfterValidator(_with_gradient)]
    """The reward that is differentiated, one of the rewards with a gradient. The recipe's own ``reward`` is only measured."""
    cap: float | None = None
    """Images with a score above ``cap`` do not train: the loss is max(cap - score, 0) up to a constant. null sets no limit. ReFL's
    published code uses 2."""

    uses_advantages: ClassVar[bool] = False
    predicted: ClassVar[bool]
    """Whether a single step goes from the kept state to the clean image; otherwise all remaining steps are computed."""

    _scorer: Any = PrivateAttr(default=None)

    @property
    def rewards(self) -> Mapping[str, Section]:  # type: ignore[override]
        return {"reward": self.reward}

    def for_trial(self) -> RewardGradient:
        return self if self.cap is None else self.model_copy(update={"cap": None})

    def load(self, device: torch.device | str) -> None:
        assert isinstance(self.reward, DifferentiableReward)
        self._scorer = self.reward.build(device=device)

    def losses(self, policy: ImageGradientPolicy, minibatch: Minibatch) -> Iterator[Loss]:
        batch, trajectory = minibatch.batch, minibatch.trajectory
        for rows in policy.row_slices(trajectory):
            images = policy.images(trajectory, rows, predicted=self.predicted)
            if self._scorer is None:
                self.load(images.device)
            tasks = [batch.tasks[k] for k in batch.group[rows]]
            scores = self._scorer.score_tensors(images, [task.copy() for task in tasks] if is_foreign(self._scorer) else tasks)
            if scores.shape != images.shape[:1] or not scores.requires_grad:
                got = f"scores of shape {tuple(scores.shape)}, {'with' if scores.requires_grad else 'without'} gradient"
                raise ValueError(f"objective.reward: it gave {got}, for {len(images)} images; return one per image, with gradient")
            weights = minibatch.weights[rows].sum(dim=1)
            used = scores if self.cap is None else scores.clamp(max=self.cap)
            value = -(weights * used).sum()
            yield Loss(value, {"policy/loss": value.detach(), "policy/score": (weights * scores.detach()).sum()})

    def problems(self, context: ObjectiveContext) -> Iterator[str]:
        if context.is_autoregressive:
            why = f"{self.label} needs the gradient of an image, and tokens have none"
            yield f"{context.objective}.kind: {why}; use {self.for_tokens}"
            return
        if context.stochastic:
            yield f"{context.rollout}.transition.kind: {self.label} differentiates deterministic steps; use ode"
        if context.engine:
            yield f"{context.rollout}.engine: an engine returns no state from which {self.label} can continue the chain; remove it"
        if context.offload:
            yield f"devices.offload: {self.label} decodes with gradient, for which the autoencoder stays on its device; remove it"


class DRaFT(RewardGradient):
    """DRaFT-K: the gradient of the reward through the decoder and the last K steps of the sampling chain. The state before these
    steps is a constant. Loss of a row: -min(score(image), cap).

    Source: Clark et al. 2023 (arXiv 2309.17400).

    Example::

        >>> retouch.DRaFT(reward=retouch.rewards.Target(), steps=2).steps
        2
    """

    kind: Literal["draft"] = "draft"
    steps: Count = 1
    """K: the number of last steps of the chain that are computed with gradient. Memory and time grow with K."""

    predicted: ClassVar[bool] = False

    def first_gradient_step(self, num_steps: int, *, seed: int, step: int) -> int:
        if self.steps > num_steps:
            raise ValueError(
                f"objective.steps: {self.steps} steps with gradient in a chain of {num_steps}; use {num_steps} or fewer"
            )
        return num_steps - self.steps

    def problems(self, context: ObjectiveContext) -> Iterator[str]:
        yield from super().problems(context)
        if context.num_steps is not None and self.steps > context.num_steps:
            has = f"the chain has {context.num_steps} ({context.rollout}.num_steps)"
            yield f"{context.objective}.steps: {self.steps} steps with gradient, and {has}; use {context.num_steps} or fewer"


class ReFL(RewardGradient):
    """Reward feedback learning: the gradient of the reward at the clean image that the model predicts in one late denoising step.
    This step is drawn at random in each training step. Loss of a row: -min(score(image), cap), with the image decoded
    from x - sigma v.

    Source: ImageReward (Xu et al. 2023, arXiv 2304.05977).

    Example::

        >>> retouch.ReFL(reward=retouch.rewards.Target(), low=4).high is None
        True
    """

    kind: Literal["refl"] = "refl"
    low: Annotated[int, Field(ge=0)]
    """First step that may be drawn. The paper draws from the last quarter of 40 steps."""
    high: Count | None = None
    """One past the last step that may be drawn; null means the number of steps."""

    predicted: ClassVar[bool] = True

    def first_gradient_step(self, num_steps: int, *, seed: int, step: int) -> int:
        import torch

        high = num_steps if self.high is None else self.high
        if not self.low < high <= num_steps:
            raise ValueError(f"objective.low, objective.high: no step in [{self.low}, {high}) of a chain of {num_steps}")
        return int(torch.randint(self.low, high, (), generator=generator(seed, "refl", step)))

    def problems(self, context: ObjectiveContext) -> Iterator[str]:
        yield from super().problems(context)
        if context.num_steps is None:
            return
        high = context.num_steps if self.high is None else self.high
        if high > context.num_steps:
            yield f"{context.objective}.high: {high} is past the last of {context.num_steps} steps; use {context.num_steps} or less"
        elif self.low >= high:
            yield f"{context.objective}.low: {self.low} leaves no step below {high}; use {high - 1} or less"
