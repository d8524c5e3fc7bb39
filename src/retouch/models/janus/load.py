"""Loads Janus-Pro (arXiv 2501.17811) from a local folder in transformers' layout (``deepseek-community/Janus-Pro-1B``; safetensors
only, no code), or takes a model that a script has loaded."""

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer, JanusForConditionalGeneration
from transformers.models.janus.modeling_janus import JanusVQVAE

from retouch.models.common.loaded import LoadedLanguageModel
from retouch.models.common.parts import LOCAL
from retouch.models.janus.model import JanusImageModel, JanusImageModules
from retouch.models.language import Attention

_AUTOENCODER = "model.vqmodel."


def load_janus(
    source: Path | str | LoadedLanguageModel,
    *,
    weights: Path | None = None,
    dtype: torch.dtype,
    device: torch.device | str,
    attention: Attention = "sdpa",
    gradient_checkpointing: bool = False,
) -> JanusImageModel:
    """Load the model with all weights frozen: the trainable modules in ``dtype``, the autoencoder in fp32.

    ``source``: a folder, or a loaded complete Janus, which keeps its dtype. ``weights``: the folder ``writer`` of an export of full
    weights, which replaces the weights of the trainable modules. Raises ValueError for a folder with another model.
    """
    if isinstance(source, LoadedLanguageModel):
        whole, tokenizer = source.base(), source.tokenizer
        vq = source.in_fp32(whole.model.vqmodel)
    else:
        folder = Path(source)
        if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
            raise ValueError(f"{folder} contains no Janus model (config.json and tokenizer.json); set the local folder of one")
        whole = JanusForConditionalGeneration.from_pretrained(folder, dtype=dtype, attn_implementation=attention, **LOCAL)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        vq = JanusVQVAE(whole.config.vq_config)
        vq.load_state_dict(_autoencoder(folder))
        vq.float()
    module = JanusImageModules(whole)
    if weights is not None:
        _load(module, weights)
    module.requires_grad_(False).eval().to(device)
    return JanusImageModel(module, tokenizer, vq=vq.to(device), gradient_checkpointing=gradient_checkpointing)


def _autoencoder(folder: Path) -> dict[str, Tensor]:
    """Read the autoencoder's weights in fp32, because codes come from a nearest-neighbour search."""
    found = {name.removeprefix(_AUTOENCODER): tensor.float() for name, tensor in _stored(folder, _AUTOENCODER)}
    if not found:
        raise ValueError(f"{folder} contains no weights of Janus' autoencoder ({_AUTOENCODER}*) in safetensors")
    return found


def _load(module: JanusImageModules, folder: Path) -> None:
    """Load the module's weights. Raises ValueError unless the names and shapes are exactly the same."""
    stored, own = dict(_stored(folder, "")), module.state_dict()
    differing = stored.keys() ^ own.keys() or {name for name in own if own[name].shape != stored[name].shape}
    if differing:
        raise ValueError(
            f"{folder} does not contain the weights of this Janus model's trainable modules ({len(differing)} tensors differ, for "
            f"example {min(differing)}); set the folder writer of an export of full weights"
        )
    module.load_state_dict(stored)


def _stored(folder: Path, prefix: str) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of all tensors in the folder's safetensors files whose names have this prefix."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            names = [name for name in tensors.keys() if name.startswith(prefix)]  # noqa: SIM118, not a mapping
            yield from ((name, tensors.get_tensor(name)) for name in names)
