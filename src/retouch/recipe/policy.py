"""Sections of a recipe about the policy: which model, what of it trains, and the average of its weights."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field, JsonValue

from retouch.config.section import ClassPath, Count, NonNegative, Pixels, Section
from retouch.recipe.ip_adapter import IpAdapter
from retouch.recipe.train import FullWeights, Lora

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
Attention: TypeAlias = Literal["sdpa", "flash_attention_2", "eager"]


class PlaygroundModel(Section):
    """The built-in tiny editor."""

    kind: Literal["playground"]
    path: str | None = None
    """Folder of other weights of the same shape; null takes those that ship with the package."""
    size: Pixels | None = None
    """Height and width of its pictures in pixels; null takes the playground's own."""
    dtype: Dtype = "float32"
    """Type of the frozen weights and of the forward pass; log-probabilities are fp32 in any case."""


class PlaygroundPainter(PlaygroundModel):
    """The built-in tiny text-to-image model, for renderers of prompts."""

    kind: Literal["playground-painter"]  # type: ignore[assignment]


class PlaygroundWords(PlaygroundModel):
    """The built-in tiny model that paints words on signs, for ``playground-words`` data."""

    kind: Literal["playground-words"]  # type: ignore[assignment]


class DiffusersModel(Section):
    """A model of one of the families known here, in the layout of its diffusers pipeline."""

    kind: Literal["qwen-image", "qwen-image-edit", "qwen-image-edit-plus", "sd3", "z-image", "flux", "flux-fill", "flux-kontext"]
    path: str
    """Folder or Hugging Face id of the pipeline."""
    size: Pixels | None = None
    """Height and width of the pictures it makes, in pixels; an editor with null takes its source's."""
    dtype: Dtype = "bfloat16"
    """Type of the frozen weights and of the forward pass; log-probabilities are fp32 in any case."""
    guidance: NonNegative | None = Field(default=None, exclude_if=lambda guidance: guidance is None)
    """What a guidance-distilled model (FLUX.1) is told of how closely to follow the words: an input and no second forward. Null
    takes its pipeline's own: 3.5, and 30 for ``flux-fill``."""


class ImportedModel(Section):
    """A model adapter of your own (``retouch.protocols.DenoisingModel``)."""

    kind: Literal["import"]
    class_: ClassPath = Field(alias="class")
    """The class, as ``package.module:Class``."""
    args: dict[str, JsonValue] = Field(default={})
    """Keyword arguments of its constructor."""


Model: TypeAlias = Annotated[
    PlaygroundModel | PlaygroundPainter | PlaygroundWords | DiffusersModel | ImportedModel, Field(discriminator="kind")
]


class Ema(Section):
    """A running average of the trained weights, used for evaluation and for what is exported."""

    decay: Annotated[float, Field(gt=0.0, lt=1.0)]
    """How much of the average stays at each update."""
    every: Count = 1
    """Optimizer steps between updates."""


class DenoisingPolicy(Section):
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
