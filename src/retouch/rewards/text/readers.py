"""Readers of text in images: the protocols, and RapidOCR, which runs on the CPU with the models of its wheel."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from PIL.Image import Image

if TYPE_CHECKING:
    import numpy as np

Corners: TypeAlias = tuple[tuple[float, float], ...]
Pixels: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

_SMALLEST = 4  # pixels per side; no letter fits into fewer


@dataclass(frozen=True, slots=True)
class TextLine:
    """A line of text in an image.

    ``confidence``: of the reader, 0 to 1. ``corners``: of the line's outline, (x, y) in pixels; empty if the reader does not return
    them.
    """

    text: str
    confidence: float
    corners: Corners = ()


class TextReader(Protocol):
    """Finds the lines of text in an image, from top to bottom."""

    def __call__(self, image: Image) -> list[TextLine]: ...


@runtime_checkable
class LineReader(Protocol):
    """Reads images that contain a single line each, without detecting the line."""

    def read_lines(self, images: Sequence[Image]) -> list[TextLine]: ...


class RapidReader:
    """RapidOCR with the models of its own wheel; nothing is downloaded. Raises ValueError if it is not installed (extra ``ocr``).

    ``line_width``: lines are resized to a height of 48 px and padded to this width in px; None uses RapidOCR's default, 320. A
    smaller width is faster for short lines; longer lines are always read completely.
    """

    def __init__(self, *, threads: int = 1, line_width: int | None = None) -> None:
        self._engine = _engine(threads, line_width)
        self._line_width = line_width

    @property
    def fingerprint(self) -> str:
        """The version of RapidOCR, and the line width."""
        return f"rapidocr {version('rapidocr')}, line width {self._line_width}"

    def __call__(self, image: Image) -> list[TextLine]:
        """The lines of text; none in an image with a side of less than 4 pixels."""
        if not is_large(image):
            return []
        found = self._engine(pixels(image))
        if found.txts is None:
            return []
        return [
            TextLine(text, float(sure), corners(at)) for text, sure, at in zip(found.txts, found.scores, found.boxes, strict=True)
        ]

    def read_lines(self, images: Sequence[Image]) -> list[TextLine]:
        """The single line of text in each image, read as a batch; "" if no text can be read."""
        return read_large(images, self._read)

    def _read(self, images: Sequence[Image]) -> list[TextLine]:
        read = self._engine.recognize_txt([pixels(image) for image in images])
        return [TextLine(text, float(sure)) for text, sure in zip(read.txts, read.scores, strict=True)]


def is_large(image: Image) -> bool:
    """Whether the image is large enough for letters."""
    return min(image.size) >= _SMALLEST


def read_large(images: Sequence[Image], read: Callable[[Sequence[Image]], list[TextLine]]) -> list[TextLine]:
    """A line for each image: the result of ``read`` for images that are large enough, "" for the others."""
    large = [image for image in images if is_large(image)]
    lines = read(large) if large else []
    assert len(lines) == len(large), "a reader gives a line for each picture"
    rest = iter(lines)
    return [next(rest) if is_large(image) else TextLine("", 0.0) for image in images]


def pixels(image: Image) -> Pixels:
    """The pixels, (h, w, 3), in the channel order blue, green, red, which readers expect."""
    import numpy as np

    return np.ascontiguousarray(np.asarray(image.convert("RGB"))[:, :, ::-1])


def corners(outline: Any) -> Corners:
    """Convert an outline of n points, (n, 2), as readers return it."""
    return tuple((float(x), float(y)) for x, y in outline)


def _engine(threads: int, line_width: int | None) -> Any:
    try:
        from rapidocr import RapidOCR
    except ImportError:
        raise ValueError("reading text in images needs rapidocr: pip install 'retouch[ocr]'") from None
    limits = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": threads for kind in ("intra", "inter")}
    shape = {} if line_width is None else {"Rec.rec_img_shape": [3, 48, line_width]}
    return RapidOCR(params={"Global.log_level": "critical", **limits, **shape})
