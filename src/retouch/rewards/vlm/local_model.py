"""A judge in this process: a Qwen2-VL, Qwen2.5-VL or Qwen3-VL from a folder, for where there is no server.

It answers one question after another. One-word answers are read off the first token's exact distribution; scores are generated
freely (no grammar constrains them to the schema) and read like any free text.
"""

import json
import math
import threading
import time
from collections.abc import Sequence
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
from retouch.rewards.vlm.forms import JudgeReply
from retouch.rewards.vlm.questions import Answer, Question
from retouch.rewards.weights import weights_digest, weights_folder

_CLASSES: dict[str, Any] = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
}
_NAMES = {"qwen2_vl": "Qwen2-VL", "qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL"}
_PAD = "<|image_pad|>"
_LIKELIEST = 50


class LocalJudge:
    """Answers questions with the model in ``path``, frozen; the same question, seed and temperature give the same answer.

    Use thinking variants only for forms that ask for scores: where the first token is the answer, theirs would begin a thought.
    ValueError: the weights are not on this machine, or are of another kind of model.
    """

    def __init__(self, path: str | Path, *, device: torch.device | str, dtype: torch.dtype = torch.float32) -> None:
        folder = weights_folder(path)
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
        if kind not in _CLASSES:
            raise ValueError(f"{path} is a model of type {kind!r}; choose one of type {', '.join(_CLASSES)}")
        model = _CLASSES[kind].from_pretrained(folder, local_files_only=True, use_safetensors=True, dtype=dtype)
        self.model = model.requires_grad_(False).eval().to(device)
        self.tokenizer = Qwen2Tokenizer.from_pretrained(folder, local_files_only=True)
        self.processor = Qwen2VLImageProcessorPil.from_pretrained(folder, local_files_only=True)
        self.identity = f"a {_NAMES[kind]} in this process, weights {weights_digest(folder)}, {dtype}"
        end = self.tokenizer.convert_tokens_to_ids("<|im_end|>")
        self._end = int(end)
        self._asking = threading.Lock()

    def ask(self, questions: Sequence[Question]) -> list[Answer]:
        """An answer to each question, in order. Calls from several threads wait for each other."""
        with self._asking:
            return [self._answer(question) for question in questions]

    def _answer(self, question: Question) -> Answer:
        began = time.monotonic()
        inputs = self._inputs(question)
        if question.form.schema() is None:
            ids, logits = self._generate(inputs, question, longest=1)
            first = self._first(logits)
        else:
            ids, _ = self._generate(inputs, question, longest=question.form.max_tokens)
            first = {}
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
            seconds=time.monotonic() - began,
            input_tokens=inputs["input_ids"].shape[1],
            output_tokens=len(ids),
        )

    def _inputs(self, question: Question) -> dict[str, Tensor]:
        """The chat as token ids, each image a run of image tokens. Text of the question is never read as special tokens."""
        images = [part.convert("RGB") for part in question.parts if not isinstance(part, str)]
        seen = self.processor(images=images, return_tensors="pt")
        counts = iter((seen["image_grid_thw"].prod(-1) // self.processor.merge_size**2).tolist())
        ids = [*self._ids("<|im_start|>system\n"), *self._words(question.rubric), *self._ids("<|im_end|>\n<|im_start|>user\n")]
        for part in question.parts:
            ids += self._words(part + "\n") if isinstance(part, str) else self._ids(_block(next(counts)))
        ids += self._ids("<|im_end|>\n<|im_start|>assistant\n")
        tokens = torch.tensor([ids])
        inputs = {
            "input_ids": tokens,
            "attention_mask": torch.ones_like(tokens),
            "mm_token_type_ids": (tokens == self._image).int(),
        }
        inputs |= {"pixel_values": seen["pixel_values"].to(self.model.dtype), "image_grid_thw": seen["image_grid_thw"]}
        return {name: tensor.to(self.model.device) for name, tensor in inputs.items()}

    @property
    def _image(self) -> int:
        return int(self.model.config.image_token_id)

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _words(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def _generate(
        self, inputs: dict[str, Tensor], question: Question, *, longest: int
    ) -> tuple[Int[Tensor, " t"], Float[Tensor, " v"]]:
        """The generated ids, and the logits of the first token."""
        drawn = [_Gumbel(question)] if question.temperature > 0 else []
        made: Any = self.model.generate(
            **inputs,
            generation_config=self._settings(longest),
            logits_processor=LogitsProcessorList(drawn),
        )
        return made.sequences[0, inputs["input_ids"].shape[1] :].cpu(), made.logits[0][0].float().cpu()

    def _settings(self, longest: int) -> GenerationConfig:
        """Greedy search, without any setting of the folder's own generation_config.json."""
        ends = {"eos_token_id": self._end, "pad_token_id": self._end}
        return GenerationConfig(do_sample=False, max_new_tokens=longest, return_dict_in_generate=True, output_logits=True, **ends)

    def _first(self, logits: Float[Tensor, " v"]) -> dict[str, float]:
        """The likeliest first tokens with their log-probabilities; tokens of the same text are one."""
        found: dict[str, float] = {}
        values, ids = logits.log_softmax(dim=0).topk(min(_LIKELIEST, len(logits)))
        for value, token in zip(values.tolist(), ids.tolist(), strict=True):
            text = self.tokenizer.decode([token])
            found[text] = math.log(math.exp(found[text]) + math.exp(value)) if text in found else value
        return found


class _Gumbel:
    """Sampling as the greatest of logits / temperature + Gumbel noise, from a generator of the question's own."""

    def __init__(self, question: Question) -> None:
        self._generator = generator("judge", "answer", question.seed)
        self._temperature = question.temperature

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        uniform = torch.rand(scores.shape, generator=self._generator, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
        noise = -(-uniform.log()).log()
        return (scores.double() / self._temperature + noise.to(scores.device)).float()


def _block(count: int) -> str:
    return f"<|vision_start|>{_PAD * count}<|vision_end|>\n"
