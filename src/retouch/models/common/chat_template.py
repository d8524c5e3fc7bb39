"""Fills a Qwen chat template with the text and images of tasks, and converts the result to token ids and pixels.

The template has one placeholder ``{}``. Images are vision blocks in the template or in the text that replaces the placeholder; each
becomes a run of image tokens, one for each merged patch.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL.Image import Image, fromarray
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.image_utils import SizeDict

PAD = "<|image_pad|>"
VISION = f"<|vision_start|>{PAD}<|vision_end|>"
TURNS = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"

Tokens = Mapping[str, Tensor]


class QwenTemplate:
    """A template with its tokenizer and its image processor (None: no images).

    ``image_token``: the id of an image token in the model. Raises ValueError for a template without exactly one placeholder, and
    for a tokenizer with another id for ``<|image_pad|>``."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, template: str, image_processor: Any = None, image_token: int | None = None
    ) -> None:
        if template.count("{}") != 1:
            raise ValueError(f"a template needs exactly one placeholder {{}}; this one has {template.count('{}')}: {template!r}")
        if image_processor is not None and tokenizer.convert_tokens_to_ids(PAD) != image_token:
            raise ValueError(f"{PAD} must be token {image_token}, the model's image_token_id, in the tokenizer")
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.head, _, self.tail = template.partition("{}")

    def check(self, instruction: str, task: str) -> None:
        """Raise ValueError if an instruction contains a special token of the tokenizer, which would change the template."""
        for token in {*self.tokenizer.all_special_tokens, PAD, "<|vision_start|>", "<|vision_end|>"}:
            if token in instruction:
                raise ValueError(f"the instruction of task {task!r} contains the special token {token}; remove it")

    def resized(self, image: Image) -> Image:
        """Resize the image as the image processor does, and convert it to RGB; the processor does not resize the result again.

        So a server that has the same processor, but resizes with torchvision instead of PIL, reads the same pixels. Raises
        ValueError if one side is 200 times as long as the other.
        """
        if self.image_processor is None:
            return image
        processor = self.image_processor
        pixels = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        factor = processor.patch_size * processor.merge_size
        made = processor.resize(pixels, size=SizeDict(**dict(processor.size)), resample=processor.resample, factor=factor)
        return fromarray(np.ascontiguousarray(made.transpose(1, 2, 0)))

    def tokenise(self, bodies: Sequence[str], images: Sequence[Sequence[Image]]) -> Tokens:
        """Return the model's inputs for the texts ``bodies``, which replace the placeholder, and the ``images`` of each row.

        The inputs are input_ids and attention_mask (r, l), padded on the right; with images also pixel_values (patches of all
        images) and image_grid_thw (images, 3).
        """
        texts = [self.head + body + self.tail for body in bodies]
        flat = [image for row in images for image in row]
        vision: dict[str, Tensor] = {}
        if flat:
            if self.image_processor is None:
                raise ValueError("these tasks have images, but there is no image_processor")
            processed = self.image_processor(images=flat, return_tensors="pt")
            vision = {"pixel_values": processed["pixel_values"], "image_grid_thw": processed["image_grid_thw"]}
            counts = (vision["image_grid_thw"].prod(-1) // self.image_processor.merge_size**2).tolist()
            texts = _expand(texts, [len(row) for row in images], counts)
        tokens = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        return {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"], **vision}


def _expand(texts: Sequence[str], images: Sequence[int], counts: Sequence[int]) -> list[str]:
    """Repeat each image placeholder once for every merged patch of its image.

    ``images``: number of images per row. ``counts``: number of merged patches per image.
    """
    remaining = iter(counts)
    expanded = []
    for text, number in zip(texts, images, strict=True):
        head, *rest = text.split(PAD)
        if len(rest) != number:
            raise ValueError(f"a row has {number} images, but its template has {len(rest)} placeholders for them")
        expanded.append(head + "".join(PAD * next(remaining) + part for part in rest))
    return expanded
