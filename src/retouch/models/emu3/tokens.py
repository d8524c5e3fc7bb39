"""Emu3's tokens: those that give a picture its form, and one for each code of its autoencoder.

A picture of h x w codes is written as boi "h*w" img, then h rows of w visual tokens, each row followed by eol, then eof eoi.
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


class Emu3Words:
    """The ids of Emu3's tokenizer. ValueError where it lacks one of the tokens above, or codes are missing between others."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        known = tokenizer.get_vocab()
        lacking = [token for token in (BOS, EOS, PAD, BOI, IMG, EOL, EOF, EOI) if token not in known]
        if lacking:
            raise ValueError(f"the tokenizer has no token {lacking}; give Emu3's own (BAAI/Emu3-Gen, say)")
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
        """What stands between boi and the first row."""
        return [*self.text_ids(f"{height}*{width}"), self.img]

    def picture(self, codes: Int[Tensor, "h w"]) -> list[int]:
        """A picture's ids, from boi to eoi."""
        rows = [[*self.visual[row.cpu()].tolist(), self.eol] for row in codes]
        return [self.boi, *self.header(*codes.shape), *(each for row in rows for each in row), self.eof, self.eoi]

    def codes(self, ids: Sequence[int], *, height: int, width: int) -> Int[Tensor, "h w"] | None:
        """The codes of the one picture in a completion; None where there is none, or it has another form."""
        if list(ids).count(self.img) != 1:
            return None
        start = list(ids).index(self.img) + 1
        body = list(ids)[start : start + height * (width + 1)]
        if len(body) < height * (width + 1) or any(each != self.eol for each in body[width :: width + 1]):
            return None
        drawn = [each for place, each in enumerate(body) if place % (width + 1) != width]
        if any(each not in self._codes for each in drawn):
            return None
        return torch.tensor([self._codes[each] for each in drawn]).reshape(height, width)

    def text_ids(self, text: str) -> list[int]:
        """The ids of a text, special tokens by their names."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids
