"""Pictures as data URLs: lossless, so that a judge sees the pixels that the policy made."""

import base64
import io

from PIL.Image import Image

_WEBP_LIMIT = 16383  # pixels a side, of the format


def data_url(image: Image) -> str:
    """The picture as lossless WebP in base64 (PNG beyond WebP's largest side), in RGB."""
    form = "PNG" if max(image.size) > _WEBP_LIMIT else "WEBP"
    settings = {"compress_level": 1} if form == "PNG" else {"lossless": True, "quality": 0, "method": 0}
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, form, **settings)
    return f"data:image/{form.lower()};base64,{base64.b64encode(buffer.getvalue()).decode()}"
