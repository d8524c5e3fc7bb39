"""A judge that runs in this process without a server: a Qwen2-VL, Qwen2.5-VL or Qwen3-VL model from a folder.

It answers questions one after the other or in batches. One-word answers are read from the exact distribution of the first token.
Scores are generated without a constraint to the JSON schema, and read as free text.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3VLForConditionalGeneration,
)

from retouch.core.random import generator
from retouch.models.base import Bits
from retouch.models.quantized import quantize, require_quantizer
from retouch.records.files import read_json
from retouch.rewards.worker import SideStream
from retouch_judge.questions import Answer, JudgeReply, Question, first_tokens
from retouch_rewards.weights import weights_digest, weights_folder

_CLASSES: dict[str, Any] = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
}
_NAMES = {"qwen2_vl": "Qwen2-VL", "qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL"}
_PAD = "<|image_pad|>"
_SYSTEM = "You are a helpful assistant."  # Qwen2-VL's and Qwen2.5-VL's, if a conversation has none; Qwen3-VL has none
_LIKELIEST = 50


class LocalJudge:
    """Answers questions with the model in ``path``, frozen; the same question, seed and temperature give the same answer.

    ``bits``: quantise the weights of its blocks. ``batch``: the maximum number of questions in one forward pass; more than one
    changes answers by rounding. On a GPU, the model runs on its own CUDA stream. Use thinking models only for forms that ask for
    scores: with a form that reads the first token, this token would begin the reasoning instead of the answer.
    Raises ValueError if the weights are not on this machine, are of another type of model, or cannot be quantised.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        device: torch.device | str,
        dtype: torch.dtype = torch.float32,
        batch: int = 1,
        bits: Bits | None = None,
    ) -> None:
        folder = weights_folder(path)
        kind = read_json(folder / "config.json").get("model_type")
        if kind not in _CLASSES:
            raise ValueError(f"{path} is a model of type {kind!r}; choose one of type {', '.join(_CLASSES)}")
        place = torch.device(device)
        if bits is not None:
            require_quantizer(bits, device=place, dtype=str(dtype).removeprefix("torch."), key="judge.quantize")
        model = _CLASSES[kind].from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=dtype)
        if bits is not None:
            quantize(model, bits, device=place, key="judge.quantize")
        self.model = model.requires_grad_(False).eval().to(device)
        self.tokenizer = Qwen2Tokenizer.from_pretrained(folder, local_files_only=True)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        self.identity = f"a {_NAMES[kind]} in this process, weights {weights_digest(folder)}, {dtype}" + (
            f", {bits}" if bits else ""
        )
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._end = int(end)
        self.batch = batch
        self._asking = threading.Lock()
        self._side_stream = SideStream(device)

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """Return an answer to each question, in order. Calls from several threads wait for each other."""
        # The questions of a batch have the same maximum number of answer tokens.
        by_length: dict[int, list[int]] = {}
        for index, question in enumerate(questions):
            longest = 1 if question.form.schema() is None else question.form.max_tokens
            by_length.setdefault(longest, []).append(index)
        answers: dict[int, Answer] = {}
        with self._asking, self._side_stream():
            for longest, indices in by_length.items():
                for batch in (indices[first : first + self.batch] for first in range(0, len(indices), self.batch)):
                    answers |= zip(batch, self._answers([questions[index] for index in batch], longest=longest), strict=True)
        return [answers[index] for index in range(len(questions))]

    def _answers(self, questions: Sequence[Question], *, longest: int) -> list[Answer]:
        """Answer questions in one batch, with at most ``longest`` tokens each."""
        began = time.monotonic()
        inputs = self._inputs(questions)
        ids, logits = self._generate(inputs, questions, longest=longest)
        lengths = inputs["attention_mask"].sum(1).tolist()
        found = [self._answer(*each) for each in zip(questions, lengths, ids, logits, strict=True)]
        return [replace(answer, seconds=(time.monotonic() - began) / len(found)) for answer in found]

    def _answer(self, question: Question, length: int, ids: Int[Tensor, " t"], logits: Float[Tensor, " v"]) -> Answer:
        first = self._first(logits) if question.form.schema() is None else {}
        ended = len(ids) > 0 and int(ids[-1]) == self._end
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        scores = question.form.read(JudgeReply(text, "stop" if ended else "length", first=first))
        return Answer(
            scores=scores or {},
            fault="" if scores is not None else "unusable answer",
            text=text,
            attempts=1,
            seed=question.seed,
            temperature=question.temperature,
            input_tokens=length,
            output_tokens=len(ids),
        )

    def _row(self, question: Question) -> "_Row":
        """Tokenize the chat; each image is a run of image tokens. Text of the question never becomes special tokens."""
        images = [part.convert("RGB") for part in question.parts if not isinstance(part, str)]
        seen = self.processor(images=images, return_tensors="pt") if images else None
        counts = iter(() if seen is None else (seen["image_grid_thw"].prod(-1) // self.processor.merge_size**2).tolist())
        ids = [*self._ids("<|im_start|>system\n"), *self._words(question.rubric), *self._ids("<|im_end|>\n")]
        words, gap = self._words, "\n"
        if question.verbatim:  # the text of a published prompt may have special tokens; it escapes those of the instruction
            words, gap = self._ids, ""
            system = question.rubric or ("" if self.model.config.model_type == "qwen3_vl" else _SYSTEM)
            ids = self._ids(f"<|im_start|>system\n{system}<|im_end|>\n" if system else "")
        ids += self._ids("<|im_start|>user\n")
        for part in question.parts:
            shown = "" if isinstance(part, str) else f"<|vision_start|>{_PAD * next(counts)}<|vision_end|>{gap}"
            ids += words(part + gap) if isinstance(part, str) else self._ids(shown)
        ids += self._ids(f"<|im_end|>\n<|im_start|>assistant\n{question.begins}")
        if seen is None:
            return _Row(torch.tensor(ids), None, None)
        return _Row(torch.tensor(ids), seen["pixel_values"].to(self.model.dtype), seen["image_grid_thw"])

    def _inputs(self, questions: Sequence[Question]) -> dict[str, Tensor]:
        """Return the questions as one batch on the model's device, padded on the left, so that the answers of all rows begin at the
        same position."""
        rows = [self._row(question) for question in questions]
        longest = max(len(row.ids) for row in rows)
        tokens = torch.full((len(rows), longest), self._end)
        mask = torch.zeros_like(tokens)
        for index, row in enumerate(rows):
            tokens[index, longest - len(row.ids) :] = row.ids
            mask[index, longest - len(row.ids) :] = 1
        inputs = {"input_ids": tokens, "attention_mask": mask, "mm_token_type_ids": (tokens == self._image).int()}
        for name, images in (
            ("pixel_values", [row.pixels for row in rows if row.pixels is not None]),
            ("image_grid_thw", [row.grids for row in rows if row.grids is not None]),
        ):
            if images:
                inputs[name] = torch.cat(images)
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}

    @property
    def _image(self) -> int:
        return int(self.model.config.image_token_id)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _words(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def _generate(
        self, inputs: dict[str, Tensor], questions: Sequence[Question], *, longest: int
    ) -> tuple[list[Int[Tensor, " t"]], Float[Tensor, "r v"]]:
        """Generate answers. Returns the ids of each row up to its end token, and the logits of each row's first token."""
        drawn = [_Gumbel(questions)] if any(question.temperature > 0 for question in questions) else []
        own = {"eos_token_id": self._end, "pad_token_id": self._end}  # not those of the folder's generation_config.json
        config = GenerationConfig(do_sample=False, max_new_tokens=longest, return_dict_in_generate=True, output_logits=True, **own)
        made: Any = self.model.generate(**inputs, generation_config=config, logits_processor=LogitsProcessorList(drawn))
        rows = made.sequences[:, inputs["input_ids"].shape[1] :].cpu()
        ends = [(row == self._end).nonzero().flatten().tolist() for row in rows]
        ids = [row[: end[0] + 1] if end else row for row, end in zip(rows, ends, strict=True)]
        return ids, made.logits[0].float().cpu()

    def _first(self, logits: Float[Tensor, " v"]) -> dict[str, float]:
        values, ids = logits.log_softmax(dim=0).topk(min(_LIKELIEST, len(logits)))
        texts = [self.tokenizer.decode([token]) for token in ids.tolist()]
        return first_tokens(zip(texts, values.tolist(), strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class _Row:
    """A tokenized question: its token ids, and the patches of its images and their sizes in patches (None without images)."""

    ids: Int[Tensor, " l"]
    pixels: Float[Tensor, "n d"] | None
    grids: Int[Tensor, "m 3"] | None


class _Gumbel:
    """A logits processor that samples with the Gumbel-max trick: logits / temperature + Gumbel noise, before greedy search. Each
    question has its own generator, so that the draws of a row do not depend on the other rows. Rows with temperature 0 are not
    changed."""

    def __init__(self, questions: Sequence[Question]) -> None:
        self._rows = [(question.temperature, generator("judge", "answer", question.seed)) for question in questions]

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        rows = list(scores.split(1))
        for index, (temperature, source) in enumerate(self._rows):
            if temperature > 0:
                uniform = torch.rand(rows[index].shape, generator=source, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
                noise = -(-uniform.log()).log()
                rows[index] = (rows[index].double() / temperature + noise.to(scores.device)).float()
        return torch.cat(rows)
