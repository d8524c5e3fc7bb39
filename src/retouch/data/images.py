"""Loads images from files or bytes in one form: upright, mode RGB (masks: L), with at most a given number of pixels.

Sizes are (width, height) in pixels. Only PNG, JPEG and WebP are decoded. Colours are converted to sRGB; the values of masks are not
colours and are not converted.
"""

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from PIL import ExifTags, Image, ImageChops, ImageCms, ImageOps, UnidentifiedImageError

FORMATS = ("PNG", "JPEG", "WEBP")
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
MAX_PIXELS = 50_000_000  # 150 MB once decoded

# Exceptions that Pillow raises for damaged files. Its messages are not passed on: they may contain memory addresses.
_DAMAGED = (OSError, EOFError, SyntaxError, ValueError, OverflowError, struct.error, zlib.error, Warning)
_OF_PROFILE = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
_LIKE_SRGB = 2  # in levels of 255: sRGB profiles of different makers differ by this much
_GREYISH = 16  # the largest difference of the channels of a grey pixel that a lossy format has stored


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """An image that is not decoded yet. ``name``: its name in messages. ``data``: the path or the bytes of its file."""

    name: str
    data: Path | bytes


@dataclass(frozen=True, slots=True)
class Header:
    """The header of an image file. ``size``: (width, height) after the EXIF rotation. ``rotated``: whether EXIF rotates it.
    ``profile``: whether a colour profile is converted to sRGB, or cannot be used (it is damaged, or of another kind of colours)."""

    mode: str
    size: tuple[int, int]
    rotated: bool
    profile: Literal["none", "converted", "unusable"] = "none"


def read_header(source: str | Path | EncodedImage, *, max_pixels: int = MAX_PIXELS) -> Header:
    """The header of an image; its pixels are not decoded if the format allows this. Raises ValueError under the same conditions as
    ``load_image``."""
    with _opened(source, max_pixels=max_pixels) as image:
        turn = image.getexif().get(ExifTags.Base.Orientation, 1)
        width, height = image.size
        size = (height, width) if turn in (5, 6, 7, 8) else (width, height)
        transform = _srgb_transform(image.info.get("icc_profile"), image.mode)
        profile = transform if isinstance(transform, str) else "converted"
        return Header(image.mode, size, turn in range(2, 9), profile)


def load_image(source: str | Path | EncodedImage, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Load the image in mode RGB with 8 bits per channel, rotated as its EXIF data say.

    Of 16-bit files the high byte is used. Greyscale and palettes become RGB. Colours with a colour profile are converted to sRGB;
    without one, RGB is taken as sRGB, and CMYK is converted by the plain formula. Transparent parts are composited over white. Of a
    JPEG with several images the first is used.

    Raises ValueError with the name of the file if it is missing, truncated, damaged, an animation, not PNG, JPEG or WebP, or if it
    has more than ``max_pixels`` pixels according to its header (then nothing is decoded).
    """
    with _opened(source, max_pixels=max_pixels) as image:
        upright = in_srgb(ImageOps.exif_transpose(image))
        if upright.mode == "RGBA":
            upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
        rgb = upright.convert("RGB")
    rgb.info.clear()  # otherwise saving the image would write a profile or rotation that no longer applies
    return rgb


def in_srgb(image: Image.Image) -> Image.Image:
    """The image in mode RGB, or RGBA if it has transparent parts, with its colours converted from their profile to sRGB."""
    profile = image.info.get("icc_profile")
    if image.mode.startswith("I"):  # 16-bit grey by its high byte, as 16-bit colours are read; Pillow's own conversion would clip
        import numpy as np

        wide = np.asarray(image)
        narrow = (wide >> 8).astype(np.uint8)
        if "transparency" in image.info:
            narrow[wide == image.info["transparency"]] = 255  # over white
        image = Image.fromarray(narrow)
    transform = _srgb_transform(profile, image.mode)
    plain = image.convert("RGBA" if image.has_transparency_data else "RGB")
    if isinstance(transform, str):
        return plain
    colours: Image.Image = transform.apply(image.convert(str(transform.input_mode)))
    if plain.mode == "RGBA":
        colours.putalpha(plain.getchannel("A"))
    return colours


@lru_cache(maxsize=32)
def _srgb_transform(profile: bytes | None, mode: str) -> ImageCms.ImageCmsTransform | Literal["none", "unusable"]:
    """The conversion to sRGB of an image of this mode; "none" if it has no profile, or one of sRGB."""
    if not profile:
        return "none"
    srgb = ImageCms.createProfile("sRGB")
    try:
        read = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        takes = _OF_PROFILE.get(read.profile.xcolor_space.strip())
        grey = mode in ("1", "L", "LA") or mode.startswith("I")
        if takes is None or (takes == "CMYK") != (mode == "CMYK") or (takes == "L" and not grey):
            return "unusable"
        transform = ImageCms.buildTransform(read, srgb, takes, "RGB")
    except (OSError, ImageCms.PyCMSError):
        return "unusable"
    if takes == "RGB":
        ramp = [255 * step // 5 for step in range(6)]
        cube = Image.frombytes("RGB", (36, 6), bytes(value for r in ramp for g in ramp for b in ramp for value in (r, g, b)))
        changes = ImageChops.difference(cube, transform.apply(cube)).getextrema()
        if max(most for _, most in changes) <= _LIKE_SRGB:  # type: ignore[misc]
            return "none"
    return transform


def load_mask(source: str | Path | EncodedImage, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """Load a mask in mode L: 255 where the image should change, 0 where it should stay.

    A mask of black and one other value or colour (0 and 1, 0 and 128, a palette) becomes 0 and 255. Other grey levels stay, of 16
    bits the high byte.

    Raises ValueError under the same conditions as ``load_image``, and for masks that can be read in several ways: with transparent
    parts, because some tools erase the part to change, others the part to keep; with several colours; and with several grey levels
    of which none is in the brighter half.
    """
    with _opened(source, max_pixels=max_pixels) as image:
        upright = ImageOps.exif_transpose(image)
        clear = upright.has_transparency_data  # of 16-bit greys: a transparent value
        if clear and not upright.mode.startswith("I"):
            clear = upright.convert("RGBA").getchannel("A").getextrema() != (255, 255)
        mask = None if clear else _mask_values(upright)
    if mask is None:
        name = source.name if isinstance(source, EncodedImage) else source
        what = "a mask with transparent parts" if clear else "a mask of several colours or of dark grey levels only"
        raise ValueError(f"{name}: {what}; save it as black and white, with white where the image should change")
    mask.info.clear()
    return mask


def _mask_values(image: Image.Image) -> Image.Image | None:
    """The mask in mode L; None if it can be read in several ways."""
    import numpy as np

    if image.mode.startswith("I"):
        values, white = np.asarray(image), 65535
    else:
        rgb = image.convert("RGB")
        red, green, blue = rgb.split()
        spread = max(np.asarray(ImageChops.difference(red, other)).max() for other in (green, blue))
        if spread > _GREYISH:
            colours = {colour for _, colour in rgb.getcolors(2) or ()}
            return rgb.convert("L").point(lambda value: 255 * (value > 0)) if (0, 0, 0) in colours else None
        values, white = np.asarray(rgb.convert("L")), 255
    levels = np.flatnonzero(np.bincount(values.ravel()))
    top = int(levels[-1])
    if top == 1 or (len(levels) == 2 and levels[0] == 0):
        values = (values > 0) * white
    elif 0 < top <= white // 2:
        return None
    return Image.fromarray((values if white == 255 else values >> 8).astype(np.uint8))


def fit(image: Image.Image, *, size: tuple[int, int]) -> Image.Image:
    """Scale the image (Lanczos) to cover ``size``, (width, height), and crop it at the centre; unchanged if it has this size."""
    return ImageOps.fit(image, size, method=Image.Resampling.LANCZOS)


def fit_mask(mask: Image.Image, *, size: tuple[int, int]) -> Image.Image:
    """Scale and crop a mask like ``fit``, but by nearest neighbour, so that no new values appear."""
    return ImageOps.fit(mask, size, method=Image.Resampling.NEAREST)


def off_centre(region: Image.Image) -> tuple[float, float]:
    """The distances of a region, which is the bright half of the grey levels, from the vertical and the horizontal line through the
    centre of its image, as shares of the width and the height; 0 for a region on both sides of the line, and without one."""
    import numpy as np

    found = []
    for axis in (0, 1):
        line = np.asarray(np.any(np.asarray(region) > 127, axis=axis))
        places = np.flatnonzero(line) + 0.5 - len(line) / 2
        found.append(max(0.0, float(np.abs(places).min()) - 0.5) / len(line) if len(places) else 0.0)
    return found[0], found[1]


def kept_by_fit(source: tuple[int, int], *, size: tuple[int, int]) -> tuple[float, float]:
    """The shares of the width and the height of an image of size ``source`` that ``fit`` to ``size`` keeps."""
    ratio = (size[0] * source[1]) / (size[1] * source[0])
    return min(1.0, ratio), min(1.0, 1 / ratio)


def removed_by_fit(what: str, off: tuple[float, float], source: tuple[int, int], *, size: tuple[int, int]) -> str:
    """The reason why an image of size ``source`` is not fitted to ``size``: the crop would remove the whole region ``what``, whose
    ``off_centre`` is ``off``. Empty if it does not."""
    if not any(distance > 0 and 2 * distance >= kept for distance, kept in zip(off, kept_by_fit(source, size=size), strict=True)):
        return ""
    return (
        f"the crop of {source[0]}x{source[1]} to the middle, in the shape of {size[0]}x{size[1]}, removes the whole {what}; crop "
        "the images around it, or choose a size of their shape"
    )


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
