"""Rewards of the text that the policy wrote, without a judge: its format, its quality as a prompt, and its similarity to the
instruction.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from retouch.core.answers import answer_in
from retouch.records.files import read_json
from retouch.rewards.base import PathText, RewardSection
from retouch.types import Column, Sample, Scores
from retouch_rewards.weights import ModelReward, weights_digest, weights_folder

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor


def completion_of(sample: Sample) -> str:
    """The text that the policy wrote. Raises ValueError if there is none."""
    if sample.completion is None:
        raise ValueError(f"task {sample.task.id!r} has no completion to score; use this reward with a policy that writes text")
    return sample.completion


def think_format(completion: str, *, opening: str = "<think>", closing: str = "</think>") -> float:
    """1.0 if the completion is ``opening``, a thought, ``closing`` and an answer, with each mark exactly once; otherwise 0.0.

    Neither the thought nor the answer may be blank. If the prompt already ends with the opening mark, put the mark before the
    completion. Raises ValueError if a mark is empty or both are equal.

    Source: the format reward of DeepSeek-R1 (arXiv 2501.12948), ``think_format_reward`` in TRL.
    """
    _check_marks(opening, closing)
    text = completion.strip()
    if not text.startswith(opening) or text.count(opening) != 1 or text.count(closing) != 1:
        return 0.0
    thought, _, answer = text.removeprefix(opening).partition(closing)
    return float(bool(thought.strip()) and bool(answer.strip()))


class ThinkReward(RewardSection):
    """Whether a completion is a thought followed by an answer. Column ``think_format``, 0 or 1, as computed by ``think_format``.

    Example::

        >>> retouch.score(retouch.rewards.Think(), image, completion="<think>red?</think>make it blue")
        {'think_format': 1.0}
    """

    kind: Literal["thinking"] = "thinking"
    opening: str = "<think>"
    """Mark before the thought."""
    closing: str = "</think>"
    """Mark after the thought."""

    columns: ClassVar[Mapping[str, Column]] = {"think_format": Column(0.0, 1.0)}
    reads_completions = True

    @model_validator(mode="after")
    def _two_marks(self) -> Self:
        _check_marks(self.opening, self.closing)
        return self

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column, (b,), float32. Raises ValueError for a sample without a completion."""
        import torch

        texts = [completion_of(sample) for sample in samples]
        return {"think_format": torch.tensor([think_format(t, opening=self.opening, closing=self.closing) for t in texts])}


def _check_marks(opening: str, closing: str) -> None:
    if not opening or not closing or opening == closing:
        raise ValueError(f"the marks `opening` {opening!r} and `closing` {closing!r} must differ and must not be empty")


_WORD = re.compile(r"\w+(?:['’]\w+)?")
_STOP_WORDS = frozenset(
    (
        *("a", "an", "and", "are", "as", "at", "be", "by", "for", "from", "has", "he", "her", "his", "in", "is", "it", "its", "my"),
        *("of", "on", "or", "our", "she", "that", "the", "their", "them", "they", "this", "to", "was", "we", "with", "you"),
    )
)
_PRAISE = (
    *("high quality", "high-quality", "best quality", "highly detailed", "detailed", "intricate", "sharp focus", "high resolution"),
    *("4k", "8k", "hd", "uhd", "hdr", "photorealistic", "realistic", "professional", "masterpiece", "cinematic", "studio lighting"),
)
_PRAISES = re.compile(rf"(?<!\w)(?:{'|'.join(sorted(map(re.escape, _PRAISE), key=len, reverse=True))})(?!\w)")
_DETAILS, _PRAISES_WANTED, _SENTENCE = 5, 3, 5


@dataclass(frozen=True, slots=True)
class PromptQuality:
    """The five sub-scores, each 0 to 1. ``total``: 0 to 5."""

    length: float
    keywords: float
    details: float
    quality_words: float
    sentence: float

    @property
    def total(self) -> float:
        """The sum of the five sub-scores."""
        return self.length + self.keywords + self.details + self.quality_words + self.sentence


def prompt_quality(original: str, enhanced: str) -> PromptQuality:
    """Compare the words of an enhanced prompt with the original prompt (in languages with spaces between words).

    ``length``: 1 if the enhanced prompt has more words. ``keywords``: the share of the original's words, without stop words, that
    are kept. ``details``: number of new words / 5, at most 1. ``quality_words``: number of different phrases of
    praise ("high quality", "detailed", "4k", ...) / 3, at most 1. ``sentence``: 1 if it has at least five words. Case is ignored.
    """
    before, after = _words(original), _words(enhanced)
    wanted = set(before) - _STOP_WORDS or set(before)
    new = set(after) - set(before) - _STOP_WORDS
    praise = set(_PRAISES.findall(enhanced.casefold()))
    return PromptQuality(
        length=float(len(after) > len(before)),
        keywords=len(wanted & set(after)) / len(wanted) if wanted else 1.0,
        details=min(len(new) / _DETAILS, 1.0),
        quality_words=min(len(praise) / _PRAISES_WANTED, 1.0),
        sentence=float(len(after) >= _SENTENCE),
    )


class PromptQualityReward(RewardSection):
    """Five sub-scores of the prompt that a policy wrote, compared with the task's instruction. For monitoring: a policy that is
    trained on them learns to add "4k".

    ``length``, ``keywords``, ``details``, ``quality_words``, ``sentence``, each 0 to 1, as in ``prompt_quality``; ``total``, 0 to
    5. All are 0 if the completion contains no prompt.

    Example::

        >>> reward = retouch.rewards.PromptQuality()
        >>> retouch.score(reward, image, instruction="a cat", completion="a cat on a red sofa, soft light, 4k.")["total"] > 1
        True
    """

    kind: Literal["prompt_quality"] = "prompt_quality"

    columns: ClassVar[Mapping[str, Column]] = {
        **dict.fromkeys(("length", "keywords", "details", "quality_words", "sentence"), Column(0.0, 1.0)),
        "total": Column(0.0, 5.0),
    }
    reads_completions = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column, (b,), float32. Raises ValueError for a sample without a completion."""
        import torch

        rows = [self._points(sample.task.instruction, answer_in(completion_of(sample))) for sample in samples]
        table = torch.tensor(rows, dtype=torch.float32).view(len(samples), len(self.columns))
        return dict(zip(self.columns, table.unbind(dim=1), strict=True))

    def _points(self, original: str, enhanced: str | None) -> list[float]:
        if enhanced is None:
            return [0.0] * len(self.columns)
        points = prompt_quality(original, enhanced)
        return [*astuple(points), points.total]


def _words(text: str) -> list[str]:
    return _WORD.findall(text.casefold())


_POOLING = Path("1_Pooling") / "config.json"  # as in the sentence-transformers package
_LENGTH = "sentence_bert_config.json"
_ROWS = 32


class SentenceSimilarityReward(ModelReward):
    """How similar the prompt that the policy wrote is to the task's instruction, by sentence embeddings (Sentence-BERT, arXiv
    1908.10084).

    Column ``kept``, 0 to 1: max(cosine, 0) of the two embeddings, 0 if the completion contains no prompt. It can limit the drift of
    a rewritten prompt, for example with ``clip/similarity - max(0.7 - sentence/kept, 0)`` (after Promptist, arXiv 2212.09611).
    ``truncated``, a diagnostic: 1 if one of the texts is longer than the maximum length of the model.

    Example::

        >>> retouch.rewards.SentenceSimilarity().path
        'sentence-transformers/all-MiniLM-L6-v2'
    """

    kind: Literal["sentence_similarity"] = "sentence_similarity"
    path: PathText = "sentence-transformers/all-MiniLM-L6-v2"
    """Folder of a text encoder, or its id in the Hugging Face cache; nothing is downloaded. A model of sentence-transformers, or
    any encoder of transformers, with the mean of its token states as the embedding."""

    columns: ClassVar[Mapping[str, Column]] = {"kept": Column(0.0, 1.0), "truncated": Column(0.0, 1.0, diagnostic=True)}
    reads_completions = True

    def load(self, device: torch.device | str) -> SentenceEncoder:
        """Load the encoder, frozen, in fp32. Raises ValueError if there are no weights, or if its pooling is not supported."""
        return SentenceEncoder.open(self.path, device=device)

    @property
    def fingerprint(self) -> str:
        """The encoder's weights and its pooling."""
        folder = weights_folder(self.path)
        return f"weights {weights_digest(folder)}, {_pooling(folder)}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Each column, (b,), float32. Raises ValueError for a sample without a completion."""
        import torch

        prompts = [answer_in(completion_of(sample)) for sample in samples]
        kept, truncated = torch.zeros(len(samples)), torch.full((len(samples),), torch.nan)
        rows = [row for row, prompt in enumerate(prompts) if prompt is not None]
        if rows:
            before, before_cut = self.model([samples[row].task.instruction for row in rows])
            after, after_cut = self.model([str(prompts[row]) for row in rows])
            kept[rows] = (before * after).sum(dim=1).clamp(0, 1)
            truncated[rows] = (before_cut | after_cut).float()
        return {"kept": kept, "truncated": truncated}


@dataclass(frozen=True, slots=True, eq=False)
class SentenceEncoder:
    """A text encoder. The embedding is the mean of the token states (``pooling`` "mean") or the first token state ("cls").

    ``longest``: maximum number of tokens; longer texts are truncated.
    """

    model: Any
    tokenizer: Any
    pooling: str
    longest: int

    @classmethod
    def open(cls, path: str | Path, *, device: torch.device | str) -> SentenceEncoder:
        """Load an encoder from a folder or the Hugging Face cache. Raises ValueError if there are no weights, or for another
        pooling."""
        import torch
        from transformers import AutoModel, AutoTokenizer

        folder = weights_folder(path)
        pooling = _pooling(folder)
        model = AutoModel.from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        longest = min(
            _setting(folder / _LENGTH, "max_seq_length", model.config.max_position_embeddings), tokenizer.model_max_length
        )
        return cls(model.requires_grad_(False).eval().to(device), tokenizer, pooling, longest)

    def __call__(self, texts: Sequence[str]) -> tuple[Float[Tensor, "n d"], Tensor]:
        """The embedding of each text, a unit vector in fp32 on the CPU, and which texts were truncated. Equal texts are encoded
        once."""
        import torch

        distinct = list(dict.fromkeys(texts))
        place = torch.tensor([distinct.index(text) for text in texts])
        truncated = torch.tensor([len(self.tokenizer(text)["input_ids"]) > self.longest for text in distinct])
        vectors = torch.cat([self._vectors(distinct[first : first + _ROWS]) for first in range(0, len(distinct), _ROWS)])
        return vectors[place], truncated[place]

    def _vectors(self, texts: Sequence[str]) -> Float[Tensor, "n d"]:
        import torch

        tokens = self.tokenizer(list(texts), padding=True, truncation=True, max_length=self.longest, return_tensors="pt")
        fields = {name: tokens[name].to(self.model.device) for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            states = self.model(**fields).last_hidden_state.float()
        weight = fields["attention_mask"].unsqueeze(-1).to(states.dtype)
        pooled = states[:, 0] if self.pooling == "cls" else (weight * states).sum(dim=1) / weight.sum(dim=1)
        return torch.nn.functional.normalize(pooled, dim=1).cpu()


def _pooling(folder: Path) -> str:
    """The pooling in the configuration of sentence-transformers; "mean" without that file. Raises ValueError for another
    pooling."""
    file = folder / _POOLING
    if not file.is_file():
        return "mean"
    modes = {name for name, value in read_json(file).items() if value is True}
    chosen = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
    found = [way for mode, way in chosen.items() if mode in modes]
    if len(found) != 1 or any(mode.startswith("pooling_mode_") and mode not in chosen for mode in modes):
        raise ValueError(f"{file}: its states are pooled by {', '.join(sorted(modes))}; use an encoder with mean or CLS pooling")
    return found[0]


def _setting(file: Path, name: str, default: int) -> int:
    return int(read_json(file).get(name, default)) if file.is_file() else default
