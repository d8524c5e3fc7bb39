"""What a frozen image model that draws keeps on its device, worked out before anything is loaded.

Weights follow from counts and are exact. What comes and goes is measured on the meta device (``live_bytes``), in the model's true
width; one block stands for all, since without gradients they take turns.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from retouch.memory.peak import in_dtype, most_alive
from retouch.memory.plan import MemoryPlan, Row
from retouch.memory.sizes import build_meta, stored_count
from retouch.memory.tokens import Part
from retouch.models.common.single_frame import for_single_frames

_META = torch.device("meta")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """How an image model draws. ``rows`` at once, ``size`` (height, width) px, ``sources`` pictures of ``source`` px beside it,
    ``text`` tokens of conditioning.
    """

    rows: int
    size: tuple[int, int]
    source: tuple[int, int]
    sources: int
    text: int
    dtype: torch.dtype


def image_model_plan(described: Mapping[str, Part], drawing: Drawing, *, without: tuple[str, ...] = ()) -> MemoryPlan:
    """What the renderer's device holds. ``without``: parts that lie elsewhere."""
    rows = [
        Row(part if part != "transformer" else "image model", stored_count(made) * drawing.dtype.itemsize)
        for part, made in described.items()
        if part not in without
    ]
    return MemoryPlan(
        tuple(rows),
        (
            Row("drawing: one denoising step", _step_bytes(described["transformer"], described["vae"], drawing)),
            Row("drawing: pictures from latents", _decoding_bytes(described["vae"], drawing)),
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
            (Row("autoencoder", stored_count(autoencoder) * torch.float32.itemsize),),
            (
                Row("drawing: pictures from codes", most_alive(lambda: module.decode(codes), given=given)),
                Row("reading: codes of pictures", most_alive(lambda: module.encode(pixels, sizes), given=given)),
            ),
        )


def _step_bytes(transformer: Part, vae: Part, drawing: Drawing) -> int:
    one = {key: 1 for key in ("num_layers", "num_single_layers", "n_layers", "n_refiner_layers") if key in transformer["config"]}
    config = {**transformer["config"], **one}
    if "dual_attention_layers" in config:
        config["dual_attention_layers"] = [0] if config["dual_attention_layers"] else []
    module = in_dtype(copy.deepcopy(build_meta({"class": transformer["class"], "config": config})), drawing.dtype)
    noisy, told = _step_inputs(transformer, vae, drawing)
    inputs = [value for value in tree_leaves(told) if isinstance(value, Tensor)]
    with torch.no_grad():
        made = most_alive(lambda: module(**told), given=[*inputs, *module.parameters(), *module.buffers()])
    # Latents, and velocities of both branches under guidance, are kept in fp32 from step to step.
    return made + sum(value.numel() * value.element_size() for value in inputs) + 3 * 4 * noisy


def _step_inputs(transformer: Part, vae: Part, drawing: Drawing) -> tuple[int, dict[str, Any]]:
    """How many numbers are denoised, and everything that the transformer is given."""
    config, time = transformer["config"], torch.empty(drawing.rows, device=_META)
    if transformer["class"] == "ZImageTransformer2DModel":
        side = 2 ** (len(vae["config"]["block_out_channels"]) - 1)
        latents = _empty(drawing, config["in_channels"], 1, *(edge // side for edge in drawing.size))
        text = _empty(drawing, drawing.text, config["cap_feat_dim"])
        return latents.numel(), {"x": list(latents), "t": time, "cap_feats": list(text), "return_dict": False}
    told: dict[str, Any] = {"timestep": time, "return_dict": False}
    if transformer["class"] == "SD3Transformer2DModel":
        side = 2 ** (len(vae["config"]["block_out_channels"]) - 1)
        told["hidden_states"] = _empty(drawing, config["in_channels"], *(edge // side for edge in drawing.size))
        told["pooled_projections"] = _empty(drawing, config["pooled_projection_dim"])
    elif transformer["class"] == "FluxTransformer2DModel":
        side = 2 * 2 ** (len(vae["config"]["block_out_channels"]) - 1)
        tokens = (drawing.size[0] // side) * (drawing.size[1] // side)
        told["hidden_states"] = _empty(drawing, tokens, config["in_channels"])
        told["pooled_projections"] = _empty(drawing, config["pooled_projection_dim"])
        told["img_ids"], told["txt_ids"] = (torch.empty(count, 3, device=_META) for count in (tokens, drawing.text))
        if config["guidance_embeds"]:
            told["guidance"] = torch.empty(drawing.rows, device=_META)
    else:
        side = 2 * 2 ** len(vae["config"]["temperal_downsample"])
        grids = [drawing.size, *[drawing.source] * drawing.sources]
        shapes = [(1, height // side, width // side) for height, width in grids]
        told["hidden_states"] = _empty(drawing, sum(height * width for _, height, width in shapes), config["in_channels"])
        told["img_shapes"] = [shapes] * drawing.rows
    told["encoder_hidden_states"] = _empty(drawing, drawing.text, config["joint_attention_dim"])
    return told["hidden_states"].numel(), told


def _decoding_bytes(vae: Part, drawing: Drawing) -> int:
    module: Any = in_dtype(copy.deepcopy(build_meta(vae)), drawing.dtype)
    height, width = drawing.size
    if vae["class"] == "AutoencoderKLQwenImage":
        for_single_frames(module)
        side = 2 ** len(vae["config"]["temperal_downsample"])
        latents = _empty(drawing, vae["config"]["z_dim"], 1, height // side, width // side)
    else:
        side = 2 ** (len(vae["config"]["block_out_channels"]) - 1)
        latents = _empty(drawing, vae["config"]["latent_channels"], height // side, width // side)
    with torch.no_grad():
        return most_alive(lambda: module.decode(latents), given=[latents, *module.parameters(), *module.buffers()])


def _empty(drawing: Drawing, *shape: int) -> Tensor:
    return torch.empty(drawing.rows, *shape, dtype=drawing.dtype, device=_META)
