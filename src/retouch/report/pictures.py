"""Pictures inside the page: small ones as they are, to the pixel, large ones smaller."""

import base64
import io
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from retouch.report.markup import Html, tag

EXACT = 160  # edge in pixels up to which a picture goes into the page as it is
PIXELATED = 96  # edge up to which it is shown with hard pixels
LARGE, SMALL = 384, 208  # edges to which larger ones are reduced, twice what they are shown with


def picture(path: Path | None, *, words: str, edge: int = LARGE) -> Html:
    """The picture at ``path``, reduced to ``edge`` pixels where it is large; a box that says so where there is none.

    ``words`` are for those who cannot see it.
    """
    if path is None:
        return tag("span", "no picture", class_="nothing")
    if not path.is_file():
        return tag("span", "file is gone", class_="nothing")
    content = path.read_bytes()
    try:
        with Image.open(io.BytesIO(content)) as image:
            image.load()
            size, longest = image.size, max(image.size)
            kind, content = ("png", content) if longest <= EXACT and image.format == "PNG" else _encode(image, edge)
    except (UnidentifiedImageError, OSError, Image.DecompressionBombError):
        return tag("span", "not readable", class_="nothing")
    source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    style = "pixelated" if longest <= PIXELATED else None
    return tag("img", src=source, alt=words, width=size[0], height=size[1], class_=style, decoding="async")


def _encode(image: Image.Image, edge: int) -> tuple[str, bytes]:
    """A small picture as PNG; a large one reduced, as JPEG, because twenty photographs as PNG would weigh tens of megabytes."""
    buffer = io.BytesIO()
    if max(image.size) <= EXACT:
        image.convert("RGB").save(buffer, format="PNG")
        return "png", buffer.getvalue()
    reduced = image.convert("RGB")
    reduced.thumbnail((edge, edge), Image.Resampling.LANCZOS)
    reduced.save(buffer, format="JPEG", quality=88)
    return "jpeg", buffer.getvalue()
