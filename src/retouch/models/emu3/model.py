"""Emu3 (arXiv 2409.18869) as an image editor, as in EARL (arXiv 2508.01119): it reads source image and instruction as tokens and
generates the edited image as tokens.

A prompt consists of bos, the tokens of the source image, the instruction, and the prefill, the first tokens of the answer.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from PIL.Image import Image
from torch import Tensor, nn
from transformers import Emu3ForCausalLM, Emu3VQVAE, PreTrainedTokenizerBase

from retouch.models.causal.text_grammar import CausalText, require_no_special_tokens
from retouch.models.emu3.grammar import GridGrammar, NoGrammar
from retouch.models.emu3.images import Emu3ImageTokenizer
from retouch.models.emu3.tokens import Emu3Tokens
from retouch.protocols import Grammar
from retouch.types import Codes, Prompts, Task

DRAW = "<|image start|>"
THINK = " Let's think step by step. <|start thinking|>"
END_OF_THOUGHT = "<|end thinking|>"
THOUGHT = Codes.THOUGHT


class Emu3Editor(CausalText):
    """Emu3's language model, which can be trained, and its frozen autoencoder (implements
    ``retouch.protocols.AutoregressiveModel``).

    Images are part of the prompt's token ids, so an engine of ``policies/engines`` can generate the completions.

    ``size``: (height, width) of all images in pixels, multiples of the autoencoder's factor (8). ``prefill``: ``DRAW`` starts the
    image at once, ``THINK`` generates text first. ``grammar``: False does not enforce the structure of an image.
    Raises ValueError if the tokenizer does not have exactly one visual token for each code.

    Source: Emu3 (arXiv 2409.18869) and EARL (arXiv 2508.01119).
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
        self.words = Emu3Tokens(tokenizer)
        self.image_tokenizer = Emu3ImageTokenizer(vq, size)
        self.vq, self.size, self.grid = self.image_tokenizer.vq, size, self.image_tokenizer.grid
        self.prefill_ids = self.words.text_ids(prefill)
        self.thinks = self.prefill_ids[-1:] != [self.words.boi]
        tokens, codes = len(self.words.visual), self.vq.config.codebook_size
        if tokens != codes:
            raise ValueError(
                f"the tokenizer has {tokens} visual tokens but the autoencoder has {codes} codes; use those of one model"
            )
        self.codebook_size = codes
        rows = module.get_output_embeddings().weight.shape[0]
        self.grammar: Grammar = (
            GridGrammar(self.words, height=self.grid[0], width=self.grid[1], vocabulary=rows, device=module.device)
            if grammar
            else NoGrammar(self.words, vocabulary=rows, device=module.device)
        )
        self.stop: tuple[int, ...] = (self.words.eos,)
        self.pad = self.words.pad

    image_token: int | None = None

    def resized_images(self, task: Task) -> tuple[Image, ...]:
        """Empty: source images are part of the prompt's token ids, so an engine gets no images in addition."""
        return ()

    @staticmethod
    def decoder(module: nn.Module) -> nn.Module:
        decoder: nn.Module = module.get_submodule("model")
        return decoder

    def encode(self, tasks: Sequence[Task]) -> Prompts:
        """Encode the tasks' prompts.

        Raises ValueError for a task without exactly one image, or with a special token in its instruction.
        """
        require_no_special_tokens(tasks, self.words.tokenizer)
        for task in tasks:
            if len(task.images) != 1 and Codes.SOURCE not in task.meta:
                raise ValueError(f"task {task.id!r} has {len(task.images)} images; Emu3Editor takes one")
        sources = self._codes(tasks, Codes.SOURCE)
        rows = [
            [self.words.bos, *self.words.image_ids(codes), *self.words.text_ids(task.instruction), *self.prefill_ids]
            for task, codes in zip(tasks, sources, strict=True)
        ]
        return self.prompts(rows)

    def _codes(self, tasks: Sequence[Task], key: str) -> list[Int[Tensor, "h w"]]:
        """Return each task's codes from ``task.meta[key]``; the images of tasks without stored codes are encoded in one batch."""
        codes = {row: self._checked(task, key) for row, task in enumerate(tasks) if key in task.meta}
        to_encode = {
            row: task.images[0] if key == Codes.SOURCE else task.target for row, task in enumerate(tasks) if row not in codes
        }
        images = [image for image in to_encode.values() if image is not None]
        codes |= zip(to_encode, self.encode_codes(images) if images else (), strict=True)
        return [codes[row] for row in range(len(tasks))]

    def _checked(self, task: Task, key: str) -> Int[Tensor, "h w"]:
        codes = torch.tensor(task.meta[key])
        if tuple(codes.shape) != self.grid or not 0 <= int(codes.min()) <= int(codes.max()) < self.codebook_size:
            raise ValueError(
                f"task {task.id!r} has {key} of shape {tuple(codes.shape)} and values up to {int(codes.max())}, but this model has "
                f"{self.codebook_size} codes in grids of {self.grid}; tokenize the data again"
            )
        return codes

    def encode_codes(self, images: Sequence[Image]) -> Int[Tensor, "r h w"]:
        """Encode images, which are first resized to ``size`` (Lanczos), to codes."""
        return self.image_tokenizer.encode(images)

    def decode_codes(self, codes: Int[Tensor, "r h w"]) -> list[Image]:
        """Decode codes to images."""
        return self.image_tokenizer.decode(codes)

    def codes_in(self, ids: Sequence[int]) -> Int[Tensor, "h w"] | None:
        """The codes of the image in a completion; None if it contains no complete image of this size."""
        begun = [] if self.thinks else [self.words.boi]
        return self.words.codes([*begun, *ids], height=self.grid[0], width=self.grid[1])

    def target_ids(self, tasks: Sequence[Task]) -> list[list[int]]:
        """Return the completion that each task demonstrates: the target image. With ``THINK``, the reasoning text in the task's
        meta (``thought``) comes before the image.

        Raises ValueError for a task without a target, or without the reasoning text.
        """
        for task in tasks:
            if task.target is None and Codes.TARGET not in task.meta:
                raise ValueError(f"task {task.id!r} has no target image, which supervised learning needs")
            if self.thinks and not isinstance(task.meta.get(THOUGHT), str):
                raise ValueError(f"task {task.id!r} has no reasoning text in meta['{THOUGHT}'], which policy.model.think needs")
        targets = [self.words.image_ids(codes) for codes in self._codes(tasks, Codes.TARGET)]
        if not self.thinks:
            return [ids[1:] for ids in targets]  # the first token is in the prefill
        return [
            [*self.words.text_ids(f"{task.meta[THOUGHT]}{END_OF_THOUGHT}"), *ids] for task, ids in zip(tasks, targets, strict=True)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a completion, without the image and the tokens that give its size."""
        structure = {*self.words.visual.tolist(), self.words.eol, self.words.img}
        header = self.words.header(*self.grid)
        text: list[int] = []
        size = iter(() if self.thinks else header)  # the ids of the header that are still expected
        for each in ids:
            if each == self.words.boi:
                size = iter(header)
            elif each != next(size, None):
                size = iter(())
                text += [] if each in structure else [each]
        decoded: str = self.words.tokenizer.decode(text, skip_special_tokens=True)
        return decoded
