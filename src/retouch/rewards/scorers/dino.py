"""Preservation of the source where nothing should change, in the features of DINOv2 (arXiv 2304.07193)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from PIL import Image

from retouch.config.section import Count
from retouch.rewards.base import ModelReward, source_image
from retouch.rewards.facts import PathText
from retouch.rewards.weights import weights_digest, weights_folder
from retouch.types import Column, Sample, Scores, Task

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor

_MEAN = (0.485, 0.456, 0.406)  # of ImageNet, as the model was trained
_STD = (0.229, 0.224, 0.225)


class DinoReward(ModelReward):
    """Preservation of the source where nothing should change, in the features of DINOv2 (arXiv 2304.07193).

    Column ``preservation``, 0 to 1: the mean over patches of max(cosine, 0) between the features of the image and of its source.
    Each patch is weighted by how much of it ``task.mask`` leaves alone (white is where to change); without a mask all weigh the
    same, and the requested change then counts as a loss. Exactly 1 for an unchanged image, and where the mask leaves nothing alone.

    Example::

        >>> retouch.rewards.Dino(size=448).path
        'facebook/dinov2-base'
    """

    kind: Literal["dino"] = "dino"
    path: PathText = "facebook/dinov2-base"
    """Folder of the weights, or their id in the Hugging Face cache."""
    size: Count = 224
    """Both images are resized to so many pixels a side (bicubic); a multiple of the model's patch."""

    columns: ClassVar[Mapping[str, Column]] = {"preservation": Column(0.0, 1.0)}
    needs_source = True

    def load(self, device: torch.device | str) -> Any:
        """The model, frozen, in fp32. ValueError: no weights of DINOv2, or a size that is no multiple of its patch."""
        import torch
        from transformers import Dinov2Config, Dinov2Model

        folder = weights_folder(self.path)
        config = Dinov2Config.from_pretrained(folder, local_files_only=True)
        if config.model_type != "dinov2" or self.size % config.patch_size:
            raise ValueError(
                f"{self.path}, size {self.size}: give a DINOv2 model and a multiple of its patch of {config.patch_size} pixels"
            )
        model = Dinov2Model.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=torch.float32)
        return model.requires_grad_(False).eval().to(device)

    @property
    def fingerprint(self) -> str:
        """The model's weights, and the size of its images."""
        return f"weights {weights_digest(weights_folder(self.path))}, size {self.size}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column, (b,), float32. A sample without an image scores 0. Sources are encoded once a task.

        ValueError: a task without a source.
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
        """A unit vector for each patch, row by row."""
        import torch

        pixels = normalised_pixels([image], self.size).to(self.model.device)
        with torch.no_grad():
            features = self.model(pixel_values=pixels).last_hidden_state[0, 1:]
            return torch.nn.functional.normalize(features.double(), dim=1).cpu()

    def _kept(self, task: Task) -> Float[Tensor, " n"]:
        """How much of each patch the mask leaves alone, 0 to 1."""
        import numpy as np
        import torch

        grid = self.size // self.model.config.patch_size
        if task.mask is None:
            return torch.ones(grid**2, dtype=torch.float64)
        small = task.mask.convert("L").resize((grid, grid), Image.Resampling.BOX)
        return 1 - torch.from_numpy(np.asarray(small).astype(np.float64)).flatten() / 255


def normalised_pixels(images: Sequence[Image.Image], size: int) -> Float[Tensor, "n 3 s s"]:
    """The images at ``size`` pixels a side (bicubic), with the mean and the deviation of ImageNet, as DINOv2 was trained."""
    import numpy as np
    import torch

    small = [image.convert("RGB").resize((size, size), Image.Resampling.BICUBIC) for image in images]
    pixels = torch.from_numpy(np.stack([np.asarray(image).astype(np.float32) for image in small]))
    return ((pixels / 255 - torch.tensor(_MEAN)) / torch.tensor(_STD)).permute(0, 3, 1, 2)
