"""LPIPS (arXiv 1801.03924, version 0.1 on AlexNet): the perceptual distance of two images in the features of a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from PIL import Image
from pydantic import Field

from retouch.rewards.base import Device, LoadedModel, PathText, RewardSection, score_images, source_image
from retouch.rewards.weights import weights_digest
from retouch.types import Column, Sample, Scores

if TYPE_CHECKING:
    import torch

    from retouch.rewards.scorers.networks import Lpips as Network


class LpipsReward(RewardSection):
    """Preservation of the source image outside the mask, by LPIPS (arXiv 1801.03924, version 0.1 on AlexNet).

    Column ``preservation``, 0 to 1: max(0, 1 - d), where d is the LPIPS distance of the image to its source; 1 if they are equal.
    The weight of a location of a feature map is the share of it that ``task.mask`` protects (black; white marks the area to edit).
    The score is 1 if the mask protects nothing.

    Example::

        >>> list(retouch.rewards.Lpips(weights="/models/lpips.safetensors").columns)
        ['preservation']
    """

    kind: Literal["lpips"] = "lpips"
    weights: PathText
    """A safetensors file with AlexNet's features (``features.<n>.weight`` and ``.bias`` of torchvision) and the linear layers of
    LPIPS (``lin<k>.model.1.weight`` of the package lpips). Both are published as pickles: convert them if you trust the source."""
    size: Annotated[int, Field(ge=64)] = 256
    """Side in pixels to which both images are resized (bicubic); below 64, the last feature map would be empty."""
    device: Device = None
    """Where the model runs; null takes the run's device."""

    columns: ClassVar[Mapping[str, Column]] = {"preservation": Column(0.0, 1.0)}
    cli_key = "weights"
    needs_source = True

    def load(self, device: torch.device | str) -> Network:
        """Load the network. Raises ValueError if the file does not exist or does not contain these weights."""
        from retouch.rewards.scorers.networks import Lpips

        return Lpips(self.weights, size=self.size, device=device)

    @property
    def fingerprint(self) -> str:
        """Digest of the network's weights, and the image size."""
        return f"weights {weights_digest(self.weights)}, size {self.size}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A sample without an image scores 0.

        Raises ValueError if a task has no source image.
        """
        sources = {id(sample.task): source_image(sample.task) for sample in samples}
        kept = score_images(samples, lambda task, image: 1 - self.distance(sources[id(task)], image, task.mask))
        return {"preservation": kept.clamp(0, 1)}

    def distance(self, a: Image.Image, b: Image.Image, mask: Image.Image | None = None) -> float:
        """Return the LPIPS distance, 0 for equal images: the sum over layers of the mean over locations of the weighted squared
        difference of unit features. ``mask``: white marks locations that do not count."""
        distance: float = self.model.distance(a, b, mask)
        return distance

    def loaded_models(self) -> Iterator[LoadedModel]:
        """Yield AlexNet with the linear layers; their sizes are known."""
        yield LoadedModel(self.kind, "float32", self.device)
