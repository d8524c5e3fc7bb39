"""``retouch tools fid``: the Fréchet distance and the kernel distance between the images of two folders."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal, overload

from PIL import Image

from retouch.data.images import SUFFIXES, load_image
from retouch.distributed.ranks import scoring_device
from retouch_bench.inception import inception_features
from retouch_rewards.dino import dinov2_features
from retouch_rewards.measures import frechet_distance, kernel_distance

# With fewer images than the 2048 features of Inception, the covariance of the features does not have full rank.
_FEW = 2048


@dataclass(frozen=True, slots=True)
class SetDistances:
    """The distances between two sets of images. ``frechet``: FID or FD-DINOv2, at least 0. ``kernel``: the unbiased kernel distance
    in the same features, KID or KD-DINOv2; it can be slightly below 0. ``images`` and ``references``: the numbers of images."""

    features: Literal["Inception", "DINOv2"]
    frechet: float
    kernel: float
    images: int
    references: int

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        frechet, kernel = ("FID", "KID") if self.features == "Inception" else ("FD-DINOv2", "KD-DINOv2")
        text = (
            f"{frechet} {self.frechet:.3f}, {kernel} {self.kernel:.5f}, {self.images} images against {self.references} references"
        )
        if min(self.images, self.references) < _FEW:
            text += (
                f"\nFewer than {_FEW} images: {frechet} is biased upward, more for smaller sets. Compare it only between sets of "
                f"the same sizes; {kernel} has no such bias."
            )
        return text


def distances_of_folders(
    images: Path, references: Path, *, inception: Path | None = None, dinov2: str | None = None
) -> SetDistances:
    """Return FID and KID (``inception``: the file of the weights), or FD-DINOv2 and KD-DINOv2 (``dinov2``: folder or id of the
    model), between the images of two folders and their subfolders.

    Images are loaded a few at a time. Raises ValueError if not exactly one of ``inception`` and ``dinov2`` is given, if a folder
    has fewer than two images, if an image is damaged, or if the weights cannot be used.
    """
    name: Literal["Inception", "DINOv2"]
    if inception is not None and dinov2 is None:
        name, encode = "Inception", partial(inception_features, weights=inception)
    elif dinov2 is not None and inception is None:
        name, encode = "DINOv2", partial(dinov2_features, path=dinov2)
    else:
        raise ValueError("give the weights of one network: inception for FID, or dinov2 for FD-DINOv2")
    one, other = (ImageFiles(folder) for folder in (images, references))
    features = encode(one, other, device=scoring_device())
    return SetDistances(name, frechet_distance(*features), kernel_distance(*features), len(one), len(other))


class ImageFiles(Sequence[Image.Image]):
    """The images in a folder and its subfolders, sorted by path; each is loaded when it is read. Raises ValueError if there are
    fewer than two."""

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; give a folder of images")
        self._paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
        if len(self._paths) < 2:
            raise ValueError(f"{folder} has {len(self._paths)} PNG, JPEG or WebP images; a distance of sets needs at least two")

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, index: int) -> Image.Image: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Image.Image]: ...
    def __getitem__(self, index: int | slice) -> Image.Image | Sequence[Image.Image]:
        if isinstance(index, slice):
            return [load_image(path) for path in self._paths[index]]
        return load_image(self._paths[index])
