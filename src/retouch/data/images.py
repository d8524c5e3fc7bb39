"""Pictures from files or bytes, made uniform: upright, mode RGB (masks: L), never larger than a stated number of pixels.

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

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 50_000_000  # 150 MB once decoded

# What Pillow raises for damaged files. Its own words are not passed on: they may hold memory addresses.
_DAMAGED = (OSError, EOFError, SyntaxError, ValueError, OverflowError, struct.error, zlib.error, Warning)


@dataclass(frozen=True, slots=True)
class Picture:
    """An encoded picture that is not decoded yet. ``name`` is what messages call it; ``data``: where it is, or its bytes."""

    name: str
    data: Path | bytes


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says of itself before it is decoded. ``size``: (width, height) once upright; ``rotated``: EXIF turns it."""

    format: str
    mode: str
    size: tuple[int, int]
    rotated: bool


@dataclass(frozen=True, slots=True)
class Exact:
    """Every picture becomes ``width`` by ``height``."""

    width: int
    height: int

    def size(self, source: tuple[int, int]) -> tuple[int, int]:
        """(width, height), whatever the source."""
        return self.width, self.height


@dataclass(frozen=True, slots=True)
class Area:
    """Pictures keep their shape as nearly as ``multiple`` allows, and shrink where they have more than ``max_area`` pixels."""

    max_area: int
    multiple: int = 16

    def __post_init__(self) -> None:
        if self.multiple < 1 or self.max_area < self.multiple**2:
            raise ValueError(
                f"max_area {self.max_area} must be at least multiple * multiple = {self.multiple**2}, and both above 0"
            )

    def size(self, source: tuple[int, int]) -> tuple[int, int]:
        """(width, height), each a multiple of ``multiple`` and at least that; width * height <= max_area."""
        scale = min(1.0, math.sqrt(self.max_area / (source[0] * source[1])))
        units = [max(1, int(side * scale) // self.multiple) for side in source]
        most = self.max_area // self.multiple**2
        if units[0] * units[1] > most:  # a sliver, whose short side had to grow
            units[units.index(max(units))] = most // min(units)
        return units[0] * self.multiple, units[1] * self.multiple


Resize: TypeAlias = Exact | Area


def read_header(source: str | Path | Picture, *, max_pixels: int = MAX_PIXELS) -> Header:
    """The header of a picture, without decoding its pixels where the format allows. ValueError as in ``load_image``."""
    with _opened(source, max_pixels=max_pixels) as image:
        turn = image.getexif().get(ExifTags.Base.Orientation, 1)
        width, height = image.size
        assert image.format is not None
        size = (height, width) if turn in (5, 6, 7, 8) else (width, height)
        return Header(image.format, image.mode, size, turn in range(2, 9))


def load_image(source: str | Path | Picture, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """The picture, upright as its EXIF says, in mode RGB with 8 bits a channel.

    16-bit files keep their high byte; greyscale and palettes become RGB; CMYK is converted by the plain formula; transparency is
    laid over white; of the several pictures that a phone's JPEG may hold, the first. ValueError, naming the file: missing, not a
    PNG, JPEG or WebP, an animation, more than ``max_pixels`` by its header (nothing is decoded then), truncated or damaged.
    """
    with _opened(source, max_pixels=max_pixels) as image:
        upright = _eight_bits(ImageOps.exif_transpose(image))
        if upright.has_transparency_data:
            white = Image.new("RGBA", upright.size, "white")
            upright = Image.alpha_composite(white, upright.convert("RGBA"))
        rgb = upright.convert("RGB")
    rgb.info.clear()  # a stale profile or rotation would be written back with the pixels
    return rgb


def load_mask(source: str | Path | Picture, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """A mask in mode L: 255 where the picture is to change, 0 where it is to stay. Colours become their luma; greys stay.

    ValueError as in ``load_image``, and for a mask with transparent parts: some tools erase what is to change, others what is
    to stay, so it has to be saved as black and white.
    """
    with _opened(source, max_pixels=max_pixels) as image:
        upright = _eight_bits(ImageOps.exif_transpose(image))
        clear = upright.has_transparency_data and upright.convert("RGBA").getchannel("A").getextrema() != (255, 255)
        mask = upright.convert("RGB").convert("L")
    if clear:
        name = source.name if isinstance(source, Picture) else source
        raise ValueError(f"{name}: a mask with transparent parts; save it as black and white, white where to change")
    mask.info.clear()
    return mask


def fit(image: Image.Image, *, size: tuple[int, int]) -> Image.Image:
    """The picture scaled (Lanczos) to cover ``size``, (width, height), and cut at the centre; unchanged where it fits already."""
    return ImageOps.fit(image, size, method=Image.Resampling.LANCZOS)


def fit_mask(mask: Image.Image, *, size: tuple[int, int]) -> Image.Image:
    """The same for a mask, by nearest neighbour, so that no value appears that was not there."""
    return ImageOps.fit(mask, size, method=Image.Resampling.NEAREST)


@contextmanager
def _opened(source: str | Path | Picture, *, max_pixels: int) -> Iterator[Image.Image]:
    picture = source if isinstance(source, Picture) else Picture(str(source), Path(source))
    try:
        if isinstance(picture.data, Path) and not picture.data.is_file():  # opening a pipe would wait for ever
            raise FileNotFoundError
        data = io.BytesIO(picture.data) if isinstance(picture.data, bytes) else picture.data
        with Image.open(data, formats=FORMATS) as image:
            pixels = image.width * image.height
            frames = image.n_frames if image.format in ("PNG", "WEBP") else 1  # type: ignore[attr-defined]
            if pixels <= max_pixels and frames == 1:
                yield image
                return
    except FileNotFoundError:
        raise ValueError(f"{picture.name}: no such file") from None
    except PermissionError:
        raise ValueError(f"{picture.name}: may not be read; change its permissions") from None
    except UnidentifiedImageError:
        raise ValueError(f"{picture.name}: not a PNG, JPEG or WebP picture; convert it to one") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise ValueError(f"{picture.name}: far more than the {max_pixels} pixels that are allowed; make it smaller") from None
    except _DAMAGED:
        raise ValueError(f"{picture.name}: truncated or damaged; get or export it again") from None
    if pixels > max_pixels:
        raise ValueError(f"{picture.name}: {pixels} pixels, more than the {max_pixels} that are allowed; make it smaller")
    raise ValueError(f"{picture.name}: an animation of {frames} frames; keep one")


def _eight_bits(image: Image.Image) -> Image.Image:
    """16-bit greyscale by its high byte, as Pillow reads 16-bit colours; its own conversion would clip instead."""
    if not image.mode.startswith("I"):
        return image
    wide = np.asarray(image)
    narrow = (wide >> 8).astype(np.uint8)
    if "transparency" in image.info:
        narrow[wide == image.info["transparency"]] = 255  # over white
    return Image.fromarray(narrow)
