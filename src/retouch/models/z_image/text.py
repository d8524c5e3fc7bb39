"""What Z-Image knows of a prompt: hidden states of Qwen3 over its chat template, of the last layer but one.

The template is the tokenizer's own, with one turn of the user and thinking on. Of a prompt all tokens are kept, the template's too:
(r, L, 2560) with a mask.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase, Qwen3Model

from retouch.models.qwen_image.template import QwenTemplate


class ZImageText:
    """A Qwen3 text encoder with its tokenizer. ``max_sequence_length``: of a prompt in its template, in tokens.

    ValueError where the tokenizer has no chat template that puts a prompt in as it stands.
    """

    def __init__(self, encoder: Qwen3Model, tokenizer: PreTrainedTokenizerBase, *, max_sequence_length: int = 512) -> None:
        user = [{"role": "user", "content": "{}"}]
        made = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True, enable_thinking=True)
        self.template = QwenTemplate(tokenizer, template=str(made))
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.max_sequence_length = max_sequence_length

    def check(self, prompt: str, task: str) -> None:
        """ValueError where the prompt spells a special token of the tokenizer, or is not read to its end."""
        self.template.check(prompt, task)
        tokens = self.template.tokenise([prompt], [()])["input_ids"].shape[1]
        if tokens > self.max_sequence_length:
            raise ValueError(
                f"the prompt of task {task!r} has {tokens} tokens in its template, and Z-Image reads {self.max_sequence_length}; "
                "shorten it"
            )

    def embed(self, prompts: Sequence[str]) -> tuple[Float[Tensor, "r l d"], Bool[Tensor, "r l"]]:
        """Embeddings, padded on the right with zeros, and their mask, on the encoder's device."""
        tokens = self.template.tokenise(prompts, [()] * len(prompts))
        ids, mask = (tokens[name].to(self.encoder.device) for name in ("input_ids", "attention_mask"))
        output = self.encoder(input_ids=ids, attention_mask=mask, output_hidden_states=True, use_cache=False)
        assert output.hidden_states is not None
        states: Tensor = output.hidden_states[-2]
        return torch.where(mask[..., None].bool(), states, 0), mask.bool()
