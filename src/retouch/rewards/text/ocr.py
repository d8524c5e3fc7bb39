"""The reward of kind ``ocr``: whether the image shows the requested text and no other text, by OCR."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, Self, TypeAlias

from PIL.Image import Image, Resampling
from PIL.Image import new as new_image
from PIL.ImageDraw import Draw
from pydantic import Field

from retouch.config.section import Count
from retouch.rewards.base import RewardSection
from retouch.rewards.facts import RunFacts
from retouch.rewards.identity import Fingerprinted
from retouch.rewards.text.paddle_reader import PaddleOcr
from retouch.rewards.text.readers import LineReader, RapidReader, TextLine, TextReader
from retouch.types import Column, Sample, Scores, Task

if TYPE_CHECKING:
    import torch

Where: TypeAlias = Literal["picture", "mask", "box"]


class OcrReward(RewardSection):
    """Whether the image shows the requested text, ``task.text``, and no other text.

    ``correctness``, 0 to 1: 1 - edit distance / length of the longer text, between ``task.text`` and all text that was read, in
    reading order. Differences of case, spaces and Unicode's compatible forms are ignored. Missing and superfluous letters lower the
    score equally, so an image with more text than requested gets no higher score. ``confidence``, 0 to 1, a diagnostic: the mean
    confidence of the reader in its lines (NaN if there are none); it is also high for a wrong word that is clearly written.

    Example::

        >>> retouch.rewards.Ocr(where="mask").reads_text  # every task needs the text that its image should show
        True
    """

    kind: Literal["ocr"] = "ocr"
    reader: PaddleOcr | None = Field(default=None, exclude_if=lambda reader: reader is None)
    """The OCR engine; null uses RapidOCR, which has its models in its package."""
    where: Where = "picture"
    """Where the text is read: ``picture``, in the whole image; ``mask``, only lines of which at least half is inside the task's
    mask; ``box``, in the mask's bounding box, read as one line, which is much faster."""
    threads: Count = 1
    """Number of CPU threads of the reader."""
    line_width: Count | None = Field(default=None, exclude_if=lambda width: width is None)
    """Width in px to which RapidOCR pads lines of 48 px height; a smaller width is faster. Null uses RapidOCR's default, 320."""

    columns: ClassVar[Mapping[str, Column]] = {"correctness": Column(0.0, 1.0), "confidence": Column(0.0, 1.0, diagnostic=True)}
    changeable: ClassVar[frozenset[str]] = frozenset({"threads"})
    reads_text = True
    version = 2

    def load(self, device: torch.device | str) -> TextReader:
        """Load the reader, on the CPU. Raises ValueError if its package is not installed, or if ``line_width`` is set for another
        reader than RapidOCR."""
        if self.reader is not None:
            if self.line_width is not None:
                raise ValueError("line_width is only for RapidOCR; remove it, or remove `reader`")
            return self.reader.open(threads=self.threads)
        return RapidReader(threads=self.threads, line_width=self.line_width)

    def with_model(self, model: TextReader) -> Self:
        """A copy of the reward with another reader. Raises ValueError if ``where`` is "box" and the reader cannot read single
        lines."""
        if self.where == "box" and not isinstance(model, LineReader):
            raise ValueError(f"{type(model).__name__} has no read_lines(images); with where='box' it must read single lines")
        return super().with_model(model)

    @property
    def fingerprint(self) -> str:
        """The reader, and the value of ``where``."""
        own = self.model.fingerprint if isinstance(self.model, Fingerprinted) else type(self.model).__name__
        return f"{own}, {self.where}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column, (b,), float32. The ``correctness`` of a sample without an image is 0. Raises ValueError for a task without a
        text, or without a mask that ``where`` needs."""
        import torch

        for sample in samples:
            if not comparable(sample.task.text or ""):
                raise ValueError(f"task {sample.task.id!r} has no text (task.text) that the image should show")
            if self.where != "picture":
                _marked(sample.task)
        correctness, confidence = [], []
        for sample, lines in zip(samples, self._read(samples), strict=True):
            found = " ".join(line.text for line in lines)
            correctness.append(similarity(sample.task.text or "", found) if sample.image is not None else 0.0)
            confidence.append(sum(line.confidence for line in lines) / len(lines) if lines else float("nan"))
        return {"correctness": torch.tensor(correctness), "confidence": torch.tensor(confidence).clamp(0, 1)}

    def problems(self, path: str, prefix: str, run: RunFacts) -> Iterator[str]:
        """Yield one line if ``line_width`` is set for another reader than RapidOCR."""
        yield from super().problems(path, prefix, run)
        if self.reader is not None and self.line_width is not None:
            yield f"{path}.line_width: it is only for RapidOCR, but the reader is {self.reader.kind}; remove it"

    def _read(self, samples: Sequence[Sample]) -> list[list[TextLine]]:
        """The lines that are scored, for each sample."""
        if self.where == "box":
            drawn = [(place, sample.task, sample.image) for place, sample in enumerate(samples) if sample.image is not None]
            crops = [image.crop(_box(task, image)) for _, task, image in drawn]
            found: list[list[TextLine]] = [[] for _ in samples]
            for (place, _, _), line in zip(drawn, self.model.read_lines(crops), strict=True):
                found[place] = [line] if line.text else []
            return found
        read = [[] if sample.image is None else self.model(sample.image) for sample in samples]
        if self.where == "picture":
            return read
        return [
            [] if sample.image is None else [line for line in lines if _inside(line, _mask(sample.task, sample.image)) >= 0.5]
            for sample, lines in zip(samples, read, strict=True)
        ]


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's distance: the smallest number of insertions, deletions and replacements of one character that turn ``a`` into
    ``b``.

    Source: Levenshtein 1966; the reward of Flow-GRPO (arXiv 2505.05470) uses it too.
    """
    previous = list(range(len(b) + 1))
    for row, left in enumerate(a, 1):
        current = [row]
        for column, right in enumerate(b, 1):
            current.append(min(previous[column] + 1, current[-1] + 1, previous[column - 1] + (left != right)))
        previous = current
    return previous[-1]


def comparable(text: str) -> str:
    """The text in the form in which texts are compared: NFKC of Unicode, case-folded, without spaces."""
    return "".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).split())


def similarity(wanted: str, found: str) -> float:
    """1 - edit distance / length of the longer text, 0 to 1, of two texts in ``comparable`` form; 1 if both are empty."""
    wanted, found = comparable(wanted), comparable(found)
    longest = max(len(wanted), len(found))
    return 1.0 - edit_distance(wanted, found) / longest if longest else 1.0


def _marked(task: Task) -> Image:
    """The task's mask. Raises ValueError if the task has no mask, or if the mask is empty."""
    if task.mask is None or task.mask.getbbox() is None:
        raise ValueError(f"task {task.id!r} has no mask, or an empty one; the mask must mark where its text should be")
    return task.mask


def _mask(task: Task, image: Image) -> Image:
    """The task's mask, resized to the size of the image."""
    mask = _marked(task)
    return mask if mask.size == image.size else mask.resize(image.size, Resampling.NEAREST)


def _box(task: Task, image: Image) -> tuple[int, int, int, int]:
    """The bounding box of the task's mask in pixels of the image, rounded outwards, so that it contains every marked pixel."""
    mask = _marked(task)
    box = mask.getbbox()
    assert box is not None
    left, upper, right, lower = box
    return (
        left * image.width // mask.width,
        upper * image.height // mask.height,
        -(-right * image.width // mask.width),
        -(-lower * image.height // mask.height),
    )


def _inside(line: TextLine, mask: Image) -> float:
    """The share of the pixels inside the line's outline that the mask marks."""
    import numpy as np

    outline = new_image("L", mask.size)
    Draw(outline).polygon([(round(x), round(y)) for x, y in line.corners], fill=255)
    covered = np.asarray(outline) > 0
    return float((np.asarray(mask) > 127)[covered].mean()) if covered.any() else 0.0
