"""Pictures as bytes on the wire, without loss: WebP between machines, raw pixels on one machine.

Lossless WebP at its fastest setting is smaller than PNG and several times as quick. A JPEG would show the judge other pixels than
the policy made.
"""

import io
from typing import Literal, TypeAlias

from PIL.Image import Image

from retouch.rewards.wire.schema import PictureHead

Encoding: TypeAlias = Literal["webp", "raw"]
_WEBP_SIDE = 16383


def encode(image: Image, encoding: Encoding) -> tuple[PictureHead, bytes]:
    """The picture's head and bytes. Modes other than RGB and L become RGB; profiles and rotations are left behind."""
    plain = image if image.mode in ("RGB", "L") else image.convert("RGB")
    mode: Literal["RGB", "L"] = "L" if plain.mode == "L" else "RGB"
    if encoding == "raw":
        return PictureHead(form="raw", mode=mode, width=plain.width, height=plain.height), plain.tobytes()
    buffer = io.BytesIO()
    if max(plain.size) <= _WEBP_SIDE:
        plain.save(buffer, "WEBP", lossless=True, quality=0, method=0, exif=b"", icc_profile=b"", xmp=b"")
    else:
        plain.save(buffer, "PNG", compress_level=1, exif=b"", icc_profile=None)
    return PictureHead(form="encoded", mode=mode), buffer.getvalue()
