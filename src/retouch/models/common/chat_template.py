"""A Qwen chat template with tasks' words and pictures put into it, as token ids and pixels.

The template has one placeholder ``{}``. Pictures stand in it, or in what replaces the placeholder, as vision blocks; each becomes a
run of image tokens, one for each merged patch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from PIL.Image import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase

PAD = "<|image_pad|>"
VISION = f"<|vision_start|>{PAD}<|vision_end|>"
TURNS = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"

Tokens = Mapping[str, Tensor]


class QwenTemplate:
    """A template with the tokenizer and the image processor (None: no pictures) that read it.

    ``image_token``: the id that the model takes for an image token. ValueError where the template has not exactly one placeholder,
    or where the tokenizer has another id for ``<|image_pad|>``.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, template: str, image_processor: Any = None, image_token: int | None = None
    ) -> None:
        if template.count("{}") != 1:
            raise ValueError(f"a template has exactly one placeholder {{}}; this has {template.count('{}')}: {template!r}")
        if image_processor is not None and tokenizer.convert_tokens_to_ids(PAD) != image_token:
            raise ValueError(f"{PAD} must be token {image_token}, the model's image_token_id, in the tokenizer")
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.head, _, self.tail = template.partition("{}")

    def check(self, instruction: str, task: str) -> None:
        """ValueError where an instruction spells one of the tokenizer's special tokens, which would change the template."""
        for token in {*self.tokenizer.all_special_tokens, PAD, "<|vision_start|>", "<|vision_end|>"}:
            if token in instruction:
                raise ValueError(f"the instruction of task {task!r} contains the special token {token}; take it out")

    def tokenise(self, bodies: Sequence[str], pictures: Sequence[Sequence[Image]]) -> Tokens:
        """The model's inputs for these bodies (what replaces the placeholder) and each row's pictures, in order.

        input_ids and attention_mask (r, l), padded on the right; with pictures also pixel_values (patches of all pictures) and
        image_grid_thw (pictures, 3).
        """
        texts = [self.head + body + self.tail for body in bodies]
        flat = [picture for row in pictures for picture in row]
        vision: dict[str, Tensor] = {}
        if flat:
            if self.image_processor is None:
                raise ValueError("these tasks have pictures, and no image_processor was given to read them")
            seen = self.image_processor(images=flat, return_tensors="pt")
            vision = {"pixel_values": seen["pixel_values"], "image_grid_thw": seen["image_grid_thw"]}
            counts = (vision["image_grid_thw"].prod(-1) // self.image_processor.merge_size**2).tolist()
            texts = _expand(texts, [len(row) for row in pictures], counts)
        tokens = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        return {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"], **vision}


def _expand(texts: Sequence[str], pictures: Sequence[int], counts: Sequence[int]) -> list[str]:
    """Each image placeholder repeated as often as its picture has merged patches."""
    left = iter(counts)
    expanded = []
    for text, number in zip(texts, pictures, strict=True):
        head, *rest = text.split(PAD)
        if len(rest) != number:
            raise ValueError(f"a row has {number} pictures, and {len(rest)} places for them in its template")
        expanded.append(head + "".join(PAD * next(left) + part for part in rest))
    return expanded
