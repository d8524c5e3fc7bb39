"""Emu3 as an editor (EARL): a source picture and an instruction are read as tokens, and the edited picture is written as tokens.

A prompt is bos, the source picture's tokens, the instruction, and the prefill with which the answer begins.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from PIL.Image import Image, Resampling, fromarray
from torch import Tensor, nn
from transformers import Emu3ForConditionalGeneration, PreTrainedTokenizerBase

from retouch.models.causal_text import CausalText
from retouch.models.emu3_words import Emu3Words
from retouch.models.frozen import evaluating
from retouch.models.grid_grammar import GridGrammar
from retouch.types import Prompts, Task

DRAW = "<|image start|>"
THINK = " Let's think step by step. <|start thinking|>"
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


class Emu3Editor(CausalText):
    """Emu3 with its autoencoder (implements ``retouch.types.AutoregressiveModel``).

    ``size``: (height, width) in px of every picture; the autoencoder shrinks each side by its own factor (8). ``prefill``: ``DRAW``
    begins the picture at once, ``THINK`` lets text come first.
    """

    def __init__(
        self,
        module: Emu3ForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        *,
        size: tuple[int, int],
        prefill: str = DRAW,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__(module, gradient_checkpointing=gradient_checkpointing)
        self.words = Emu3Words(tokenizer)
        self.vq = module.model.vqmodel.requires_grad_(False).eval()
        self.size = size
        self.prefill_ids = self.words.spell(prefill)
        factor = self.vq.spatial_scale_factor
        if size[0] % factor or size[1] % factor:
            raise ValueError(f"size {size}: sides must be multiples of {factor} px, the autoencoder's factor")
        tokens, codes = len(self.words.visual), self.vq.config.codebook_size
        if tokens != codes:
            raise ValueError(f"the tokenizer has {tokens} visual tokens, and the autoencoder {codes} codes; they belong together")
        self.grid = (size[0] // factor, size[1] // factor)
        rows = module.get_output_embeddings().weight.shape[0]
        self.grammar = GridGrammar(self.words, height=self.grid[0], width=self.grid[1], vocabulary=rows, device=module.device)
        self.stop = (self.words.eos,)
        self.pad = self.words.pad

    @staticmethod
    def decoder(module: nn.Module) -> nn.Module:
        decoder: nn.Module = module.get_submodule("model.text_model")
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
        begun = [self.words.boi] if self.prefill_ids[-1:] == [self.words.boi] else []
        return self.words.codes([*begun, *ids], height=self.grid[0], width=self.grid[1])

    def spell(self, text: str) -> list[int]:
        """The ids of a text, special tokens by their names: a picture's too, so that it can be imitated."""
        return self.words.spell(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; a picture is not text."""
        seen = set(self.words.visual.tolist()) | {self.words.eol, self.words.img}
        text: str = self.words.tokenizer.decode([each for each in ids if each not in seen], skip_special_tokens=True)
        return text
