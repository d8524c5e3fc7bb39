"""PaddleOCR 3 as a reader of text in images, through its own package, on the CPU.

The package requires other versions of numpy and OpenCV than the tests of Retouch, so it is imported only when a reader is made.
"""

import signal
import threading
from collections.abc import Sequence
from typing import Any, Literal

from PIL.Image import Image

from retouch.config.section import Section
from retouch.rewards.text.readers import TextLine, corners, is_large, pixels, read_large

_SURE = 0.5  # lines with a lower confidence are dropped, as in RapidOCR
_AT_ONCE = 6  # lines per batch, as in PaddleOCR's own pipeline


class PaddleOcr(Section):
    """PaddleOCR, which downloads its models unless they are in its cache. Not tested with the real models."""

    kind: Literal["paddleocr"] = "paddleocr"
    model: str | None = None
    """Name of the recognition model, for example ``korean_PP-OCRv5_mobile_rec``; null uses the package's default, which differs
    between versions."""

    def open(self, *, threads: int) -> "PaddleReader":
        """Make the reader. ``threads``: number of CPU threads. Raises ValueError if PaddleOCR is not installed (extra ``paddle``)
        or does not know the model."""
        return PaddleReader(threads=threads, model=self.model)


class PaddleReader:
    """PaddleOCR's detection and recognition models, without the models that rotate and unwarp whole documents. PaddleOCR reads its
    models from its own cache (``~/.paddlex``), and downloads models that are not in it.

    ``model``: the name of the recognition model (``korean_PP-OCRv5_mobile_rec``); None uses the package's default, which differs
    between versions. Raises ValueError if PaddleOCR is not installed (extra ``paddle``) or does not know the model.
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
        """The lines of text; none in an image with a side of less than 4 pixels."""
        if not is_large(image):
            return []
        (found,) = self._finding.predict(pixels(image))
        lines = zip(found["rec_texts"], found["rec_scores"], found["rec_polys"], strict=True)
        return [TextLine(text, float(sure), corners(at)) for text, sure, at in lines]

    def read_lines(self, images: Sequence[Image]) -> list[TextLine]:
        """The single line of text in each image, read as a batch; "" if no text can be read."""
        return read_large(images, self._read)

    def _read(self, images: Sequence[Image]) -> list[TextLine]:
        read = self._reading.predict(input=[pixels(image) for image in images], batch_size=_AT_ONCE)
        return [TextLine(line["rec_text"], float(line["rec_score"])) for line in read]


def _package() -> tuple[Any, Any, str]:
    """The class of the pipeline, the class of the recognition model, and the version of the package."""
    try:
        import paddle
        from paddleocr import PaddleOCR, TextRecognition, __version__  # version 2 has no TextRecognition
    except ImportError as error:
        raise ValueError(
            f"PaddleOCR 3 cannot be imported ({error}): pip install 'retouch[paddle]', best in a separate environment, "
            "behind `retouch serve`"
        ) from None
    # The package sets a handler that ends the process on SIGTERM, but a run must save a last checkpoint on SIGTERM. Disabling this
    # handler leaves the system's handler, which ends the process too, so Python's own handler is set again.
    paddle.disable_signal_handler()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))
    return PaddleOCR, TextRecognition, __version__
