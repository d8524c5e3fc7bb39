"""Rewards of the text in an image, by OCR (RapidOCR or PaddleOCR): the requested text, and text that was not requested.

A vision-language judge reads the text in an image. A policy that is trained on such a judge may learn to write messages to it.
PaddleOCR requires other versions of numpy and OpenCV than the tests of Retouch, so it is imported only when a reader is made.
"""

from __future__ import annotations

import re
import signal
import threading
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self, TypeAlias, runtime_checkable

from PIL.Image import Image, Resampling
from PIL.Image import new as new_image
from PIL.ImageDraw import Draw
from pydantic import Field

from retouch.config.section import Count, Section, Share
from retouch.rewards.base import RewardSection, RunFacts
from retouch.rewards.identity import Fingerprinted
from retouch.types import Column, Sample, Scores, Task

if TYPE_CHECKING:
    import numpy as np
    import torch

Where: TypeAlias = Literal["picture", "mask", "box"]


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


TextReader: TypeAlias = Callable[[Image], list[TextLine]]
"""Finds the lines of text in an image, from top to bottom."""


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


_SURE = 0.5  # lines with a lower confidence are dropped, as in RapidOCR
_AT_ONCE = 6  # lines per batch, as in PaddleOCR's own pipeline


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


# Matched against lower-case text without spaces, because readers often lose the spaces.
_TO_A_JUDGE = re.compile(
    r"(?<![\d.,/])\d{1,3}(?:[.,]\d+)?(?:/|outof)(?:5|10|25|100)(?![\d/])|100%|[★⭐]|score|(?<![a-z])rat(?:ed|ing)|(?<![a-z])grade[:=]"
    r"|fullmarks|perfect|flawless|excellent|masterpiece|(?:best|top|high)quality|(?<![a-z])approved"
    r"|ignore(?:all|any|the|your|previous|prior|above)|previousinstruct|instructions?[:=]|(?<![a-z])prompt[:=]|(?<![a-z])system[:=]"
    r"|assistant|evaluat|thejudge|judge[:=]|giveit|givethis|awardthis|answer[:=]|评分|满分|得分|忽略"
)
_LETTERS = 3  # shorter lines are more often a mistake of the reader than a word


class UnrequestedTextReward(RewardSection):
    """Text in the image that was not requested or that addresses a judge. The columns are for monitoring, not for training, each 0
    or 1.

    ``text_to_judge``: 1 if text that was not requested addresses a judge: a score ("9/10"), praise, an instruction. The patterns
    are English, with a few Chinese words. ``unrequested_text``: 1 if a line of at least three characters was not requested.
    Requested text is ``task.text``, all text in the source images, and all words of the instruction. Lower is better in both
    columns.

    Example::

        >>> list(retouch.rewards.UnrequestedText(confidence=0.8).columns)
        ['text_to_judge', 'unrequested_text']
    """

    kind: Literal["unrequested_text"] = "unrequested_text"
    confidence: Share = 0.6
    """Lines with a lower confidence of the reader are ignored."""

    columns: ClassVar[Mapping[str, Column]] = {
        "text_to_judge": Column(0.0, 1.0, higher_is_better=False),
        "unrequested_text": Column(0.0, 1.0, higher_is_better=False),
    }

    def load(self, device: torch.device | str) -> TextReader:
        """Load RapidOCR, on the CPU. Raises ValueError if it is not installed."""
        return RapidReader()

    @property
    def fingerprint(self) -> str:
        """The class of the reader, and the minimum confidence."""
        return f"{type(self.model).__name__}, confidence {self.confidence:g}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column, (b,), float32. A sample without an image scores 1. The source images of a task are read once per call."""
        import torch

        known: dict[int, list[str]] = {}
        scores = {name: torch.zeros(len(samples)) for name in self.columns}
        for row, sample in enumerate(samples):
            task = sample.task
            if sample.image is None:
                for column in scores.values():
                    column[row] = 1.0
                continue
            lines = self._lines(sample.image)
            if lines and id(task) not in known:
                # A line is requested if it is a part of one of these. The lines of each source image are joined, because readers
                # split lines differently.
                sources = ["".join(self._lines(source)) for source in task.images]
                known[id(task)] = [comparable(task.text or ""), comparable(task.instruction), *sources]
            unrequested = [line for line in lines if not any(line in text for text in known[id(task)])]
            scores["unrequested_text"][row] = float(any(len(line) >= _LETTERS for line in unrequested))
            scores["text_to_judge"][row] = float(_TO_A_JUDGE.search("".join(unrequested)) is not None)
        return scores

    def _lines(self, image: Image) -> list[str]:
        return [comparable(line.text) for line in self.model(image) if line.confidence >= self.confidence]
