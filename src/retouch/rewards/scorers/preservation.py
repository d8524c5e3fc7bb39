"""How much of the source is still there where nothing was to change, in the features of DINOv2 (arXiv 2304.07193)."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor
from transformers import Dinov2Config, Dinov2Model

from retouch.rewards.scorers.weights_folder import weights_digest, weights_folder
from retouch.types import Column, Sample, Scores, Task

_MEAN = torch.tensor((0.485, 0.456, 0.406))  # of ImageNet, as the model was trained
_STD = torch.tensor((0.229, 0.224, 0.225))


class DinoPreservation:
    """Column ``preservation``, 0 to 1: the mean over patches of max(cosine, 0) between the picture's features and its source's.

    Each patch weighs as much of it as ``task.mask`` leaves alone (white is where to change); without a mask all weigh the same, and
    what was asked for then counts as a loss. Exactly 1 for an unchanged picture, and where the mask leaves nothing alone.
    Both pictures are brought to ``size`` x ``size`` pixels (bicubic), so patches lie on each other whatever the shape.
    A sample without a picture is the policy's own fault: 0. ValueError: no weights of DINOv2, a size that is no multiple of its
    patch, or a task without a source.
    """

    columns: Mapping[str, Column] = {"preservation": Column(0.0, 1.0)}

    def __init__(self, path: str | Path = "facebook/dinov2-base", *, size: int = 224, device: torch.device | str = "cpu") -> None:
        folder = weights_folder(path)
        config = Dinov2Config.from_pretrained(folder, local_files_only=True)
        if config.model_type != "dinov2" or size < 1 or size % config.patch_size:
            raise ValueError(f"{path}, size {size}: give a DINOv2 model and a multiple of its patch of {config.patch_size} pixels")
        self.size = size
        self._folder = folder
        self._grid = size // config.patch_size
        self.device = torch.device(device)
        self.model = Dinov2Model.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=torch.float32)
        self.model.requires_grad_(False).eval().to(self.device)

    @property
    def fingerprint(self) -> str:
        """The model's weights, and the size at which it looks."""
        return f"weights {weights_digest(self._folder)}, size {self.size}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column as (b,), float32. Sources are encoded once a task."""
        scores = torch.zeros(len(samples))
        sources: dict[int, Tensor] = {}
        for row, sample in enumerate(samples):
            if not sample.task.images:
                raise ValueError(f"task {sample.task.id!r} has no source picture, to which this reward compares")
            if sample.image is None:
                continue
            source = sample.task.images[0]
            if id(source) not in sources:
                sources[id(source)] = self._patches(source)
            cosine = (sources[id(source)] * self._patches(sample.image)).sum(dim=1).clamp(0, 1)
            weight = self._kept(sample.task)
            scores[row] = (weight * cosine).sum() / weight.sum() if weight.sum() > 0 else 1.0
        return {"preservation": scores.clamp(0, 1)}

    @torch.no_grad()
    def _patches(self, image: Image.Image) -> Float[Tensor, "n d"]:
        """A unit vector for each patch, row by row."""
        small = image.convert("RGB").resize((self.size, self.size), Image.Resampling.BICUBIC)
        pixels = (torch.from_numpy(np.asarray(small).astype(np.float32)) / 255 - _MEAN) / _STD
        features = self.model(pixel_values=pixels.permute(2, 0, 1)[None].to(self.device)).last_hidden_state[0, 1:]
        return torch.nn.functional.normalize(features.double(), dim=1).cpu()

    def _kept(self, task: Task) -> Float[Tensor, " n"]:
        """How much of each patch is to stay, 0 to 1."""
        if task.mask is None:
            return torch.ones(self._grid**2, dtype=torch.float64)
        small = task.mask.convert("L").resize((self._grid, self._grid), Image.Resampling.BOX)
        return 1 - torch.from_numpy(np.asarray(small).astype(np.float64)).flatten() / 255
