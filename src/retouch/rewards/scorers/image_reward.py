"""ImageReward (arXiv 2304.05977): a BLIP that was tuned on people's rankings, through the package that its authors publish.

The package needs torchvision, so it cannot be installed beside a build of torch without it; it is imported when the model is
loaded.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from retouch.rewards.base import RewardSection
from retouch.rewards.facts import Device, PathText
from retouch.rewards.weights import weights_digest
from retouch.types import Column, Sample, Scores

if TYPE_CHECKING:
    import torch

_RANGE = 10.0  # standard deviations of the model's own scale; images in use score -2.5 to 2.5


class ImageRewardScore(RewardSection):
    """ImageReward (arXiv 2304.05977): which image people rank higher, through the authors' own package.

    Column ``image_reward``, -10 to 10: the model's standardised score of the image for the instruction, clamped; NaN if the
    score is not finite.

    Example::

        >>> retouch.rewards.ImageRewardScore().columns["image_reward"].high
        10.0
    """

    kind: Literal["image_reward"] = "image_reward"
    weights: PathText | None = None
    """Its checkpoint ``ImageReward.pt``, which the package reads with ``torch.load`` (take it from where you trust it); null takes
    the published one, which the package downloads with its configuration where it is not there yet."""
    cache: PathText | None = None
    """Folder in which the package keeps what it downloads; null takes its own."""
    device: Device = None
    """Where the model runs; null takes the run's device."""

    columns: ClassVar[Mapping[str, Column]] = {"image_reward": Column(-_RANGE, _RANGE)}
    shorthand = "weights"

    def load(self, device: torch.device | str) -> Any:
        """The package's model. ValueError: the package is not installed, or there is no such file."""
        if self.weights is not None and not Path(self.weights).is_file():
            raise ValueError(f"{self.weights} is no file; give ImageReward's checkpoint, ImageReward.pt")
        package = _package()
        with contextlib.redirect_stdout(io.StringIO()):  # it prints
            return package.load(
                "ImageReward-v1.0" if self.weights is None else self.weights, device=str(device), download_root=self.cache
            )

    @property
    def fingerprint(self) -> str:
        """The checkpoint; the published one is named by the package alone."""
        return "ImageReward-v1.0" if self.weights is None else f"weights {weights_digest(self.weights)}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column, (b,), float32. A sample without an image scores -10."""
        import torch

        with torch.no_grad():
            return {"image_reward": torch.tensor([self._score(sample) for sample in samples], dtype=torch.float32)}

    def _score(self, sample: Sample) -> float:
        """The package opens files, so the image is handed over as one: a lossless one in memory."""
        if sample.image is None:
            return -_RANGE
        file = io.BytesIO()
        sample.image.convert("RGB").save(file, "PNG", compress_level=1)
        file.seek(0)
        score = float(self.model.score(sample.task.instruction, file))
        return min(max(score, -_RANGE), _RANGE) if math.isfinite(score) else math.nan


def _package() -> Any:
    try:
        import ImageReward
    except ImportError as error:
        raise ValueError(
            f"ImageReward's package cannot be imported ({error}): pip install image-reward, beside a torchvision that fits torch"
        ) from None
    return ImageReward
