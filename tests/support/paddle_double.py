"""A strict double of PaddleOCR 3: it accepts the same arguments and images and returns results in the same form.

It reads each bar of one colour as a line of text that names the colour, so an image with a wrong order of channels gives a wrong
text.
"""

import ctypes
import signal
import sys
import types
from typing import Any

import numpy as np

SIZE = (8, 30)  # height and width of a bar
LINES = {(255, 0, 0): ("blue", 0.9), (0, 0, 255): ("red", 0.8), (0, 200, 0): ("green", 0.3)}  # blue, green, red
MODELS = ("PP-OCRv6_medium_rec", "korean_PP-OCRv5_mobile_rec")
_COMMON = {"device": str, "engine": str, "enable_hpi": bool, "cpu_threads": int, "enable_mkldnn": bool, "precision": str}


def install(monkeypatch: Any) -> list[tuple[str, Any]]:
    """Install doubles of the packages ``paddle`` and ``paddleocr``; return a list to which every object that is made is added."""
    made: list[tuple[str, Any]] = []
    framework, package = types.ModuleType("paddle"), types.ModuleType("paddleocr")
    framework.disable_signal_handler = _disable_signal_handler
    package.__version__ = "3.7.0"
    package.PaddleOCR = lambda **given: _recorded(made, PaddleOCR(**given))
    package.TextRecognition = lambda **given: _recorded(made, TextRecognition(**given))
    monkeypatch.setitem(sys.modules, "paddle", framework)
    monkeypatch.setitem(sys.modules, "paddleocr", package)
    return made


def _recorded(made: list[Any], one: Any) -> Any:
    made.append(one)
    return one


def _disable_signal_handler() -> None:
    """Change the signal handler in C, as the package does; Python does not notice this change."""
    ctypes.CDLL(None).signal(int(signal.SIGTERM), None)


class PaddleOCR:
    def __init__(
        self,
        *,
        text_detection_model_name: str | None = None,
        text_recognition_model_name: str | None = None,
        use_doc_orientation_classify: bool | None = None,
        use_doc_unwarping: bool | None = None,
        use_textline_orientation: bool | None = None,
        text_rec_score_thresh: float | None = None,
        **common: Any,
    ) -> None:
        turns = (use_doc_orientation_classify, use_doc_unwarping, use_textline_orientation)
        assert turns == (False, False, False), "None loads three more models, which turn and unwarp the pixels"
        assert text_detection_model_name is None
        self.common = _checked_arguments(common)
        self.model = _model(text_recognition_model_name)
        self.threshold = text_rec_score_thresh or 0.0
        self.asked: list[Any] = []

    def predict(self, input: Any) -> list[dict[str, Any]]:
        arrays = [_checked_pixels(pixels) for pixels in (input if isinstance(input, list) else [input])]
        self.asked += arrays
        return [self._result(pixels) for pixels in arrays]

    def _result(self, pixels: np.ndarray) -> dict[str, Any]:
        lines = _lines(pixels)
        sure = [line for line in lines if line[1] >= self.threshold]
        outlines = [line[2] for line in sure]
        boxes = np.array([[*outline.min(0), *outline.max(0)] for outline in outlines], dtype=np.int16)
        return {
            "input_path": None,
            "page_index": None,
            "dt_polys": [line[2] for line in lines],  # also of lines below the confidence threshold
            "rec_texts": [line[0] for line in sure],
            "rec_scores": [line[1] for line in sure],
            "rec_polys": outlines,
            "rec_boxes": boxes,
        }


class TextRecognition:
    def __init__(
        self, *, model_name: str | None = None, model_dir: str | None = None, input_shape: Any = None, **common: Any
    ) -> None:
        assert model_dir is None
        assert input_shape is None, "long lines would be squeezed into this shape"
        self.common = _checked_arguments(common)
        self.model = _model(model_name)
        self.asked: list[Any] = []

    def predict(self, input: Any, batch_size: int | None = None) -> list[dict[str, Any]]:
        assert isinstance(input, list)
        assert input, "predict is never called with an empty list"
        assert type(batch_size) is int
        arrays = [_checked_pixels(pixels) for pixels in input]
        self.asked += arrays
        read = [next(iter(_lines(pixels)), ("", 0.0, None)) for pixels in arrays]
        return [{"input_path": None, "page_index": None, "rec_text": text, "rec_score": sure} for text, sure, _ in read]


def _checked_arguments(common: dict[str, Any]) -> dict[str, Any]:
    for name, value in common.items():
        if name not in _COMMON:
            raise ValueError(f"Unknown argument: {name}")
        assert type(value) is _COMMON[name], name
    return common


def _model(name: str | None) -> str:
    if name is not None and name not in MODELS:
        raise ValueError(f"No engine bindings registered for model {name!r}.")
    return name or MODELS[0]


def _checked_pixels(pixels: Any) -> np.ndarray:
    """Check that this is an image that the package accepts.

    The package skips other objects with a warning, so the results of later images move up; a size of 0 is an error there.
    """
    assert type(pixels) is np.ndarray
    assert pixels.dtype == np.uint8
    assert pixels.ndim == 3
    assert pixels.shape[2] == 3
    assert pixels.flags.c_contiguous
    assert min(pixels.shape[:2]) >= 4
    return pixels


def _lines(pixels: np.ndarray) -> list[tuple[str, float, np.ndarray]]:
    """Return text, confidence and outline (4, 2) of each bar, from top to bottom."""
    found = []
    for colour, (text, sure) in LINES.items():
        rows, columns = np.nonzero((pixels == np.array(colour)).all(-1))
        if len(rows):
            (top, bottom), (left, right) = (rows.min(), rows.max()), (columns.min(), columns.max())
            found.append((text, sure, np.array([(left, top), (right, top), (right, bottom), (left, bottom)], dtype=np.int16)))
    return sorted(found, key=lambda line: int(line[2][0, 1]))
