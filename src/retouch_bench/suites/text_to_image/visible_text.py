"""Text in generated images, read by OCR: Flow-GRPO's test list (arXiv 2505.05470) and LongText-Bench (X-Omni, arXiv 2507.22058)."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from retouch.data.rows import Row, Rows
from retouch.data.sources.folder import read_prompts
from retouch.rewards.base import RewardSection
from retouch.rewards.identity import Fingerprinted
from retouch.rewards.text.ocr import RapidReader, TextReader, edit_distance, similarity
from retouch.types import Column, Json, Sample, Scores
from retouch_bench.suite import SuiteItem
from retouch_bench.suites.row_suite import RowSuite, pooled_mean, texts_of
from retouch_judge.models import JudgeModel

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from numpy import ndarray

_READER = "Text is read by RapidOCR; the published reader is {}. Their agreement is unknown until it is measured."
_LETTERS = "àâäéèêëîïôöùûüçÀÂÄÉÈÊËÎÏÔÖÙÛÜÇ"
_CHINESE = "\u4e00-\u9fa5"


class ReadTextReward(RewardSection):
    """Measures how much of the requested text an image shows. Columns, 0 to 1:

    ``accuracy``: 1 - edit distance / length of ``task.text``, at least 0, and 1 if the recognized text contains it (Flow-GRPO).
    ``exact``: 1 - edit distance / length of the longer text, so that superfluous text also counts. ``words``: the share of the
    words that were recognized, or of the characters if the ``language`` of the task is Chinese (LongText-Bench).
    """

    columns: ClassVar[Mapping[str, Column]] = {name: Column(0.0, 1.0) for name in ("accuracy", "exact", "words")}
    reads_text = True

    def load(self, device: torch.device | str) -> TextReader:
        """Load RapidOCR, on the CPU. Raises ValueError if it is not installed."""
        return RapidReader()

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the text reader."""
        return self.model.fingerprint if isinstance(self.model, Fingerprinted) else type(self.model).__name__

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. Raises ValueError for a task without a text."""
        import torch

        table = torch.zeros(len(samples), 3)
        for row, sample in enumerate(samples):
            if not (sample.task.text or "").strip():
                raise ValueError(f"task {sample.task.id!r} has no text that the image should show")
            if sample.image is not None:
                wanted, lines = sample.task.text or "", [line.text for line in self.model(sample.image)]
                chinese = sample.task.meta.get("language") == "zh"
                scores = accuracy(wanted, lines), similarity(wanted, " ".join(lines)), word_share(wanted, lines, chinese=chinese)
                table[row] = torch.tensor(scores)
        return dict(zip(self.columns, table.unbind(1), strict=True))


def accuracy(wanted: str, lines: Sequence[str]) -> float:
    """Return 1 - edit distance / length, ignoring case and spaces, 0 to 1; 1 if the recognized text contains the wanted text.

    Source: the reward of Flow-GRPO (arXiv 2505.05470).
    """
    wanted, found = wanted.replace(" ", "").lower(), "".join(lines).replace(" ", "").lower()
    if wanted in found:
        return 1.0
    return 1.0 - min(edit_distance(found, wanted), len(wanted)) / len(wanted)


def units(text: str, *, chinese: bool) -> list[str]:
    """Split a text into words, or a Chinese one into characters, as LongText-Bench (arXiv 2507.22058) counts them: without
    punctuation, and words in lower case."""
    kept = f"{_CHINESE}a-zA-Z0-9{_LETTERS}"
    if chinese:
        return re.findall(f"[{kept}]", text)
    return re.sub(rf"[^{kept}\s]", "", text).lower().split()


def word_share(wanted: str, lines: Sequence[str], *, chinese: bool) -> float:
    """Return the share of the wanted words that were recognized, counting repetitions; 0 if there are no wanted words.

    Source: LongText-Bench (X-Omni, arXiv 2507.22058).
    """
    right, found = Counter(units(wanted, chinese=chinese)), Counter(units(" ".join(lines), chinese=chinese))
    return (right & found).total() / right.total() if right else 0.0


class OcrSuite(RowSuite):
    """Flow-GRPO's OCR test list: prompts with a short text in double quotes."""

    name: ClassVar[str] = "ocr"
    title: ClassVar[str] = "OCR accuracy (Flow-GRPO)"
    source: ClassVar[str] = "https://github.com/yifan123/flow_grpo"
    licence: ClassVar[str] = "MIT"
    size: ClassVar[int] = 1018
    protocol: ClassVar[str] = (
        "One image of each prompt. accuracy = 1 - edit distance / length of the text in the prompt's first double quotes, ignoring "
        "case and spaces, at least 0, and 1 if the recognized text contains it; the mean over images. exact also counts "
        "superfluous text."
    )
    deviations: ClassVar[tuple[str, ...]] = (_READER.format("PaddleOCR"),)
    task = "text-to-image"
    columns: ClassVar[Mapping[str, Column]] = {name: ReadTextReward.columns[name] for name in ("accuracy", "exact", "words")}
    headline_column: ClassVar[str] = "accuracy"
    layout: ClassVar[str] = "give dataset/ocr/test.txt of the repository yifan123/flow_grpo, one prompt per line"

    def rows(self, data: Path) -> Rows:
        """The lines of the file."""
        return read_prompts(data, name="ocr")

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item. Raises ValueError if the prompt has no text in quotes."""
        if not (row.text or "").replace(" ", ""):
            raise ValueError("no text between double quotes")
        return SuiteItem(id=row.id.replace("/", "-"), prompt=row.instruction, text=row.text)

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        """OCR; no judge is asked."""
        return ReadTextReward()


class LongTextSuite(RowSuite):
    """LongText-Bench: images with long English or Chinese texts."""

    language: Literal["en", "zh"] = "en"
    """Language of the file."""

    name: ClassVar[str] = "longtext"
    title: ClassVar[str] = "LongText-Bench"
    source: ClassVar[str] = "https://huggingface.co/datasets/X-Omni/LongText-Bench"
    licence: ClassVar[str] = "Apache-2.0"
    size: ClassVar[int] = 160
    protocol: ClassVar[str] = (
        "Four images of each prompt. words is the share of the words of the requested texts that were recognized, ignoring "
        "punctuation and case; characters for Chinese. Words are pooled over all images, so long texts count more."
    )
    deviations: ClassVar[tuple[str, ...]] = (_READER.format("Qwen2.5-VL-7B-Instruct"),)
    task = "text-to-image"
    images_per_item: ClassVar[int] = 4
    columns: ClassVar[Mapping[str, Column]] = {name: ReadTextReward.columns[name] for name in ("words", "exact")}
    headline_column: ClassVar[str] = "words"
    layout: ClassVar[str] = "give text_prompts.jsonl or text_prompts_zh.jsonl of the data set X-Omni/LongText-Bench"

    def rows(self, data: Path) -> Rows:
        """The lines of the file."""
        # The column text is a list, so item() reads it from the meta of the row; the field text gets a column that is a string.
        return read_prompts(data, columns={"id": "prompt_id", "instruction": "prompt", "text": "prompt"}, name="longtext")

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item. Raises ValueError if the line has no text to show."""
        texts = row.meta.get("text")
        text = " ".join(texts_of(texts if isinstance(texts, list) else [texts], "text"))
        words = len(units(text, chinese=self.language == "zh"))
        if not words:
            raise ValueError("'text': no words")
        category = row.meta.get("category")
        fields: dict[str, Json] = {"language": self.language, "units": words}
        return SuiteItem(id=row.id, prompt=row.instruction, text=text, category=str(category or ""), fields=fields)

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        """OCR; no judge is asked."""
        return ReadTextReward()

    def headline(
        self, items: Sequence[SuiteItem], values: Mapping[str, Float[ndarray, " n"]], weights: Float[ndarray, "b n"]
    ) -> dict[str, Float[ndarray, " b"]]:
        """Compute the pooled share of words, and the mean of the other columns."""
        import numpy as np

        found = super().headline(items, values, weights)
        if "words" in values:  # not of another reward that scores the images
            counts = np.array([float(str(item.fields["units"])) for item in items])
            found["words"] = pooled_mean(values["words"], counts, weights)
        return found
