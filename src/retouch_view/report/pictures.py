"""Images embedded in the page: small ones unchanged, large ones reduced."""

import base64
import io
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from retouch.records.files import read_bytes
from retouch_view.report.markup import Html, tag

EXACT = 160  # an image whose longest edge has at most this many pixels is embedded unchanged
PIXELATED = 96  # an image whose longest edge has at most this many pixels is displayed without smoothing
LARGE, SMALL = 384, 208  # larger images are reduced to this longest edge in pixels, twice the displayed size


def picture(path: Path | None, *, words: str, edge: int = LARGE) -> Html:
    """Embed the image at ``path``, reduced to ``edge`` pixels if it is large; a box with the reason if there is no image.

    ``words``: the alternative text.
    """
    if path is None:
        return tag("span", "no image", class_="nothing")
    try:
        return embedded(read_bytes(path), words=words, edge=edge)
    except FileNotFoundError:
        return tag("span", "file not found", class_="nothing")
    except OSError:
        return tag("span", "not readable", class_="nothing")


def embedded(content: bytes, *, words: str, edge: int = LARGE) -> Html:
    """Embed the image in ``content``, the bytes of an image file, in the same way as ``picture``."""
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
    """Encode a small image as PNG, and a large one reduced as JPEG: 20 photographs as PNG would take tens of megabytes."""
    buffer = io.BytesIO()
    if max(image.size) <= EXACT:
        image.convert("RGB").save(buffer, format="PNG")
        return "png", buffer.getvalue()
    reduced = image.convert("RGB")
    reduced.thumbnail((edge, edge), Image.Resampling.LANCZOS)
    reduced.save(buffer, format="JPEG", quality=88)
    return "jpeg", buffer.getvalue()
