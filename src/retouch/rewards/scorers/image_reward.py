"""ImageReward (arXiv 2304.05977): a BLIP that was tuned on people's rankings, through the package that its authors publish.

The package needs torchvision, so it cannot be installed beside a build of torch without it; it is imported when a reward is made.
"""

import contextlib
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from retouch.rewards.scorers.weights_folder import weights_digest
from retouch.types import Column, Sample, Scores

_RANGE = 10.0  # standard deviations of the model's own scale; pictures in use have -2.5 to 2.5


class ImageRewardScore:
    """Column ``image_reward``, -10 to 10: the model's standardised score of the picture for the instruction; outside it is cut.

    ``weights``: its checkpoint ``ImageReward.pt``, which the package reads with ``torch.load`` (take it from where you trust it);
    by default the published one, which the package downloads with its configuration into ``cache`` where it is not yet there.
    A score that is no number is NaN. A sample without a picture is the policy's own fault: -10.
    ValueError: the package is not installed, or there is no such file.
    """

    columns: Mapping[str, Column] = {"image_reward": Column(-_RANGE, _RANGE)}

    def __init__(
        self, weights: str | Path | None = None, *, cache: str | Path | None = None, device: torch.device | str = "cpu"
    ) -> None:
        if weights is not None and not Path(weights).is_file():
            raise ValueError(f"{weights} is no file; give ImageReward's checkpoint, ImageReward.pt")
        self._weights = weights
        package = _package()
        with contextlib.redirect_stdout(io.StringIO()):  # it prints
            self.model = package.load(
                "ImageReward-v1.0" if weights is None else str(weights),
                device=str(device),
                download_root=None if cache is None else str(cache),
            )

    @property
    def fingerprint(self) -> str:
        """The checkpoint; the published one is named by the package alone."""
        return "ImageReward-v1.0" if self._weights is None else f"weights {weights_digest(self._weights)}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column as (b,), float32."""
        return {"image_reward": torch.tensor([self._score(sample) for sample in samples], dtype=torch.float32)}

    @torch.no_grad()
    def _score(self, sample: Sample) -> float:
        """The package opens files, so the picture is handed over as one: a lossless one in memory."""
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
