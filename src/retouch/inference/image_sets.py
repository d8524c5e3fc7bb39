"""``retouch fid``: the Fréchet distance between the images of two folders."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import overload

import torch
from PIL import Image

from retouch.data.images import load_image

# With fewer images than the 2048 features of Inception, the covariance of the features does not have full rank.
_FEW = 2048
_SUFFIXES = (".jpeg", ".jpg", ".png", ".webp")


@dataclass(frozen=True, slots=True)
class SetDistance:
    """``name``: FID or FD-DINOv2. ``images`` and ``references``: the numbers of images."""

    name: str
    distance: float
    images: int
    references: int

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        text = f"{self.name} {self.distance:.3f}, {self.images} images against {self.references} references"
        if min(self.images, self.references) < _FEW:
            text += (
                f"\nFewer than {_FEW} images: the distance is biased upward, more for smaller sets. Compare it only with distances "
                "of sets of the same sizes."
            )
        return text


def distance_of_folders(images: Path, references: Path, *, inception: Path | None = None, dinov2: str | None = None) -> SetDistance:
    """Return the FID (``inception``: the file of its weights) or the FD-DINOv2 (``dinov2``: folder or id of the model) between the
    images of two folders and their subfolders.

    Images are loaded a few at a time. Raises ValueError if not exactly one of ``inception`` and ``dinov2`` is given, if a folder
    has fewer than two images, if an image is damaged, or if the weights cannot be used.
    """
    if (inception is None) == (dinov2 is None):
        raise ValueError("give the weights of one network: inception for FID, or dinov2 for FD-DINOv2")
    one, other = ImageFiles.of_folder(images), ImageFiles.of_folder(references)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if inception is not None:
        from retouch.rewards.scorers.inception import fid

        return SetDistance("FID", fid(one, other, weights=inception, device=device), len(one), len(other))
    from retouch.rewards.scorers.style import distance_of_sets

    assert dinov2 is not None
    return SetDistance("FD-DINOv2", distance_of_sets(one, other, path=dinov2, device=device), len(one), len(other))


class ImageFiles(Sequence[Image.Image]):
    """A sequence of images that loads each image when it is read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    @classmethod
    def of_folder(cls, folder: Path) -> "ImageFiles":
        """The images in a folder and its subfolders, sorted by path. Raises ValueError if there are fewer than two."""
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder; give a folder of images")
        paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in _SUFFIXES and path.is_file())
        if len(paths) < 2:
            raise ValueError(f"{folder} has {len(paths)} PNG, JPEG or WebP images; a distance of sets needs at least two")
        return cls(paths)

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
