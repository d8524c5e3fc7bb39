"""The names that ComfyUI gives to the tensors of a LoRA, per model family.

ComfyUI identifies a LoRA's tensors by the module names of its own models (``diffusion_model.<module>``, or ``lora_unet_<module>``
with underscores, as kohya's sd-scripts writes them), and for some families also by the names of diffusers' transformer
(``transformer.<module>``). It does not read the metadata in which diffusers stores alpha, so each module has a tensor
``<name>.alpha`` here; the adapter's output is scaled by alpha / rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

FILE = "comfyui_lora.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComfyUINames:
    """ComfyUI's names of a family's modules.

    ``prefix``: the text in front of a module's path in diffusers' transformer. ``joined``: used instead of ``prefix`` if one module
    of ComfyUI computes the outputs of several modules of diffusers; maps ComfyUI's module to the modules of diffusers, in the order
    of their outputs. ``*`` is the number of a block. The names in ``joined`` are written with underscores after ``lora_unet_``.
    """

    prefix: str = ""
    joined: Mapping[str, Sequence[str]] = field(default_factory=dict)


def comfyui_tensors(tensors: Mapping[str, Tensor], module: nn.Module, names: ComfyUINames, *, alpha: float) -> dict[str, Tensor]:
    """Return the tensors of a LoRA under ComfyUI's names.

    ``tensors``: ``<path>.lora_A.weight`` (rank, in) and ``<path>.lora_B.weight`` (out, rank), by the path of each adapted module in
    ``module``. If ComfyUI joins several modules, their adapters become one adapter, whose rank is the sum of their ranks. Raises
    ValueError for a module that has no name in ComfyUI.
    """
    import torch

    pairs = {
        name.removesuffix(".lora_A.weight"): (down, tensors[name.replace(".lora_A.", ".lora_B.")])
        for name, down in tensors.items()
        if name.endswith(".lora_A.weight")
    }
    assert len(tensors) == 2 * len(pairs), "a LoRA has two matrices for each module, and nothing else"
    made: dict[str, Tensor] = {}
    if not names.joined:
        for path, (down, up) in pairs.items():
            made[f"{names.prefix}{path}.lora_A.weight"] = down
            made[f"{names.prefix}{path}.lora_B.weight"] = up
            made[f"{names.prefix}{path}.alpha"] = torch.tensor(float(alpha))
        return made
    for name, paths in _groups(pairs, names.joined).items():
        down, up, count = _join([pairs.get(path) for path in paths], [_outputs(module, path) for path in paths])
        key = "lora_unet_" + name.replace(".", "_")
        made[f"{key}.lora_down.weight"] = down
        made[f"{key}.lora_up.weight"] = up
        made[f"{key}.alpha"] = torch.tensor(float(alpha * count))
    return made


def _groups(paths: Mapping[str, Any], joined: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Return ComfyUI's modules that have an adapter, each with the modules of diffusers that it joins."""
    owners = {part: (name, parts) for name, parts in joined.items() for part in parts}
    found: dict[str, list[str]] = {}
    for path in paths:
        number = next((piece for piece in path.split(".") if piece.isdigit()), "")
        pattern = path.replace(f".{number}.", ".*.", 1) if path not in owners else path
        if pattern not in owners:
            raise ValueError(f"{path} has no name in ComfyUI; leave it out of policy.train.targets, or export without comfyui")
        name, parts = owners[pattern]
        found[name.replace("*", number, 1)] = [part.replace("*", number, 1) for part in parts]
    return found


def _outputs(module: nn.Module, path: str) -> int:
    layer: Any = module.get_submodule(path)
    return int(layer.out_features)


def _join(pairs: Sequence[tuple[Tensor, Tensor] | None], outputs: Sequence[int]) -> tuple[Tensor, Tensor, int]:
    """Join the adapters of several modules with the same input into one: (down, up, number of adapters).

    ``pairs``: the (down, up) matrices of each module, or None for a module without an adapter. ``outputs``: their output widths.
    """
    import torch

    if len(pairs) == 1 and pairs[0] is not None:
        return *pairs[0], 1
    present = [pair for pair in pairs if pair is not None]
    down = torch.cat([pair[0] for pair in present])
    up = down.new_zeros(sum(outputs), len(down))
    row = column = 0
    for pair, count in zip(pairs, outputs, strict=True):
        if pair is not None:
            rank = pair[1].shape[1]
            up[row : row + count, column : column + rank] = pair[1]
            column += rank
        row += count
    return down, up, len(present)
