"""An IP-Adapter as a file: ``ip_adapter.safetensors``.

    image_proj.proj.weight, .bias                  a linear projection, or
    image_proj.proj.0.weight, ... proj.2.bias      the two layers of an MLP
    image_proj.norm.weight, .bias                  of the tokens
    ip_adapter.<k>.to_k_ip.weight, .to_v_ip.weight keys and values of block k: double blocks first, then single ones
    ip_adapter.<k>.to_k_ip.bias, .to_v_ip.bias     in the form that diffusers loads

In the form of 4 or 16 tokens, linear and in double blocks alone, this is what a Flux pipeline's ``load_ip_adapter`` reads; the
larger one has the names of the larger adapters' own checkpoints. Files with the names of XLabs' adapters are read too.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from retouch.models.ip_adapter import adapter as ip_adapter

FILE = "ip_adapter.safetensors"
_THEIRS = (
    ("ip_adapter_proj_model.", "image_proj."),
    ("double_blocks.", "ip_adapter."),
    ("processor.", ""),
    ("ip_adapter_double_stream_k_proj", "to_k_ip"),
    ("ip_adapter_double_stream_v_proj", "to_v_ip"),
)


def write(transformer: nn.Module, folder: Path) -> Path:
    """The adapter's weights as they are now; returns the file."""
    file = folder / FILE
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in _named(transformer).items()}, file)
    return file


@torch.no_grad()
def read(transformer: nn.Module, path: Path) -> None:
    """Take over the weights of a file, or of ``ip_adapter.safetensors`` in a folder.

    ValueError where it is no such file, or of an adapter of another form.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file() or file.suffix != ".safetensors":
        raise ValueError(f"{path} is no folder with {FILE}, and no .safetensors file; other kinds are not read")
    try:
        given = {_ours(name): tensor for name, tensor in load_file(file).items()}
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    wanted = _named(transformer)
    odd = sorted(given.keys() ^ wanted.keys()) or sorted(name for name in wanted if given[name].shape != wanted[name].shape)
    if odd:
        raise ValueError(f"{file} is an adapter of another form than the recipe's: they differ at {odd[0]} first")
    for name, tensor in wanted.items():
        tensor.copy_(given[name])


def _named(transformer: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors by their names in a file."""
    found: list[Any] = ip_adapter.modules(transformer)
    projection = found[0].image_projection_layers[0].state_dict()
    named = {f"image_proj.{name.replace('image_embeds.', 'proj.')}": tensor for name, tensor in projection.items()}
    for k, processor in enumerate(found[1:]):
        for name, tensor in processor.state_dict().items():
            named[f"ip_adapter.{k}.{name.replace('_ip.0.', '_ip.')}"] = tensor
    return named


def _ours(name: str) -> str:
    for theirs, ours in _THEIRS:
        name = name.replace(theirs, ours)
    return name
