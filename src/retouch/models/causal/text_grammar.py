"""The grammar of text completions: a single set of tokens."""

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from retouch.types import Kind, Prompts


class TextGrammar:
    """Any text: all tokens of the tokenizer except image and video placeholders (implements ``Grammar``; nothing is forced).

    The output embedding has more rows than the tokenizer has tokens; the ids of the additional rows are excluded too.
    """

    kinds: tuple[int, ...] = (Kind.TEXT_TOKEN,)
    forces = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, device: torch.device) -> None:
        self.vocabularies = torch.arange(vocabulary, device=device)[None] < len(tokenizer)
        named = [token for token in tokenizer.get_added_vocab() if "vision" in token or "image" in token or "video" in token]
        self.vocabularies[:, [tokenizer.convert_tokens_to_ids(token) for token in named]] = False

    def parse(self, prompts: Prompts, ids: Int[Tensor, "r k"]) -> tuple[Int[Tensor, "r k1"], Int[Tensor, "r k1"]]:
        sets = ids.new_zeros(ids.shape[0], ids.shape[1] + 1)
        return sets, sets - 1
