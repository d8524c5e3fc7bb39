"""Rewards by the features of a network: preservation of the source image, by DINOv2 (arXiv 2304.07193) or LPIPS (arXiv 1801.03924),
and the style of a reference image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from PIL import Image
from pydantic import Field

from retouch.config.section import Count
from retouch.records.files import read_json
from retouch.rewards.base import Device, LoadedModel, PathText, RewardSection, score_images, source_image
from retouch.types import Column, Sample, Scores, Task
from retouch_rewards.weights import ModelReward, weights_digest, weights_folder

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor

    from retouch_rewards.networks import Dino, DualEncoder, Lpips


class DinoReward(ModelReward):
    """Preservation of the source image outside the mask, measured with the features of DINOv2 (arXiv 2304.07193).

    Column ``preservation``, 0 to 1: the mean over patches of max(cosine, 0) between the features of the image and of its source.
    The weight of a patch is the share of the patch that ``task.mask`` protects (black; white marks the area to edit). Without a
    mask, all patches have the same weight, so that the requested edit lowers the score. The score is exactly 1 for an unchanged
    image, and if the mask protects nothing.

    Example::

        >>> retouch.rewards.Dino(size=448).path
        'facebook/dinov2-base'
    """

    kind: Literal["dino"] = "dino"
    path: PathText = "facebook/dinov2-base"
    """Folder of the weights, or their id in the Hugging Face cache."""
    size: Count = 224
    """Side in pixels to which both images are resized (bicubic); a multiple of the model's patch size."""

    columns: ClassVar[Mapping[str, Column]] = {"preservation": Column(0.0, 1.0)}
    needs_source = True

    def load(self, device: torch.device | str) -> Dino:
        """Load the model, frozen, in fp32.

        Raises ValueError if there are no DINOv2 weights, or if ``size`` is not a multiple of the patch size.
        """
        from retouch_rewards.networks import Dino

        return Dino(self.path, size=self.size, device=device)

    @property
    def fingerprint(self) -> str:
        """Digest of the model's weights, and the image size."""
        return f"weights {weights_digest(weights_folder(self.path))}, size {self.size}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A sample without an image scores 0. The source image of a task is encoded once.

        Raises ValueError if a task has no source image.
        """
        from retouch_rewards.networks import unmasked_share

        sources = {id(sample.task): source_image(sample.task) for sample in samples}
        features: dict[int, Tensor] = {}

        def score(task: Task, image: Image.Image) -> Float[Tensor, ""] | float:
            source = sources[id(task)]
            if id(source) not in features:
                features[id(source)] = self.model.patches(source)
            cosine = (features[id(source)] * self.model.patches(image)).sum(dim=1).clamp(0, 1)
            weight = unmasked_share(task.mask, (self.model.grid, self.model.grid), cosine.dtype).flatten()
            return (weight * cosine).sum() / weight.sum() if weight.sum() > 0 else 1.0

        return {"preservation": score_images(samples, score).clamp(0, 1)}


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

    def load(self, device: torch.device | str) -> Lpips:
        """Load the network. Raises ValueError if the file does not exist or does not contain these weights."""
        from retouch_rewards.networks import Lpips

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


class StyleReward(ModelReward):
    """Similarity of the image to the task's reference: the cosine of their embeddings by CLIP's image encoder (CLIP-I) or of
    DINOv2's class tokens (DINO score; both as in DreamBooth, arXiv 2208.12242).

    Column ``style``, 0 to 1: max(cosine, 0).

    Example::

        >>> retouch.rewards.Style(path="openai/clip-vit-large-patch14", where="mask").where
        'mask'
    """

    kind: Literal["style"] = "style"
    path: PathText = "facebook/dinov2-base"
    """Folder of the weights of DINOv2, CLIP or SigLIP, or their id in the Hugging Face cache; nothing is downloaded."""
    where: Literal["picture", "mask"] = "picture"
    """Compare the whole image (``picture``), or the bounding box of the white part of ``task.mask`` (``mask``), for example if only
    the words in the mask must have the style of the reference."""

    columns: ClassVar[Mapping[str, Column]] = {"style": Column(0.0, 1.0)}

    def load(self, device: torch.device | str) -> Dino | DualEncoder:
        """Load the encoder, frozen, in fp32. Raises ValueError if there are no weights, or if the model is of another type."""
        from retouch_rewards.networks import Dino, DualEncoder

        kind = read_json(weights_folder(self.path) / "config.json").get("model_type")
        return (Dino if kind == "dinov2" else DualEncoder)(self.path, device=device)

    @property
    def fingerprint(self) -> str:
        """Digest of the encoder's weights, and the value of ``where``."""
        return f"weights {weights_digest(weights_folder(self.path))}, {self.where}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A sample without an image scores 0.

        Raises ValueError if a task has no reference, or if ``where`` is ``mask`` and a task has no mask.
        """
        references = {id(sample.task): _reference(sample.task) for sample in samples}
        drawn = [(sample.task, sample.image) for sample in samples if sample.image is not None]
        if not drawn:
            return {"style": score_images(samples, lambda task, image: 0.0)}
        made = iter(self.model.images([self._part(task, image) for task, image in drawn]))
        wanted = dict(zip(references, self.model.images(list(references.values())), strict=True))
        return {"style": score_images(samples, lambda task, image: (next(made) * wanted[id(task)]).sum().clamp(0, 1))}

    def _part(self, task: Task, image: Image.Image) -> Image.Image:
        if self.where == "picture":
            return image
        if task.mask is None:
            raise ValueError(f"task {task.id!r} has no mask, and where: 'mask' compares the style inside it; use where: 'picture'")
        box = task.mask.convert("L").resize(image.size, Image.Resampling.NEAREST).point(lambda value: 255 * (value > 127)).getbbox()
        return image if box is None else image.crop(box)


def distance_of_sets(
    images: Sequence[Image.Image],
    references: Sequence[Image.Image],
    *,
    path: str = "facebook/dinov2-base",
    device: torch.device | str = "cpu",
) -> float:
    """Return the Fréchet distance of two sets of images in the features of DINOv2 (FD-DINOv2, arXiv 2306.04675): FID with DINOv2
    instead of Inception.

    The distance is 0 for equal sets and has no upper bound. It depends on the number of images, so it cannot be a reward of single
    images. ``path``: folder of a DINOv2 model, or its id in the Hugging Face cache. Raises ValueError if a set has fewer than two
    images, or if the model is not DINOv2.
    """
    from retouch_rewards.measures import frechet_distance

    return frechet_distance(*dinov2_features(images, references, path=path, device=device))


def dinov2_features(
    *sets: Sequence[Image.Image], path: str = "facebook/dinov2-base", device: torch.device | str = "cpu"
) -> list[Float[Tensor, "n d"]]:
    """Return DINOv2's class tokens of each set of images, in fp32 on the CPU. ``path`` and errors are those of
    ``distance_of_sets``."""
    from retouch_rewards.networks import Dino

    encoder = Dino(path, device=device)
    return [encoder.states(images) for images in sets]


def _reference(task: Task) -> Image.Image:
    if task.reference is None:
        raise ValueError(f"task {task.id!r} has no reference image, which the style reward needs; use data with references")
    return task.reference
