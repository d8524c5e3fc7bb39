"""Sections of a recipe about sampling while the policy learns: the denoising chain and which of its steps train, or the tokens."""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag

from retouch.config.section import UNTAGGED, Count, NonNegative, Positive, Section, Share
from retouch.recipe.engine import Engine


class SdeTransition(Section):
    """The stochastic step of Flow-GRPO, or DanceGRPO's with a noise that does not depend on sigma."""

    kind: Literal["sde", "dance"]
    noise_level: NonNegative
    """Scale of the injected noise; 0.7 is usual, Qwen takes 1.0 to 1.5."""


class CpsTransition(Section):
    """The stochastic step that keeps the coefficients of the schedule (CPS)."""

    kind: Literal["cps"]
    noise_level: Share
    """From 0, no new noise, to 1, all noise new at each step."""


class OdeTransition(Section):
    """The deterministic step: no exploration, no log-probabilities."""

    kind: Literal["ode"]


class AllSteps(Section):
    """Every step but the last one trains."""

    mode: Literal["all"]


class DrawnWindow(Section):
    """Some neighbouring steps train, from a start drawn anew each training step (Flow-GRPO-Fast).

    ``branch``: the samples of a group share everything before the window.
    """

    mode: Literal["window", "branch"]
    size: Count
    """Steps in the window."""
    low: Annotated[int, Field(ge=0)] = 0
    """First step that it may hold."""
    high: Count | None = None
    """One past the last step that it may hold; null goes up to the last step, which never trains."""


class SlidingWindow(Section):
    """Some neighbouring steps train, and move on as training goes on (MixGRPO)."""

    mode: Literal["sliding"]
    size: Count
    """Steps in the window."""
    every: Count = 10
    """Training steps between two moves."""
    stride: Count = 1
    """Steps of a move, at most ``size``."""


class DenoisingRollout(Section):
    """How a denoising policy samples while it learns."""

    num_steps: Annotated[int, Field(ge=1)]
    """Denoising steps of a picture."""
    transition: Annotated[SdeTransition | CpsTransition | OdeTransition, Field(discriminator="kind")]
    """What happens in a step that trains; all other steps are deterministic."""
    reduction: Literal["mean", "sum"] = "mean"
    """How a transition's log-probability is taken over the elements of a latent; the clip range depends on it."""
    window: Annotated[AllSteps | DrawnWindow | SlidingWindow, Field(discriminator="mode")] = AllSteps(mode="all")
    """Which steps of the chain train."""
    guidance_scale: Annotated[float, Field(ge=1.0)] = 1.0
    """Classifier-free guidance in sampling and training alike; 1 is none, anything more doubles the forwards."""
    shared_noise: bool = False
    """All samples of a group start from the same noise."""
    chunk: Count = 128
    """Rows per forward when sampling."""


class TokenRollout(Section):
    """How a writer writes while it learns."""

    kind: Literal["tokens"]
    max_new_tokens: Count
    """Longest completion; what has not ended by then is cut off."""
    temperature: Positive = 1.0
    """Logits are divided by it, in sampling and training alike."""
    top_k: Count | None = None
    """Only the so many likeliest tokens are drawn from; null leaves all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Only the likeliest tokens that together have this probability are drawn from; null leaves all."""
    chunk: Count = 128
    """Rows written at once."""
    engine: Engine | None = Field(default=None, exclude_if=lambda engine: engine is None)
    """What writes them; null is ``cached`` with its defaults."""


def _which(value: Any) -> str:
    """A rollout without a kind is a denoising chain's."""
    kind = value.get("kind", UNTAGGED) if isinstance(value, dict) else getattr(value, "kind", UNTAGGED)
    return kind if isinstance(kind, str) else UNTAGGED


Rollout: TypeAlias = Annotated[
    Annotated[DenoisingRollout, Tag(UNTAGGED)] | Annotated[TokenRollout, Tag("tokens")], Discriminator(_which)
]
