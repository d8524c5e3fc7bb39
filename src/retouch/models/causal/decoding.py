"""Decoding with a key-value cache, whose memory may be allocated from the start.

Runs a transformers decoder on embeddings and explicit positions, in one forward pass or step by step with a KV cache.

The decoder is the model without its output head: ``model`` of a text model, ``model.language_model`` of a vision-language model.
Decoder and head are called separately, so a stepper that shards weights must wrap both, and must keep the head unsharded during an
evaluation, in which ranks call it a different number of times.

A KV cache with preallocated room, so that a new token is written in place.

transformers' DynamicCache concatenates all keys and values for every new token; with a long prompt, this copy is most of the memory
traffic of decoding.
"""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Cache, StaticCache
from transformers.cache_utils import DynamicCache, DynamicLayer

ROOM = 64  # tokens


class PreallocatedCacheLayer(DynamicLayer):
    """A cache layer whose keys and values are views of longer buffers. With gradients enabled it concatenates as usual, because
    autograd forbids writing in place."""

    keys: Tensor
    values: Tensor
    _buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        length = self.get_seq_length()
        if torch.is_grad_enabled() or length == 0:
            self._buffers = None
            joined: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return joined
        end = length + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < end:
            self._buffers = _grown(self.keys, end + ROOM), _grown(self.values, end + ROOM)
        keys, values = self._buffers
        keys[..., length:end, :] = key_states
        values[..., length:end, :] = value_states
        self.keys, self.values = keys[..., :end, :], values[..., :end, :]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._buffers = None


def with_preallocated_layers(cache: DynamicCache) -> DynamicCache:
    """The empty cache with a preallocated layer in place of each layer that keeps every token."""
    cache.layers = [PreallocatedCacheLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _grown(tensor: Tensor, length: int) -> Tensor:
    buffer = tensor.new_empty(*tensor.shape[:-2], length, tensor.shape[-1])
    buffer[..., : tensor.shape[-2], :] = tensor
    return buffer


@dataclass(frozen=True, slots=True, eq=False)
class LayerFeatures:
    """Features that Qwen3-VL adds to the states of its first layers at image tokens (DeepStack, arXiv 2406.04334).

    ``positions``: which tokens are image tokens, (b, l). ``features``: one tensor (image tokens, d) for each of these layers.
    """

    positions: Bool[Tensor, "b l"]
    features: tuple[Float[Tensor, "n d"], ...]


def new_cache(decoder: nn.Module) -> Cache:
    """An empty KV cache; layers with a sliding window keep only the window."""
    return with_preallocated_layers(DynamicCache(config=decoder.config))


def run(
    decoder: nn.Module,
    embeds: Float[Tensor, "b k d"],
    *,
    mask: Bool[Tensor, "b l"],
    positions: Int[Tensor, "b k axes"],
    cache: Cache | None = None,
    layer_features: LayerFeatures | None = None,
) -> Float[Tensor, "b k d"]:
    """Return the states after the final norm.

    ``mask`` covers the tokens in the cache and these k tokens, which are added to the cache.
    """
    visual = {}
    if layer_features is not None:
        visual = {"visual_pos_masks": layer_features.positions, "deepstack_visual_embeds": list(layer_features.features)}
    output = decoder(
        inputs_embeds=embeds,
        attention_mask=mask.long(),
        position_ids=positions[..., 0] if positions.shape[-1] == 1 else positions.permute(2, 0, 1),
        past_key_values=cache,
        use_cache=cache is not None,
        **visual,
    )
    states: Tensor = output.last_hidden_state
    return states


def select(cache: Cache, rows: Int[Tensor, " r"]) -> Cache:
    """Reduce the cache to these rows, in place. Keys and values keep their gradient."""
    cache.batch_select_indices(rows)
    return cache


def static_cache(decoder: nn.Module, cache: Cache, rows: Int[Tensor, " r"], *, room: int) -> Cache:
    """Copy these rows of the cache into tensors with room for ``room`` more tokens, so that no shape changes during decoding.

    Raises ValueError for a decoder with a sliding window.
    """
    if any(cache.is_sliding):
        raise ValueError("rollout.engine.static: the model attends to a sliding window, so its cache cannot be static; remove it")
    made = StaticCache(config=decoder.config, max_cache_len=cache.get_seq_length() + room)
    for index, layer in enumerate(cache.layers):
        made.update(layer.keys[rows], layer.values[rows], index)
    return made


def padded_left(rows: list[Tensor]) -> tuple[Tensor, Bool[Tensor, "p l"]]:
    """Rows of shapes (l_i, ...), padded with zeros on the left, and the mask of the positions that are not padding."""
    longest = max(len(row) for row in rows)
    padded = torch.stack([torch.cat([row.new_zeros(longest - len(row), *row.shape[1:]), row]) for row in rows])
    lengths = torch.tensor([len(row) for row in rows], device=padded.device)
    return padded, torch.arange(longest, device=padded.device) >= longest - lengths[:, None]


def embeddings(module: Any, ids: Int[Tensor, "r k"]) -> Float[Tensor, "r k d"]:
    """Return the module's input embeddings of token ids."""
    return module.get_input_embeddings()(ids)


def logits(module: Any, states: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
    """Return the logits of hidden states, in float32."""
    return module.get_output_embeddings()(states).float()
