"""The images that a run scored, as PNG files with their SHA-256 as the name; for runs that set ``ledger.keep_images``."""

from pathlib import Path

from PIL import Image

from retouch.records import files
from retouch.rewards.ledger.hashing import UNREADABLE, image_hash


class ImageStore:
    """The folder ``pictures/`` of a run. Each image is one file ``pictures/ab/ab12....png``, even if it was scored several
    times."""

    def __init__(self, run: Path) -> None:
        self._root = run / "pictures"

    def path(self, digest: str) -> Path:
        """The path of the image with this SHA-256; the file may not exist."""
        return self._root / digest[:2] / f"{digest}.png"

    def save(self, digest: str, image: Image.Image) -> None:
        """Write the image unless its file exists. If the process is killed, the file is complete or does not exist."""
        path = self.path(digest)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_png(path, image, compress_level=1)

    def read(self, digest: str) -> Image.Image | None:
        """The image; None if it was not stored, or if its file contains another image."""
        return read_image(self.path(digest), digest)


def read_image(path: Path, digest: str) -> Image.Image | None:
    """The image in a file; None if the file cannot be read, or if its image has another SHA-256."""
    try:
        with files.open_file(path) as file, Image.open(file) as opened:
            opened.load()
            image = opened.copy()
    except UNREADABLE:
        return None
    return image if image_hash(image) == digest else None
