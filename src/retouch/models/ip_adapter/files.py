"""Reads and writes an IP-Adapter as ``ip_adapter.safetensors``, with these names:

    image_proj.proj.weight, .bias                  a linear projection, or
    image_proj.proj.0.weight, ... proj.2.bias      the two layers of an MLP
    image_proj.norm.weight, .bias                  LayerNorm of the tokens
    image_proj.mlp. ..., image_proj.qformer. ...   an MLP and a Q-Former, whose tokens are added
    ip_adapter.<k>.to_k_ip.weight, .to_v_ip.weight keys and values of block k: double blocks first, then single ones
    ip_adapter.<k>.to_k_ip.bias, .to_v_ip.bias     only in the layout that diffusers loads

An adapter with 4 or 16 tokens, a linear projection and only double blocks can be loaded with ``load_ip_adapter`` of diffusers' Flux
pipelines. Other adapters have the names of the larger adapters' published checkpoints. Files with the names of XLabs' adapters can
be read too."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from retouch.models.ip_adapter import adapter as ip_adapter

FILE = "ip_adapter.safetensors"
_MLP, _QFORMER = "image_proj.mlp.", "image_proj.qformer."
_XLABS_NAMES = (
    ("ip_adapter_proj_model.", "image_proj."),
    ("double_blocks.", "ip_adapter."),
    ("processor.", ""),
    ("ip_adapter_double_stream_k_proj", "to_k_ip"),
    ("ip_adapter_double_stream_v_proj", "to_v_ip"),
)


def write(transformer: nn.Module, folder: Path) -> Path:
    """Write the adapter's current weights; returns the file."""
    file = folder / FILE
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in _named(transformer).items()}, file)
    return file


@torch.no_grad()
def read(transformer: nn.Module, path: Path) -> None:
    """Load the weights of a file, or of ``ip_adapter.safetensors`` in a folder, into the transformer's adapter. If the adapter has
    an MLP and the file has an MLP and a Q-Former, only the MLP is loaded.

    Raises ValueError for a file of another kind, and for an adapter with other settings.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file() or file.suffix != ".safetensors":
        raise ValueError(f"{path} is neither a folder with {FILE} nor a .safetensors file; other formats are not read")
    try:
        stored = {_translated(name): tensor for name, tensor in load_file(file).items()}
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    own = _named(transformer)
    if f"{_MLP}norm.weight" in stored and f"{_MLP}norm.weight" not in own:
        stored = {name.replace(_MLP, "image_proj."): each for name, each in stored.items() if not name.startswith(_QFORMER)}
    differing = sorted(stored.keys() ^ own.keys()) or sorted(name for name in own if stored[name].shape != own[name].shape)
    if differing:
        raise ValueError(f"{file} is an adapter with other settings than the recipe's; the first difference is {differing[0]}")
    for name, tensor in own.items():
        tensor.copy_(stored[name])


def _named(transformer: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors by their names in a file."""
    found: list[Any] = ip_adapter.modules(transformer)
    projection = found[0].image_projection_layers[0].state_dict()
    named = {f"image_proj.{name.replace('image_embeds.', 'proj.')}": tensor for name, tensor in projection.items()}
    for k, processor in enumerate(found[1:]):
        for name, tensor in processor.state_dict().items():
            named[f"ip_adapter.{k}.{name.replace('_ip.0.', '_ip.')}"] = tensor
    return named


def _translated(name: str) -> str:
    for xlabs_name, own_name in _XLABS_NAMES:
        name = name.replace(xlabs_name, own_name)
    return name
