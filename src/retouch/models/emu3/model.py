"""Emu3 as an editor (EARL): a source picture and an instruction are read as tokens, and the edited picture is written as tokens.

A prompt is bos, the source picture's tokens, the instruction, and the prefill with which the answer begins.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from PIL.Image import Image
from torch import Tensor, nn
from transformers import Emu3ForCausalLM, Emu3VQVAE, PreTrainedTokenizerBase

from retouch.models.common.causal_text import CausalText, require_plain
from retouch.models.emu3.grammar import GridGrammar, NoGrammar
from retouch.models.emu3.images import Emu3Pictures
from retouch.models.emu3.tokens import Emu3Words
from retouch.protocols import Grammar
from retouch.types import Codes, Prompts, Task

DRAW = "<|image start|>"
THINK = " Let's think step by step. <|start thinking|>"
END_OF_THOUGHT = "<|end thinking|>"
THOUGHT = Codes.THOUGHT


class Emu3Editor(CausalText):
    """Emu3's language model, which may train, and its autoencoder, which stays frozen (``retouch.protocols.AutoregressiveModel``).

    A server can generate in its place (``policies/engines``): its images are part of the prompt's ids.

    ``size``: (height, width) in px of every picture; the autoencoder shrinks each side by its own factor (8). ``prefill``: ``DRAW``
    begins the picture at once, ``THINK`` lets text come first. ``grammar``: False leaves the form of a picture to the model.
    """

    def __init__(
        self,
        module: Emu3ForCausalLM,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vq: Emu3VQVAE,
        size: tuple[int, int],
        prefill: str = DRAW,
        grammar: bool = True,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__(module, gradient_checkpointing=gradient_checkpointing)
        self.words = Emu3Words(tokenizer)
        self.pictures = Emu3Pictures(vq, size)
        self.vq, self.size, self.grid = self.pictures.vq, size, self.pictures.grid
        self.prefill_ids = self.words.text_ids(prefill)
        self.thinks = self.prefill_ids[-1:] != [self.words.boi]
        tokens, codes = len(self.words.visual), self.vq.config.codebook_size
        if tokens != codes:
            raise ValueError(f"the tokenizer has {tokens} visual tokens, and the autoencoder {codes} codes; they belong together")
        self.codebook_size = codes
        rows = module.get_output_embeddings().weight.shape[0]
        self.grammar: Grammar = (
            GridGrammar(self.words, height=self.grid[0], width=self.grid[1], vocabulary=rows, device=module.device)
            if grammar
            else NoGrammar(self.words, vocabulary=rows, device=module.device)
        )
        self.stop = (self.words.eos,)
        self.pad = self.words.pad

    image_token: int | None = None

    def resized_images(self, task: Task) -> tuple[Image, ...]:
        """No picture is sent beside the prompt: it is in it."""
        return ()

    @staticmethod
    def decoder(module: nn.Module) -> nn.Module:
        decoder: nn.Module = module.get_submodule("model")
        return decoder

    def encode(self, tasks: Sequence[Task]) -> Prompts:
        """The tasks' prompts. ValueError for a task without exactly one picture, or an instruction that spells a special token."""
        require_plain(tasks, self.words.tokenizer)
        for task in tasks:
            if len(task.images) != 1 and Codes.SOURCE not in task.meta:
                raise ValueError(f"task {task.id!r} has {len(task.images)} pictures; Emu3Editor takes one")
        sources = self._codes(tasks, Codes.SOURCE)
        rows = [
            [self.words.bos, *self.words.picture(codes), *self.words.text_ids(task.instruction), *self.prefill_ids]
            for task, codes in zip(tasks, sources, strict=True)
        ]
        return self.prompts(rows)

    def _codes(self, tasks: Sequence[Task], key: str) -> list[Int[Tensor, "h w"]]:
        """Each task's own codes; pictures are encoded, all at once, where a task brings none."""
        codes = {row: self._checked(task, key) for row, task in enumerate(tasks) if key in task.meta}
        pictures = {
            row: task.images[0] if key == Codes.SOURCE else task.target for row, task in enumerate(tasks) if row not in codes
        }
        images = [image for image in pictures.values() if image is not None]
        codes |= zip(pictures, self.encode_codes(images) if images else (), strict=True)
        return [codes[row] for row in range(len(tasks))]

    def _checked(self, task: Task, key: str) -> Int[Tensor, "h w"]:
        codes = torch.tensor(task.meta[key])
        if tuple(codes.shape) != self.grid or not 0 <= int(codes.min()) <= int(codes.max()) < self.codebook_size:
            raise ValueError(
                f"task {task.id!r} brings {key} of the shape {tuple(codes.shape)} up to {int(codes.max())}, and this model has "
                f"{self.codebook_size} codes in grids of {self.grid}; tokenize it again"
            )
        return codes

    def encode_codes(self, images: Sequence[Image]) -> Int[Tensor, "r h w"]:
        """Pictures as codes, at ``size`` (Lanczos)."""
        return self.pictures.encode(images)

    def decode_codes(self, codes: Int[Tensor, "r h w"]) -> list[Image]:
        """Codes as pictures."""
        return self.pictures.decode(codes)

    def codes_in(self, ids: Sequence[int]) -> Int[Tensor, "h w"] | None:
        """The codes of the picture in a completion, of one of this size; None where there is none."""
        begun = [] if self.thinks else [self.words.boi]
        return self.words.codes([*begun, *ids], height=self.grid[0], width=self.grid[1])

    def target_ids(self, tasks: Sequence[Task]) -> list[list[int]]:
        """What draws each task's target: after ``THINK`` the thought in its meta (``thought``) first, then the picture.

        ValueError where a task has no target, or no thought to go before it.
        """
        for task in tasks:
            if task.target is None and Codes.TARGET not in task.meta:
                raise ValueError(f"task {task.id!r} has no target picture, which supervised learning imitates")
            if self.thinks and not isinstance(task.meta.get(THOUGHT), str):
                raise ValueError(f"task {task.id!r} has no text in meta['{THOUGHT}'], with which a model that thinks begins")
        pictures = [self.words.picture(codes) for codes in self._codes(tasks, Codes.TARGET)]
        if not self.thinks:
            return [picture[1:] for picture in pictures]  # the prefill has begun it
        return [
            [*self.words.text_ids(f"{task.meta[THOUGHT]}{END_OF_THOUGHT}"), *picture]
            for task, picture in zip(tasks, pictures, strict=True)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; a picture is not text."""
        seen = set(self.words.visual.tolist()) | {self.words.eol, self.words.img}
        text: str = self.words.tokenizer.decode([each for each in ids if each not in seen], skip_special_tokens=True)
        return text
