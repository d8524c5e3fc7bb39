"""Prompt embeddings that are computed once: the text encoders are on the device only for prompts that are not in the store."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from retouch.models.common.parts import bits_hash, evaluating, to_device
from retouch.models.common.pipeline_model import PipelineModel
from retouch.models.offloading.on_device import on_device
from retouch.models.offloading.store import EmbeddingStore

_VERSION = 2
_VOLATILE = ("_name_or_path", "transformers_version", "architectures")


class CachedPrompts:
    """Returns the text encoders' output for prompts, from ``store`` if it is stored there (implements ``ReadsPrompts``).

    An entry is keyed by everything that it depends on: the encoders' weights, configurations and types, the tokenizers, template
    and lengths, the kind of device, the prompt, and the images that the encoders read with it. Each prompt is encoded alone, so an
    entry does not depend on the batch in which the prompt occurred first. Embeddings of a whole batch differ from it by rounding.
    """

    def __init__(self, model: PipelineModel, store: EmbeddingStore, *, device: torch.device) -> None:
        self._model = model
        self._store = store
        self._device = device

    def __call__(self, prompts: Sequence[str], images: Sequence[Sequence[Image]]) -> dict[str, Tensor]:
        keys = [self._key(prompt, row) for prompt, row in zip(prompts, images, strict=True)]
        rows = {key: self._store.read(key) for key in dict.fromkeys(keys)}
        missing = [key for key, row in rows.items() if row is None]
        if missing:
            encoders = self._model.text.encoders
            with on_device(self._device, encoders), evaluating(*encoders):
                for key in missing:
                    index = keys.index(key)
                    encoded = self._model.embed_prompts([prompts[index]], [images[index]])
                    rows[key] = {name: tensor[0].cpu() for name, tensor in encoded.items()}
            for key in missing:
                self._store.write(key, _known(rows[key]))
        found = [_known(rows[key]) for key in keys]
        batches = {name: _batch([row[name] for row in found]) for name in found[0]}
        return {name: to_device(batch, self._device) for name, batch in batches.items()}

    def _key(self, prompt: str, images: Sequence[Image]) -> str:
        digest = hashlib.sha256(self._identity)
        for part in (prompt.encode(), *(_pixels(image) for image in images)):
            digest.update(len(part).to_bytes(8, "big") + part)
        return digest.hexdigest()

    @cached_property
    def _identity(self) -> bytes:
        described = [_VERSION, self._device.type, describe(self._model.text)]
        return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).digest()


def describe(value: Any) -> Any:
    """Return everything that determines a text encoder's output, as JSON: weights, configurations, vocabularies and settings.

    Raises TypeError for a value of an unknown type, so that nothing is left out by accident.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, nn.Module):
        return {"class": type(value).__qualname__, "config": _config(value), "weights": _weights(value)}
    if isinstance(value, PreTrainedTokenizerBase):
        words = json.dumps(sorted(value.get_vocab().items())).encode()
        settings = (value.model_max_length, value.padding_side, value.truncation_side, value.chat_template)
        special = {name: str(token) for name, token in value.special_tokens_map.items()}
        return {"vocabulary": hashlib.sha256(words).hexdigest(), "special": special, "settings": [str(each) for each in settings]}
    if isinstance(value, Mapping):
        return {str(key): describe(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [describe(inner) for inner in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if hasattr(value, "to_dict"):  # an image processor
        return {"class": type(value).__qualname__, "settings": json.loads(json.dumps(value.to_dict(), default=str))}
    if type(value).__module__.partition(".")[0] in ("builtins", "torch") or not hasattr(value, "__dict__"):
        raise TypeError(f"{type(value).__name__} in a text encoder: prompt embeddings cannot be keyed by it")
    constants = {name: describe(getattr(type(value), name)) for name in dir(type(value)) if name.isupper()}
    return {"class": type(value).__qualname__, "constants": constants, **describe(vars(value))}


def _config(module: nn.Module) -> Any:
    config = getattr(module, "config", None)
    if config is None:
        return repr(module)
    settings = {key: inner for key, inner in config.to_dict().items() if key not in _VOLATILE}
    return json.loads(json.dumps([settings, getattr(config, "_attn_implementation", None)], default=str))


def _weights(module: nn.Module) -> list[Any]:
    """Return the name, dtype, shape and a hash of the bits of each tensor."""
    named = sorted([*module.named_parameters(), *module.named_buffers()], key=itemgetter(0))
    hashes = torch.stack([bits_hash(tensor) for _, tensor in named]).tolist() if named else []
    return [[name, str(tensor.dtype), list(tensor.shape), each] for (name, tensor), each in zip(named, hashes, strict=True)]


def _pixels(image: Image) -> bytes:
    return f"{image.mode} {image.width} {image.height} ".encode() + image.tobytes()


def _known(row: dict[str, Tensor] | None) -> dict[str, Tensor]:
    assert row is not None
    return row


def _batch(rows: Sequence[Tensor]) -> Tensor:
    """Stack the rows into one tensor, padded on the right with zeros if their lengths differ."""
    equal = all(row.shape == rows[0].shape for row in rows)
    return torch.stack(list(rows)) if equal else pad_sequence(list(rows), batch_first=True)
