"""LPIPS (arXiv 1801.03924, version 0.1 on AlexNet): how different two pictures look, by the features of a network."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from retouch.rewards.scorers.weights_folder import weights_digest
from retouch.types import Column, Sample, Scores

# (name, outputs, inputs, kernel, stride, padding, whether the maps are halved before it)
_CONVOLUTIONS = (
    ("features.0", 64, 3, 11, 4, 2, False),
    ("features.3", 192, 64, 5, 1, 2, True),
    ("features.6", 384, 192, 3, 1, 1, True),
    ("features.8", 256, 384, 3, 1, 1, False),
    ("features.10", 256, 256, 3, 1, 1, False),
)
_SHIFT = torch.tensor((-0.030, -0.088, -0.188)).view(3, 1, 1)
_SCALE = torch.tensor((0.458, 0.448, 0.450)).view(3, 1, 1)


class LpipsPreservation:
    """Column ``preservation``, 0 to 1: max(0, 1 - d), d the LPIPS distance of the picture to its source. 1 where they are the same.

    With ``task.mask`` (white is where to change), each place of a feature map weighs as much of it as the mask leaves alone; where
    that is nothing the score is 1. Both pictures are brought to ``size`` x ``size`` pixels (bicubic).
    ``weights``: a safetensors file with torchvision's AlexNet (``features.<n>.weight`` and ``.bias``) and lpips's linear layers
    (``lin<k>.model.1.weight``), which are published as pickles: convert them where you trust them.
    A sample without a picture is the policy's own fault: 0. ValueError: no such weights, a size under 64, a task without a source.
    """

    columns: Mapping[str, Column] = {"preservation": Column(0.0, 1.0)}

    def __init__(self, weights: str | Path, *, size: int = 256, device: torch.device | str = "cpu") -> None:
        if size < 64:
            raise ValueError(f"size {size}: the last of the network's maps vanishes below 64 pixels")
        self.size = size
        self._file = weights
        self.device = torch.device(device)
        self._weights = {name: tensor.float().to(device) for name, tensor in _load(Path(weights)).items()}

    @property
    def fingerprint(self) -> str:
        """The network's weights, and the size at which it looks."""
        return f"weights {weights_digest(self._file)}, size {self.size}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column as (b,), float32."""
        scores = torch.zeros(len(samples))
        for row, sample in enumerate(samples):
            if not sample.task.images:
                raise ValueError(f"task {sample.task.id!r} has no source picture, to which this reward compares")
            if sample.image is not None:
                scores[row] = 1 - self.distance(sample.task.images[0], sample.image, sample.task.mask)
        return {"preservation": scores.clamp(0, 1)}

    @torch.no_grad()
    def distance(self, a: Image.Image, b: Image.Image, mask: Image.Image | None = None) -> float:
        """d, from 0 for equal pictures: over layers, the weighted squared difference of unit features, averaged over places."""
        total = 0.0
        for layer, (left, right) in enumerate(zip(self._maps(a), self._maps(b), strict=True)):
            apart = functional.conv2d((left - right).square()[None], self._weights[f"lin{layer}.model.1.weight"])[0, 0].cpu()
            weight = _kept(mask, (apart.shape[1], apart.shape[0]))
            total += float((weight * apart).sum() / weight.sum()) if weight.sum() > 0 else 0.0
        return total

    def _maps(self, image: Image.Image) -> list[Float[Tensor, "c h w"]]:
        """The five feature maps, of unit length at every place."""
        small = image.convert("RGB").resize((self.size, self.size), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.asarray(small).astype(np.float32)).permute(2, 0, 1) / 127.5 - 1
        x = ((pixels - _SHIFT) / _SCALE).to(self.device)[None]
        maps = []
        for name, _, _, _, stride, padding, halved in _CONVOLUTIONS:
            if halved:
                x = functional.max_pool2d(x, kernel_size=3, stride=2)
            x = functional.conv2d(x, self._weights[f"{name}.weight"], self._weights[f"{name}.bias"], stride, padding).relu()
            maps.append((x / (x.square().sum(dim=1, keepdim=True).sqrt() + 1e-10))[0])
        return maps


def _kept(mask: Image.Image | None, size: tuple[int, int]) -> Float[Tensor, "h w"]:
    """How much of each place is to stay, 0 to 1; ``size`` is width and height."""
    if mask is None:
        return torch.ones(size[1], size[0])
    return 1 - torch.from_numpy(np.asarray(mask.convert("L").resize(size, Image.Resampling.BOX)).astype(np.float32)) / 255


def _load(path: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError):
        raise ValueError(
            f"{path} is no safetensors file; LPIPS needs AlexNet's features and its own linear layers in one"
        ) from None
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (name, outputs, inputs, kernel, _, _, _) in enumerate(_CONVOLUTIONS):
        shapes[f"{name}.weight"] = (outputs, inputs, kernel, kernel)
        shapes[f"{name}.bias"] = (outputs,)
        shapes[f"lin{layer}.model.1.weight"] = (1, outputs, 1, 1)
    wrong = [name for name, shape in shapes.items() if name not in tensors or tuple(tensors[name].shape) != shape]
    if wrong:
        raise ValueError(f"{path} lacks {', '.join(wrong)}, or has them in other shapes; it is not LPIPS on AlexNet")
    return {name: tensors[name] for name in shapes}
