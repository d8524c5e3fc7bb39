"""Rewards that use only pixels: the share of a colour, the closeness to a target image, and the size as a JPEG."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from PIL.Image import Image
from pydantic import Field

from retouch.rewards.base import RewardSection
from retouch.types import Column, Sample, Scores, Task

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

_CHANNELS = ("red", "green", "blue")
LUMA = (0.299, 0.587, 0.114)
"""The weights of red, green and blue in the luminance (ITU-R BT.601)."""


def to_tensor(image: Image) -> Float[Tensor, "h w 3"]:
    """Return red, green and blue of every pixel, 0 to 1, float64."""
    import numpy as np
    import torch

    pixels = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    return torch.from_numpy(pixels.astype(np.float64)) / 255


def pixels_of_tasks(
    images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task], pixels_of: Callable[[Task, tuple[int, int]], Float[Tensor, "3 h w"]]
) -> Float[Tensor, "r 3 h w"]:
    """Return ``pixels_of(task, (w, h))`` for the task of each image, with dtype and device of the images; once for equal tasks."""
    import torch

    height, width = images.shape[-2:]
    made = {key: pixels_of(task, (width, height)) for key, task in {id(task): task for task in tasks}.items()}
    return torch.stack([made[id(task)] for task in tasks]).to(images)


class ShareReward(RewardSection):
    """The share of one colour channel in the image.

    Column ``share``, 0 to 1: the mean over the pixels of channel / (red + green + blue); a black pixel counts as 1/3.

    Example::

        >>> retouch.score(retouch.rewards.Share(channel="red"), image)
        {'share': 1.0}
    """

    kind: Literal["share"] = "share"
    channel: Literal["red", "green", "blue"] = "red"
    """The colour channel."""

    columns: ClassVar[Mapping[str, Column]] = {"share": Column(0.0, 1.0)}
    cli_key = "channel"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A sample without an image scores 0."""
        import torch

        shares = [0.0 if sample.image is None else float(self._share(sample.image)) for sample in samples]
        return {"share": torch.tensor(shares, dtype=torch.float32)}

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """Return ``share``, with gradient in the images (``retouch.protocols.DifferentiableReward``)."""
        return self._shares(images.movedim(1, -1)).flatten(1).mean(dim=1)

    def _share(self, image: Image) -> Float[Tensor, ""]:
        return self._shares(to_tensor(image)).mean()

    def _shares(self, pixels: Float[Tensor, "*r h w 3"]) -> Float[Tensor, "*r h w"]:
        """Return the share of the channel in each pixel."""
        light = pixels.sum(dim=-1)
        share = pixels[..., _CHANNELS.index(self.channel)] / light.masked_fill(light == 0, 1)
        return share.masked_fill(light == 0, 1 / 3)


class TargetReward(RewardSection):
    """Closeness of the image to the task's target image, pixel by pixel. Every task must have a target image.

    Column ``closeness``, 0 to 1: 1 - the mean squared difference between the pixel values of the image and of the target, which is
    resized to the size of the image (Lanczos). Use it for tasks with one correct answer, such as the tasks of the playground. The
    reward is differentiable, for ``draft`` and ``refl``.

    Example::

        >>> retouch.score(retouch.rewards.Target(), image, target=image)
        {'closeness': 1.0}
    """

    kind: Literal["target"] = "target"

    columns: ClassVar[Mapping[str, Column]] = {"closeness": Column(0.0, 1.0)}
    needs_target = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A sample without an image scores 0."""
        import torch

        scores = torch.zeros(len(samples))
        for row, sample in enumerate(samples):
            if sample.image is not None:
                image = to_tensor(sample.image).movedim(-1, 0)
                scores[row] = self.score_tensors(image[None], [sample.task])[0]
        return {"closeness": scores}

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """Return ``closeness``, with gradient in the images (``retouch.protocols.DifferentiableReward``).

        Raises ValueError if a task has no target image.
        """
        target = pixels_of_tasks(images, tasks, self._target)
        return 1 - (images - target).square().flatten(1).mean(dim=1)

    @staticmethod
    def _target(task: Task, size: tuple[int, int]) -> Float[Tensor, "3 h w"]:
        from PIL.Image import Resampling

        if task.target is None:
            raise ValueError(f"task {task.id!r} has no target image, which the target reward needs; use data with target images")
        target = task.target if task.target.size == size else task.target.resize(size, Resampling.LANCZOS)
        return to_tensor(target).movedim(-1, 0)


class CompressibilityReward(RewardSection):
    """JPEG compressibility of the image (DDPO, arXiv 2305.13301).

    Column ``compressibility``, 0 to 1: 1 - bytes of the JPEG / bytes of the raw pixels (3 per pixel); 0 if the JPEG is larger. To
    train for images that are hard to compress, give the column a negative weight.

    Example::

        >>> retouch.score(retouch.rewards.Compressibility(), image.resize((256, 256)))["compressibility"] > 0.9
        True
    """

    kind: Literal["compressibility"] = "compressibility"
    quality: Annotated[int, Field(ge=1, le=95)] = 95
    """Quality of the JPEG."""

    columns: ClassVar[Mapping[str, Column]] = {"compressibility": Column(0.0, 1.0)}

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A sample without an image scores 0."""
        import torch

        return {"compressibility": torch.tensor([0.0 if sample.image is None else self._saved(sample.image) for sample in samples])}

    def _saved(self, image: Image) -> float:
        buffer = io.BytesIO()
        image.convert("RGB").save(buffer, "JPEG", quality=self.quality, optimize=False, subsampling="4:2:0")
        return max(0.0, 1 - buffer.tell() / (3 * image.width * image.height))
