"""A KV cache with preallocated room, so that a new token is written in place.

transformers' DynamicCache concatenates all keys and values for every new token; with a long prompt, this copy is most of the memory
traffic of decoding.
"""

import torch
from torch import Tensor
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
