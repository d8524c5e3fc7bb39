"""Rewards that use only pixels: a colour, the target, the size as a JPEG, the source's structure, appearance, and colour grades.

Images are (h, w, 3), 0 to 1, float64. They are scored one at a time, so that a score does not depend on the rest of the batch.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from PIL import Image
from pydantic import Field

from retouch.config.section import Count, NonNegative, Share
from retouch.rewards.base import RewardSection, score_images, source_image
from retouch.types import Column, Json, Sample, Scores, Task

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

_CHANNELS = ("red", "green", "blue")
LUMA = (0.299, 0.587, 0.114)
"""The weights of red, green and blue in the luminance (ITU-R BT.601)."""


def to_tensor(image: Image.Image) -> Float[Tensor, "h w 3"]:
    """Return red, green and blue of every pixel, 0 to 1, float64."""
    import torch

    pixels = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3).double() / 255


def pixels_of_tasks(
    images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task], pixels_of: Callable[[Task, tuple[int, int]], Float[Tensor, "3 h w"]]
) -> Float[Tensor, "r 3 h w"]:
    """Return ``pixels_of(task, (w, h))`` for the task of each image, with dtype and device of the images; once for equal tasks."""
    height, width = images.shape[-2:]
    made = {key: pixels_of(task, (width, height)) for key, task in {id(task): task for task in tasks}.items()}
    pixels = images.new_empty(images.shape)
    for row, task in enumerate(tasks):
        pixels[row] = made[id(task)]
    return pixels


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
        return {"share": score_images(samples, lambda task, image: self._shares(to_tensor(image)).mean())}

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """Return ``share``, with gradient in the images (``retouch.protocols.DifferentiableReward``)."""
        return self._shares(images.movedim(1, -1)).flatten(1).mean(dim=1)

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
        return {
            "closeness": score_images(
                samples, lambda task, image: self.score_tensors(to_tensor(image).movedim(-1, 0)[None], [task])[0]
            )
        }

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """Return ``closeness``, with gradient in the images (``retouch.protocols.DifferentiableReward``).

        Raises ValueError if a task has no target image.
        """
        target = pixels_of_tasks(images, tasks, self._target)
        return 1 - (images - target).square().flatten(1).mean(dim=1)

    @staticmethod
    def _target(task: Task, size: tuple[int, int]) -> Float[Tensor, "3 h w"]:
        if task.target is None:
            raise ValueError(f"task {task.id!r} has no target image, which the target reward needs; use data with target images")
        target = task.target if task.target.size == size else task.target.resize(size, Image.Resampling.LANCZOS)
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

        def saved(task: Task, image: Image.Image) -> float:
            buffer = io.BytesIO()
            image.convert("RGB").save(buffer, "JPEG", quality=self.quality, optimize=False, subsampling="4:2:0")
            return max(0.0, 1 - buffer.tell() / (3 * image.width * image.height))

        return {"compressibility": score_images(samples, saved)}


Byte: TypeAlias = Annotated[int, Field(ge=0, le=255)]
Colour: TypeAlias = tuple[Byte, Byte, Byte]

CONTRAST_FLOOR = 0.03  # the noise of an autoencoder, about 4 of 255, must not count as structure
FLOOR = 0.02
_COLOURS: dict[str, Json] = {
    "red": [255, 0, 0],
    "green": [0, 255, 0],
    "blue": [0, 0, 255],
    "white": [255, 255, 255],
    "black": [0, 0, 0],
}


class PhotosReward(RewardSection):
    """Preservation of the source image, times closeness to a colour. Columns, each 0 to 1:

    ``preservation``: 1 - sqrt(1 - max(r, 0)), where r = (mean n m + e) / sqrt((mean n^2 + e) (mean m^2 + e)), e = 0.02, is the
    correlation of the luminance structure of the image, n, with the structure of its source, m: sqrt(1 - r) is their RMS distance
    at equal strength. Structure is (luminance - local mean) / (local standard deviation + 0.03), where local means a box of about
    an eighth of the shorter side. The column is exactly 1 for an unchanged image, slightly lower after a change of all colours, and
    near 0 for a flat or an unrelated image. ``colour``: 1 - d / d_max, where d is the distance of the mean colour to ``colour``,
    and d_max the distance of ``colour`` to the farthest corner of the colour cube. ``reward``: preservation ** preserve * colour.

    Example::

        >>> reward = retouch.rewards.Photos(colour=(255, 0, 0))
        >>> round(retouch.score(reward, image, source=image)["reward"], 3)
        1.0
    """

    kind: Literal["photos"] = "photos"
    colour: Colour
    """Target colour: red, green and blue, 0 to 255."""
    preserve: NonNegative = 1.0
    """Exponent of the preservation: 0 ignores the source image; a higher value preserves more of it."""
    side: Count | None = Field(default=None, exclude_if=lambda side: side is None)
    """Both images are shrunk to this many pixels on the shorter side before their structures are compared, so that the layout
    counts and fine detail does not; null compares the structures at the size of the image."""

    columns: ClassVar[Mapping[str, Column]] = {
        "preservation": Column(0.0, 1.0),
        "colour": Column(0.0, 1.0),
        "reward": Column(0.0, 1.0),
    }
    cli_key = "colour"
    needs_source = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. A sample without an image scores 0.

        A source image of another size is resized to the size of the image. Raises ValueError if a task has no source image.
        """
        import torch

        table = torch.zeros(len(samples), 2, dtype=torch.float64)
        for row, sample in enumerate(samples):
            source = source_image(sample.task)
            if sample.image is not None:
                before, after = (self._structure(each) for each in (at_size(source, sample.image.size), sample.image))
                energy = (before.square().mean() + FLOOR) * (after.square().mean() + FLOOR)
                correlation = ((before * after).mean() + FLOOR) / energy.sqrt()
                table[row, 0] = 1 - (1 - correlation).clamp(0, 1).sqrt()
                pixels = to_tensor(sample.image)
                wanted = pixels.new_tensor(self.colour) / 255
                distance = (pixels.mean(dim=(0, 1)) - wanted).norm()
                table[row, 1] = 1 - (distance / wanted.maximum(1 - wanted).norm()).clamp(max=1)
        preservation, colour = table.unbind(dim=1)
        scores = {"preservation": preservation, "colour": colour, "reward": preservation**self.preserve * colour}
        return {name: column.float() for name, column in scores.items()}

    @classmethod
    def from_cli(cls, argument: str) -> Json:
        """Parse a colour: a name or ``#rrggbb``. Raises ValueError for other texts."""
        if re.fullmatch(r"#[0-9a-fA-F]{6}", argument):
            return list(bytes.fromhex(argument[1:]))
        if argument not in _COLOURS:
            raise ValueError(f"photos:{argument}: give a colour: {', '.join(_COLOURS)}, or #rrggbb")
        return _COLOURS[argument]

    def _structure(self, image: Image.Image) -> Float[Tensor, "h w"]:
        """The luminance of the image, which is first shrunk to ``side``, without its local mean and in units of its contrast."""
        if self.side is not None and self.side < min(image.size):
            width, height = (max(1, round(length * self.side / min(image.size))) for length in image.size)
            image = image.convert("RGB").resize((width, height), Image.Resampling.BOX)
        pixels = to_tensor(image)
        luminance = pixels @ pixels.new_tensor(LUMA)
        radius = max(1, min(luminance.shape) // 16)
        mean = _local_mean(luminance, radius)
        variance = (_local_mean(luminance.square(), radius) - mean.square()).clamp(min=0)
        return (luminance - mean) / (variance.sqrt() + CONTRAST_FLOOR)


def at_size(source: Image.Image, size: tuple[int, int]) -> Image.Image:
    """The source image at ``size`` (width, height), resized with Lanczos if it has another size."""
    return source if source.size == size else source.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def _local_mean(values: Float[Tensor, "h w"], radius: int) -> Float[Tensor, "h w"]:
    """Return the mean over the box of (2 radius + 1)^2 pixels around each pixel; pixels outside the image do not count."""
    import torch

    for axis in (0, 1):
        length = values.shape[axis]
        place = torch.arange(length)
        low, high = (place - radius).clamp(min=0), (place + radius + 1).clamp(max=length)
        total = torch.nn.functional.pad(values.cumsum(dim=axis), (1, 0) if axis else (0, 0, 1, 0))
        count = (high - low).view((-1, 1) if axis == 0 else (1, -1))
        values = (total.index_select(axis, high) - total.index_select(axis, low)) / count
    return values


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

        table = torch.zeros(len(samples), len(self.columns), dtype=torch.float64)
        for row, sample in enumerate(samples):
            task, image = sample.task, sample.image
            if image is not None:
                pixels = to_tensor(image)
                luminance = pixels @ pixels.new_tensor(LUMA)
                most, least = pixels.amax(dim=2), pixels.amin(dim=2)
                # Parseval's theorem: sqrt(sum of |F|^2 over the fine frequencies) / number of pixels
                spectrum = torch.fft.fft2(luminance)
                down, across = (torch.fft.fftfreq(length, dtype=torch.float64).abs() > 0.25 for length in luminance.shape)
                fine = down[:, None] | across[None, :]
                table[row, 0] = luminance.mean()
                table[row, 1] = ((most - least) / most.masked_fill(most == 0, 1)).mean()
                table[row, 2] = spectrum.abs().square()[fine].sum().sqrt() / luminance.numel()
                table[row, 3] = math.nan
                if task.mask is not None and task.images:
                    weight = 1 - to_tensor(task.mask.convert("L").resize(image.size, Image.Resampling.BOX))[:, :, 0]
                    source = to_tensor(task.images[0].convert("RGB").resize(image.size, Image.Resampling.LANCZOS))
                    if weight.sum() > 0:
                        table[row, 3] = 1 - (weight * (pixels - source).abs().mean(dim=2)).sum() / weight.sum()
        return {name: column.float().clamp(0, 1) for name, column in zip(self.columns, table.unbind(dim=1), strict=True)}


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

        def closeness(task: Task, image: Image.Image) -> Float[Tensor, ""]:
            return 1 - (to_tensor(image).movedim(-1, 0) - self._graded(task, image.size)).square().mean().sqrt()

        return {"closeness": score_images(samples, closeness)}

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """Return ``closeness``, with gradient in the images (``retouch.protocols.DifferentiableReward``).

        Raises ValueError if a task has no source image.
        """
        target = pixels_of_tasks(images, tasks, self._graded)
        return 1 - ((images - target).square().flatten(1).mean(dim=1) + _LEAST).sqrt()

    def _graded(self, task: Task, size: tuple[int, int]) -> Float[Tensor, "3 h w"]:
        """The source image of the task after the grade, at ``size`` (width, height), 0 to 1, float64."""
        pixels = to_tensor(at_size(source_image(task), size))
        grey = (pixels @ pixels.new_tensor(LUMA))[..., None]
        colourful = (grey + self.saturation * (pixels - grey)).clamp(0, 1)
        return colourful.lerp(pixels.new_tensor(self.colour) / 255, self.strength).movedim(-1, 0)
