"""What reads text in pictures: the seam, and RapidOCR behind it, on the CPU with the models of its wheel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np
from PIL.Image import Image

Corners: TypeAlias = tuple[tuple[float, float], ...]
Pixels: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_SMALLEST = 4  # pixels a side: no letter fits into less


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text that was found, with the reader's confidence, 0 to 1, and where it is known its outline, (x, y) in pixels."""

    text: str
    confidence: float
    corners: Corners = ()


class TextReader(Protocol):
    """Finds the lines of text in a picture, from top to bottom."""

    def __call__(self, image: Image) -> list[Line]: ...


@runtime_checkable
class LineReader(Protocol):
    """Reads pictures of one line each, which need no finding."""

    def read_lines(self, images: Sequence[Image]) -> list[Line]: ...


class RapidReader:
    """RapidOCR with the models of its own wheel; nothing is downloaded. ValueError: it is not installed (extra ``ocr``).

    ``line_width``: a line is brought to a height of 48 px to be read, and filled up to this width in px; None takes RapidOCR's own,
    320. Short lines cost less with less; longer ones are read whole in any case.
    """

    def __init__(self, *, threads: int = 1, line_width: int | None = None) -> None:
        self._engine = _engine(threads, line_width)
        self._line_width = line_width

    @property
    def fingerprint(self) -> str:
        """Which version reads, and how wide."""
        return f"rapidocr {version('rapidocr')}, line width {self._line_width}"

    def __call__(self, image: Image) -> list[Line]:
        """The lines of text; none in a picture of under 4 pixels a side."""
        if not is_large(image):
            return []
        found = self._engine(pixels(image))
        if found.txts is None:
            return []
        return [Line(text, float(sure), corners(at)) for text, sure, at in zip(found.txts, found.scores, found.boxes, strict=True)]

    def read_lines(self, images: Sequence[Image]) -> list[Line]:
        """The one line of text in each picture, read as a batch; "" where none can be read."""
        return read_large(images, self._read)

    def _read(self, images: Sequence[Image]) -> list[Line]:
        read = self._engine.recognize_txt([pixels(image) for image in images])
        return [Line(text, float(sure)) for text, sure in zip(read.txts, read.scores, strict=True)]


def is_large(image: Image) -> bool:
    """Whether letters could stand in it."""
    return min(image.size) >= _SMALLEST


def read_large(images: Sequence[Image], read: Callable[[Sequence[Image]], list[Line]]) -> list[Line]:
    """A line for each picture: as ``read`` has those that are large enough, "" for the others, which it is not shown."""
    large = [image for image in images if is_large(image)]
    lines = read(large) if large else []
    assert len(lines) == len(large), "a reader gives a line for each picture"
    rest = iter(lines)
    return [next(rest) if is_large(image) else Line("", 0.0) for image in images]


def pixels(image: Image) -> Pixels:
    """Blue, green, red, (h, w, 3), as readers take them."""
    return np.ascontiguousarray(np.asarray(image.convert("RGB"))[:, :, ::-1])


def corners(outline: Any) -> Corners:
    """An outline as readers give it, (n, 2)."""
    return tuple((float(x), float(y)) for x, y in outline)


def _engine(threads: int, line_width: int | None) -> Any:
    try:
        from rapidocr import RapidOCR
    except ImportError:
        raise ValueError("reading text in pictures needs rapidocr: pip install 'retouch[ocr]'") from None
    limits = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": threads for kind in ("intra", "inter")}
    shape = {} if line_width is None else {"Rec.rec_img_shape": [3, 48, line_width]}
    return RapidOCR(params={"Global.log_level": "critical", **limits, **shape})
