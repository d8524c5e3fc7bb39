"""Decoder-only language models: one forward pass or step-by-step decoding with a KV cache, and the grammar of text.

The decoder is the model without its output head: ``model`` of a text model, ``model.language_model`` of a vision-language model.
Decoder and head are called separately, so a stepper that shards weights must wrap both, and must keep the head unsharded during an
evaluation, in which ranks call it a different number of times.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from PIL.Image import Image, Resampling, fromarray
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import Cache, PreTrainedTokenizerBase, StaticCache
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from retouch.types import Kind, Prompts, Task

ROOM = 64  # tokens


class PreallocatedCacheLayer(DynamicLayer):
    """A cache layer whose keys and values are views of longer buffers, so that a new token is written in place.

    transformers' layer copies all keys and values for every new token; with a long prompt, this is most of the memory traffic of
    decoding. With gradients enabled it concatenates as usual, because autograd forbids writing in place.
    """

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
            keys, values = (each.new_empty(*each.shape[:-2], end + ROOM, each.shape[-1]) for each in (self.keys, self.values))
            keys[..., :length, :], values[..., :length, :] = self.keys, self.values
            self._buffers = keys, values
        keys, values = self._buffers
        keys[..., length:end, :] = key_states
        values[..., length:end, :] = value_states
        self.keys, self.values = keys[..., :end, :], values[..., :end, :]
        return self.keys, self.values

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self._buffers = None  # the rows of the buffers are those of the old batch


def new_cache(decoder: nn.Module) -> Cache:
    """An empty KV cache; layers with a sliding window keep only the window, and all others are preallocated."""
    cache = DynamicCache(config=decoder.config)
    cache.layers = [PreallocatedCacheLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache


@dataclass(frozen=True, slots=True, eq=False)
class LayerFeatures:
    """Features that Qwen3-VL adds to the states of its first layers at image tokens (DeepStack, arXiv 2406.04334).

    ``positions``: which tokens are image tokens, (b, l). ``features``: one tensor (image tokens, d) for each of these layers.
    """

    positions: Bool[Tensor, "b l"]
    features: tuple[Float[Tensor, "n d"], ...]


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


def padded_left(rows: list[Tensor]) -> tuple[Tensor, Bool[Tensor, "p l"]]:
    """Rows of shapes (l_i, ...), padded with zeros on the left, and the mask of the positions that are not padding."""
    longest = max(len(row) for row in rows)
    padded = torch.stack([torch.cat([row.new_zeros(longest - len(row), *row.shape[1:]), row]) for row in rows])
    lengths = torch.tensor([len(row) for row in rows], device=padded.device)
    return padded, torch.arange(longest, device=padded.device) >= longest - lengths[:, None]


@contextmanager
def recomputing(module: nn.Module, *, on: bool) -> Iterator[None]:
    """If ``on``, forward passes inside the block keep only each layer's input. The backward pass may run outside of the block.

    transformers recomputes a layer only if the layer is in training mode. ``train()`` would also switch its submodules, and with
    them dropout, so only the flag of the layer itself is set. Source: Chen et al. 2016 (arXiv 1604.06174).
    """
    layers = [layer for layer in module.modules() if isinstance(layer, GradientCheckpointingLayer)] if on else []
    before = [layer.training for layer in layers]
    for layer in layers:
        layer.gradient_checkpointing = layer.training = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            layer.gradient_checkpointing, layer.training = False, training


class TextGrammar:
    """Any text: all tokens of the tokenizer except image and video placeholders (implements ``Grammar``; nothing is forced).

    The output embedding has more rows than the tokenizer has tokens; the ids of the additional rows are excluded too.
    """

    kinds: tuple[int, ...] = (Kind.TEXT_TOKEN,)
    forces = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocabulary: int, device: torch.device) -> None:
        self.vocabularies = torch.arange(vocabulary, device=device)[None] < len(tokenizer)
        named = [token for token in tokenizer.get_added_vocab() if "vision" in token or "image" in token or "video" in token]
        self.vocabularies[:, [tokenizer.convert_tokens_to_ids(token) for token in named]] = False

    def parse(self, prompts: Prompts, ids: Int[Tensor, "r k"]) -> tuple[Int[Tensor, "r k1"], Int[Tensor, "r k1"]]:
        sets = ids.new_zeros(ids.shape[0], ids.shape[1] + 1)
        return sets, sets - 1


class CausalText:
    """The methods of ``retouch.protocols.AutoregressiveModel`` that depend only on the decoder.

    ``gradient_checkpointing``: an update keeps only each layer's input, and computes the prompt once per row instead of once per
    task. Subclasses override ``embed`` and ``logits`` if generated tokens have their own embeddings and head, and
    ``embed_prompts`` if prompts have images.
    """

    def __init__(self, module: nn.Module, *, gradient_checkpointing: bool = False) -> None:
        self.module: nn.Module = module
        self.gradient_checkpointing = gradient_checkpointing
        self.shares_prompts = not gradient_checkpointing

    axes: int = 1
    """The number of axes of positions: 3 for models with images."""
    decoder_path: str = "model"

    def decoder(self, module: nn.Module) -> nn.Module:
        """The model without its output head."""
        return module.get_submodule(self.decoder_path)

    def embed(self, module: Any, ids: Int[Tensor, "r k"]) -> Float[Tensor, "r k d"]:
        """Return the embeddings of generated tokens."""
        return module.get_input_embeddings()(ids)

    def embed_prompts(self, module: Any, prompts: Prompts) -> tuple[Float[Tensor, "p l d"], LayerFeatures | None]:
        """Return the embeddings of prompts, and the features that the first layers add to them."""
        return module.get_input_embeddings()(prompts.ids), None

    def prompts(self, rows: Sequence[Sequence[int]]) -> Prompts:
        """Build prompts from rows of token ids, padded on the left."""
        device = next(self.module.parameters()).device
        ids, mask = padded_left([torch.tensor(row, device=device) for row in rows])
        return Prompts(ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)[..., None], tuple({} for _ in rows))

    def prefill(self, module: nn.Module, prompts: Prompts) -> tuple[Float[Tensor, "p d"], Cache]:
        assert not (self.gradient_checkpointing and torch.is_grad_enabled())  # its layers would not fill the cache
        decoder = self.decoder(module)
        cache = new_cache(decoder)
        embeds, features = self.embed_prompts(module, prompts)
        states = run(decoder, embeds, mask=prompts.mask, positions=prompts.positions, cache=cache, layer_features=features)
        return states[:, -1], cache

    def extend(
        self, module: nn.Module, ids: Int[Tensor, "r k"], *, mask: Bool[Tensor, "r l"], positions: Int[Tensor, "r k"], cache: Cache
    ) -> Float[Tensor, "r k d"]:
        axes = positions[..., None].expand(*positions.shape, self.axes)
        return run(self.decoder(module), self.embed(module, ids), mask=mask, positions=axes, cache=cache)

    def select(self, cache: Cache, rows: Int[Tensor, " r"]) -> Cache:
        """Reduce the cache to these rows, in place. Keys and values keep their gradient."""
        cache.batch_select_indices(rows)
        return cache

    def static_cache(self, cache: Cache, rows: Int[Tensor, " r"], *, room: int) -> Cache:
        """Move these rows of the cache into tensors with room for ``room`` more tokens, so that no shape changes during decoding
        (``retouch.policies.decoding.HasStaticCache``). The old cache is empty afterwards, so that only one layer is held twice.

        Raises ValueError for a decoder with a sliding window.
        """
        if any(cache.is_sliding):
            raise ValueError(
                "rollout.engine.static: the model attends to a sliding window, so its cache cannot be static; remove it"
            )
        length = int(cache.get_seq_length())
        made = StaticCache(config=self.decoder(self.module).config, max_cache_len=length + room)
        for index, layer in enumerate(cache.layers):
            made.update(layer.keys[rows, :, :length], layer.values[rows, :, :length], index)
            layer.keys = layer.values = None
        return made

    def states(
        self, module: nn.Module, prompts: Prompts, ids: Int[Tensor, "r k"], mask: Bool[Tensor, "r k"]
    ) -> Float[Tensor, "r k d"]:
        more = ids.shape[1] - 1  # the state after the last token is not used
        new = prompts.next_positions()[:, None] + torch.arange(more, device=ids.device)
        positions = torch.cat([prompts.positions, new[..., None].expand(*new.shape, self.axes)], dim=1)
        row_mask = torch.cat([prompts.mask, mask[:, :more]], dim=1)
        with recomputing(module, on=self.gradient_checkpointing and torch.is_grad_enabled()):
            embeds, features = self.embed_prompts(module, prompts)
            if features is not None:
                features = LayerFeatures(nn.functional.pad(features.positions, (0, more)), features.features)
            embeds = torch.cat([embeds, self.embed(module, ids[:, :more])], dim=1)
            states = run(self.decoder(module), embeds, mask=row_mask, positions=positions, layer_features=features)
        return states[:, -ids.shape[1] :]

    def logits(self, module: Any, states: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """Return the logits of hidden states, in fp32."""
        return module.get_output_embeddings()(states).float()


def require_no_special_tokens(tasks: Sequence[Task], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if an instruction contains a special token, which would be read as an image or a turn of the dialogue."""
    special = set(tokenizer.get_added_vocab())
    for task in tasks:
        if found := [token for token in special if token in task.instruction]:
            raise ValueError(f"the instruction of task {task.id!r} contains the special token {found[0]}; remove it")


def to_pixels(images: Sequence[Image], size: tuple[int, int], device: torch.device) -> Float[Tensor, "r 3 h w"]:
    """Convert images to the fp32 RGB from -1 to 1 that image tokenizers read.

    ``size``: (height, width) in px, to which they are resized (Lanczos).
    """
    height, width = size
    resized = [image.convert("RGB").resize((width, height), Resampling.LANCZOS) for image in images]
    levels = torch.stack([torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8) for image in resized])
    return levels.reshape(-1, height, width, 3).permute(0, 3, 1, 2).to(device) / 127.5 - 1


def to_images(pixels: Float[Tensor, "r 3 h w"]) -> list[Image]:
    """Convert the pixels of an image tokenizer to images; values outside -1 to 1 are clipped."""
    levels = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return [fromarray(each) for each in levels]
