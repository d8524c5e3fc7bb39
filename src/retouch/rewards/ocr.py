"""Whether the text that was asked for stands in the picture, and no other, as read by RapidOCR on the CPU (models in its wheel)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias, get_args, runtime_checkable

import numpy as np
import torch
from PIL.Image import Image, Resampling
from PIL.Image import new as new_image
from PIL.ImageDraw import Draw

from retouch.rewards.edit_distance import comparable, similarity
from retouch.types import Column, Sample, Scores, Task

Where: TypeAlias = Literal["picture", "mask", "box"]
Corners: TypeAlias = tuple[tuple[float, float], ...]

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

    def __call__(self, image: Image) -> list[Line]:
        """The lines of text; none in a picture of under 4 pixels a side."""
        if min(image.size) < _SMALLEST:
            return []
        found = self._engine(_pixels(image))
        if found.txts is None:
            return []
        outlines = [tuple((float(x), float(y)) for x, y in box) for box in found.boxes]
        return [Line(text, float(sure), at) for text, sure, at in zip(found.txts, found.scores, outlines, strict=True)]

    def read_lines(self, images: Sequence[Image]) -> list[Line]:
        """The one line of text in each picture, read as a batch; "" where none can be read."""
        large = [image for image in images if min(image.size) >= _SMALLEST]
        read = self._engine.recognize_txt([_pixels(image) for image in large]) if large else None
        lines = iter(() if read is None else [Line(text, float(sure)) for text, sure in zip(read.txts, read.scores, strict=True)])
        return [next(lines) if min(image.size) >= _SMALLEST else Line("", 0.0) for image in images]


class OcrReward:
    """Columns, each 0 to 1:

    - ``correctness``: 1 - edit distance / length of the longer, between ``task.text`` and everything that was read, in reading
      order. Compared are characters, without regard to case, spaces and Unicode's compatible forms. So missing and superfluous
      letters cost alike, and painting more text than was asked for does not pay.
    - ``confidence``: the reader's mean confidence in the lines it found, a diagnostic (NaN where there are none): a clearly written
      wrong word has a high one.

    ``where``: all of the ``picture``; the lines of which at least half lies in the task's ``mask``; or the mask's bounding ``box``,
    read as one line without looking for it, which costs a fraction. ``reader``: None takes RapidOCR on ``threads`` threads, with
    ``line_width`` as in ``RapidReader``. ValueError: a task without a text to write, or the mask.
    """

    columns: Mapping[str, Column] = {"correctness": Column(0.0, 1.0), "confidence": Column(0.0, 1.0, diagnostic=True)}

    def __init__(
        self,
        reader: TextReader | None = None,
        *,
        where: Where = "picture",
        threads: int = 1,
        line_width: int | None = None,
    ) -> None:
        if where not in get_args(Where):
            raise ValueError(f"where is one of {', '.join(get_args(Where))}, not {where!r}")
        self.reader = reader or RapidReader(threads=threads, line_width=line_width)
        if where == "box" and not isinstance(self.reader, LineReader):
            raise ValueError(f"{type(self.reader).__name__} has no read_lines(images); with where='box' it must read single lines")
        self.where = where

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column as (b,), float32. A sample without a picture is the policy's own fault: 0."""
        for sample in samples:
            if not comparable(sample.task.text or ""):
                raise ValueError(f"task {sample.task.id!r} has no text (task.text) that the picture should show")
            if self.where != "picture":
                _marked(sample.task)
        correctness, confidence = [], []
        for sample, lines in zip(samples, self._read(samples), strict=True):
            found = " ".join(line.text for line in lines)
            correctness.append(similarity(sample.task.text or "", found) if sample.image is not None else 0.0)
            confidence.append(sum(line.confidence for line in lines) / len(lines) if lines else float("nan"))
        return {"correctness": torch.tensor(correctness), "confidence": torch.tensor(confidence).clamp(0, 1)}

    def _read(self, samples: Sequence[Sample]) -> list[list[Line]]:
        """The lines that count, of each sample."""
        if self.where == "box":
            assert isinstance(self.reader, LineReader)
            drawn = [(place, sample.task, sample.image) for place, sample in enumerate(samples) if sample.image is not None]
            crops = [image.crop(_mask(task, image).getbbox()) for _, task, image in drawn]
            found: list[list[Line]] = [[] for _ in samples]
            for (place, _, _), line in zip(drawn, self.reader.read_lines(crops), strict=True):
                found[place] = [line] if line.text else []
            return found
        read = [[] if sample.image is None else self.reader(sample.image) for sample in samples]
        if self.where == "picture":
            return read
        return [
            [] if sample.image is None else [line for line in lines if _inside(line, _mask(sample.task, sample.image)) >= 0.5]
            for sample, lines in zip(samples, read, strict=True)
        ]


def _marked(task: Task) -> Image:
    """The task's mask. ValueError where it has none, or marks nothing."""
    if task.mask is None or task.mask.getbbox() is None:
        raise ValueError(f"task {task.id!r} has no mask that says where its text should stand")
    return task.mask


def _mask(task: Task, image: Image) -> Image:
    """The task's mask at the picture's size."""
    mask = _marked(task)
    return mask if mask.size == image.size else mask.resize(image.size, Resampling.NEAREST)


def _inside(line: Line, mask: Image) -> float:
    """The share of the line's outline, in pixels, that the mask marks."""
    outline = new_image("L", mask.size)
    Draw(outline).polygon([(round(x), round(y)) for x, y in line.corners], fill=255)
    covered = np.asarray(outline) > 0
    return float((np.asarray(mask) > 127)[covered].mean()) if covered.any() else 0.0


def _pixels(image: Image) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Blue, green, red, as the reader takes them."""
    return np.asarray(image.convert("RGB"))[:, :, ::-1]


def _engine(threads: int, line_width: int | None) -> Any:
    try:
        from rapidocr import RapidOCR
    except ImportError:
        raise ValueError("reading text in pictures needs rapidocr: pip install 'retouch[ocr]'") from None
    limits = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": threads for kind in ("intra", "inter")}
    shape = {} if line_width is None else {"Rec.rec_img_shape": [3, 48, line_width]}
    return RapidOCR(params={"Global.log_level": "critical", **limits, **shape})
