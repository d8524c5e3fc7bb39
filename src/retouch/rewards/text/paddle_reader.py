"""PaddleOCR 3 as the reader of text, through its own package, on the CPU.

The package requires versions of numpy and OpenCV that are not those of Retouch's tests, so it is imported when a reader is made.
"""

import signal
import threading
from collections.abc import Sequence
from typing import Any, Literal

from PIL.Image import Image

from retouch.config.section import Section
from retouch.rewards.text.readers import TextLine, corners, is_large, pixels, read_large

_SURE = 0.5  # lines of a lower confidence are dropped, as RapidOCR drops them
_AT_ONCE = 6  # lines, as in PaddleOCR's own pipeline


class PaddleOcr(Section):
    """PaddleOCR, which downloads its models unless they are in its cache; untested on the real ones."""

    kind: Literal["paddleocr"] = "paddleocr"
    model: str | None = None
    """Its recogniser by name, ``korean_PP-OCRv5_mobile_rec``; null is the package's default, which differs between its versions."""

    def open(self, *, threads: int) -> "PaddleReader":
        """The reader, on so many CPU threads. ValueError: it is not installed (extra ``paddle``), or knows no such model."""
        return PaddleReader(threads=threads, model=self.model)


class PaddleReader:
    """PaddleOCR's detector and recogniser, without the models that rotate and unwarp whole documents. It finds its models in its
    own cache (``~/.paddlex``), and downloads those that are not there.

    ``model``: the recogniser by name (``korean_PP-OCRv5_mobile_rec``); None takes the package's default, which differs between its
    versions. ValueError: it is not installed (extra ``paddle``), or knows no such model.
    """

    def __init__(self, *, threads: int = 1, model: str | None = None) -> None:
        pipeline, recogniser, version = _package()
        place = {"device": "cpu", "cpu_threads": threads}
        self._finding = pipeline(
            use_doc_orientation_classify=False,
            use_doc_unwarping=False,
            use_textline_orientation=False,
            text_recognition_model_name=model,
            text_rec_score_thresh=_SURE,
            **place,
        )
        self._reading = recogniser(model_name=model, **place)
        self.fingerprint = f"paddleocr {version}, {model or 'its own model'}"

    def __call__(self, image: Image) -> list[TextLine]:
        """The lines of text; none in an image of under 4 pixels a side."""
        if not is_large(image):
            return []
        (found,) = self._finding.predict(pixels(image))
        lines = zip(found["rec_texts"], found["rec_scores"], found["rec_polys"], strict=True)
        return [TextLine(text, float(sure), corners(at)) for text, sure, at in lines]

    def read_lines(self, images: Sequence[Image]) -> list[TextLine]:
        """The one line of text in each image, read as a batch; "" where none can be read."""
        return read_large(images, self._read)

    def _read(self, images: Sequence[Image]) -> list[TextLine]:
        read = self._reading.predict(input=[pixels(image) for image in images], batch_size=_AT_ONCE)
        return [TextLine(line["rec_text"], float(line["rec_score"])) for line in read]


def _package() -> tuple[Any, Any, str]:
    """The pipeline, the recogniser alone, and the package's version."""
    try:
        import paddle
        from paddleocr import PaddleOCR, TextRecognition, __version__  # version 2 has no TextRecognition
    except ImportError as error:
        raise ValueError(
            f"PaddleOCR 3 cannot be imported ({error}): pip install 'retouch[paddle]', best in an environment of its own, "
            "behind `retouch serve`"
        ) from None
    # The package sets a handler that ends the process on SIGTERM, which tells a run to save a last checkpoint. Disabling it leaves
    # the system's handler, which ends the process too, so Python's own is set again.
    paddle.disable_signal_handler()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    return PaddleOCR, TextRecognition, __version__
