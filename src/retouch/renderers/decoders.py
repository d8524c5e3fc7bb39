"""Renderers that only decode: the clean latents of a denoising policy, or the image tokens of an autoregressive policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from retouch.renderers.base import RendererSection, WeightContext
from retouch.renderers.sampling import HasCompletions

if TYPE_CHECKING:
    from jaxtyping import Int
    from PIL.Image import Image
    from torch import Tensor

    from retouch.protocols import AutoregressiveModel, DenoisingModel, Renderer
    from retouch.types import Conditioning, Task


@runtime_checkable
class HasLatents(Protocol):
    """The fields of a trajectory that ``LatentRenderer`` reads."""

    @property
    def outputs(self) -> Tensor: ...

    @property
    def conditioning(self) -> Conditioning: ...


@dataclass(frozen=True, slots=True, eq=False)
class LatentRenderer:
    """Decodes the latents of a denoising policy (implements ``retouch.protocols.Renderer``).

    The image of a row with a value that is not finite is None, the policy's own fault.
    """

    model: DenoisingModel

    def __call__(self, tasks: Sequence[Task], trajectory: HasLatents) -> list[Image | None]:
        import torch

        x = trajectory.outputs
        finite = x.flatten(1).isfinite().all(dim=1)
        if not finite.any():
            return [None] * len(x)
        with torch.no_grad():
            images = iter(self.model.decode(x[finite], trajectory.conditioning))
        return [next(images) if usable else None for usable in finite.tolist()]


class CodesRenderer(RendererSection):
    """Decodes the image tokens of a completion with the autoencoder of the policy's own model."""

    kind: Literal["codes"] = "codes"

    reads = "vision"

    def build(
        self,
        image_model: DenoisingModel | AutoregressiveModel,
        writer: AutoregressiveModel,
        *,
        published: WeightContext | None = None,
        sharded: bool = False,
    ) -> Renderer:
        if not isinstance(image_model, DecodesCodes):
            raise ValueError(f"renderer.kind: codes needs a model with codes_in and decode_codes, not {type(image_model).__name__}")
        return CodesDecoder(image_model, batch=self.batch)


@runtime_checkable
class DecodesCodes(Protocol):
    """A model that finds the codes of an image in a completion, and decodes them."""

    def codes_in(self, ids: Sequence[int]) -> Int[Tensor, "h w"] | None:
        """The codes of the image in a completion; None if there is no complete image."""
        ...

    def decode_codes(self, codes: Int[Tensor, "r h w"]) -> list[Image]:
        """Decode codes to images."""
        ...


class CodesDecoder:
    """Decodes the image tokens of completions, ``batch`` images at once (implements ``retouch.protocols.Renderer``).

    The image of a completion that is truncated or has no complete image is None, the policy's own fault.
    """

    def __init__(self, model: DecodesCodes, *, batch: int = 8) -> None:
        if batch < 1:
            raise ValueError(f"batch {batch}: give at least 1")
        self.model = model
        self.batch = batch

    def __call__(self, tasks: Sequence[Task], trajectory: HasCompletions) -> list[Image | None]:
        import torch

        images: list[Image | None] = [None] * len(trajectory.outputs)
        complete = []
        for row, completion in enumerate(trajectory.outputs):
            codes = None if completion.truncated else self.model.codes_in(completion.ids)
            if codes is not None:
                complete.append((row, codes))
        for first in range(0, len(complete), self.batch):
            part = complete[first : first + self.batch]
            with torch.no_grad():
                decoded = self.model.decode_codes(torch.stack([codes for _, codes in part]))
            for (row, _), image in zip(part, decoded, strict=True):
                images[row] = image
        return images
