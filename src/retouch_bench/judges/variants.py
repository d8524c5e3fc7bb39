"""Makes changed copies of images: brighter, darker, smaller, degraded, or with a line of text. All functions are deterministic."""

import io
from collections.abc import Mapping

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

_SHADE = 0.8
_QUALITY = 12  # JPEG quality
_NOISE = 24.0  # standard deviation; values range from 0 to 255
_BAND = 0.1  # height of the line of text, as a share of the height of the image


def brighter(image: Image.Image) -> Image.Image:
    """Reduce the distance of every value to white to 80 %; nothing is clipped."""
    return image.convert("RGB").point([round(255 - _SHADE * (255 - value)) for value in range(256)] * 3)


def darker(image: Image.Image) -> Image.Image:
    """Multiply every value by 0.8."""
    return image.convert("RGB").point([round(_SHADE * value) for value in range(256)] * 3)


def smaller(image: Image.Image) -> Image.Image:
    """Halve the width and height, by averaging."""
    return image.convert("RGB").resize((max(1, image.width // 2), max(1, image.height // 2)), Image.Resampling.BOX)


def degraded(image: Image.Image) -> Mapping[str, Image.Image]:
    """Make copies of the same size by name of their defect: JPEG artefacts, blur, noise, or a quarter of the resolution."""
    plain = image.convert("RGB")
    buffer = io.BytesIO()
    plain.save(buffer, "JPEG", quality=_QUALITY)
    with Image.open(buffer) as opened:
        jpeg = opened.convert("RGB")
    noise = np.random.default_rng(0).normal(0, _NOISE, (plain.height, plain.width, 3))
    noisy = np.clip(np.asarray(plain, dtype=np.float64) + noise, 0, 255).round().astype(np.uint8)
    low = plain.resize((max(1, plain.width // 4), max(1, plain.height // 4)), Image.Resampling.BOX)
    return {
        "JPEG": jpeg,
        "blur": plain.filter(ImageFilter.GaussianBlur(max(plain.size) / 60)),
        "noise": Image.fromarray(noisy),
        "low resolution": low.resize(plain.size, Image.Resampling.BICUBIC),
    }


def with_text(image: Image.Image, words: str) -> Image.Image:
    """Draw the words in black on a white band at the bottom, scaled down to the width of the image if they are wider."""
    made = image.convert("RGB")
    height = max(1, round(_BAND * made.height))
    canvas = ImageDraw.Draw(made)
    canvas.rectangle((0, made.height - height, made.width, made.height), fill="white")
    size = height * 0.8
    font = ImageFont.load_default(size)
    size *= min(1.0, 0.96 * made.width / max(1.0, canvas.textlength(words, font)))
    if size >= 1:
        middle = made.width / 2, made.height - height / 2
        canvas.text(middle, words, fill="black", font=ImageFont.load_default(size), anchor="mm")
    return made
