"""Every picture that was judged, by what it is: ``pictures/ab/ab12....png`` in the run's folder. For runs that ask for it."""

import io
import os
from pathlib import Path

from PIL import Image

from retouch.rewards.ledger.content import of_picture


class KeptPictures:
    """Pictures under their SHA-256, each once however often it was judged."""

    def __init__(self, run: Path) -> None:
        self._root = run / "pictures"

    def path(self, name: str) -> Path:
        """Where the picture of that name lies, if it is kept."""
        return self._root / name[:2] / f"{name}.png"

    def keep(self, name: str, image: Image.Image) -> None:
        """Write the picture; a kill leaves the whole file or none of that name."""
        path = self.path(name)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        buffer = io.BytesIO()
        image.save(buffer, format="PNG", compress_level=1)
        aside = path.with_suffix(f".{os.getpid()}.tmp")
        aside.write_bytes(buffer.getvalue())
        os.replace(aside, path)

    def read(self, name: str) -> Image.Image | None:
        """The picture, or None where it is not kept, or not as it was judged."""
        return read_picture(self.path(name), name)


def read_picture(path: Path, name: str) -> Image.Image | None:
    """The picture in a file, or None where there is no file or another picture than that of the name."""
    try:
        with Image.open(path) as file:
            file.load()
            image = file.copy()
    except OSError:  # no file, or none that is whole
        return None
    return image if of_picture(image) == name else None
