"""How little space a picture takes as a JPEG: DDPO's reward (arXiv 2305.13301), which anyone can verify."""

import io
from collections.abc import Mapping, Sequence

import torch
from PIL.Image import Image

from retouch.types import Column, Sample, Scores


class CompressibilityReward:
    """Column ``compressibility``, 0 to 1: 1 - bytes as a JPEG / bytes as pixels (3 each), and 0 where the JPEG is the larger.

    ``quality``: the JPEG's, 1 to 95. For pictures that are hard to compress give the column a negative weight. A sample without a
    picture is the policy's own fault: 0. ValueError: a quality out of range.
    """

    columns: Mapping[str, Column] = {"compressibility": Column(0.0, 1.0)}

    def __init__(self, *, quality: int = 95) -> None:
        if not 1 <= quality <= 95:
            raise ValueError(f"quality {quality}: a JPEG's is 1 to 95")
        self.quality = quality

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column as (b,), float32."""
        return {"compressibility": torch.tensor([0.0 if sample.image is None else self._saved(sample.image) for sample in samples])}

    def _saved(self, image: Image) -> float:
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "JPEG", quality=self.quality, optimize=False, subsampling="4:2:0")
        return max(0.0, 1 - buffer.tell() / (3 * image.width * image.height))
