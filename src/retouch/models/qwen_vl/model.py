"""Qwen's instruct models as writers: Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (arXiv 2502.13923) and Qwen3-VL with images, Qwen2.5
and Qwen3 (arXiv 2505.09388) without.

A prompt is a chat template with a task's images and instruction in it. Image placeholder tokens are never generated.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from PIL.Image import Image, Resampling
from torch import Tensor, nn
from transformers import (
    Cache,
    PreTrainedTokenizerBase,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2ForCausalLM,
    Qwen2VLForConditionalGeneration,
    Qwen3ForCausalLM,
    Qwen3VLForConditionalGeneration,
)

from retouch.models.causal import decoding
from retouch.models.causal.decoding import LayerFeatures
from retouch.models.causal.text_grammar import TextGrammar
from retouch.models.common.chat_template import VISION, QwenTemplate
from retouch.models.common.latents import Area, fit
from retouch.models.common.recompute import recomputing
from retouch.models.qwen_vl import vision
from retouch.protocols import Grammar
from retouch.types import Prompts, Task

STOP = ("<|im_end|>", "<|endoftext|>")
VisionModel: TypeAlias = Qwen2VLForConditionalGeneration | Qwen2_5_VLForConditionalGeneration | Qwen3VLForConditionalGeneration
TextModel: TypeAlias = Qwen2ForCausalLM | Qwen3ForCausalLM


class QwenWriter:
    """A Qwen instruct model (implements ``retouch.protocols.AutoregressiveModel``).

    ``template``: for example ``TURNS.format(system=..., user="{}")``. ``image_block``: the text that represents each image before
    the instruction, with ``{}`` for its number from 1; "" if the template has the vision block. ``area``: area in pixels to which
    images are resized (see ``fit``). ``stop``: the tokens that end a completion. ``gradient_checkpointing``: an update keeps only
    each layer's input, and computes the prompt once per row instead of once per task.

    Raises ValueError for a stop token that the tokenizer does not have, and for an image processor of a text model.

    Sources: Qwen2-VL (arXiv 2409.12191), Qwen2.5-VL (arXiv 2502.13923), Qwen2.5 (arXiv 2412.15115), Qwen3 (arXiv 2505.09388).
    """

    def __init__(
        self,
        module: VisionModel | TextModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str,
        image_processor: Any = None,
        image_block: str = VISION,
        area: Area = "as_is",
        stop: Sequence[str] = STOP,
        gradient_checkpointing: bool = False,
    ) -> None:
        reads = isinstance(module, VisionModel)
        if image_processor is not None and not reads:
            raise ValueError(f"{type(module).__name__} reads no images; omit image_processor")
        known = tokenizer.get_vocab()
        if any(token not in known for token in stop):
            raise ValueError(f"stop {list(stop)}: the tokenizer has no token {[token for token in stop if token not in known]}")
        self.module: nn.Module = module
        self.image_token: int | None = module.config.image_token_id if reads else None
        self.template = QwenTemplate(tokenizer, template=template, image_processor=image_processor, image_token=self.image_token)
        self.image_block = image_block
        self.area: Area = area
        self.gradient_checkpointing = gradient_checkpointing
        self.shares_prompts = not gradient_checkpointing
        self.grammar: Grammar = TextGrammar(tokenizer, module.get_output_embeddings().weight.shape[0], module.device)
        self.stop: tuple[int, ...] = tuple(known[token] for token in stop)
        self.pad = known["<|endoftext|>"]

    def resized_images(self, task: Task) -> list[Image]:
        """Resize a task's images to their final size, which the image processor does not change."""
        fitted = (image.resize(fit(image, self.area)[::-1], Resampling.LANCZOS) for image in task.images)
        return [self.template.resized(image) for image in fitted]

    def encode(self, tasks: Sequence[Task]) -> Prompts:
        """Encode the tasks' prompts. Raises ValueError for a special token in an instruction, or images without a placeholder."""
        for task in tasks:
            self.template.check(task.instruction, task.id)
        blocks = ["".join(self.image_block.format(k) for k in range(1, len(task.images) + 1)) for task in tasks]
        images = [self.resized_images(task) for task in tasks]
        tokens = self.template.tokenise([block + task.instruction for block, task in zip(blocks, tasks, strict=True)], images)
        device = next(self.module.parameters()).device
        tokens = {name: tensor.to(device) for name, tensor in tokens.items()}
        real = tokens["attention_mask"].bool()
        ids, mask = decoding.padded_left([row[keep] for row, keep in zip(tokens["input_ids"], real, strict=True)])
        if self.image_token is None:
            return Prompts(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)[..., None], tuple({} for _ in tasks))
        # Positions are always passed explicitly: otherwise the model stores this batch's positions and reuses them for the next.
        grids = tokens.get("image_grid_thw")
        types = (ids == self.image_token).int()
        model: Any = self.module.get_submodule("model")
        positions, _ = model.get_rope_index(ids, types, image_grid_thw=grids, attention_mask=mask)
        image_inputs: tuple[dict[str, Tensor], ...] = tuple({} for _ in tasks)
        if grids is not None:
            numbers, merge = [len(row) for row in images], self.template.image_processor.merge_size
            image_inputs = vision.by_row(self.module, tokens["pixel_values"], grids, numbers=numbers, merge=merge)
        return Prompts(ids, mask, positions.permute(1, 2, 0), image_inputs)

    def prefill(self, module: nn.Module, prompts: Prompts) -> tuple[Float[Tensor, "p d"], Cache]:
        assert not (self.gradient_checkpointing and torch.is_grad_enabled())  # its layers would not fill the cache
        embeds, features = vision.embed(module, prompts, self.image_token)
        decoder = _decoder(module)
        cache = decoding.new_cache(decoder)
        states = decoding.run(decoder, embeds, mask=prompts.mask, positions=prompts.positions, cache=cache, layer_features=features)
        return states[:, -1], cache

    def extend(
        self, module: nn.Module, ids: Int[Tensor, "r k"], *, mask: Bool[Tensor, "r l"], positions: Int[Tensor, "r k"], cache: Cache
    ) -> Float[Tensor, "r k d"]:
        axes = positions[..., None].expand(*positions.shape, 1 if self.image_token is None else 3)
        return decoding.run(_decoder(module), decoding.embeddings(module, ids), mask=mask, positions=axes, cache=cache)

    def select(self, cache: Cache, rows: Int[Tensor, " r"]) -> Cache:
        return decoding.select(cache, rows)

    def static_cache(self, cache: Cache, rows: Int[Tensor, " r"], *, room: int) -> Cache:
        """See ``retouch.policies.autoregressive.decoding.HasStaticCache``."""
        return decoding.static_cache(_decoder(self.module), cache, rows, room=room)

    def states(
        self, module: nn.Module, prompts: Prompts, ids: Int[Tensor, "r k"], mask: Bool[Tensor, "r k"]
    ) -> Float[Tensor, "r k d"]:
        more = ids.shape[1] - 1  # the state after the last token is not used
        new = prompts.next_positions()[:, None] + torch.arange(more, device=ids.device)
        positions = torch.cat([prompts.positions, new[..., None].expand(*new.shape, prompts.positions.shape[-1])], dim=1)
        with recomputing(module, on=self.gradient_checkpointing and torch.is_grad_enabled()):
            embeds, features = vision.embed(module, prompts, self.image_token)
            if features is not None:
                features = LayerFeatures(nn.functional.pad(features.positions, (0, more)), features.features)
            embeds = torch.cat([embeds, decoding.embeddings(module, ids[:, :more])], dim=1)
            row_mask = torch.cat([prompts.mask, mask[:, :more]], dim=1)
            states = decoding.run(_decoder(module), embeds, mask=row_mask, positions=positions, layer_features=features)
        return states[:, -ids.shape[1] :]

    def logits(self, module: nn.Module, states: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        return decoding.logits(module, states)

    def text_ids(self, text: str) -> list[int]:
        """The ids of a text. Raises ValueError if the text contains a special token."""
        self.template.check(text, text)
        ids: list[int] = self.template.tokenizer(text).input_ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.template.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def _decoder(module: nn.Module) -> nn.Module:
    return module.get_submodule("model.language_model" if isinstance(module, VisionModel) else "model")
