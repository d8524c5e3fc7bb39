"""Prompts in a chat template: fills Qwen's template with the text and images of tasks, and encodes it with a frozen Qwen3.

The template has one placeholder ``{}``. Images are vision blocks in the template or in the text that replaces the placeholder; each
becomes a run of image tokens, one for each merged patch.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from PIL.Image import Image, fromarray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen2VLImageProcessorPil, Qwen3Model
from transformers.image_utils import SizeDict

from retouch.models.parts import Source

PAD = "<|image_pad|>"
VISION = f"<|vision_start|>{PAD}<|vision_end|>"

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
            # Each image's placeholder is repeated once for every merged patch.
            counts = iter((vision["image_grid_thw"].prod(-1) // self.image_processor.merge_size**2).tolist())
            for place, (text, row) in enumerate(zip(texts, images, strict=True)):
                head, *rest = text.split(PAD)
                if len(rest) != len(row):
                    raise ValueError(f"a row has {len(row)} images, but its template has {len(rest)} placeholders for them")
                texts[place] = head + "".join(PAD * next(counts) + part for part in rest)
        tokens = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
        return {"input_ids": tokens["input_ids"], "attention_mask": tokens["attention_mask"], **vision}


def load_image_processor(source: Source) -> Any:
    """The PIL version of the image processor of a pipeline with a Qwen vision-language model; it needs no torchvision."""
    if not isinstance(source, Path | str):
        from retouch.models.loaded import pil_image_processor

        return pil_image_processor(source.components["processor"])
    return Qwen2VLImageProcessorPil.from_pretrained(Path(source) / "processor", local_files_only=True)


class ChatPrompts:
    """Base class of text encoders that read a prompt in a chat template.

    ``FAMILY``: name of the models, for messages. ``max_sequence_length``: maximum number of tokens of a prompt in its template, not
    counting the first ``prefix`` tokens, whose states are dropped."""

    FAMILY: ClassVar[str]

    def __init__(self, encoder: Any, template: QwenTemplate, *, max_sequence_length: int, prefix: int = 0) -> None:
        self.encoder = encoder
        self.template = template
        self.tokenizer = template.tokenizer
        self.max_sequence_length = max_sequence_length
        self.prefix = prefix

    @property
    def encoders(self) -> list[nn.Module]:
        return [self.encoder]

    def check(self, prompt: str, task: str) -> None:
        """Raise ValueError if the prompt contains a special token of the tokenizer, or is too long."""
        self.template.check(prompt, task)
        tokens = self.template.tokenise([prompt], [()])["input_ids"].shape[1] - self.prefix
        if tokens > self.max_sequence_length:
            raise ValueError(
                f"the prompt of task {task!r} has {tokens} tokens in its template, but {self.FAMILY} reads at most "
                f"{self.max_sequence_length}; shorten it"
            )


class Qwen3Text(ChatPrompts):
    """Base class of Qwen3 text encoders; the prompt is the only user turn of the tokenizer's chat template.

    ``LAYERS``: indices of the hidden states that are concatenated (0 is the embedding). ``THINKING``: the template's
    ``enable_thinking``.
    ``PADDING``: a batch is padded to its longest prompt or to ``max_sequence_length``.

    Raises ValueError if the tokenizer has no chat template that contains the prompt unchanged.
    """

    LAYERS: ClassVar[tuple[int, ...]]
    THINKING: ClassVar[bool]
    PADDING: ClassVar[Literal["longest", "max_length"]] = "longest"
    encoder: Qwen3Model

    def __init__(self, encoder: Qwen3Model, tokenizer: PreTrainedTokenizerBase, *, max_sequence_length: int = 512) -> None:
        user = [{"role": "user", "content": "{}"}]
        made = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True, enable_thinking=self.THINKING)
        super().__init__(encoder, QwenTemplate(tokenizer, template=str(made)), max_sequence_length=max_sequence_length)

    def embed(self, prompts: Sequence[str]) -> tuple[Float[Tensor, "r l d"], Bool[Tensor, "r l"]]:
        """Return embeddings and their mask, on the encoder's device. The embeddings of padding are undefined.

        A batch is padded to its longest prompt on the right, or to ``max_sequence_length`` on the tokenizer's side.
        """
        texts = [self.template.head + prompt + self.template.tail for prompt in prompts]
        padding = {"max_length": self.max_sequence_length} if self.PADDING == "max_length" else {"padding_side": "right"}
        tokens = self.tokenizer(texts, padding=self.PADDING, return_tensors="pt", **padding)
        ids, mask = (tokens[name].to(self.encoder.device) for name in ("input_ids", "attention_mask"))
        states = self.encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False).hidden_states
        assert states is not None
        return torch.cat([states[layer] for layer in self.LAYERS], dim=-1), mask.bool()
