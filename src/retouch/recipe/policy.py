"""Sections of a recipe about the policy: which model, what of it trains, and the average of its weights."""

from typing import Annotated, Literal

from pydantic import Field

from retouch.config.section import Count, Positive, Section
from retouch.models.base import ImageModel
from retouch.models.ip_adapter.section import IpAdapter
from retouch.models.kinds import IMAGE_MODELS, LANGUAGE_MODELS
from retouch.models.language import LanguageModel
from retouch.models.train import FullWeights, Lora


class Ema(Section):
    """A running average of the trained weights, used for evaluation and for what is exported."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)]
    """How much of the average stays at each update."""
    every: Count = 1
    """Optimizer steps between updates."""


class DenoisingPolicyKeys(Section):
    """A flow-matching model that acts by denoising."""

    kind: Literal["denoising"]
    model: Annotated[ImageModel, IMAGE_MODELS]
    """The model."""
    train: Annotated[FullWeights | Lora | IpAdapter, Field(discriminator="kind")]
    """What of it trains."""
    ema: Ema | None = None
    """Average of the trained weights; null keeps none."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""


class LanguageModelLora(Lora):
    """Low-rank adapters on the language model's attention; its own weights stay as they are and serve as reference."""

    rank: Count = 32
    """Inner width of each adapter."""
    alpha: Positive = 64.0
    """The adapter's output is scaled by alpha / rank."""


class AutoregressivePolicyKeys(Section):
    """A language model that acts by generating tokens; a renderer makes the image of its completion."""

    kind: Literal["autoregressive"]
    model: Annotated[LanguageModel, LANGUAGE_MODELS]
    """The language model."""
    train: Annotated[FullWeights | LanguageModelLora, Field(discriminator="kind")] = LanguageModelLora(kind="lora")
    """What of it trains."""
    ema: Ema | None = None
    """Average of the trained weights; null keeps none."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time; each row then reads its prompt for itself."""
    mask_truncated: bool = False
    """Completions that were truncated at ``rollout.max_new_tokens`` teach nothing."""
    logits_at_once: Count = 256
    """Tokens whose logits exist at once in an update; changes memory and time only."""
    entropy: bool = False
    """Also measure the entropy of the tokens' distributions: ``policy/entropy`` in the metrics."""
