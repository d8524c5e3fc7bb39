"""ImageReward (arXiv 2304.05977): a BLIP model that was fine-tuned on human rankings, used through its authors' package.

The package needs torchvision, so it cannot be installed next to a build of torch that has no matching torchvision. It is imported
when the model is loaded.
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

_RANGE = 10.0  # in standard deviations, the unit of the model's scores; typical images score -2.5 to 2.5


class ImageRewardScore(RewardSection):
    """ImageReward (arXiv 2304.05977): predicts which image people rank higher, through the authors' own package.

    Column ``image_reward``, -10 to 10: the model's standardised score of the image for the instruction, clamped; NaN if the
    score is not finite.

    Example::

        >>> retouch.rewards.ImageRewardScore().columns["image_reward"].high
        10.0
    """

    kind: Literal["image_reward"] = "image_reward"
    weights: PathText | None = None
    """Path of the checkpoint ``ImageReward.pt``, which the package reads with ``torch.load``: take it only from a source that you
    trust. null uses the published checkpoint; the package downloads it, with its configuration, if it is not in the cache."""
    cache: PathText | None = None
    """Folder in which the package keeps its downloads; null uses the package's default folder."""
    device: Device = None
    """Where the model runs; null takes the run's device."""

    columns: ClassVar[Mapping[str, Column]] = {"image_reward": Column(-_RANGE, _RANGE)}
    cli_key = "weights"

    def load(self, device: torch.device | str) -> Any:
        """Load the package's model. Raises ValueError if the package is not installed, or if the checkpoint does not exist."""
        if self.weights is not None and not Path(self.weights).is_file():
            raise ValueError(f"weights: {self.weights} is not a file; give the path of ImageReward's checkpoint, ImageReward.pt")
        package = _package()
        with contextlib.redirect_stdout(io.StringIO()):  # the package prints while it loads
            return package.load(
                "ImageReward-v1.0" if self.weights is None else self.weights, device=str(device), download_root=self.cache
            )

    @property
    def fingerprint(self) -> str:
        """Digest of the checkpoint; for the published checkpoint, its name in the package."""
        return "ImageReward-v1.0" if self.weights is None else f"weights {weights_digest(self.weights)}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A sample without an image scores -10."""
        import torch

        with torch.no_grad():
            return {"image_reward": torch.tensor([self._score(sample) for sample in samples], dtype=torch.float32)}

    def _score(self, sample: Sample) -> float:
        """Score one sample. The package takes a ``PIL.Image`` or the path of a file."""
        if sample.image is None:
            return -_RANGE
        score = float(self.model.score(sample.task.instruction, sample.image.convert("RGB")))
        return min(max(score, -_RANGE), _RANGE) if math.isfinite(score) else math.nan


def _package() -> Any:
    try:
        import ImageReward
    except ImportError as error:
        raise ValueError(
            f"ImageReward's package cannot be imported ({error}): pip install image-reward, and a torchvision that fits torch"
        ) from None
    return ImageReward
