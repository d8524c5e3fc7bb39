"""Rewards by the features of DINOv2 (arXiv 2304.07193): preservation of the source image, and the style of a reference image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from PIL import Image

from retouch.config.section import Count
from retouch.records.files import read_json
from retouch.rewards.base import ModelReward, PathText, source_image
from retouch.rewards.weights import weights_digest, weights_folder
from retouch.types import Column, Sample, Scores, Task

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor

_MEAN = (0.485, 0.456, 0.406)  # ImageNet statistics, with which DINOv2 was trained
_STD = (0.229, 0.224, 0.225)


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

    def load(self, device: torch.device | str) -> Any:
        """Load the model, frozen, in fp32.

        Raises ValueError if there are no DINOv2 weights, or if ``size`` is not a multiple of the patch size.
        """
        import torch
        from transformers import Dinov2Config, Dinov2Model

        folder = weights_folder(self.path)
        config = Dinov2Config.from_pretrained(folder, local_files_only=True)
        if config.model_type != "dinov2" or self.size % config.patch_size:
            raise ValueError(
                f"{self.path}, size {self.size}: give a DINOv2 model and a multiple of its patch size of {config.patch_size} pixels"
            )
        model = Dinov2Model.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=torch.float32)
        return model.requires_grad_(False).eval().to(device)

    @property
    def fingerprint(self) -> str:
        """Digest of the model's weights, and the image size."""
        return f"weights {weights_digest(weights_folder(self.path))}, size {self.size}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A sample without an image scores 0. The source image of a task is encoded once.

        Raises ValueError if a task has no source image.
        """
        import torch

        scores = torch.zeros(len(samples))
        sources: dict[int, Tensor] = {}
        for row, sample in enumerate(samples):
            source = source_image(sample.task)
            if sample.image is None:
                continue
            if id(source) not in sources:
                sources[id(source)] = self._patches(source)
            cosine = (sources[id(source)] * self._patches(sample.image)).sum(dim=1).clamp(0, 1)
            weight = self._kept(sample.task)
            scores[row] = (weight * cosine).sum() / weight.sum() if weight.sum() > 0 else 1.0
        return {"preservation": scores.clamp(0, 1)}

    def _patches(self, image: Image.Image) -> Float[Tensor, "n d"]:
        """Return a unit vector for each patch, in row-major order."""
        import torch

        pixels = normalised_pixels([image], self.size).to(self.model.device)
        with torch.no_grad():
            features = self.model(pixel_values=pixels).last_hidden_state[0, 1:]
            return torch.nn.functional.normalize(features.double(), dim=1).cpu()

    def _kept(self, task: Task) -> Float[Tensor, " n"]:
        """Return the share of each patch that the mask protects, 0 to 1."""
        import numpy as np
        import torch

        grid = self.size // self.model.config.patch_size
        if task.mask is None:
            return torch.ones(grid**2, dtype=torch.float64)
        small = task.mask.convert("L").resize((grid, grid), Image.Resampling.BOX)
        return 1 - torch.from_numpy(np.asarray(small).astype(np.float64)).flatten() / 255


def normalised_pixels(images: Sequence[Image.Image], size: int) -> Float[Tensor, "n 3 s s"]:
    """Resize images to ``size`` pixels a side (bicubic), and normalise them with ImageNet's mean and standard deviation."""
    import numpy as np
    import torch

    small = [image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC) for image in images]
    pixels = torch.from_numpy(np.stack([np.asarray(image).astype(np.float32) for image in small]))
    return ((pixels / 255 - torch.tensor(_MEAN)) / torch.tensor(_STD)).permute(0, 3, 1, 2)


_ROWS = 16
_SIZE = 224  # pixels a side for DINOv2


class StyleEncoder(Protocol):
    """A model that turns images into vectors."""

    def images(self, images: Sequence[Image.Image]) -> Float[Tensor, "n d"]:
        """Return a unit vector for each image."""
        ...


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

    def load(self, device: torch.device | str) -> StyleEncoder:
        """Load the encoder, frozen, in fp32. Raises ValueError if there are no weights, or if the model is of another type."""
        return open_encoder(self.path, device=device)

    @property
    def fingerprint(self) -> str:
        """Digest of the encoder's weights, and the value of ``where``."""
        return f"weights {weights_digest(weights_folder(self.path))}, {self.where}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A sample without an image scores 0.

        Raises ValueError if a task has no reference, or if ``where`` is ``mask`` and a task has no mask.
        """
        import torch

        scores = torch.zeros(len(samples))
        references = {id(sample.task): _reference(sample.task) for sample in samples}
        rows = [(row, sample.task, sample.image) for row, sample in enumerate(samples) if sample.image is not None]
        if rows:
            made = self.model.images([self._part(task, image) for _, task, image in rows])
            distinct = list(references)
            wanted = dict(zip(distinct, self.model.images([references[task] for task in distinct]), strict=True))
            for (row, task, _), vector in zip(rows, made, strict=True):
                scores[row] = (vector * wanted[id(task)]).sum().clamp(0, 1)
        return {"style": scores}

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
    from retouch.core.measures import frechet_distance

    return frechet_distance(*dinov2_features(images, references, path=path, device=device))


def dinov2_features(
    *sets: Sequence[Image.Image], path: str = "facebook/dinov2-base", device: torch.device | str = "cpu"
) -> list[Float[Tensor, "n d"]]:
    """Return DINOv2's class tokens of each set of images, in fp32 on the CPU. ``path`` and errors are those of
    ``distance_of_sets``."""
    encoder = _Dino(path, device=device)
    return [encoder.states(images) for images in sets]


def open_encoder(path: str, *, device: torch.device | str) -> StyleEncoder:
    """Load DINOv2, CLIP or SigLIP from a folder or the Hugging Face cache. Raises ValueError if there are no weights, or if the
    model is of another type."""
    kind = read_json(weights_folder(path) / "config.json").get("model_type")
    if kind == "dinov2":
        return _Dino(path, device=device)
    from retouch.rewards.scorers.dual_encoder import DualEncoder

    return DualEncoder(path, device=device)


class _Dino:
    """Encodes images with DINOv2: the class token after the final norm."""

    def __init__(self, path: str, *, device: torch.device | str) -> None:
        self._model = DinoReward(path=path, size=_SIZE).load(device)

    def images(self, images: Sequence[Image.Image]) -> Float[Tensor, "n d"]:
        """Return a unit vector for each image."""
        import torch

        return torch.nn.functional.normalize(self.states(images), dim=1)

    def states(self, images: Sequence[Image.Image]) -> Float[Tensor, "n d"]:
        """Return the class token of each image, in fp32 on the CPU."""
        import torch

        found = []
        for first in range(0, len(images), _ROWS):
            pixels = normalised_pixels(images[first : first + _ROWS], _SIZE)
            with torch.no_grad():
                found.append(self._model(pixel_values=pixels.to(self._model.device)).last_hidden_state[:, 0].float().cpu())
        return torch.cat(found)


def _reference(task: Task) -> Image.Image:
    if task.reference is None:
        raise ValueError(f"task {task.id!r} has no reference image, which the style reward needs; use data with references")
    return task.reference
