"""The image files of a benchmark, and how they are named in our folders and in folders made by other programs."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from PIL.Image import Image

from retouch.data.images import SUFFIXES, load_image
from retouch.records.files import write_png
from retouch_bench.suite import Suite, SuiteItem

_LONGEST = 180


@dataclass(frozen=True, slots=True, eq=False)
class ImageKey:
    """Identifies one image of a suite. ``number``: index of the item in the whole suite. ``sample``: index of the image among those
    of the item. ``turn``: from 0."""

    item: SuiteItem
    number: int
    sample: int
    turn: int

    @property
    def slot(self) -> int:
        """The index of the image among all images of the item, which is the key of its noise."""
        return self.sample * self.item.turns + self.turn


def image_keys(items: list[tuple[int, SuiteItem]], *, suite: Suite) -> list[ImageKey]:
    """Return the places of all images of the numbered items, sorted by turn."""
    return [
        ImageKey(item, number, sample, turn)
        for turn in range(max((item.turns for _, item in items), default=0))
        for number, item in items
        for sample in range(suite.images_per_item)
        if turn < item.turns
    ]


class ImageFolder:
    """A folder with one file for each image, named by the item's id: ``ID.png``.

    If items have several images, they are ``ID-0.png``, ``ID-1.png`` and so on; later turns add ``-turn2``, ``-turn3``. Characters
    that file names cannot contain are percent-encoded (``/`` is ``%2F``); a longer name than 180 characters is replaced by its
    SHA-256. Folders of other programs may also contain ``.jpg``, ``.jpeg`` and ``.webp`` files, and subfolders if the id contains
    slashes.
    """

    def __init__(self, root: Path, *, suite: Suite) -> None:
        self.root = root
        self._several = suite.images_per_item > 1
        self._reasons: dict[Path, str] = {}

    def path(self, place: ImageKey) -> Path:
        """Return the path to which the image is written."""
        return self.root / f"{_file_name(place.item.id)}{self._ending(place)}.png"

    def find(self, place: ImageKey) -> Path | None:
        """Return the path of the existing image; None if there is none."""
        stems = [_file_name(place.item.id), *([place.item.id] if _is_plain(place.item.id) else [])]
        paths = (self.root / f"{stem}{self._ending(place)}{suffix}" for stem in stems for suffix in SUFFIXES)
        return next((path for path in paths if path.is_file()), None)

    def read(self, place: ImageKey) -> Image:
        """Load the image. Raises ValueError if there is none, with the reason if it is known, or if it cannot be read."""
        path = self.find(place)
        if path is None:
            raise ValueError(self._reasons.get(self.path(place), f"no image {self.path(place).name} in {self.root}"))
        return load_image(path)

    def explain(self, place: ImageKey, reason: str) -> None:
        """Say why there is no image; ``read`` raises a ValueError with this reason."""
        self._reasons[self.path(place)] = reason

    def write(self, place: ImageKey, image: Image) -> None:
        """Write the image atomically: a process that is killed leaves a complete file or none."""
        path = self.path(place)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_png(path, image)

    def _ending(self, place: ImageKey) -> str:
        sample = f"-{place.sample}" if self._several else ""
        return sample + (f"-turn{place.turn + 1}" if place.turn else "")


def _file_name(identity: str) -> str:
    name = quote(identity, safe=" ()+,=@")
    name = f"%{ord('.'):02X}{name[1:]}" if name.startswith(".") else name
    return name if len(name) <= _LONGEST else hashlib.sha256(identity.encode()).hexdigest()


def _is_plain(identity: str) -> bool:
    """Whether the id is a relative path that does not leave the folder."""
    return "\0" not in identity and not Path(identity).is_absolute() and ".." not in Path(identity).parts
