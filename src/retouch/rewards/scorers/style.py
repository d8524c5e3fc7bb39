"""Similarity of whole images in the features of CLIP, SigLIP or DINOv2: to a style reference, and of a set of images to another."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

from PIL import Image

from retouch.rewards.base import ModelReward
from retouch.rewards.facts import PathText
from retouch.rewards.scorers.dino import DinoReward, normalised_pixels
from retouch.rewards.weights import weights_digest, weights_folder
from retouch.types import Column, Sample, Scores, Task

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor

_ROWS = 16
_SIZE = 224  # pixels a side for DINOv2


class StyleEncoder(Protocol):
    """A model that turns images into vectors."""

    def images(self, images: Sequence[Image.Image]) -> Float[Tensor, "n d"]:
        """A unit vector for each image."""
        ...


class StyleReward(ModelReward):
    """How much the image looks like the task's reference, by the cosine of their embeddings: by CLIP's image tower (CLIP-I) or
    DINOv2's first state (DINO score; both as in DreamBooth, arXiv 2208.12242).

    Column ``style``, 0 to 1: max(cosine, 0).

    Example::

        >>> retouch.rewards.Style(path="openai/clip-vit-large-patch14", where="mask").where
        'mask'
    """

    kind: Literal["style"] = "style"
    path: PathText = "facebook/dinov2-base"
    """Folder of the weights of a DINOv2, CLIP or SigLIP, or their id in the Hugging Face cache; nothing is downloaded."""
    where: Literal["picture", "mask"] = "picture"
    """Compare the whole image, or the rectangle around the white part of ``task.mask``, as for words in the style of a crop."""

    columns: ClassVar[Mapping[str, Column]] = {"style": Column(0.0, 1.0)}

    def load(self, device: torch.device | str) -> StyleEncoder:
        """The encoder, frozen, in fp32. ValueError: no weights, or those of another kind of model."""
        return open_encoder(self.path, device=device)

    @property
    def fingerprint(self) -> str:
        """The encoder's weights, and where it looks."""
        return f"weights {weights_digest(weights_folder(self.path))}, {self.where}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column, (b,), float32; 0 for a sample without an image. ValueError: a task without a reference, or without a mask
        where one is needed."""
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
            raise ValueError(f"task {task.id!r} has no mask, around which the style is compared; use where: 'picture'")
        box = task.mask.convert("L").resize(image.size, Image.Resampling.NEAREST).point(lambda value: 255 * (value > 127)).getbbox()
        return image if box is None else image.crop(box)


def distance_of_sets(
    images: Sequence[Image.Image],
    references: Sequence[Image.Image],
    *,
    path: str = "facebook/dinov2-base",
    device: torch.device | str = "cpu",
) -> float:
    """The Fréchet distance of two sets of images in the features of DINOv2 (FD-DINOv2, arXiv 2306.04675): like FID, with another
    encoder than Inception.

    0 for equal sets, with no upper end. It depends on how many images there are, so it is no reward of single images. ``path``:
    folder of a DINOv2, or its id in the Hugging Face cache. Raises ValueError for fewer than two images in a set, and for an
    encoder of another kind.
    """
    from retouch.core.frechet import frechet_distance

    encoder = _Dino(path, device=device)
    return frechet_distance(encoder.states(images), encoder.states(references))


def open_encoder(path: str, *, device: torch.device | str) -> StyleEncoder:
    """A DINOv2, CLIP or SigLIP from a folder or the Hugging Face cache. Raises ValueError for missing weights, and for another
    kind of model."""
    kind = json.loads((weights_folder(path) / "config.json").read_text(encoding="utf-8")).get("model_type")
    if kind == "dinov2":
        return _Dino(path, device=device)
    from retouch.rewards.scorers.dual_encoder import DualEncoder

    return DualEncoder(path, device=device)


class _Dino:
    """DINOv2's first state after its last norm, which stands for the whole image."""

    def __init__(self, path: str, *, device: torch.device | str) -> None:
        self._model = DinoReward(path=path, size=_SIZE).load(device)

    def images(self, images: Sequence[Image.Image]) -> Float[Tensor, "n d"]:
        """A unit vector for each image."""
        import torch

        return torch.nn.functional.normalize(self.states(images), dim=1)

    def states(self, images: Sequence[Image.Image]) -> Float[Tensor, "n d"]:
        """The state of each image, in fp32 on the CPU."""
        import torch

        found = []
        for first in range(0, len(images), _ROWS):
            pixels = normalised_pixels(images[first : first + _ROWS], _SIZE)
            with torch.no_grad():
                found.append(self._model(pixel_values=pixels.to(self._model.device)).last_hidden_state[:, 0].float().cpu())
        return torch.cat(found)


def _reference(task: Task) -> Image.Image:
    if task.reference is None:
        raise ValueError(f"task {task.id!r} has no reference, with which this reward compares; it needs data with references")
    return task.reference
