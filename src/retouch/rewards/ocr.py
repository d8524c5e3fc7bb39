"""Whether the text that was asked for stands in the picture, and no other, as read by RapidOCR on the CPU (models in its wheel)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from PIL.Image import Image

from retouch.rewards.edit_distance import comparable, similarity
from retouch.types import Column, Sample, Scores

_SMALLEST = 4  # pixels a side: no letter fits into less


@dataclass(frozen=True, slots=True)
class Line:
    """A line of text that was found, with the reader's confidence, 0 to 1."""

    text: str
    confidence: float


class TextReader(Protocol):
    """Finds the lines of text in a picture, from top to bottom."""

    def __call__(self, image: Image) -> list[Line]: ...


class RapidReader:
    """RapidOCR with the models of its own wheel; nothing is downloaded. ValueError: it is not installed (extra ``ocr``)."""

    def __init__(self, *, threads: int = 1) -> None:
        self._engine = _engine(threads)

    def __call__(self, image: Image) -> list[Line]:
        """The lines of text; none in a picture of under 4 pixels a side."""
        if min(image.size) < _SMALLEST:
            return []
        found = self._engine(np.asarray(image.convert("RGB"))[:, :, ::-1])  # it takes blue, green, red
        if found.txts is None:
            return []
        return [Line(text, float(confidence)) for text, confidence in zip(found.txts, found.scores, strict=True)]


class OcrReward:
    """Columns, each 0 to 1:

    - ``correctness``: 1 - edit distance / length of the longer, between ``task.text`` and everything that was read, in reading
      order. Compared are characters, without regard to case, spaces and Unicode's compatible forms. So missing and superfluous
      letters cost alike, and painting more text than was asked for does not pay.
    - ``confidence``: the reader's mean confidence in the lines it found, a diagnostic (NaN where there are none): a clearly written
      wrong word has a high one.

    ValueError: a task without a text to write.
    """

    columns: Mapping[str, Column] = {"correctness": Column(0.0, 1.0), "confidence": Column(0.0, 1.0, diagnostic=True)}

    def __init__(self, reader: TextReader | None = None) -> None:
        self.reader = reader or RapidReader()

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column as (b,), float32. A sample without a picture is the policy's own fault: 0."""
        correctness, confidence = [], []
        for sample in samples:
            if not comparable(sample.task.text or ""):
                raise ValueError(f"task {sample.task.id!r} has no text (task.text) that the picture should show")
            lines = [] if sample.image is None else self.reader(sample.image)
            found = " ".join(line.text for line in lines)
            correctness.append(similarity(sample.task.text or "", found) if sample.image is not None else 0.0)
            confidence.append(sum(line.confidence for line in lines) / len(lines) if lines else float("nan"))
        return {"correctness": torch.tensor(correctness), "confidence": torch.tensor(confidence).clamp(0, 1)}


def _engine(threads: int) -> Any:
    try:
        from rapidocr import RapidOCR
    except ImportError:
        raise ValueError("reading text in pictures needs rapidocr: pip install 'retouch[ocr]'") from None
    limits = {f"EngineConfig.onnxruntime.{kind}_op_num_threads": threads for kind in ("intra", "inter")}
    return RapidOCR(params={"Global.log_level": "critical", **limits})
