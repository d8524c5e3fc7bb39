"""Images in a Qwen vision-language model: features of the vision tower at the positions of image tokens.

Qwen3-VL also adds features to its first layers (DeepStack, arXiv 2406.04334). If the vision tower is frozen, its features are
computed once per task and stored with the prompt; otherwise the patches are stored, and every forward pass encodes them again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Qwen3VLForConditionalGeneration

from retouch.models.causal import decoding
from retouch.models.causal.decoding import LayerFeatures
from retouch.models.common.parts import evaluating
from retouch.types import Prompts


def by_row(
    module: nn.Module, pixels: Float[Tensor, "n d"], grids: Int[Tensor, "m 3"], *, numbers: Sequence[int], merge: int
) -> tuple[dict[str, Tensor], ...]:
    """Return the entries of ``Prompts.image_inputs``: each row's patches and grids, or its features, of which each covers
    ``merge`` x ``merge`` patches.

    ``pixels``: patches of all images; ``grids``: (time, height, width) of each image in patches; ``numbers``: images per row.
    """
    patches = [int(part.prod(-1).sum()) for part in grids.split(list(numbers))]
    columns: dict[str, Sequence[Tensor]] = {"pixels": pixels.split(patches), "grids": grids.split(list(numbers))}
    visual = module.get_submodule("model.visual")
    if not any(parameter.requires_grad for parameter in visual.parameters()):
        with evaluating(visual):
            features, deep = _encode(module, pixels, grids)
        merged = [count // merge**2 for count in patches]
        columns = {"features": features.split(merged), **{f"deep_{k}": each.split(merged) for k, each in enumerate(deep)}}
    rows = ({name: parts[row] for name, parts in columns.items()} for row in range(len(numbers)))
    return tuple(row if number else {} for row, number in zip(rows, numbers, strict=True))


def embed(module: nn.Module, prompts: Prompts, image_token: int | None) -> tuple[Float[Tensor, "p l d"], LayerFeatures | None]:
    """Return the prompts' embeddings with image features at image tokens, and the features that Qwen3-VL adds to its first layers.

    Source: Qwen2-VL (arXiv 2409.12191); DeepStack (arXiv 2406.04334) for Qwen3-VL.
    """
    embeds = decoding.embeddings(module, prompts.ids)
    image_inputs = [row for row in prompts.image_inputs if row]
    if not image_inputs:
        return embeds, None
    joined = {name: torch.cat([row[name] for row in image_inputs]) for name in image_inputs[0]}
    if "pixels" in joined:
        features, deep = _encode(module, joined["pixels"], joined["grids"])
    else:
        features, deep = joined["features"], tuple(tensor for name, tensor in joined.items() if name.startswith("deep_"))
    positions = (prompts.ids == image_token) & prompts.mask
    embeds = embeds.masked_scatter(positions[..., None], features.to(embeds.dtype))
    return embeds, LayerFeatures(positions, deep) if deep else None


def _encode(module: nn.Module, pixels: Tensor, grids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the features of all merged patches, and the features for the first layers (DeepStack)."""
    model: Any = module.get_submodule("model")
    output = model.get_image_features(pixels, grids, return_dict=True)
    deep = output.deepstack_features if isinstance(module, Qwen3VLForConditionalGeneration) else ()
    features = torch.cat(list(output.pooler_output))
    # A layer's features are one tensor in transformers 5.17, and one tensor per image in 5.23.
    return features, tuple(torch.cat([part.view(-1, features.shape[-1]) for part in layer]) for layer in deep)
