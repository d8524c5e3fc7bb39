"""Converts published IP-Adapters to ``ip_adapter.safetensors``: the ``.bin`` files of Calligrapher and of derived trainers.

These files are pickles. They are opened only with torch's restricted loader, which reads tensors and plain values and runs no code.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from retouch.data.sources.features import load_restricted
from retouch.models.ip_adapter.adapter import FILE
from retouch.records.files import write_atomic

# The keys of the projection and of the attention blocks: in the files of system B, and in calligrapher.bin.
_LAYOUTS = (("image_proj", "ip_adapter"), ("image_proj_mlp", "attn_adapter"))
_QFORMER = "image_proj_qformer"
_PROJECTION = re.compile(r"(proj\.\d+|proj|norm)\.(weight|bias)")
_OF_QFORMER = re.compile(
    r"query_embeds|(id_proj\.[02]|cross_attn\.out_proj|cross_attn_norm|norm)\.(weight|bias)|cross_attn\.in_proj_(weight|bias)"
)
_ATTENTION = re.compile(r"(?:.*\.)?(\d+)\.(to_[kv]_ip)(?:\.0)?\.(weight|bias)")


@dataclass(frozen=True, slots=True)
class ConvertedAdapter:
    """A converted IP-Adapter. ``file``: the file that was written. ``tokens``, ``projection``: the values for ``policy.train``.
    ``blocks``: the number of blocks with attention weights."""

    file: Path
    tokens: int
    projection: str
    blocks: int

    def __str__(self) -> str:
        about = f"{self.tokens} tokens, projection '{self.projection}', {self.blocks} blocks"
        mlp = "; projection 'mlp' uses only its MLP, as system B's trainer does" if self.projection == "qformer" else ""
        return f"{self.file}: {about}. Use it with policy.train.init_from{mlp}"


def convert_adapter(source: str | Path, *, to: str | Path) -> ConvertedAdapter:
    """Write ``ip_adapter.safetensors`` with the weights of a ``.bin`` file into the folder ``to``.

    Raises ValueError if the file is missing, contains other objects than tensors, or is not such an adapter.
    """
    file, folder = Path(source), Path(to)
    if not file.is_file():
        raise ValueError(f"{source}: no such file")
    if (folder / FILE).exists():
        raise ValueError(f"{folder / FILE} exists; choose another folder")
    stored = load_restricted(file)
    parts = next((keys for keys in _LAYOUTS if isinstance(stored, Mapping) and set(keys) <= stored.keys()), None)
    if parts is None:
        expected = " or ".join(" and ".join(keys) for keys in _LAYOUTS)
        raise ValueError(f"{file}: not an IP-Adapter; it should have {expected}")
    projection, attention = (_tensors(file, part, stored[part]) for part in parts)
    qformer = _tensors(file, _QFORMER, stored[_QFORMER]) if _QFORMER in stored else {}
    if wrong := [name for name in qformer if not _OF_QFORMER.fullmatch(name)]:
        raise ValueError(f"{file}: its Q-Former has {wrong[0]!r}, which Calligrapher's does not have; it cannot be used here")
    prefix = "image_proj.mlp." if qformer else "image_proj."
    named = {f"{prefix}{name}": tensor for name, tensor in projection.items()} | _blocks(file, attention)
    named |= {f"image_proj.qformer.{name}": tensor for name, tensor in qformer.items()}
    if wrong := [name for name in projection if not _PROJECTION.fullmatch(name)]:
        raise ValueError(
            f"{file}: its projection has {wrong[0]!r}, so it is neither a linear layer nor an MLP; it cannot be used here"
        )
    last = projection.get("proj.weight", projection.get("proj.2.weight"))
    if last is None or "norm.weight" not in projection:
        raise ValueError(f"{file}: its projection has no proj.weight or proj.2.weight, or no norm.weight")
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / FILE, safetensors.torch.save(named))
    return ConvertedAdapter(
        folder / FILE,
        tokens=len(last) // len(projection["norm.weight"]),
        projection="qformer" if qformer else "linear" if "proj.weight" in projection else "mlp",
        blocks=len({name.split(".")[1] for name in named if name.startswith("ip_adapter.")}),
    )


def _tensors(file: Path, part: str, found: Any) -> dict[str, Tensor]:
    if not isinstance(found, Mapping) or not found or not all(isinstance(tensor, Tensor) for tensor in found.values()):
        raise ValueError(f"{file}: {part} should be a map of tensors")
    return {str(name): tensor.detach().to(torch.float32).contiguous() for name, tensor in found.items()}


def _blocks(file: Path, attention: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The key and value weights of the blocks, renumbered from 0 in order. Raises ValueError if a block lacks one of them."""
    found = {match.groups(): tensor for name, tensor in attention.items() if (match := _ATTENTION.fullmatch(name))}
    order = {number: place for place, number in enumerate(sorted({int(number) for number, _, _ in found}))}
    named = {f"ip_adapter.{order[int(number)]}.{what}.{kind}": tensor for (number, what, kind), tensor in found.items()}
    wanted = [f"ip_adapter.{place}.{what}.weight" for place in order.values() for what in ("to_k_ip", "to_v_ip")]
    if not order or (lacking := [name for name in wanted if name not in named]):
        missing = lacking[0] if order else "to_k_ip and to_v_ip"
        raise ValueError(f"{file}: its attention has no {missing}; its names begin with {', '.join(list(attention)[:3])}")
    return named
