"""Loads images from files or bytes in one form: upright, mode RGB (masks: L), with at most a given number of pixels.

Sizes are (width, height) in pixels. Only PNG, JPEG and WebP are decoded. Colour profiles are not applied.
"""

import io
import math
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
MAX_PIXELS = 50_000_000  # 150 MB once decoded

# Exceptions that Pillow raises for damaged files. Its messages are not passed on: they may contain memory addresses.
_DAMAGED = (OSError, EOFError, SyntaxError, ValueError, OverflowError, struct.error, zlib.error, Warning)


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image that is not decoded yet. ``name``: its name in messages. ``data``: the path or the bytes of its file."""

    name: str
    data: Path | bytes


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an image file. ``size``: (width, height) after the EXIF rotation. ``rotated``: whether EXIF rotates it."""

    mode: str
    size: tuple[int, int]
    rotated: bool


@dataclass(frozen=True, slots=True)
class Exact:
    """Resizes every image to ``width`` by ``height``."""

    width: int
    height: int

    def size(self, source: tuple[int, int]) -> tuple[int, int]:
        """The new (width, height), which does not depend on the size of the source."""
        return self.width, self.height


@dataclass(frozen=True, slots=True)
class Area:
    """Shrinks images to at most ``max_area`` pixels and keeps their aspect ratio as far as ``multiple`` allows."""

    max_area: int
    multiple: int = 16

    def __post_init__(self) -> None:
        if self.multiple < 1 or self.max_area < self.multiple**2:
            raise ValueError(
                f"max_area {self.max_area} must be at least multiple * multiple = {self.multiple**2}, and both above 0"
            )

    def size(self, source: tuple[int, int]) -> tuple[int, int]:
        """The new (width, height): both are positive multiples of ``multiple``, and width * height <= max_area."""
        scale = min(1.0, math.sqrt(self.max_area / (source[0] * source[1])))
        units = [max(1, int(side * scale) // self.multiple) for side in source]
        most = self.max_area // self.multiple**2
        if units[0] * units[1] > most:  # a very narrow image, whose short side had to grow
            units[units.index(max(units))] = most // min(units)
        return units[0] * self.multiple, units[1] * self.multiple


Resize: TypeAlias = Exact | Area


def read_header(source: str | Path | EncodedImage, *, max_pixels: int = MAX_PIXELS) -> Header:
    """The header of an image; its pixels are not decoded if the format allows this. Raises ValueError under the same conditions as
    ``load_image``."""
    with _opened(source, max_pixels=max_pixels) as image:
        turn = image.getexif().get(ExifTags.Base.Orientation, 1)
        width, height = image.size
        size = (height, width) if turn in (5, 6, 7, 8) else (width, height)
        return Header(image.mode, size, turn in range(2, 9))


def load_image(source: str | Path | EncodedImage, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Load the image in mode RGB with 8 bits per channel, rotated as its EXIF data say.

    Of 16-bit files the high byte is used. Greyscale and palettes become RGB. CMYK is converted by the plain formula. Transparent
    parts are composited over white. Of a JPEG with several images the first is used.

    Raises ValueError with the name of the file if it is missing, truncated, damaged, an animation, not PNG, JPEG or WebP, or if it
    has more than ``max_pixels`` pixels according to its header (then nothing is decoded).
    """
    with _opened(source, max_pixels=max_pixels) as image:
        upright = _eight_bits(ImageOps.exif_transpose(image))
        if upright.has_transparency_data:
            white = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(white, upright.convert("RGBA"))
        rgb = upright.convert("RGB")
    rgb.info.clear()  # otherwise saving the image would write a profile or rotation that no longer applies
    return rgb


def load_mask(source: str | Path | EncodedImage, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Load a mask in mode L: 255 where the image should change, 0 where it should stay. Colours become their luma; greys stay.

    Raises ValueError under the same conditions as ``load_image``, and for a mask with transparent parts: some tools erase the part
    to change, others the part to keep, so the mask has to be saved as black and white.
    """
    with _opened(source, max_pixels=max_pixels) as image:
        upright = _eight_bits(ImageOps.exif_transpose(image))
        clear = upright.has_transparency_data and upright.convert("RGBA").getchannel("A").getextrema() != (255, 255)
        mask = upright.convert("RGB").convert("L")
    if clear:
        name = source.name if isinstance(source, EncodedImage) else source
        raise ValueError(
            f"{name}: a mask with transparent parts; save it as black and white, with white where the image should change"
        )
    mask.info.clear()
    return mask


def fit(image: Image.Image, *, size: tuple[int, int]) -> Image.Image:
    """Scale the image (Lanczos) to cover ``size``, (width, height), and crop it at the centre; unchanged if it has this size."""
    return ImageOps.fit(image, size, method=Image.Resampling.LANCZOS)


def fit_mask(mask: Image.Image, *, size: tuple[int, int]) -> Image.Image:
    """Scale and crop a mask like ``fit``, but by nearest neighbour, so that no new values appear."""
    return ImageOps.fit(mask, size, method=Image.Resampling.NEAREST)


@contextmanager
def _opened(source: str | Path | EncodedImage, *, max_pixels: int) -> Iterator[Image.Image]:
    encoded = source if isinstance(source, EncodedImage) else EncodedImage(str(source), Path(source))
    try:
        if isinstance(encoded.data, Path) and not encoded.data.is_file():  # opening a pipe would block forever
            raise FileNotFoundError
        data = io.BytesIO(encoded.data) if isinstance(encoded.data, bytes) else encoded.data
        with Image.open(data, formats=FORMATS) as image:
            pixels = image.width * image.height
            frames = image.n_frames if image.format in ("PNG", "WEBP") else 1  # type: ignore[attr-defined]
            if pixels <= max_pixels and frames == 1:
                yield image
                return
    except FileNotFoundError:
        raise ValueError(f"{encoded.name}: no such file") from None
    except PermissionError:
        raise ValueError(f"{encoded.name}: no permission to read it; change its permissions") from None
    except UnidentifiedImageError:
        raise ValueError(f"{encoded.name}: not a PNG, JPEG or WebP image; convert it to one") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(f"{encoded.name}: far more than the {max_pixels} pixels that are allowed; make it smaller") from None
    except _DAMAGED:
        raise ValueError(f"{encoded.name}: truncated or damaged; get or export it again") from None
    if pixels > max_pixels:
        raise ValueError(f"{encoded.name}: {pixels} pixels, more than the {max_pixels} that are allowed; make it smaller")
    raise ValueError(f"{encoded.name}: an animation of {frames} frames; save one frame as an image")


def _eight_bits(image: Image.Image) -> Image.Image:
    """Convert 16-bit greyscale to 8 bits by its high byte, as Pillow reads 16-bit colours; Pillow's own conversion would clip."""
    if not image.mode.startswith("I"):
        return image
    import numpy as np

    wide = np.asarray(image)
    narrow = (wide >> 8).astype(np.uint8)
    if "transparency" in image.info:
        narrow[wide == image.info["transparency"]] = 255  # over white
    return Image.fromarray(narrow)
