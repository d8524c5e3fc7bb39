"""The preallocated key-value cache: equal to transformers' cache, and without a copy for each new token."""

import pytest
import torch
from transformers import DynamicCache

import tiny_writers
from retouch.models.causal import ROOM, PreallocatedCacheLayer, new_cache


def caches(**text):
    module = tiny_writers.module("qwen2.5", **text)
    return new_cache(module), DynamicCache(config=module.config)


def grow(cache, pieces, select=None):
    """Append pieces of these lengths to the first layer of two rows; ``select`` rows after the piece of that number."""
    draw, rows, got = torch.Generator().manual_seed(0), 2, None
    for number, length in enumerate(pieces):
        keys, values = (torch.randn(rows, 1, length, 4, generator=draw) for _ in range(2))
        got = cache.update(keys, values, 0)
        if select is not None and number == select[0]:
            cache.batch_select_indices(torch.tensor(select[1]))
            rows = len(select[1])
    return got


@pytest.mark.parametrize("pieces", [[7], [7, 1], [7, 1, 1, 2], [1] * (ROOM + 3), [7, ROOM + 9, 1], [3, *([5] * ROOM)]], ids=str)
@pytest.mark.parametrize("select", [None, (0, [1, 1, 0]), (1, [0])], ids=str)
def test_preallocated_cache_equals_the_transformers_cache(pieces, select):
    ours, theirs = caches()
    with torch.no_grad():
        for mine, wanted in zip(grow(ours, pieces, select), grow(theirs, pieces, select), strict=True):
            assert torch.equal(mine, wanted)
    assert ours.get_seq_length() == theirs.get_seq_length() == sum(pieces)


def test_selected_rows_do_not_share_memory():
    """Two copies of the same row are continued differently."""
    cache, _ = caches()
    with torch.no_grad():
        grow(cache, [3, 1])
        before = cache.layers[0].keys.clone()
        cache.batch_select_indices(torch.tensor([1, 1]))
        keys, _ = cache.update(torch.tensor([1.0, 2.0]).view(2, 1, 1, 1).expand(2, 1, 1, 4), torch.zeros(2, 1, 1, 4), 0)
    assert torch.equal(keys[:, :, :4], before[[1, 1]])
    assert keys[:, 0, 4, 0].tolist() == [1.0, 2.0]


def test_appending_with_gradients_enabled_keeps_earlier_gradients_correct():
    cache, _ = caches()
    first, second = (torch.randn(1, 1, 2, 4, requires_grad=True) for _ in range(2))
    cache.update(first, first, 0)
    keys, _ = cache.update(second, second, 0)
    seen = keys.square().sum()  # its backward pass reads the keys as they were before the next update
    cache.update(second, second, 0)
    seen.backward()
    torch.testing.assert_close(first.grad, 2 * first)


def test_sliding_window_layers_are_not_preallocated():
    windowed = tiny_writers.module("qwen2.5", use_sliding_window=True, sliding_window=4, max_window_layers=1)
    kinds = [type(layer) is PreallocatedCacheLayer for layer in new_cache(windowed.model).layers]
    assert kinds == [True, False]
