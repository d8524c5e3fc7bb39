"""What Qwen-Image knows of an instruction: hidden states of Qwen2.5-VL over a chat template, without the template's beginning.

The last hidden state (after the final norm) of the real tokens, less the system turn and the user header: (r, L, d) with a mask.
Pictures come as runs of image tokens, one for each merged patch, and have three-axis positions (time, height, width).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from PIL.Image import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration

PAD = "<|image_pad|>"
VISION = f"<|vision_start|>{PAD}<|vision_end|>"
_TURNS = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
_DESCRIBE = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the objects and "
    "background:"
)
_MODIFY = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how the user's "
    "text instruction should alter or modify the image. Generate a new image that meets the user's requirements while maintaining "
    "consistency with the original input where appropriate."
)
TEXT_TO_IMAGE = _TURNS.format(system=_DESCRIBE, user="{}")
EDIT = _TURNS.format(system=_MODIFY, user=VISION + "{}")
EDIT_PLUS = _TURNS.format(system=_MODIFY, user="{}")
OFFICIAL_PREFIX = {TEXT_TO_IMAGE: 34, EDIT: 64, EDIT_PLUS: 64}

Tokens = Mapping[str, Tensor]


class QwenText:
    """A Qwen2.5-VL text encoder with its tokenizer and image processor, and the template that it reads.

    ``template`` has one placeholder ``{}``; what stands before it, or before its first vision block, is the prefix that is
    dropped. ValueError where an official template has another number of prefix tokens than the models were trained with.
    """

    def __init__(
        self,
        encoder: Qwen2_5_VLForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str,
        image_processor: Any = None,
    ) -> None:
        if template.count("{}") != 1:
            raise ValueError(f"a template has exactly one placeholder {{}}; this has {template.count('{}')}: {template!r}")
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        self.head, _, self.tail = template.partition("{}")
        before_vision = self.head.partition("<|vision_start|>")[0]
        self.prefix = len(tokenizer(before_vision)["input_ids"]) if before_vision else 0
        if self.prefix != OFFICIAL_PREFIX.get(template, self.prefix):
            raise ValueError(
                f"the official template begins with {OFFICIAL_PREFIX[template]} tokens, and with {self.prefix} in this tokenizer: "
                "give the model's own tokenizer, or a template of your own"
            )
        self._image_token = encoder.config.image_token_id
        if image_processor is not None and tokenizer.convert_tokens_to_ids(PAD) != self._image_token:
            raise ValueError(f"{PAD} must be token {self._image_token}, the text encoder's image_token_id, in the tokenizer")

    def check(self, instruction: str, task: str) -> None:
        """ValueError where an instruction spells one of the tokenizer's special tokens, which would change the template."""
        for token in {*self.tokenizer.all_special_tokens, PAD, "<|vision_start|>", "<|vision_end|>"}:
            if token in instruction:
                raise ValueError(f"the instruction of task {task!r} contains the special token {token}; take it out")

    def tokenise(self, bodies: Sequence[str], pictures: Sequence[Sequence[Image]]) -> Tokens:
        """The encoder's inputs for these bodies (what replaces the placeholder) and each row's pictures, in order.

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

    def embed(self, tokens: Tokens) -> tuple[Float[Tensor, "r l d"], Bool[Tensor, "r l"]]:
        """Embeddings and their mask, padded on the right with zeros; with gradient where the caller has not turned it off.

        Padding in ``tokens`` may be on either side. Rows that differ in length do not change one another.
        """
        tokens = {name: tensor.to(self.encoder.device) for name, tensor in tokens.items()}
        keep = tokens["attention_mask"].bool()
        # Without the token types the encoder silently gives image tokens positions as if they were text.
        types = (tokens["input_ids"] == self._image_token).int()
        states = self.encoder.model(**tokens, mm_token_type_ids=types, use_cache=False).last_hidden_state
        rows = [state[real][self.prefix :] for state, real in zip(states, keep, strict=True)]
        lengths = torch.tensor([len(row) for row in rows], device=states.device)
        embeds = pad_sequence(rows, batch_first=True)
        return embeds, torch.arange(embeds.shape[1], device=states.device) < lengths[:, None]


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
