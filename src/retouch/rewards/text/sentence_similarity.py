"""The reward of kind ``sentence_similarity``: the cosine of the sentence embeddings of the policy's prompt and the user's
prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from retouch.core.answers import answer_in
from retouch.records.files import read_json
from retouch.rewards.base import ModelReward, completion_of
from retouch.rewards.facts import PathText
from retouch.rewards.weights import weights_digest, weights_folder
from retouch.types import Column, Sample, Scores

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor

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
