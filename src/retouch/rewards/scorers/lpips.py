"""LPIPS (arXiv 1801.03924, version 0.1 on AlexNet): how different two images look, by the features of a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from PIL import Image
from pydantic import Field

from retouch.rewards.base import RewardSection, source_image
from retouch.rewards.facts import Device, LoadedModel, PathText
from retouch.rewards.weights import weights_digest
from retouch.types import Column, Sample, Scores

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor

# (name, outputs, inputs, kernel, stride, padding, whether the maps are halved before it)
_CONVOLUTIONS = (
    ("features.0", 64, 3, 11, 4, 2, False),
    ("features.3", 192, 64, 5, 1, 2, True),
    ("features.6", 384, 192, 3, 1, 1, True),
    ("features.8", 256, 384, 3, 1, 1, False),
    ("features.10", 256, 256, 3, 1, 1, False),
)
_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)


class LpipsReward(RewardSection):
    """Preservation of the source where nothing should change, by LPIPS (arXiv 1801.03924, version 0.1 on AlexNet).

    Column ``preservation``, 0 to 1: max(0, 1 - d), d the LPIPS distance of the image to its source; 1 where they are the same. Each
    place of a feature map is weighted by how much of it ``task.mask`` leaves alone (white is where to change); the score is 1 where
    that is nothing.

    Example::

        >>> list(retouch.rewards.Lpips(weights="/models/lpips.safetensors").columns)
        ['preservation']
    """

    kind: Literal["lpips"] = "lpips"
    weights: PathText
    """AlexNet's features and LPIPS's own layers, a safetensors file: torchvision's ``features.<n>.weight`` and ``.bias``, and
    ``lin<k>.model.1.weight`` of the package lpips. They are published as pickles: convert them where you trust them."""
    size: Annotated[int, Field(ge=64)] = 256
    """Both images are resized to so many pixels a side (bicubic); below 64 the network's last map would be empty."""
    device: Device = None
    """Where the model runs; null takes the run's device."""

    columns: ClassVar[Mapping[str, Column]] = {"preservation": Column(0.0, 1.0)}
    shorthand = "weights"
    needs_source = True

    def load(self, device: torch.device | str) -> dict[str, Tensor]:
        """The weights by name, in fp32. ValueError: no such file, or other weights in it."""
        return {name: tensor.float().to(device) for name, tensor in _load(Path(self.weights)).items()}

    @property
    def fingerprint(self) -> str:
        """The network's weights, and the size of its images."""
        return f"weights {weights_digest(self.weights)}, size {self.size}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column, (b,), float32. A sample without an image scores 0. ValueError: a task without a source."""
        import torch

        scores = torch.zeros(len(samples))
        for row, sample in enumerate(samples):
            source = source_image(sample.task)
            if sample.image is not None:
                scores[row] = 1 - self.distance(source, sample.image, sample.task.mask)
        return {"preservation": scores.clamp(0, 1)}

    def distance(self, a: Image.Image, b: Image.Image, mask: Image.Image | None = None) -> float:
        """d, from 0 for equal images: over layers, the weighted squared difference of unit features, averaged over places."""
        import torch

        total = 0.0
        with torch.no_grad():
            for layer, (left, right) in enumerate(zip(self._maps(a), self._maps(b), strict=True)):
                weights = self.model[f"lin{layer}.model.1.weight"]
                difference = torch.nn.functional.conv2d((left - right).square()[None], weights)[0, 0].cpu()
                weight = _kept(mask, (difference.shape[1], difference.shape[0]))
                total += float((weight * difference).sum() / weight.sum()) if weight.sum() > 0 else 0.0
        return total

    def loaded_models(self) -> Iterator[LoadedModel]:
        """AlexNet and its layers, whose sizes are known."""
        yield LoadedModel(self.kind, "float32", self.device)

    def _maps(self, image: Image.Image) -> list[Float[Tensor, "c h w"]]:
        """The five feature maps, of unit length at every place."""
        import numpy as np
        import torch
        from torch.nn import functional

        small = image.convert("RGB").resize((self.size, self.size), Image.Resampling.BICUBIC)
        pixels = torch.from_numpy(np.asarray(small).astype(np.float32)).permute(2, 0, 1) / 127.5 - 1
        shift, scale = (torch.tensor(values).view(3, 1, 1) for values in (_SHIFT, _SCALE))
        x = ((pixels - shift) / scale).to(self.model["features.0.weight"].device)[None]
        maps = []
        for name, _, _, _, stride, padding, halved in _CONVOLUTIONS:
            if halved:
                x = functional.max_pool2d(x, kernel_size=3, stride=2)
            x = functional.conv2d(x, self.model[f"{name}.weight"], self.model[f"{name}.bias"], stride, padding).relu()
            maps.append((x / (x.square().sum(dim=1, keepdim=True).sqrt() + 1e-10))[0])
        return maps


def _kept(mask: Image.Image | None, size: tuple[int, int]) -> Float[Tensor, "h w"]:
    """How much of each place the mask leaves alone, 0 to 1; ``size`` is width and height."""
    import numpy as np
    import torch

    if mask is None:
        return torch.ones(size[1], size[0])
    return 1 - torch.from_numpy(np.asarray(mask.convert("L").resize(size, Image.Resampling.BOX)).astype(np.float32)) / 255


def _load(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

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
