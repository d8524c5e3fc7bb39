"""FID: the Fréchet distance of two sets of images in the features of the Inception network of the original FID."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import avg_pool2d, batch_norm, conv2d, interpolate, max_pool2d

from retouch_rewards.measures import frechet_distance

Convolution: TypeAlias = tuple[str, int, int, int]
"""Name, number of outputs, height and width of the kernel."""

_FILE = "pt_inception-2015-12-05-6726825d.pth"
_SIDE = 299
_EPS = 0.001
_NORM = ("running_mean", "running_var", "weight", "bias")
_CLASSES = 1008  # torchvision's network has other weights, and 1000 classes


def _three_sizes(pooled: int) -> Sequence[Sequence[Convolution]]:
    return (
        (("branch1x1", 64, 1, 1),),
        (("branch5x5_1", 48, 1, 1), ("branch5x5_2", 64, 5, 5)),
        (("branch3x3dbl_1", 64, 1, 1), ("branch3x3dbl_2", 96, 3, 3), ("branch3x3dbl_3", 96, 3, 3)),
        (("branch_pool", pooled, 1, 1),),
    )


def _rows_and_columns(inner: int) -> Sequence[Sequence[Convolution]]:
    twice = ((1, inner, 1, 1), (2, inner, 7, 1), (3, inner, 1, 7), (4, inner, 7, 1), (5, 192, 1, 7))
    return (
        (("branch1x1", 192, 1, 1),),
        (("branch7x7_1", inner, 1, 1), ("branch7x7_2", inner, 1, 7), ("branch7x7_3", 192, 7, 1)),
        tuple((f"branch7x7dbl_{number}", outputs, height, width) for number, outputs, height, width in twice),
        (("branch_pool", 192, 1, 1),),
    )


_SPLIT = (("branch3x3_1", 384, 1, 1),)
_SPLIT_DEEPER = (("branch3x3dbl_1", 448, 1, 1), ("branch3x3dbl_2", 384, 3, 3))
_WIDEST: Sequence[Sequence[Convolution]] = (
    (("branch1x1", 320, 1, 1),),
    (*_SPLIT, ("branch3x3_2a", 384, 1, 3)),
    (*_SPLIT, ("branch3x3_2b", 384, 3, 1)),
    (*_SPLIT_DEEPER, ("branch3x3dbl_3a", 384, 1, 3)),
    (*_SPLIT_DEEPER, ("branch3x3dbl_3b", 384, 3, 1)),
    (("branch_pool", 192, 1, 1),),
)
_STEM: Sequence[Convolution] = (
    ("Conv2d_1a_3x3", 32, 3, 3),
    ("Conv2d_2a_3x3", 32, 3, 3),
    ("Conv2d_2b_3x3", 64, 3, 3),
    ("Conv2d_3b_1x1", 80, 1, 1),
    ("Conv2d_4a_3x3", 192, 3, 3),
)
_HALVES = ("Mixed_6a", "Mixed_7a")
_BLOCKS: Mapping[str, Sequence[Sequence[Convolution]]] = {
    "Mixed_5b": _three_sizes(32),
    "Mixed_5c": _three_sizes(64),
    "Mixed_5d": _three_sizes(64),
    "Mixed_6a": (
        (("branch3x3", 384, 3, 3),),
        (("branch3x3dbl_1", 64, 1, 1), ("branch3x3dbl_2", 96, 3, 3), ("branch3x3dbl_3", 96, 3, 3)),
    ),
    "Mixed_6b": _rows_and_columns(128),
    "Mixed_6c": _rows_and_columns(160),
    "Mixed_6d": _rows_and_columns(160),
    "Mixed_6e": _rows_and_columns(192),
    "Mixed_7a": (
        (("branch3x3_1", 192, 1, 1), ("branch3x3_2", 320, 3, 3)),
        (("branch7x7x3_1", 192, 1, 1), ("branch7x7x3_2", 192, 1, 7), ("branch7x7x3_3", 192, 7, 1), ("branch7x7x3_4", 192, 3, 3)),
    ),
    "Mixed_7b": _WIDEST,
    "Mixed_7c": _WIDEST,
}


def fid(
    images: Sequence[Image.Image], references: Sequence[Image.Image], *, weights: str | Path, device: torch.device | str = "cpu"
) -> float:
    """Return the FID of two sets of images: the Fréchet distance of their Inception features.

    The distance is 0 for equal sets and has no upper bound. It depends on the number of images, so it cannot be a reward of single
    images. ``weights``: a safetensors file with the tensors of pytorch-fid's ``pt_inception-2015-12-05-6726825d.pth``. Raises
    ValueError if a set has fewer than two images, or if the file does not have these tensors.

    Source: Heusel et al. 2017 (arXiv 1706.08500), with the network and the resizing of the package pytorch-fid.
    """
    if min(len(images), len(references)) < 2:
        raise ValueError(f"{len(images)} and {len(references)} images: FID needs at least two of each")
    return frechet_distance(*inception_features(images, references, weights=weights, device=device))


def inception_features(
    *sets: Sequence[Image.Image], weights: str | Path, device: torch.device | str = "cpu"
) -> list[Float[Tensor, "n 2048"]]:
    """Return the Inception features of each set of images, in fp32 on the CPU. ``weights`` and errors are those of ``fid``."""
    network = InceptionFeatures(load_inception(Path(weights)), device=device)
    return [torch.stack([network(image) for image in images]) for images in sets]


class InceptionFeatures:
    """Inception V3 as the original FID uses it, from its tensors by name. It differs from torchvision's network in three ways: its
    weights are others, averages do not count the padding, and the last block takes the maximum instead of an average."""

    def __init__(self, weights: Mapping[str, Tensor], *, device: torch.device | str) -> None:
        self._weights = {name: tensor.float().to(device) for name, tensor in weights.items()}
        self._device = device

    def __call__(self, image: Image.Image) -> Float[Tensor, " d"]:
        """Return the 2048 features of an image, in fp32 on the CPU. It is resized to 299 x 299 px (bilinear, no antialiasing)."""
        pixels = torch.from_numpy(np.asarray(image.convert("RGB")).astype(np.float32)).permute(2, 0, 1)[None] / 255
        with torch.no_grad():
            return self.maps(pixels.to(self._device))["Mixed_7c"].mean(dim=(2, 3))[0].cpu()

    def maps(self, pixels: Float[Tensor, "n 3 h w"]) -> dict[str, Float[Tensor, "n c y x"]]:
        """Return the output of every block for images with values from 0 to 1, by the names of torchvision's blocks."""
        x = 2 * interpolate(pixels, size=(_SIDE, _SIDE), mode="bilinear", align_corners=False) - 1
        x = self._convolve(x, "Conv2d_1a_3x3", stride=2, padded=False)
        x = self._convolve(self._convolve(x, "Conv2d_2a_3x3", padded=False), "Conv2d_2b_3x3")
        x = max_pool2d(x, kernel_size=3, stride=2)
        maps = {"maxpool1": x}
        x = self._convolve(self._convolve(x, "Conv2d_3b_1x1"), "Conv2d_4a_3x3", padded=False)
        maps["maxpool2"] = x = max_pool2d(x, kernel_size=3, stride=2)
        for name in _BLOCKS:
            maps[name] = x = self._block(x, name)
        return maps

    def _block(self, x: Tensor, block: str) -> Tensor:
        """The outputs of the branches of a block, concatenated. In a block that halves its input, the last convolution of each
        branch has stride 2, and the pooled input is a branch of its own."""
        if block in _HALVES:
            parts = [self._branch(x, block, branch[:-1]) for branch in _BLOCKS[block]]
            last = [f"{block}.{branch[-1][0]}" for branch in _BLOCKS[block]]
            halved = [self._convolve(part, name, stride=2, padded=False) for part, name in zip(parts, last, strict=True)]
            return torch.cat([*halved, max_pool2d(x, kernel_size=3, stride=2)], dim=1)
        if block == "Mixed_7c":
            pooled = max_pool2d(x, kernel_size=3, stride=1, padding=1)
        else:
            pooled = avg_pool2d(x, kernel_size=3, stride=1, padding=1, count_include_pad=False)
        *others, of_pooled = _BLOCKS[block]
        return torch.cat([*(self._branch(x, block, each) for each in others), self._branch(pooled, block, of_pooled)], dim=1)

    def _branch(self, x: Tensor, block: str, convolutions: Sequence[Convolution]) -> Tensor:
        for name, *_ in convolutions:
            x = self._convolve(x, f"{block}.{name}")
        return x

    def _convolve(self, x: Tensor, name: str, *, stride: int = 1, padded: bool = True) -> Tensor:
        kernel = self._weights[f"{name}.conv.weight"]
        padding = (kernel.shape[2] // 2, kernel.shape[3] // 2) if padded else (0, 0)
        mean, variance, scale, shift = (self._weights[f"{name}.bn.{part}"] for part in _NORM)
        return batch_norm(conv2d(x, kernel, None, stride, padding), mean, variance, scale, shift, eps=_EPS).relu()


def load_inception(path: Path) -> dict[str, Tensor]:
    """Load the tensors of the network by name, without its classifier. Raises ValueError if the file is no safetensors file, or
    has the tensors of another network."""
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError):
        raise ValueError(f"weights: {path} is not a safetensors file; FID needs one with the tensors of {_FILE}") from None
    expected = {**inception_shapes(), "fc.weight": (_CLASSES, 2048)}
    wrong = [name for name, shape in expected.items() if name not in tensors or tuple(tensors[name].shape) != shape]
    if wrong:
        raise ValueError(
            f"weights: {path} does not have the tensors of {_FILE}: {len(wrong)} are missing or have another shape, such as "
            f"{wrong[0]!r}; the weights of torchvision's Inception give other distances"
        )
    return {name: tensors[name] for name in inception_shapes()}


def inception_shapes() -> dict[str, tuple[int, ...]]:
    """The names and shapes of the tensors of the network, without its classifier."""
    found: dict[str, tuple[int, ...]] = {}

    def add(prefix: str, convolutions: Sequence[Convolution], inputs: int) -> int:
        for name, outputs, height, width in convolutions:
            found[f"{prefix}{name}.conv.weight"] = (outputs, inputs, height, width)
            found.update({f"{prefix}{name}.bn.{part}": (outputs,) for part in _NORM})
            inputs = outputs
        return inputs

    inputs = add("", _STEM, 3)
    for block, branches in _BLOCKS.items():
        inputs = sum(add(f"{block}.", branch, inputs) for branch in branches) + (inputs if block in _HALVES else 0)
    return found
