"""Flux's text encoding of a prompt: T5's last hidden states, padded to a fixed length, and CLIP's pooled output.

embeds (r, max_sequence_length, 4096), without a mask: the transformer also reads the padding, as in the pipelines. pooled (r, 768).
"""

from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import CLIPTextModel, PreTrainedTokenizerBase, T5EncoderModel


class FluxText:
    """CLIP and T5 with their tokenizers. ``max_sequence_length``: T5's number of tokens, up to 512.

    Source: diffusers' FluxPipeline (``encode_prompt``).
    """

    def __init__(
        self,
        clip: CLIPTextModel,
        t5: T5EncoderModel,
        *,
        clip_tokenizer: PreTrainedTokenizerBase,
        t5_tokenizer: PreTrainedTokenizerBase,
        max_sequence_length: int = 512,
    ) -> None:
        if not 1 <= max_sequence_length <= 512:
            raise ValueError(f"max_sequence_length is {max_sequence_length}; T5 takes 1 to 512 tokens here")
        self.clip = clip
        self.t5 = t5
        self.clip_tokenizer = clip_tokenizer
        self.t5_tokenizer = t5_tokenizer
        self.max_sequence_length = max_sequence_length

    @property
    def encoders(self) -> list[nn.Module]:
        return [self.clip, self.t5]

    def check(self, prompt: str, task: str) -> None:
        """Raise ValueError if the prompt is longer than T5 reads. (CLIP may truncate it, as in the pipelines.)"""
        tokens = len(self.t5_tokenizer(prompt, verbose=False)["input_ids"])
        if tokens > self.max_sequence_length:
            raise ValueError(
                f"the prompt of task {task!r} has {tokens} tokens, but T5 reads at most {self.max_sequence_length}; shorten it"
            )

    def embed(self, prompts: Sequence[str]) -> tuple[Float[Tensor, "r l d"], Float[Tensor, "r e"]]:
        """Return embeds and pooled in fp32, each on its encoder's device; with gradient if gradients are enabled."""
        return self.read(*self.tokenise(prompts))

    def tokenise(self, prompts: Sequence[str]) -> tuple[Int[Tensor, "r k"], Int[Tensor, "r l"]]:
        """Return CLIP's token ids and T5's token ids."""
        return (
            _ids(self.clip_tokenizer, prompts, self.clip_tokenizer.model_max_length),
            _ids(self.t5_tokenizer, prompts, self.max_sequence_length),
        )

    def read(self, clip_ids: Int[Tensor, "r k"], t5_ids: Int[Tensor, "r l"]) -> tuple[Float[Tensor, "r l d"], Float[Tensor, "r e"]]:
        """Return embeds and pooled for the ids that ``tokenise`` returns."""
        pooled: Tensor = self.clip(clip_ids.to(self.clip.device)).pooler_output.float()
        embeds: Tensor = self.t5(t5_ids.to(self.t5.device)).last_hidden_state.float()
        return embeds, pooled


def _ids(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], length: int) -> Tensor:
    tokens = tokenizer(list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    ids: Tensor = tokens["input_ids"]
    return ids
