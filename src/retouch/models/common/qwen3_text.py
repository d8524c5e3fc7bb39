"""Text encoding with a chat template and the hidden states of a frozen Qwen3, for Z-Image and FLUX.2-klein."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen3Model

from retouch.models.common.chat_template import QwenTemplate


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
