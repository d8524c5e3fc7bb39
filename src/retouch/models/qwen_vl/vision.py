"""Pictures in a Qwen vision-language model: features of the vision tower, in the places of image tokens.

Qwen3-VL has features for its first layers too (DeepStack, arXiv 2406.04334). Where the tower does not train, its features are
computed once a task and kept with the prompt; else the patches are, and every forward looks anew.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import Qwen3VLForConditionalGeneration

from retouch.models.common.causal import Sight
from retouch.models.common.frozen import evaluating
from retouch.types import Prompts


def by_row(
    module: nn.Module, pixels: Float[Tensor, "n d"], grids: Int[Tensor, "m 3"], *, numbers: Sequence[int], merge: int
) -> tuple[dict[str, Tensor], ...]:
    """What ``Prompts.pictures`` keeps: each row's patches and grids, or its features, of ``merge`` x ``merge`` patches each.

    ``numbers``: pictures of each row.
    """
    patches = [int(part.prod(-1).sum()) for part in grids.split(list(numbers))]
    columns: dict[str, Sequence[Tensor]] = {"pixels": pixels.split(patches), "grids": grids.split(list(numbers))}
    if not any(parameter.requires_grad for parameter in module.model.visual.parameters()):
        with evaluating(module.model.visual):
            features, deep = _look(module, pixels, grids)
        merged = [count // merge**2 for count in patches]
        columns = {"features": features.split(merged), **{f"deep_{k}": each.split(merged) for k, each in enumerate(deep)}}
    rows = ({name: parts[row] for name, parts in columns.items()} for row in range(len(numbers)))
    return tuple(row if number else {} for row, number in zip(rows, numbers, strict=True))


def embed(module: nn.Module, prompts: Prompts, image_token: int | None) -> tuple[Float[Tensor, "p l d"], Sight | None]:
    """The prompts' embeddings with features in the places of image tokens, and what Qwen3-VL adds to its first layers."""
    embeds = module.get_input_embeddings()(prompts.ids)
    pictures = [row for row in prompts.pictures if row]
    if not pictures:
        return embeds, None
    joined = {name: torch.cat([row[name] for row in pictures]) for name in pictures[0]}
    if "pixels" in joined:
        features, deep = _look(module, joined["pixels"], joined["grids"])
    else:
        features, deep = joined["features"], tuple(tensor for name, tensor in joined.items() if name.startswith("deep_"))
    places = (prompts.ids == image_token) & prompts.mask
    embeds = embeds.masked_scatter(places[..., None], features.to(embeds.dtype))
    return embeds, Sight(places, deep) if deep else None


def _look(module: nn.Module, pixels: Tensor, grids: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Features of all merged patches, and those for the first layers."""
    made = module.model.get_image_features(pixels, grids, return_dict=True)
    deep = made.deepstack_features if isinstance(module, Qwen3VLForConditionalGeneration) else ()
    features = torch.cat(list(made.pooler_output))
    # A layer's are whole (transformers 5.17) or one part a picture (5.23).
    return features, tuple(torch.cat([part.view(-1, features.shape[-1]) for part in layer]) for layer in deep)
