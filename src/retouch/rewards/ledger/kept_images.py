"""Every image that a run scored, as PNG files named by their SHA-256, for runs that set ``ledger.keep_images``."""

import io
import os
from pathlib import Path

from PIL import Image

from retouch.rewards.ledger.hashing import image_hash


class KeptImages:
    """The folder ``pictures/`` of a run: ``pictures/ab/ab12....png``, each image once however often it was scored."""

    def __init__(self, run: Path) -> None:
        self._root = run / "pictures"

    def path(self, digest: str) -> Path:
        """The file of the image with this SHA-256, whether or not it exists."""
        return self._root / digest[:2] / f"{digest}.png"

    def save(self, digest: str, image: Image.Image) -> None:
        """Write the image unless it is there. A process that is killed leaves a whole file or none of that name."""
        path = self.path(digest)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        image.save(buffer, format="PNG", compress_level=1)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_bytes(buffer.getvalue())
        os.replace(temporary, path)

    def read(self, digest: str) -> Image.Image | None:
        """The image; None if it was not kept, or its file holds another image."""
        return read_image(self.path(digest), digest)


def read_image(path: Path, digest: str) -> Image.Image | None:
    """The image in a file; None if there is no readable file, or its image has another SHA-256."""
    try:
        with Image.open(path) as file:
            file.load()
            image = file.copy()
    except OSError:
        return None
    return image if image_hash(image) == digest else None
