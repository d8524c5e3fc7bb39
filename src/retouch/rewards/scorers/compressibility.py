"""How small an image is as a JPEG: the compressibility reward of DDPO (arXiv 2305.13301), which anyone can verify."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from PIL.Image import Image
from pydantic import Field

from retouch.rewards.base import RewardSection
from retouch.types import Column, Sample, Scores


class CompressibilityReward(RewardSection):
    """How small the image is as a JPEG (DDPO, arXiv 2305.13301).

    Column ``compressibility``, 0 to 1: 1 - bytes as a JPEG / bytes as pixels (3 each), and 0 where the JPEG is the larger. To train
    for images that are hard to compress, give the column a negative weight.
    """

    kind: Literal["compressibility"] = "compressibility"
    quality: Annotated[int, Field(ge=1, le=95)] = 95
    """The JPEG's quality."""

    columns: ClassVar[Mapping[str, Column]] = {"compressibility": Column(0.0, 1.0)}

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column, (b,), float32. A sample without an image scores 0."""
        import torch

        return {"compressibility": torch.tensor([0.0 if sample.image is None else self._saved(sample.image) for sample in samples])}

    def _saved(self, image: Image) -> float:
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "JPEG", quality=self.quality, optimize=False, subsampling="4:2:0")
        return max(0.0, 1 - buffer.tell() / (3 * image.width * image.height))
