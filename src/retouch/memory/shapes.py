"""What a memory plan needs to know of a transformer's configuration, whose names differ from family to family."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Bytes that autograd saves for one block per token and channel, by bytes per number: measured on the families here with
# torch.autograd.graph.saved_tensors_hooks (norms and rotary positions are kept in fp32 in either case).
_TWO_STREAMS = {2: 60, 4: 100}
_FLUX_SINGLE = {2: 50, 4: 85}
_Z_IMAGE = {2: 90, 4: 132}


@dataclass(frozen=True, slots=True)
class Blocks:
    """``count`` equal blocks; ``saved``: bytes that autograd keeps of one, per token and channel, by bytes per number."""

    count: int
    saved: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """``width``: channels of a token in a block. ``latents`` and ``text``: channels of what it is given of either."""

    blocks: tuple[Blocks, ...]
    width: int
    latents: int
    text: int


def shape_of(transformer: Mapping[str, Any]) -> Shape:
    """The shape of a transformer, described as ``sizes.parts`` does."""
    config = transformer["config"]
    if transformer["class"] == "ZImageTransformer2DModel":
        # Half of the refining blocks see the picture and half the text: together as many as one kind, with all tokens.
        count = config["n_layers"] + config["n_refiner_layers"]
        return Shape(
            blocks=(Blocks(count, _Z_IMAGE),),
            width=config["dim"],
            latents=4 * config["in_channels"],
            text=config["cap_feat_dim"],
        )
    return Shape(
        blocks=(Blocks(config["num_layers"], _TWO_STREAMS), Blocks(config.get("num_single_layers", 0), _FLUX_SINGLE)),
        width=config["num_attention_heads"] * config["attention_head_dim"],
        latents=config["in_channels"],
        text=config["joint_attention_dim"],
    )
