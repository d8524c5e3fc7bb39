"""Renderers that only decode: clean latents of a denoising policy, or the image tokens of an autoregressive one."""

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
    """What the renderer of latents reads of a trajectory."""

    @property
    def outputs(self) -> Tensor: ...

    @property
    def conditioning(self) -> Conditioning: ...


@dataclass(frozen=True, slots=True, eq=False)
class LatentRenderer:
    """Decodes the latents of a denoising policy (implements ``retouch.protocols.Renderer``). A row that is not finite gives None,
    the policy's own fault."""

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
    """The autoencoder of the policy's own model, which decodes the image tokens of a completion."""

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
            raise ValueError(f"renderer.kind: codes needs a model that decodes them, which {type(image_model).__name__} does not")
        return CodesDecoder(image_model, batch=self.batch)


@runtime_checkable
class DecodesCodes(Protocol):
    """A model that finds the codes of an image in a completion, and decodes them."""

    def codes_in(self, ids: Sequence[int]) -> Int[Tensor, "h w"] | None:
        """None if there is no complete image."""
        ...

    def decode_codes(self, codes: Int[Tensor, "r h w"]) -> list[Image]: ...


class CodesDecoder:
    """Decodes ``batch`` images at once (implements ``retouch.protocols.Renderer``).

    A truncated completion, and one without a complete image, gives None, the policy's own fault.
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
