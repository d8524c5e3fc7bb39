"""Qwen-Image's text encoding of an instruction: hidden states of Qwen2.5-VL for a chat template, without the template's beginning.

They are the last hidden states (after the final norm) of all tokens except padding, the system turn and the user header: (r, L, d)
with a mask. An image is a run of image tokens, one for each merged patch, with three-axis positions (time, height, width).
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from PIL.Image import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration

from retouch.models.common.chat_template import TURNS, VISION, QwenTemplate, Tokens

_DESCRIBE = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the objects and "
    "background:"
)
_MODIFY = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how the user's "
    "text instruction should alter or modify the image. Generate a new image that meets the user's requirements while maintaining "
    "consistency with the original input where appropriate."
)
TEXT_TO_IMAGE = TURNS.format(system=_DESCRIBE, user="{}")
EDIT = TURNS.format(system=_MODIFY, user=VISION + "{}")
EDIT_PLUS = TURNS.format(system=_MODIFY, user="{}")
OFFICIAL_PREFIX = {TEXT_TO_IMAGE: 34, EDIT: 64, EDIT_PLUS: 64}


class QwenText:
    """A Qwen2.5-VL text encoder with its tokenizer and image processor, and the template that it reads.

    ``template`` has one placeholder ``{}``; the text before it, or before its first vision block, is the prefix that is dropped.
    Raises ValueError if an official template has another number of prefix tokens than in the training of the models.
    """

    def __init__(
        self,
        encoder: Qwen2_5_VLForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str,
        image_processor: Any = None,
    ) -> None:
        self._image_token = encoder.config.image_token_id
        self.template = QwenTemplate(tokenizer, template=template, image_processor=image_processor, image_token=self._image_token)
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        before_vision = self.template.head.partition("<|vision_start|>")[0]
        self.prefix = len(tokenizer(before_vision)["input_ids"]) if before_vision else 0
        if self.prefix != OFFICIAL_PREFIX.get(template, self.prefix):
            raise ValueError(
                f"the prefix of the official template must have {OFFICIAL_PREFIX[template]} tokens, but has {self.prefix} with "
                "this tokenizer: use the model's own tokenizer, or a template of your own"
            )

    @property
    def encoders(self) -> list[nn.Module]:
        return [self.encoder]

    def check(self, instruction: str, task: str) -> None:
        """Raise ValueError if an instruction contains a special token of the tokenizer, which would change the template."""
        self.template.check(instruction, task)

    def tokenise(self, bodies: Sequence[str], images: Sequence[Sequence[Image]]) -> Tokens:
        """Return the encoder's inputs for ``bodies``, which replace the placeholder, and the images; see ``QwenTemplate``."""
        return self.template.tokenise(bodies, images)

    def embed(self, tokens: Tokens) -> tuple[Float[Tensor, "r l d"], Bool[Tensor, "r l"]]:
        """Return embeddings and their mask, padded on the right with zeros; with gradient if gradients are enabled.

        Padding in ``tokens`` may be on either side. Rows of different lengths do not influence each other.
        """
        tokens = {name: tensor.to(self.encoder.device) for name, tensor in tokens.items()}
        keep = tokens["attention_mask"].bool()
        # Without the token types, the encoder gives image tokens the positions of text, without an error.
        types = (tokens["input_ids"] == self._image_token).int()
        states = self.encoder.model(**tokens, mm_token_type_ids=types, use_cache=False).last_hidden_state
        rows = [state[real][self.prefix :] for state, real in zip(states, keep, strict=True)]
        lengths = torch.tensor([len(row) for row in rows], device=states.device)
        embeds = pad_sequence(rows, batch_first=True)
        return embeds, torch.arange(embeds.shape[1], device=states.device) < lengths[:, None]
