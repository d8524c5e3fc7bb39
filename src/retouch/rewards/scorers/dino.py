"""The ``dino`` reward: preservation of the source image in the features of DINOv2 (arXiv 2304.07193)."""

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
