"""The grammar of Emu3: text until an image starts, then one complete image of the model's size, then the end of the sequence.

Only text and visual tokens are sampled. The tokens that give an image its structure are forced: they have no log-probability and no
gradient, in sampling and in evaluation. (EARL, arXiv 2508.01119, forces them in sampling but still computes their gradient.)
"""

import torch
from jaxtyping import Int
from torch import Tensor

from retouch.models.emu3.tokens import Emu3Tokens
from retouch.types import Kind, Prompts

TEXT, VISUAL = 0, 1


class GridGrammar:
    """Images of ``height`` x ``width`` codes (implements ``Grammar``). ``vocabulary``: rows of the output embedding.

    A prompt that ends with boi (begin of image) has already started the image. Text may also end without an image.
    ``begin``: id of boi. ``form``: for each number of tokens since boi, the forced id, or -1 if a visual token is sampled.

    Source: the image format of Emu3 (arXiv 2409.18869).
    """

    kinds: tuple[int, ...] = (Kind.TEXT_TOKEN, Kind.IMAGE_TOKEN)

    def __init__(self, words: Emu3Tokens, *, height: int, width: int, vocabulary: int, device: torch.device) -> None:
        self.begin = words.boi
        visual = torch.zeros(vocabulary, dtype=torch.bool)
        visual[words.visual] = True
        text = (torch.arange(vocabulary) < len(words.tokenizer)) & ~visual
        text[[words.img, words.eol, words.eof, words.eoi, words.bos, words.pad]] = False
        self.vocabularies = torch.stack([text, visual]).to(device)
        body = ([VISUAL] * width + [words.eol]) * height
        form = [*words.header(height, width), *(-1 if each == VISUAL else each for each in body), words.eof, words.eoi, words.eos]
        self.form = torch.tensor([*form, words.pad], device=device)

    def parse(self, prompts: Prompts, ids: Int[Tensor, "r k"]) -> tuple[Int[Tensor, "r k1"], Int[Tensor, "r k1"]]:
        rows, count = ids.shape
        positions = torch.arange(count + 1, device=ids.device).expand(rows, -1)
        begun = torch.cat([prompts.ids[:, -1:] == self.begin, ids == self.begin], dim=1)  # position k follows begun[k]
        first = torch.where(begun.any(1), begun.int().argmax(1), count + 1)
        since = positions - first[:, None]
        in_image = since >= 0
        forced = torch.where(in_image, self.form[since.clamp(0, len(self.form) - 1)], -1)
        return in_image.long() * VISUAL, forced


class NoGrammar:
    """Any token may follow any other (implements ``Grammar``). Nothing is forced, so a completion may contain no complete image."""

    kinds: tuple[int, ...] = (Kind.TEXT_TOKEN, Kind.IMAGE_TOKEN)

    def __init__(self, words: Emu3Tokens, *, vocabulary: int, device: torch.device) -> None:
        self._img = words.img
        known = torch.arange(vocabulary, device=device) < len(words.tokenizer)
        self.vocabularies = known.expand(2, -1).clone()

    def parse(self, prompts: Prompts, ids: Int[Tensor, "r k"]) -> tuple[Int[Tensor, "r k1"], Int[Tensor, "r k1"]]:
        rows, count = ids.shape
        in_image = torch.cat([ids.new_zeros(rows, 1, dtype=torch.bool), (ids == self._img).cumsum(1) > 0], dim=1)
        return in_image.long() * VISUAL, ids.new_full((rows, count + 1), -1)
