"""A transformers decoder, run in one forward or step by step. It takes embeddings and explicit positions.

The decoder is the part below the head: ``model`` of a text model, ``model.language_model`` of a vision-language model. It and the
head are called by their own forwards, so a stepper that shards weights must wrap each of the two; and it must keep the head whole
during an evaluation, in which ranks call it more or less often.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, DynamicCache

from retouch.models.common.preallocated_cache import roomy


@dataclass(frozen=True, slots=True, eq=False)
class Sight:
    """What Qwen3-VL adds to the first layers' states at image tokens: places (b, l), and for each layer (tokens, d)."""

    places: Bool[Tensor, "b l"]
    features: tuple[Float[Tensor, "n d"], ...]


def new_cache(decoder: nn.Module) -> Cache:
    """An empty cache; layers with a sliding window keep no more than it."""
    return roomy(DynamicCache(config=decoder.config))


def run(
    decoder: nn.Module,
    embeds: Float[Tensor, "b k d"],
    *,
    mask: Bool[Tensor, "b l"],
    positions: Int[Tensor, "b k axes"],
    cache: Cache | None = None,
    sight: Sight | None = None,
) -> Float[Tensor, "b k d"]:
    """States after the final norm. ``mask`` covers what the cache has, and these k tokens, which are added to it."""
    seen = {} if sight is None else {"visual_pos_masks": sight.places, "deepstack_visual_embeds": list(sight.features)}
    made = decoder(
        inputs_embeds=embeds,
        attention_mask=mask.long(),
        position_ids=positions[..., 0] if positions.shape[-1] == 1 else positions.permute(2, 0, 1),
        past_key_values=cache,
        use_cache=cache is not None,
        **seen,
    )
    states: Tensor = made.last_hidden_state
    return states


def select(cache: Cache, rows: Int[Tensor, " r"]) -> Cache:
    """The cache of the given rows, in place; with gradient, where its keys and values have one."""
    cache.batch_select_indices(rows)
    return cache


def padded_left(rows: list[Tensor]) -> tuple[Tensor, Bool[Tensor, "p l"]]:
    """Rows of unequal lengths, (l_i, ...) each, padded with zeros on the left; and which places are real."""
    longest = max(len(row) for row in rows)
    padded = torch.stack([torch.cat([row.new_zeros(longest - len(row), *row.shape[1:]), row]) for row in rows])
    lengths = torch.tensor([len(row) for row in rows], device=padded.device)
    return padded, torch.arange(longest, device=padded.device) >= longest - lengths[:, None]
