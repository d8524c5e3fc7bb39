"""What a frozen image model that draws keeps on its device, worked out before anything is loaded.

Weights follow from counts and are exact. What comes and goes is measured on the meta device (``live_bytes``), in the model's true
width; one block stands for all, since without gradients they take turns.
"""

import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from retouch.memory.peak import in_dtype, most_alive
from retouch.memory.plan import MemoryPlan, MemoryRow
from retouch.memory.sizes import build_meta, stored_count
from retouch.models.base import Described, DiffusersModel, ImageBatch, Part

_META = torch.device("meta")


def image_model_plan(
    model: DiffusersModel, described: Described, batch: ImageBatch, *, without: tuple[str, ...] = ()
) -> MemoryPlan:
    """What the renderer's device holds. ``without``: parts that are elsewhere."""
    rows = [
        MemoryRow(part if part != "transformer" else "image model", stored_count(made) * batch.dtype.itemsize)
        for part, made in described.items()
        if part not in without
    ]
    return MemoryPlan(
        tuple(rows),
        (
            MemoryRow("drawing: one denoising step", _step_bytes(model, described, batch)),
            MemoryRow("drawing: pictures from latents", _decoding_bytes(model, described["vae"], batch)),
        ),
    )


def codes_plan(autoencoder: Part, *, rows: int, read: int, size: tuple[int, int]) -> MemoryPlan:
    """What makes ``rows`` pictures of codes at once, and codes of ``read`` pictures; ``size``: (height, width) px. Always fp32."""
    module: Any = build_meta(autoencoder)
    height, width = (edge // module.spatial_scale_factor for edge in size)
    codes = torch.empty(rows, height, width, dtype=torch.long, device=_META)
    pixels = torch.empty(read, autoencoder["config"]["in_channels"], *size, device=_META)
    sizes = torch.tensor([size] * read)
    given = [codes, pixels, *module.parameters(), *module.buffers()]
    with torch.no_grad():
        return MemoryPlan(
            (MemoryRow("autoencoder", stored_count(autoencoder) * torch.float32.itemsize),),
            (
                MemoryRow("drawing: pictures from codes", most_alive(lambda: module.decode(codes), given=given)),
                MemoryRow("reading: codes of pictures", most_alive(lambda: module.encode(pixels, sizes), given=given)),
            ),
        )


def _step_bytes(model: DiffusersModel, described: Described, batch: ImageBatch) -> int:
    part = model.one_of_each_block(described["transformer"])
    module = in_dtype(copy.deepcopy(build_meta(part)), batch.dtype)
    inputs = model.step_inputs(described, batch)
    noisy = sum(value.numel() for value in tree_leaves(next(iter(inputs.values()))))
    given = [value for value in tree_leaves(inputs) if isinstance(value, Tensor)]
    with torch.no_grad():
        made = most_alive(lambda: module(**inputs), given=[*given, *module.parameters(), *module.buffers()])
    # Latents, and velocities of both branches under guidance, are kept in fp32 from step to step.
    return made + sum(value.numel() * value.element_size() for value in given) + 3 * 4 * noisy


def _decoding_bytes(model: DiffusersModel, vae: Part, batch: ImageBatch) -> int:
    module: Any = in_dtype(copy.deepcopy(build_meta(vae)), batch.dtype)
    model.prepare_vae(module)
    latents = model.latents(vae, batch)
    with torch.no_grad():
        return most_alive(lambda: module.decode(latents), given=[latents, *module.parameters(), *module.buffers()])
