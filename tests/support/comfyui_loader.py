"""A reader of LoRA files that works like ComfyUI's loader, with a table of ComfyUI's module names.

ComfyUI's models have their own modules; some of these modules replace several modules of diffusers. The loader knows names for each
module, or for a range of its rows, adds ``alpha / rank * up @ down`` to these rows, and reports every other key of the file as not
loaded.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

_SD3 = {
    **{f"joint_blocks.*.x_block.attn{n}.qkv": [f"transformer_blocks.*.attn{n}.to_{part}" for part in "qkv"] for n in ("", "2")},
    **{f"joint_blocks.*.x_block.attn{n}.proj": [f"transformer_blocks.*.attn{n}.to_out.0"] for n in ("", "2")},
    "joint_blocks.*.context_block.attn.qkv": [f"transformer_blocks.*.attn.add_{part}_proj" for part in "qkv"],
    "joint_blocks.*.context_block.attn.proj": ["transformer_blocks.*.attn.to_add_out"],
    "joint_blocks.*.x_block.mlp.fc1": ["transformer_blocks.*.ff.net.0.proj"],
    "joint_blocks.*.x_block.mlp.fc2": ["transformer_blocks.*.ff.net.2"],
    "joint_blocks.*.context_block.mlp.fc1": ["transformer_blocks.*.ff_context.net.0.proj"],
    "joint_blocks.*.context_block.mlp.fc2": ["transformer_blocks.*.ff_context.net.2"],
}
_FLUX_ATTENTION = {
    "double_blocks.*.img_attn.qkv": [f"transformer_blocks.*.attn.to_{part}" for part in "qkv"],
    "double_blocks.*.txt_attn.qkv": [f"transformer_blocks.*.attn.add_{part}_proj" for part in "qkv"],
    "double_blocks.*.img_attn.proj": ["transformer_blocks.*.attn.to_out.0"],
    "double_blocks.*.txt_attn.proj": ["transformer_blocks.*.attn.to_add_out"],
}
_FLUX = {
    **_FLUX_ATTENTION,
    **{f"double_blocks.*.{c}_mlp.0": [f"transformer_blocks.*.{d}.net.0.proj"] for c, d in (("img", "ff"), ("txt", "ff_context"))},
    **{f"double_blocks.*.{c}_mlp.2": [f"transformer_blocks.*.{d}.net.2"] for c, d in (("img", "ff"), ("txt", "ff_context"))},
    "single_blocks.*.linear1": [
        *(f"single_transformer_blocks.*.attn.to_{part}" for part in "qkv"),
        "single_transformer_blocks.*.proj_mlp",
    ],
    "single_blocks.*.linear2": ["single_transformer_blocks.*.proj_out"],
}
_FLUX2 = {
    **_FLUX_ATTENTION,
    **{f"double_blocks.*.{c}_mlp.0": [f"transformer_blocks.*.{d}.linear_in"] for c, d in (("img", "ff"), ("txt", "ff_context"))},
    **{f"double_blocks.*.{c}_mlp.2": [f"transformer_blocks.*.{d}.linear_out"] for c, d in (("img", "ff"), ("txt", "ff_context"))},
    "single_blocks.*.linear1": ["single_transformer_blocks.*.attn.to_qkv_mlp_proj"],
    "single_blocks.*.linear2": ["single_transformer_blocks.*.attn.to_out"],
}
_Z_IMAGE = {
    f"{blocks}.*.{name}": [f"{blocks}.*.{part}" for part in parts]
    for blocks in ("layers", "noise_refiner", "context_refiner")
    for name, parts in {
        "attention.qkv": ["attention.to_q", "attention.to_k", "attention.to_v"],
        "attention.out": ["attention.to_out.0"],
        **{f"feed_forward.w{k}": [f"feed_forward.w{k}"] for k in (1, 2, 3)},
    }.items()
}
TABLES: dict[str, tuple[dict[str, list[str]] | None, tuple[str, ...]]] = {
    "SD3Transformer2DModel": (_SD3, ("transformer.", "base_model.model.")),
    "FluxTransformer2DModel": (_FLUX, ("transformer.", "")),
    "Flux2Transformer2DModel": (_FLUX2, ()),
    "QwenImageTransformer2DModel": (None, ("transformer.", "")),
    "ZImageTransformer2DModel": (_Z_IMAGE, ("diffusion_model.", "transformer.", "")),
}
"""For each class of diffusers: ComfyUI's modules with the diffusers modules whose weights are their rows (None: both have the same
modules), and the prefixes with which ComfyUI also accepts the names of diffusers."""


class ComfyUILoader:
    """The weights of ComfyUI's model, made from a diffusers transformer without adapters."""

    def __init__(self, transformer: nn.Module) -> None:
        table, prefixes = TABLES[type(transformer).__name__]
        weights = {name: layer.weight.detach() for name, layer in transformer.named_modules() if isinstance(layer, nn.Linear)}
        self.parts = _modules(weights, table)
        self.weights = {name: torch.cat([weights[part] for part in parts]) for name, parts in self.parts.items()}
        self.keys: dict[str, tuple[str, int, int]] = {}
        self.rows: dict[str, tuple[str, int, int]] = {}
        for name, parts in self.parts.items():
            start = 0
            for part in parts:
                self.rows[part] = (name, start, len(weights[part]))
                self.keys |= {prefix + part: self.rows[part] for prefix in prefixes}
                start += len(weights[part])
            self.keys["diffusion_model." + name] = (name, 0, start)
            self.keys["lora_unet_" + name.replace(".", "_")] = (name, 0, start)

    def load(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Add a LoRA to the weights and return the keys that are not loaded."""
        left = set(tensors)
        for key, (name, start, count) in self.keys.items():
            for up_name, down_name in ((".lora_up.weight", ".lora_down.weight"), (".lora_B.weight", ".lora_A.weight")):
                if key + up_name in tensors:
                    up, down = tensors[key + up_name], tensors[key + down_name]
                    alpha = tensors.get(key + ".alpha")
                    scale = 1.0 if alpha is None else alpha.item() / len(down)
                    self.weights[name][start : start + count] += scale * (up @ down)
                    left -= {key + up_name, key + down_name, key + ".alpha"}
        return sorted(left)

    def weight(self, path: str) -> Tensor:
        """Return the weight of the module whose path in diffusers is ``path``."""
        name, start, count = self.rows[path]
        return self.weights[name][start : start + count]


def _modules(weights: Mapping[str, Any], table: dict[str, list[str]] | None) -> dict[str, list[str]]:
    if table is None:
        return {name: [name] for name in weights}
    found = {}
    for name, parts in table.items():
        for number in range(8):
            numbered = [part.replace("*", str(number)) for part in parts]
            if all(part in weights for part in numbered):
                found[name.replace("*", str(number))] = numbered
    return found
