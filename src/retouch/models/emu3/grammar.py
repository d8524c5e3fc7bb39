"""What an image-token model may write: text until a picture begins, then a picture of exactly its form, then the end.

Only visual tokens and text are drawn. What gives the picture its form is forced: it has no log-probability and no gradient, in
sampling and in evaluation alike (EARL forced it in sampling and paid for it all the same).
"""

import torch
from jaxtyping import Int
from torch import Tensor

from retouch.models.emu3.tokens import Emu3Words
from retouch.types import Kind, Prompts

TEXT, VISUAL = 0, 1


class GridGrammar:
    """Emu3's pictures of ``height`` x ``width`` codes (a ``Grammar``). ``vocabulary``: rows of the head.

    A prompt that ends in boi has begun the picture already. Text may also end without one, which leaves nothing to draw.
    ``begin``: boi. ``form``: by tokens since it, the id that is forced, or -1 where a visual token is drawn.
    """

    kinds = (Kind.TEXT_TOKEN, Kind.IMAGE_TOKEN)

    def __init__(self, words: Emu3Words, *, height: int, width: int, vocabulary: int, device: torch.device) -> None:
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
        places = torch.arange(count + 1, device=ids.device).expand(rows, -1)
        begun = torch.cat([prompts.ids[:, -1:] == self.begin, ids == self.begin], dim=1)  # place k stands after begun[k]
        first = torch.where(begun.any(1), begun.int().argmax(1), count + 1)
        since = places - first[:, None]
        drawing = since >= 0
        forced = torch.where(drawing, self.form[since.clamp(0, len(self.form) - 1)], -1)
        return drawing.long() * VISUAL, forced


class NoGrammar:
    """Every token may follow every other (a ``Grammar``): whether a picture comes of it is left to the model. Nothing is forced."""

    kinds = (Kind.TEXT_TOKEN, Kind.IMAGE_TOKEN)

    def __init__(self, words: Emu3Words, *, vocabulary: int, device: torch.device) -> None:
        self._img = words.img
        known = torch.arange(vocabulary, device=device) < len(words.tokenizer)
        self.vocabularies = known.expand(2, -1).clone()

    def parse(self, prompts: Prompts, ids: Int[Tensor, "r k"]) -> tuple[Int[Tensor, "r k1"], Int[Tensor, "r k1"]]:
        rows, count = ids.shape
        drawing = torch.cat([ids.new_zeros(rows, 1, dtype=torch.bool), (ids == self._img).cumsum(1) > 0], dim=1)
        return drawing.long() * VISUAL, ids.new_full((rows, count + 1), -1)
