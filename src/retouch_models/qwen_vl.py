"""Qwen's instruct models as writers: Qwen2-VL, Qwen2.5-VL and Qwen3-VL with images, Qwen2.5 and Qwen3 without.

A prompt is a chat template with a task's images and instruction in it. Image placeholder tokens are never generated. The features
of the vision tower replace the embeddings of image tokens. If the tower is frozen, its features are computed once per task and
stored with the prompt; otherwise the patches are stored, and every forward pass encodes them again.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from jaxtyping import Float
from PIL.Image import Image, Resampling
from torch import Tensor, nn
from transformers import (
    PreTrainedTokenizerBase,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessorPil,
    Qwen3ForCausalLM,
    Qwen3VLForConditionalGeneration,
)

from retouch.models.base import Attention, require_attention
from retouch.models.parts import LOCAL, evaluating
from retouch.models.pipeline import Area, fit
from retouch.protocols import Grammar
from retouch.records.files import read_json
from retouch.types import Prompts, Task
from retouch_models.causal import CausalText, LayerFeatures, TextGrammar, padded_left
from retouch_models.chat_template import VISION, QwenTemplate

if TYPE_CHECKING:
    from retouch.models.loaded import LoadedLanguageModel

STOP = ("<|im_end|>", "<|endoftext|>")
VisionModel: TypeAlias = Qwen2VLForConditionalGeneration | Qwen2_5_VLForConditionalGeneration | Qwen3VLForConditionalGeneration
TextModel: TypeAlias = Qwen2ForCausalLM | Qwen3ForCausalLM


class QwenWriter(CausalText):
    """A Qwen instruct model (implements ``retouch.protocols.AutoregressiveModel``).

    ``template``: for example ``TURNS.format(system=..., user="{}")``. ``image_block``: the text that represents each image before
    the instruction, with ``{}`` for its number from 1; "" if the template has the vision block. ``area``: area in pixels to which
    images are resized (see ``fit``). ``stop``: the tokens that end a completion.

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
        super().__init__(module, gradient_checkpointing=gradient_checkpointing)
        self.image_token: int | None = module.config.image_token_id if reads else None
        self.template = QwenTemplate(tokenizer, template=template, image_processor=image_processor, image_token=self.image_token)
        self.image_block = image_block
        self.area: Area = area
        self.axes = 3 if reads else 1
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
        ids, mask = padded_left([row[keep] for row, keep in zip(tokens["input_ids"], real, strict=True)])
        if self.image_token is None:
            return Prompts(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)[..., None], tuple({} for _ in tasks))
        # Positions are always passed explicitly: otherwise the model stores this batch's positions and reuses them for the next.
        grids = tokens.get("image_grid_thw")
        types = (ids == self.image_token).int()
        model: Any = self.module.get_submodule("model")
        positions, _ = model.get_rope_index(ids, types, image_grid_thw=grids, attention_mask=mask)
        image_inputs: tuple[dict[str, Tensor], ...] = tuple({} for _ in tasks)
        if grids is not None:
            image_inputs = self._image_inputs(tokens["pixel_values"], grids, numbers=[len(row) for row in images])
        return Prompts(ids, mask, positions.permute(1, 2, 0), image_inputs)

    def _image_inputs(self, pixels: Tensor, grids: Tensor, *, numbers: Sequence[int]) -> tuple[dict[str, Tensor], ...]:
        """Return each row's patches and grids or, if the vision tower is frozen, the features of its merged patches.

        ``pixels``: (n, d) patches of all images. ``grids``: (images, 3), each (time, height, width) in patches. ``numbers``: images
        per row.
        """
        patches = [int(part.prod(-1).sum()) for part in grids.split(list(numbers))]
        columns: dict[str, Sequence[Tensor]] = {"pixels": pixels.split(patches), "grids": grids.split(list(numbers))}
        visual = self.module.get_submodule("model.visual")
        if not any(parameter.requires_grad for parameter in visual.parameters()):
            with evaluating(visual):
                features, deep = _encode(self.module, pixels, grids)
            merged = [count // self.template.image_processor.merge_size**2 for count in patches]
            columns = {"features": features.split(merged), **{f"deep_{k}": each.split(merged) for k, each in enumerate(deep)}}
        rows = ({name: parts[row] for name, parts in columns.items()} for row in range(len(numbers)))
        return tuple(row if number else {} for row, number in zip(rows, numbers, strict=True))

    def decoder(self, module: nn.Module) -> nn.Module:
        return module.get_submodule("model.language_model" if isinstance(module, VisionModel) else "model")

    def embed_prompts(self, module: nn.Module, prompts: Prompts) -> tuple[Float[Tensor, "p l d"], LayerFeatures | None]:
        """Return the prompts' embeddings with image features at image tokens, and the features that Qwen3-VL adds to its first
        layers (DeepStack, arXiv 2406.04334)."""
        embeds, _ = super().embed_prompts(module, prompts)
        image_inputs = [row for row in prompts.image_inputs if row]
        if not image_inputs:
            return embeds, None
        joined = {name: torch.cat([row[name] for row in image_inputs]) for name in image_inputs[0]}
        if "pixels" in joined:
            features, deep = _encode(module, joined["pixels"], joined["grids"])
        else:
            features, deep = joined["features"], tuple(tensor for name, tensor in joined.items() if name.startswith("deep_"))
        positions = (prompts.ids == self.image_token) & prompts.mask
        embeds = embeds.masked_scatter(positions[..., None], features.to(embeds.dtype))
        return embeds, LayerFeatures(positions, deep) if deep else None

    def text_ids(self, text: str) -> list[int]:
        """The ids of a text. Raises ValueError if the text contains a special token."""
        self.template.check(text, text)
        ids: list[int] = self.template.tokenizer(text).input_ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self.template.tokenizer.decode(list(ids), skip_special_tokens=True)
        return text


def _encode(module: nn.Module, pixels: Tensor, grids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the features of all merged patches, and the features for the first layers (DeepStack)."""
    model: Any = module.get_submodule("model")
    output = model.get_image_features(pixels, grids, return_dict=True)
    deep = output.deepstack_features if isinstance(module, Qwen3VLForConditionalGeneration) else ()
    features = torch.cat(list(output.pooler_output))
    # A layer's features are one tensor in transformers 5.17, and one tensor per image in 5.23.
    return features, tuple(torch.cat([part.view(-1, features.shape[-1]) for part in layer]) for layer in deep)


CLASSES: dict[str, Any] = {
    "qwen2_vl": Qwen2VLForConditionalGeneration,
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen2": Qwen2ForCausalLM,
    "qwen3": Qwen3ForCausalLM,
}


def load_writer(
    source: "Path | str | LoadedLanguageModel",
    *,
    template: str,
    dtype: torch.dtype,
    device: torch.device | str,
    attention: Attention = "sdpa",
    image_block: str = VISION,
    area: Area = "as_is",
    stop: Sequence[str] = STOP,
    gradient_checkpointing: bool = False,
) -> QwenWriter:
    """Load the writer in ``dtype`` on ``device`` with all weights frozen; a loaded model keeps its dtype and its attention. For the
    other arguments see ``QwenWriter``.

    Raises ValueError for a folder with another model, and for an attention implementation that is not available.
    """
    image_processor = None
    if not isinstance(source, Path | str):
        module, tokenizer = source.base(), source.tokenizer
        if isinstance(module, VisionModel):
            image_processor = source.image_processor
    else:
        require_attention(attention, dtype=dtype, device=torch.device(device))
        config = Path(source) / "config.json"
        kind = read_json(config)["model_type"] if config.is_file() else None
        if kind not in CLASSES:
            found = "no config.json" if kind is None else f"a model of type {kind!r}"
            raise ValueError(f"{source} contains {found}; set the local folder of a model of type {', '.join(CLASSES)}")
        module = CLASSES[kind].from_pretrained(source, dtype=dtype, attn_implementation=attention, **LOCAL)
        tokenizer = Qwen2Tokenizer.from_pretrained(source, local_files_only=True)
        if isinstance(module, VisionModel):
            image_processor = Qwen2VLImageProcessorPil.from_pretrained(source, local_files_only=True)  # needs no torchvision
    return QwenWriter(
        module.requires_grad_(False).eval().to(device),
        tokenizer,
        template=template,
        image_processor=image_processor,
        image_block=image_block,
        area=area,
        stop=stop,
        gradient_checkpointing=gradient_checkpointing,
    )
