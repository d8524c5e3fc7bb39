"""Emu3's special tokens (arXiv 2409.18869): those that structure an image, and one for each code of its autoencoder.

An image of h x w codes is the sequence boi "h*w" img, then h rows of w visual tokens, each followed by eol, then eof eoi.
"""

import re
from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

BOS, EOS, PAD = "<|extra_203|>", "<|extra_204|>", "<|endoftext|>"
BOI, IMG, EOL, EOF, EOI = "<|image start|>", "<|image token|>", "<|extra_200|>", "<|extra_201|>", "<|image end|>"
_VISUAL = re.compile(r"<\|visual token (\d{6})\|>")


class Emu3Tokens:
    """The ids of Emu3's special tokens. Raises ValueError if the tokenizer lacks one, or the visual tokens' numbers have gaps."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        known = tokenizer.get_vocab()
        missing = [token for token in (BOS, EOS, PAD, BOI, IMG, EOL, EOF, EOI) if token not in known]
        if missing:
            raise ValueError(f"the tokenizer has no token {missing}; use Emu3's own (for example BAAI/Emu3-Gen)")
        self.tokenizer = tokenizer
        self.bos, self.eos, self.pad = (known[token] for token in (BOS, EOS, PAD))
        self.boi, self.img, self.eol, self.eof, self.eoi = (known[token] for token in (BOI, IMG, EOL, EOF, EOI))
        codes = {int(match[1]): index for token, index in known.items() if (match := _VISUAL.fullmatch(token))}
        if not codes or max(codes) + 1 != len(codes):
            raise ValueError(
                f"the tokenizer has {len(codes)} visual tokens, numbered up to {max(codes, default=-1)}; some are missing"
            )
        self.visual: Int[Tensor, " codes"] = torch.tensor([codes[code] for code in range(len(codes))])
        """The id of each code."""
        self._codes = {index: code for code, index in codes.items()}

    def header(self, height: int, width: int) -> list[int]:
        """The ids between boi and the first row: the size and img."""
        return [*self.text_ids(f"{height}*{width}"), self.img]

    def image_ids(self, codes: Int[Tensor, "h w"]) -> list[int]:
        """The ids of an image, from boi to eoi."""
        rows = [[*self.visual[row.cpu()].tolist(), self.eol] for row in codes]
        return [self.boi, *self.header(*codes.shape), *(each for row in rows for each in row), self.eof, self.eoi]

    def codes(self, ids: Sequence[int], *, height: int, width: int) -> Int[Tensor, "h w"] | None:
        """The codes of the only image in a completion; None if there is not exactly one, or it has another structure."""
        if list(ids).count(self.img) != 1:
            return None
        start = list(ids).index(self.img) + 1
        body = list(ids)[start : start + height * (width + 1)]
        if len(body) < height * (width + 1) or any(each != self.eol for each in body[width :: width + 1]):
            return None
        visual = [each for position, each in enumerate(body) if position % (width + 1) != width]
        if any(each not in self._codes for each in visual):
            return None
        return torch.tensor([self._codes[each] for each in visual]).reshape(height, width)

    def text_ids(self, text: str) -> list[int]:
        """The ids of a text, in which special tokens may be spelled out."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids
