"""Statistics of images that need no judge: brightness, saturation, fine detail, and preservation of the protected area.

Reward hacking is often visible here first: all images become bright or oversaturated, or contain a pattern of single pixels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from PIL import Image

from retouch.rewards.base import RewardSection
from retouch.rewards.scorers.pixels import LUMA, to_tensor
from retouch.types import Column, Sample, Scores, Task

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class AppearanceReward(RewardSection):
    """Brightness, saturation, fine detail and preservation: columns for monitoring, not for training, each 0 to 1.

    ``brightness``: mean luminance. ``saturation``: mean of (max - min) / max over red, green and blue, 0 for black. ``detail``: the
    root mean square of the luminance's frequency components above half the Nyquist frequency along either axis; about 0.01 to 0.06
    for photographs, and 0.87 s for noise of standard deviation s. ``preservation``, a diagnostic: 1 - the mean absolute difference
    to the source image, over the area that ``task.mask`` protects (black; white marks the area to edit); NaN if there is no source
    image, no mask or no protected area.

    Example::

        >>> retouch.score(retouch.rewards.Appearance(), image)["saturation"]
        1.0
    """

    kind: Literal["appearance"] = "appearance"

    columns: ClassVar[Mapping[str, Column]] = {
        "brightness": Column(0.0, 1.0),
        "saturation": Column(0.0, 1.0),
        "detail": Column(0.0, 1.0),
        "preservation": Column(0.0, 1.0, diagnostic=True),
    }

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. A sample without an image scores 0."""
        import torch

        luma = torch.tensor(LUMA, dtype=torch.float64)
        table = torch.zeros(len(samples), len(self.columns), dtype=torch.float64)
        for row, sample in enumerate(samples):
            if sample.image is not None:
                pixels = to_tensor(sample.image)
                luminance = pixels @ luma
                kept = _preservation(sample.task, sample.image)
                table[row] = torch.stack([luminance.mean(), _saturation(pixels), _detail(luminance), kept])
        return {name: column.float().clamp(0, 1) for name, column in zip(self.columns, table.unbind(dim=1), strict=True)}


def _saturation(pixels: Float[Tensor, "h w 3"]) -> Float[Tensor, ""]:
    most, least = pixels.amax(dim=2), pixels.amin(dim=2)
    return ((most - least) / most.masked_fill(most == 0, 1)).mean()


def _detail(luminance: Float[Tensor, "h w"]) -> Float[Tensor, ""]:
    """Compute the column ``detail`` by Parseval's theorem: sqrt(sum of |F|^2 over the fine frequencies) / number of pixels."""
    import torch

    spectrum = torch.fft.fft2(luminance)
    down, across = (torch.fft.fftfreq(length, dtype=torch.float64).abs() > 0.25 for length in luminance.shape)
    fine = down[:, None] | across[None, :]
    return spectrum.abs().square()[fine].sum().sqrt() / luminance.numel()


def _preservation(task: Task, image: Image.Image) -> Float[Tensor, ""]:
    import torch

    missing = torch.tensor(float("nan"), dtype=torch.float64)
    if task.mask is None or not task.images:
        return missing
    source = task.images[0].convert("RGB")
    mask = task.mask.convert("L").resize(image.size, Image.Resampling.BOX)
    difference = (to_tensor(image) - to_tensor(source.resize(image.size, Image.Resampling.LANCZOS))).abs().mean(dim=2)
    weight = 1 - to_tensor(mask)[:, :, 0]
    return 1 - (weight * difference).sum() / weight.sum() if weight.sum() > 0 else missing
