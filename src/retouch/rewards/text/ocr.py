"""Whether the text that was asked for stands in the picture, and no other, as a reader of text reads it."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from PIL.Image import Image, Resampling
from PIL.Image import new as new_image
from PIL.ImageDraw import Draw

from retouch.rewards.identity import Fingerprinted
from retouch.rewards.text.edit_distance import comparable, similarity
from retouch.rewards.text.text_readers import Line, LineReader, RapidReader, TextReader
from retouch.types import Column, Sample, Scores, Task

Where: TypeAlias = Literal["picture", "mask", "box"]


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
        if reader is not None and line_width is not None:
            raise ValueError("line_width is RapidOCR's alone; leave it out beside another reader")
        self.reader = reader or RapidReader(threads=threads, line_width=line_width)
        if where == "box" and not isinstance(self.reader, LineReader):
            raise ValueError(f"{type(self.reader).__name__} has no read_lines(images); with where='box' it must read single lines")
        self.where = where

    @property
    def fingerprint(self) -> str:
        """Who reads, and where."""
        own = self.reader.fingerprint if isinstance(self.reader, Fingerprinted) else type(self.reader).__name__
        return f"{own}, {self.where}"

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
