"""From image tokens to pictures, through a frozen autoencoder of codes. A row without a whole picture is the policy's own fault."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int
from PIL.Image import Image
from torch import Tensor

from retouch.renderers.sampling import Completed
from retouch.types import Task


@runtime_checkable
class CodesModel(Protocol):
    """What finds the codes in a completion, and makes pictures of them."""

    def codes_in(self, ids: Sequence[int]) -> Int[Tensor, "h w"] | None:
        """None where there is no whole picture."""
        ...

    def decode_codes(self, codes: Int[Tensor, "r h w"]) -> list[Image]: ...


class CodesRenderer:
    """Decodes ``rows`` pictures at once (implements ``retouch.protocols.Renderer``). A completion that was cut off gives None."""

    def __init__(self, model: CodesModel, *, rows: int = 8) -> None:
        if rows < 1:
            raise ValueError(f"rows {rows}: give at least 1")
        self.model = model
        self.rows = rows

    @torch.no_grad()
    def __call__(self, tasks: Sequence[Task], trajectory: Completed) -> list[Image | None]:
        images: list[Image | None] = [None] * len(trajectory.outputs)
        drawn = []
        for row, output in enumerate(trajectory.outputs):
            codes = None if output.cut_off else self.model.codes_in(output.ids)
            if codes is not None:
                drawn.append((row, codes))
        for first in range(0, len(drawn), self.rows):
            part = drawn[first : first + self.rows]
            for (row, _), image in zip(part, self.model.decode_codes(torch.stack([codes for _, codes in part])), strict=True):
                images[row] = image
        return images
