"""Sections of a recipe about a policy that writes: the language model, and what of it trains."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from retouch.config.section import Count, Positive, Section
from retouch.models.base import Dtype, ImportedModel
from retouch.models.train import FullWeights, Lora
from retouch.recipe.emu3 import Emu3, PlaygroundEmu3
from retouch.recipe.policy import Attention, Ema


class QwenWriter(Section):
    """A Qwen instruct model: ``qwen-vl`` sees pictures (Qwen2-VL, Qwen2.5-VL, Qwen3-VL), ``qwen`` does not (Qwen2.5, Qwen3)."""

    kind: Literal["qwen-vl", "qwen"]
    path: str
    """Folder or Hugging Face id of the model."""
    dtype: Dtype = "bfloat16"
    """Type of the frozen weights and of the forward pass; log-probabilities are fp32 in any case."""
    attention: Attention = "sdpa"
    """How attention is computed; ``flash_attention_2`` needs the flash-attn package and a GPU."""
    system: str | None = None
    """System prompt; null takes the enhancer's that comes with the package, or before an editor that editor's whole template."""
    area: Count | None = None
    """Pixels that the writer sees of a picture; null leaves pictures as they are, or before an editor takes that editor's."""


class PlaygroundWriter(Section):
    """The built-in tiny Qwen2.5-VL, which writes for the playground's editor."""

    kind: Literal["playground-writer"]
    path: str | None = None
    """Folder of other weights; null takes those that ship with the package."""
    dtype: Dtype = "float32"
    """Type of the frozen weights and of the forward pass; log-probabilities are fp32 in any case."""
    attention: Attention = "sdpa"
    """How attention is computed."""


class PlaygroundEnhancer(PlaygroundWriter):
    """The built-in tiny Qwen2-VL, which says people's requests in the words of the playground's painter; it sees no pictures."""

    kind: Literal["playground-enhancer"]  # type: ignore[assignment]


WriterModel: TypeAlias = Annotated[
    QwenWriter | PlaygroundWriter | PlaygroundEnhancer | Emu3 | PlaygroundEmu3 | ImportedModel, Field(discriminator="kind")
]


class WriterLora(Lora):
    """Low-rank adapters on the language model's attention; its own weights stay as they are and serve as reference."""

    rank: Count = 32
    """Inner width of each adapter."""
    alpha: Positive = 64.0
    """The adapter's output is scaled by alpha / rank."""


class AutoregressivePolicy(Section):
    """A language model that acts by writing; a renderer makes the picture of what it wrote."""

    kind: Literal["autoregressive"]
    model: WriterModel
    """The language model."""
    train: Annotated[FullWeights | WriterLora, Field(discriminator="kind")] = WriterLora(kind="lora")
    """What of it trains."""
    ema: Ema | None = None
    """Average of the trained weights; null keeps none."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, more time; each row then reads its prompt for itself."""
    mask_truncated: bool = False
    """Completions that were cut off at ``rollout.max_new_tokens`` teach nothing."""
    logits_at_once: Count = 256
    """Tokens whose logits exist at once in an update; changes memory and time only."""
    entropy: bool = False
    """Also measure the entropy of the tokens' distributions: ``policy/entropy`` in the metrics."""
