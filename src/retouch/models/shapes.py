"""What the memory plan knows about an image model: its description, the shape of its transformer, and a batch of images.

A model is *described* part by part: ``{"transformer": {"class": ..., "config": ...}, "vae": ..., ...}``, from its folder or from a
published configuration, so that its memory can be planned before any weight is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Size: TypeAlias = tuple[int, int]
"""(height, width) in px."""
Part: TypeAlias = Mapping[str, Any]
"""A part of a model: its "class" and its "config"."""
PartConfigs: TypeAlias = Mapping[str, Part]
"""The described parts of a model by name."""

MEGAPIXEL = (1024, 1024)
INSTRUCTION_TOKENS = 256
"""Length in tokens that the memory plan assumes for an instruction if the model does not set one."""
# Bytes that autograd saves for one block per token and channel, for each dtype's number of bytes (2 or 4). They were measured on
# these families with torch.autograd.graph.saved_tensors_hooks (norms and rotary positions are kept in fp32 for both dtypes).
TWO_STREAMS = {2: 60, 4: 100}
ONE_STREAM = {2: 50, 4: 85}


@dataclass(frozen=True, slots=True)
class Blocks:
    """``count`` equal blocks. ``saved``: bytes that autograd saves for one block per token and channel, by bytes of the dtype.
    ``backward``: the values per token and channel that the backward pass of a recomputed block adds to them at its peak."""

    count: int
    saved: Mapping[int, int]
    backward: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A transformer's shape. ``width``: channels of a token in a block. ``latents``, ``text``: channels of these two inputs."""

    blocks: tuple[Blocks, ...]
    width: int
    latents: int
    text: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBatch:
    """A batch of images to sample.

    ``rows``: number of images, each of ``size`` (height, width) px. ``sources``: number of source images per row, each of
    ``source`` px. ``text``: number of text tokens per row.
    """

    rows: int
    size: Size
    source: Size
    sources: int
    text: int
    dtype: torch.dtype

    def empty(self, *shape: int) -> Tensor:
        """A tensor (rows, *shape) of the batch's dtype, on the meta device."""
        import torch

        return torch.empty(self.rows, *shape, dtype=self.dtype, device="meta")

    def times(self) -> Tensor:
        """A tensor (rows,) of fp32, on the meta device: one timestep per row."""
        import torch

        return torch.empty(self.rows, device="meta")
