"""Emu3 as an editor (EARL): a source picture and an instruction are read as tokens, and the edited picture is written as tokens.

A prompt is bos, the source picture's tokens, the instruction, and the prefill with which the answer begins.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from PIL.Image import Image, Resampling, fromarray
from torch import Tensor, nn
from transformers import Emu3ForCausalLM, Emu3VQVAE, PreTrainedTokenizerBase

from retouch.models.causal_text import CausalText
from retouch.models.emu3_words import Emu3Words
from retouch.models.frozen import evaluating
from retouch.models.grid_grammar import GridGrammar, NoGrammar
from retouch.types import Grammar, Prompts, Task

DRAW = "<|image start|>"
THINK = " Let's think step by step. <|start thinking|>"
END_OF_THOUGHT = "<|end thinking|>"
THOUGHT = "thought"  # the key in a task's meta
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


class Emu3Editor(CausalText):
    """Emu3's language model, which may train, and its autoencoder, which stays frozen (``retouch.types.AutoregressiveModel``).

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
        self.vq = vq.requires_grad_(False).eval()
        self.size = size
        self.prefill_ids = self.words.spell(prefill)
        self.thinks = self.prefill_ids[-1:] != [self.words.boi]
        factor = self.vq.spatial_scale_factor
        if size[0] % factor or size[1] % factor:
            raise ValueError(f"size {size}: sides must be multiples of {factor} px, the autoencoder's factor")
        tokens, codes = len(self.words.visual), self.vq.config.codebook_size
        if tokens != codes:
            raise ValueError(f"the tokenizer has {tokens} visual tokens, and the autoencoder {codes} codes; they belong together")
        self.grid = (size[0] // factor, size[1] // factor)
        rows = module.get_output_embeddings().weight.shape[0]
        self.grammar: Grammar = (
            GridGrammar(self.words, height=self.grid[0], width=self.grid[1], vocabulary=rows, device=module.device)
            if grammar
            else NoGrammar(self.words, vocabulary=rows, device=module.device)
        )
        self.stop = (self.words.eos,)
        self.pad = self.words.pad

    @staticmethod
    def decoder(module: nn.Module) -> nn.Module:
        decoder: nn.Module = module.get_submodule("model")
        return decoder

    def encode(self, tasks: Sequence[Task]) -> Prompts:
        """The tasks' prompts. ValueError for a task without exactly one picture, or an instruction that spells a special token."""
        special = set(self.words.tokenizer.get_added_vocab())
        for task in tasks:
            if len(task.images) != 1:
                raise ValueError(f"task {task.id!r} has {len(task.images)} pictures; Emu3Editor takes one")
            spelt = [token for token in special if token in task.instruction]
            if spelt:
                raise ValueError(f"the instruction of task {task.id!r} spells the special token {spelt[0]}; say it otherwise")
        sources = self.encode_codes([task.images[0] for task in tasks])
        rows = [
            [self.words.bos, *self.words.picture(codes), *self.words.spell(task.instruction), *self.prefill_ids]
            for task, codes in zip(tasks, sources, strict=True)
        ]
        return self.prompts(rows)

    def encode_codes(self, images: Sequence[Image]) -> Int[Tensor, "r h w"]:
        """Pictures as codes, at ``size`` (Lanczos)."""
        height, width = self.size
        resized = [image.convert("RGB").resize((width, height), Resampling.LANCZOS) for image in images]
        pixels = torch.stack([torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8) for image in resized])
        pixels = pixels.reshape(-1, height, width, 3).permute(0, 3, 1, 2).to(self.vq.device) / 127.5 - 1
        sizes = torch.tensor([self.size] * len(images))
        with evaluating(self.vq):
            codes = self.vq.encode(pixels, sizes, return_dict=True).image_tokens
        return torch.stack(list(codes)).long()

    def decode_codes(self, codes: Int[Tensor, "r h w"]) -> list[Image]:
        """Codes as pictures."""
        with evaluating(self.vq):
            pixels = self.vq.decode(codes.to(self.vq.device)).float()
        levels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
        return [fromarray(each) for each in levels]

    def codes_in(self, ids: Sequence[int]) -> Int[Tensor, "h w"] | None:
        """The codes of the picture in a completion, of one of this size; None where there is none."""
        begun = [] if self.thinks else [self.words.boi]
        return self.words.codes([*begun, *ids], height=self.grid[0], width=self.grid[1])

    def drawn(self, tasks: Sequence[Task]) -> list[list[int]]:
        """What draws each task's target: after ``THINK`` the thought in its meta (``thought``) first, then the picture.

        ValueError where a task has no target, or no thought to go before it.
        """
        targets = [task.target for task in tasks if task.target is not None]
        for task in tasks:
            if task.target is None:
                raise ValueError(f"task {task.id!r} has no target picture, which supervised learning imitates")
            if self.thinks and not isinstance(task.meta.get(THOUGHT), str):
                raise ValueError(f"task {task.id!r} has no text in meta['{THOUGHT}'], with which a model that thinks begins")
        pictures = [self.words.picture(codes) for codes in self.encode_codes(targets)]
        if not self.thinks:
            return [picture[1:] for picture in pictures]  # the prefill has begun it
        return [
            [*self.words.spell(f"{task.meta[THOUGHT]}{END_OF_THOUGHT}"), *picture]
            for task, picture in zip(tasks, pictures, strict=True)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; a picture is not text."""
        seen = set(self.words.visual.tolist()) | {self.words.eol, self.words.img}
        text: str = self.words.tokenizer.decode([each for each in ids if each not in seen], skip_special_tokens=True)
        return text
