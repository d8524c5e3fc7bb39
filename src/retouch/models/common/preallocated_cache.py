"""A cache with room for more tokens: one that is written goes beside those before it, which are not copied for its sake.

transformers' own joins keys and values anew for every token, and with a long prompt that is most of what decoding moves.
"""

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

ROOM = 64  # tokens


class RoomyLayer(DynamicLayer):
    """Keys and values stand at the beginning of longer buffers. With gradient, where nothing may be overwritten, there are none."""

    _buffers: tuple[Tensor, Tensor] | None = None

    def update(self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        length = self.get_seq_length()
        if torch.is_grad_enabled() or length == 0:
            self._buffers = None
            joined: tuple[Tensor, Tensor] = super().update(key_states, value_states, *args, **kwargs)
            return joined
        end = length + key_states.shape[-2]
        if self._buffers is None or self._buffers[0].shape[-2] < end:
            self._buffers = _roomier(self.keys, end + ROOM), _roomier(self.values, end + ROOM)
        keys, values = self._buffers
        keys[..., length:end, :] = key_states
        values[..., length:end, :] = value_states
        self.keys, self.values = keys[..., :end, :], values[..., :end, :]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._buffers = None


def roomy(cache: DynamicCache) -> DynamicCache:
    """The empty cache, with room in those of its layers that keep every token."""
    cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


def _roomier(tensor: Tensor, length: int) -> Tensor:
    buffer = tensor.new_empty(*tensor.shape[:-2], length, tensor.shape[-1])
    buffer[..., : tensor.shape[-2], :] = tensor
    return buffer
