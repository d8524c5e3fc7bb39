"""Sections of a recipe about the policy: which model, what of it trains, and the average of its weights."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from retouch.config.section import Count, Section
from retouch.models.base import ImageModel
from retouch.models.ip_adapter.section import IpAdapter
from retouch.models.kinds import IMAGE_MODELS
from retouch.models.train import FullWeights, Lora

Attention: TypeAlias = Literal["sdpa", "flash_attention_2", "eager"]
Model: TypeAlias = Annotated[ImageModel, IMAGE_MODELS]


class Ema(Section):
    """A running average of the trained weights, used for evaluation and for what is exported."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)]
    """How much of the average stays at each update."""
    every: Count = 1
    """Optimizer steps between updates."""


class DenoisingPolicyKeys(Section):
    """A flow-matching model that acts by denoising."""

    kind: Literal["denoising"]
    model: Model
    """The model."""
    train: Annotated[FullWeights | Lora | IpAdapter, Field(discriminator="kind")]
    """What of it trains."""
    ema: Ema | None = None
    """Average of the trained weights; null keeps none."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
