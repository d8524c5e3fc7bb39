"""What a writer of text may write: a grammar of one set of tokens."""

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from retouch.types import Kind, Prompts


class WithoutVision:
    """Any text: every token of the tokenizer but those that stand for pictures (a ``Grammar``; nothing is forced).

    The weights have more rows than the tokenizer has tokens; those have no text and are left out too.
    """

    kinds = (Kind.TEXT_TOKEN,)

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, device: torch.device) -> None:
        self.vocabularies = torch.arange(vocabulary, device=device)[None] < len(tokenizer)
        named = [token for token in tokenizer.get_added_vocab() if "vision" in token or "image" in token or "video" in token]
        self.vocabularies[:, [tokenizer.convert_tokens_to_ids(token) for token in named]] = False

    def parse(self, prompts: Prompts, ids: Int[Tensor, "r k"]) -> tuple[Int[Tensor, "r k1"], Int[Tensor, "r k1"]]:
        places = ids.new_zeros(ids.shape[0], ids.shape[1] + 1)
        return places, places - 1
