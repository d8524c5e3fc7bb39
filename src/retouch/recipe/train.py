"""Sections of a recipe about what of a model trains: all of it, or low-rank adapters."""

from typing import Literal

from retouch.config.section import Count, Positive, Section, Share


class FullWeights(Section):
    """All weights of the transformer train."""

    kind: Literal["full"]


class Lora(Section):
    """Low-rank adapters train; the model's own weights stay as they are and serve as reference."""

    kind: Literal["lora"]
    rank: Count
    """Inner width of each adapter."""
    alpha: Positive
    """The adapter's output is scaled by alpha / rank."""
    targets: tuple[str, ...] | None = None
    """Names of the linear layers that get an adapter, as endings of their paths; null takes the family's usual ones."""
    init_from: str | None = None
    """Folder of an existing LoRA to go on from; null starts at zero."""
    dropout: Share = 0.0
    """Share of an adapter's inputs that are dropped; anything above 0 makes the ratio differ from 1 at the first step."""
