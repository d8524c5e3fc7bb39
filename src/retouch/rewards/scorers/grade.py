"""The ``grade`` reward: closeness of the image to its source photograph after a colour grade, pixel by pixel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

from retouch.config.section import NonNegative, Share
from retouch.rewards.base import RewardSection, source_image
from retouch.rewards.scorers.photos import Colour, at_size
from retouch.rewards.scorers.pixels import LUMA, pixels_of_tasks, to_tensor
from retouch.types import Column, Sample, Scores, Task

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

_LEAST = 1e-8  # the gradient of a root is infinite at 0


class GradeReward(RewardSection):
    """Closeness of the image to its source photograph after a colour grade: other saturation, then a mix with a colour.

    Column ``closeness``, 0 to 1: 1 - the root mean squared difference between the pixel values of the image and of the graded
    source, which is resized to the size of the image (Lanczos). Every task must have a source image. The reward needs no model, and
    it is differentiable, for ``draft`` and ``refl``.

    Example::

        >>> reward = retouch.rewards.Grade(saturation=0)  # black and white
        >>> retouch.score(reward, image.convert("L").convert("RGB"), source=image)["closeness"] > 0.99
        True
    """

    kind: Literal["grade"] = "grade"
    saturation: NonNegative = 1.0
    """Factor of the saturation: 0 is black and white, 1 is unchanged, more is more colourful."""
    colour: Colour = (255, 255, 255)
    """The colour that is mixed in: red, green and blue, 0 to 255."""
    strength: Share = 0.0
    """The share of ``colour`` in the mix: 0 keeps the photograph, 1 is the colour alone."""

    columns: ClassVar[Mapping[str, Column]] = {"closeness": Column(0.0, 1.0)}
    needs_source = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A sample without an image scores 0.

        Raises ValueError if a task has no source image.
        """
        import torch

        scores = torch.zeros(len(samples))
        for row, sample in enumerate(samples):
            if sample.image is not None:
                image = to_tensor(sample.image).movedim(-1, 0)
                scores[row] = 1 - (image - self._graded(sample.task, sample.image.size)).square().mean().sqrt()
        return {"closeness": scores}

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """Return ``closeness``, with gradient in the images (``retouch.protocols.DifferentiableReward``).

        Raises ValueError if a task has no source image.
        """
        target = pixels_of_tasks(images, tasks, self._graded)
        return 1 - ((images - target).square().flatten(1).mean(dim=1) + _LEAST).sqrt()

    def _graded(self, task: Task, size: tuple[int, int]) -> Float[Tensor, "3 h w"]:
        """The source image of the task after the grade, at ``size`` (width, height), 0 to 1, float64."""
        import torch

        pixels = to_tensor(at_size(source_image(task), size))
        grey = (pixels @ torch.tensor(LUMA, dtype=pixels.dtype))[..., None]
        colourful = (grey + self.saturation * (pixels - grey)).clamp(0, 1)
        mixed: Tensor = torch.lerp(colourful, torch.tensor(self.colour, dtype=pixels.dtype) / 255, self.strength)
        return mixed.movedim(-1, 0)
