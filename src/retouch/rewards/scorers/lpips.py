"""LPIPS (arXiv 1801.03924, version 0.1 on AlexNet): the perceptual distance of two images in the features of a network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from PIL import Image
from pydantic import Field

from retouch.rewards.base import Device, LoadedModel, PathText, RewardSection, source_image
from retouch.rewards.weights import weights_digest
from retouch.types import Column, Sample, Scores

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor

# (name, output channels, input channels, kernel, stride, padding, whether the maps are halved before the convolution)
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

    def load(self, device: torch.device | str) -> dict[str, Tensor]:
        """Load the weights by name, in fp32. Raises ValueError if the file does not exist or does not contain these weights."""
        return {name: tensor.float().to(device) for name, tensor in _load(Path(self.weights)).items()}

    @property
    def fingerprint(self) -> str:
        """Digest of the network's weights, and the image size."""
        return f"weights {weights_digest(self.weights)}, size {self.size}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A sample without an image scores 0.

        Raises ValueError if a task has no source image.
        """
        import torch

        scores = torch.zeros(len(samples))
        for row, sample in enumerate(samples):
            source = source_image(sample.task)
            if sample.image is not None:
                scores[row] = 1 - self.distance(source, sample.image, sample.task.mask)
        return {"preservation": scores.clamp(0, 1)}

    def distance(self, a: Image.Image, b: Image.Image, mask: Image.Image | None = None) -> float:
        """Return the LPIPS distance, 0 for equal images: the sum over layers of the mean over locations of the weighted squared
        difference of unit features. ``mask``: white marks locations that do not count."""
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
        """Yield AlexNet with the linear layers; their sizes are known."""
        yield LoadedModel(self.kind, "float32", self.device)

    def _maps(self, image: Image.Image) -> list[Float[Tensor, "c h w"]]:
        """Return the five feature maps, each normalised to unit length at every location."""
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
    """Return the share of each location that the mask protects, 0 to 1; ``size`` is (width, height)."""
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
            f"weights: {path} is not a safetensors file; LPIPS needs one with AlexNet's features and LPIPS's linear layers"
        ) from None
    shapes: dict[str, tuple[int, ...]] = {}
    for layer, (name, outputs, inputs, kernel, _, _, _) in enumerate(_CONVOLUTIONS):
        shapes[f"{name}.weight"] = (outputs, inputs, kernel, kernel)
        shapes[f"{name}.bias"] = (outputs,)
        shapes[f"lin{layer}.model.1.weight"] = (1, outputs, 1, 1)
    wrong = [name for name, shape in shapes.items() if name not in tensors or tuple(tensors[name].shape) != shape]
    if wrong:
        raise ValueError(f"{path} lacks {', '.join(wrong)}, or has them in other shapes; these are not weights of LPIPS on AlexNet")
    return {name: tensors[name] for name in shapes}
