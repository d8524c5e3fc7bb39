"""The memory plan of a frozen image model that only renders, computed before anything is loaded.

Weights follow from parameter counts and are exact. Activations are measured on the meta device (``peak_bytes``) in the model's true
width. One block of each kind is enough, because without gradients the blocks use the same memory one after the other.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from retouch.memory.peak import cast_parameters, peak_bytes
from retouch.memory.plan import MemoryPlan, MemoryRow
from retouch.memory.sizes import build_meta, stored_count
from retouch.models.base import DiffusersModel
from retouch.models.shapes import ImageBatch, Part, PartConfigs

_META = torch.device("meta")


def image_model_plan(
    model: DiffusersModel, described: PartConfigs, batch: ImageBatch, *, without: tuple[str, ...] = ()
) -> MemoryPlan:
    """The memory plan of the renderer's device. ``without``: names of parts that are on another device."""
    rows = [
        MemoryRow(part if part != "transformer" else "image model", stored_count(made) * batch.dtype.itemsize)
        for part, made in described.items()
        if part not in without
    ]
    return MemoryPlan(
        tuple(rows),
        (
            MemoryRow("rendering: one denoising step", _step_bytes(model, described, batch)),
            MemoryRow("rendering: decoding of latents", _decoding_bytes(model, described["vae"], batch)),
        ),
    )


def codes_plan(autoencoder: Part, *, decoded: int, encoded: int, size: tuple[int, int]) -> MemoryPlan:
    """The memory plan of an image tokenizer that decodes ``decoded`` images and encodes ``encoded`` images at once, in fp32.

    ``size``: (height, width) in pixels.
    """
    module: Any = build_meta(autoencoder)
    height, width = (edge // module.spatial_scale_factor for edge in size)
    codes = torch.empty(decoded, height, width, dtype=torch.long, device=_META)
    pixels = torch.empty(encoded, autoencoder["config"]["in_channels"], *size, device=_META)
    sizes = torch.tensor([size] * encoded)
    existing = [codes, pixels, *module.parameters(), *module.buffers()]
    with torch.no_grad():
        return MemoryPlan(
            (MemoryRow("autoencoder", stored_count(autoencoder) * torch.float32.itemsize),),
            (
                MemoryRow("rendering: decoding of codes", peak_bytes(lambda: module.decode(codes), existing=existing)),
                MemoryRow("encoding: images to codes", peak_bytes(lambda: module.encode(pixels, sizes), existing=existing)),
            ),
        )


def _step_bytes(model: DiffusersModel, described: PartConfigs, batch: ImageBatch) -> int:
    part = model.one_of_each_block(described["transformer"])
    module = cast_parameters(copy.deepcopy(build_meta(part)), batch.dtype)
    inputs = model.step_inputs(described, batch)
    noisy = sum(value.numel() for value in tree_leaves(next(iter(inputs.values()))))
    tensors = [value for value in tree_leaves(inputs) if isinstance(value, Tensor)]
    with torch.no_grad():
        peak = peak_bytes(lambda: module(**inputs), existing=[*tensors, *module.parameters(), *module.buffers()])
    # Between steps, latents and the velocities of both branches of guidance are kept in fp32.
    return peak + sum(value.numel() * value.element_size() for value in tensors) + 3 * 4 * noisy


def _decoding_bytes(model: DiffusersModel, vae: Part, batch: ImageBatch) -> int:
    module: Any = cast_parameters(copy.deepcopy(build_meta(vae)), batch.dtype)
    model.prepare_vae(module)
    model.limit_vae(module)
    latents = model.latents(vae, batch)
    with torch.no_grad():
        return peak_bytes(lambda: module.decode(latents), existing=[latents, *module.parameters(), *module.buffers()])
