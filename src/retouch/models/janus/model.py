"""Janus-Pro as a painter: it reads an instruction and writes a picture as codes, and nothing else (text to image).

Codes have embeddings and a head of their own, so what is written has its own ids: the codes from 0 on, and one more that ends a
picture, which is forced after the last code and never read. The published sampler runs each picture twice, with and without its
instruction, and guides the one away from the other. Here guidance is off, in sampling and in evaluation alike: what is drawn from
is the model's own distribution, and one forward gives its gradient.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from PIL.Image import Image
from torch import Tensor, nn
from transformers import JanusForConditionalGeneration, PreTrainedTokenizerBase
from transformers.models.janus.modeling_janus import JanusPreTrainedModel, JanusVQVAE

from retouch.models.common.causal_text import CausalText, require_plain
from retouch.models.common.code_pixels import pictures, pixels
from retouch.models.common.frozen import evaluating
from retouch.protocols import Grammar
from retouch.types import Kind, Prompts, Task

TEMPLATE = "<|User|>: {}\n\n<|Assistant|>:"
BEGIN = "<begin_of_image>"


class JanusDrawing(JanusPreTrainedModel):
    """The parts of a Janus that draw, under their own names: the language model, and embeddings and head of the codes."""

    def __init__(self, whole: JanusForConditionalGeneration) -> None:
        super().__init__(whole.config)
        self.model = nn.Module()
        for name in ("language_model", "generation_embeddings", "generation_aligner", "generation_head"):
            self.model.add_module(name, whole.model.get_submodule(name))

    def get_input_embeddings(self) -> nn.Module:
        """Of text."""
        embeddings: nn.Module = self.model.get_submodule("language_model").get_input_embeddings()
        return embeddings


class WholePicture:
    """``count`` codes, then ``end`` (a ``Grammar``)."""

    kinds = (Kind.IMAGE_TOKEN,)

    def __init__(self, *, count: int, codes: int, end: int, device: torch.device) -> None:
        self.vocabularies = torch.ones(1, codes, dtype=torch.bool, device=device)
        self._count, self._end = count, end

    def parse(self, prompts: Prompts, ids: Int[Tensor, "r k"]) -> tuple[Int[Tensor, "r k1"], Int[Tensor, "r k1"]]:
        places = torch.arange(ids.shape[1] + 1, device=ids.device).expand(ids.shape[0], -1)
        return torch.zeros_like(places), torch.where(places < self._count, -1, self._end)


class JanusPainter(CausalText):
    """What draws, which may train, and the autoencoder, which stays frozen (``retouch.protocols.AutoregressiveModel``).

    ``template``: the dialogue around an instruction, after which the picture begins. ``size``, (height, width) in px, and ``grid``,
    in codes, are the model's own. ValueError where the tokenizer does not know how a picture begins.
    """

    def __init__(
        self,
        module: JanusDrawing,
        tokenizer: PreTrainedTokenizerBase,
        *,
        vq: JanusVQVAE,
        template: str = TEMPLATE,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__(module, gradient_checkpointing=gradient_checkpointing)
        if BEGIN not in tokenizer.get_vocab() or tokenizer.bos_token_id is None:
            raise ValueError(f"the tokenizer has no {BEGIN} or no token that begins a text; give Janus' own")
        self.tokenizer, self.template = tokenizer, template
        self.vq = vq.requires_grad_(False).eval()
        side, factor = vq.config.num_patches, 2 ** (len(vq.config.channel_multiplier) - 1)
        self.grid, self.size = (side, side), (side * factor, side * factor)
        codes = vq.config.num_embeddings
        self.stop, self.pad = (codes,), codes
        self.grammar: Grammar = WholePicture(count=side * side, codes=codes, end=codes, device=module.device)

    @staticmethod
    def decoder(module: nn.Module) -> nn.Module:
        decoder: nn.Module = module.get_submodule("model.language_model")
        return decoder

    def embed(self, module: nn.Module, ids: Int[Tensor, "r k"]) -> Float[Tensor, "r k d"]:
        """The end of a picture has no embedding; where it stands nobody reads."""
        parts: Any = module.get_submodule("model")
        embeds: Tensor = parts.generation_aligner(parts.generation_embeddings(ids.clamp(max=self.pad - 1)))
        return embeds

    def logits(self, module: nn.Module, states: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """Of the codes."""
        logits: Tensor = module.get_submodule("model.generation_head")(states)
        return logits.float()

    def encode(self, tasks: Sequence[Task]) -> Prompts:
        """The tasks' prompts. ValueError for a task with a picture, or an instruction that spells a special token."""
        require_plain(tasks, self.tokenizer)
        for task in tasks:
            if task.images:
                raise ValueError(f"task {task.id!r} has a picture, and Janus draws from words alone; take an editor")
        return self.prompts([self._prompt(task.instruction) for task in tasks])

    def _prompt(self, instruction: str) -> list[int]:
        ids: list[int] = self.tokenizer(self.template.format(instruction) + BEGIN, add_special_tokens=False).input_ids
        return [self.tokenizer.bos_token_id, *ids]

    def encode_codes(self, images: Sequence[Image]) -> Int[Tensor, "r h w"]:
        """Pictures as codes, at ``size`` (Lanczos)."""
        with evaluating(self.vq):
            codes = self.vq.encode(pixels(images, self.size, self.vq.device), return_dict=True).image_tokens
        return codes.reshape(-1, *self.grid)

    def decode_codes(self, codes: Int[Tensor, "r h w"]) -> list[Image]:
        """Codes as pictures."""
        with evaluating(self.vq):
            return pictures(self.vq.decode(codes.flatten(1).to(self.vq.device)))

    def codes_in(self, ids: Sequence[int]) -> Int[Tensor, "h w"] | None:
        """The codes of the picture in a completion; None where it is not whole."""
        height, width = self.grid
        if len(ids) != height * width or not all(0 <= each < self.pad for each in ids):
            return None
        return torch.tensor(ids).reshape(height, width)

    def target_ids(self, tasks: Sequence[Task]) -> list[list[int]]:
        """What draws each task's target, which supervised learning imitates. ValueError where a task has none."""
        targets = [task.target for task in tasks if task.target is not None]
        if len(targets) < len(tasks):
            without = next(task for task in tasks if task.target is None)
            raise ValueError(f"task {without.id!r} has no target picture, which supervised learning imitates")
        return self.encode_codes(targets).flatten(1).tolist()

    def decode(self, ids: Sequence[int]) -> str:
        """No text: codes are no words."""
        return ""
