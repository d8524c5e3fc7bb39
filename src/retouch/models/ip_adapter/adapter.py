"""An IP-Adapter on the transformer of Flux or Qwen-Image: a picture's embedding becomes a few tokens, to which blocks attend.

The adapter is part of the transformer (``encoder_hid_proj`` and the blocks' attention processors), so that its weights are trained,
copied, saved and swapped as any others. It begins by adding exactly 0: its values are 0.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from jaxtyping import Float
from torch import Tensor, nn

from retouch.core.random import generator
from retouch.models.ip_adapter.attention import FluxReferenceAttention, QwenReferenceAttention, WideLinear
from retouch.types import Conditioning

_SIXTEEN = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How an adapter is made. ``tokens`` that an embedding becomes, through a ``projection``; which ``blocks`` attend to them (of
    Flux: double ones, or single ones too; Qwen-Image has double ones alone); ``scale`` of what they find.
    """

    tokens: int
    projection: Literal["linear", "mlp"]
    blocks: Literal["double", "all"]
    scale: float = 1.0


class MlpProjection(nn.Module):
    """Embedding to tokens through a hidden layer of twice its width, normed."""

    def __init__(self, embed_width: int, width: int, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.proj = nn.Sequential(nn.Linear(embed_width, 2 * embed_width), nn.GELU(), nn.Linear(2 * embed_width, tokens * width))
        self.norm = nn.LayerNorm(width)

    def forward(self, embeds: Float[Tensor, "r d"]) -> Float[Tensor, "r n w"]:
        made: Tensor = self.norm(self.proj(embeds).unflatten(-1, (self.tokens, -1)))
        return made


def read_by_diffusers(transformer: nn.Module, form: Form) -> bool:
    """Whether the adapter is one that a Flux pipeline's ``load_ip_adapter`` reads: it takes 16 tokens for what has 65536 rows, and
    everything else for 4."""
    if not isinstance(transformer, FluxTransformer2DModel) or form.projection != "linear" or form.blocks != "double":
        return False
    rows = form.tokens * int(transformer.config.joint_attention_dim)
    return form.tokens == (16 if rows == _SIXTEEN else 4)


def attach(transformer: nn.Module, form: Form, *, embed_width: int, seed: int) -> None:
    """Put a new adapter on the transformer, drawn from the seed, in fp32 and trainable. The rest stays as it is.

    ValueError for a transformer that has no such attention, and for single blocks where there are none.
    """
    if not isinstance(transformer, FluxTransformer2DModel | QwenImageTransformer2DModel):
        raise ValueError(f"an IP-Adapter is for Flux and Qwen-Image here, and not for {type(transformer).__name__}")
    if form.blocks == "all" and isinstance(transformer, QwenImageTransformer2DModel):
        raise ValueError("Qwen-Image has double blocks alone; take blocks 'double'")
    device, width = transformer.device, int(transformer.config.joint_attention_dim)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "ip-adapter").initial_seed())
        made: nn.Module
        if form.projection == "linear":
            made = ImageProjection(embed_width, cross_attention_dim=width, num_image_text_embeds=form.tokens)
        else:
            made = MlpProjection(embed_width, width, form.tokens)
        processors = {
            name: base if name.startswith("single_") and form.blocks == "double" else _processor(transformer, form, base)
            for name, base in transformer.attn_processors.items()
        }
    transformer.encoder_hid_proj = MultiIPAdapterImageProjection([made.to(device)])
    transformer.set_attn_processor(processors)
    for adapted in modules(transformer):
        adapted.to(device).requires_grad_(True)


def _processor(transformer: FluxTransformer2DModel | QwenImageTransformer2DModel, form: Form, base: Any) -> nn.Module:
    width, result = int(transformer.config.joint_attention_dim), next(transformer.parameters()).dtype
    made: Any
    if read_by_diffusers(transformer, form):
        made = FluxIPAdapterAttnProcessor(transformer.inner_dim, width, num_tokens=(form.tokens,), scale=form.scale)
        for name in ("to_k_ip", "to_v_ip"):
            setattr(made, name, nn.ModuleList([WideLinear(width, transformer.inner_dim, bias=True, result=result)]))
        nn.init.zeros_(made.to_v_ip[0].bias)
        nn.init.zeros_(made.to_v_ip[0].weight)
    else:
        kind = FluxReferenceAttention if isinstance(transformer, FluxTransformer2DModel) else QwenReferenceAttention
        heads, head_width = transformer.config.num_attention_heads, transformer.config.attention_head_dim
        made = kind(base, width=width, heads=heads, head_width=head_width, scale=form.scale, result=result)
        nn.init.zeros_(made.to_v_ip.weight)
    adapter: nn.Module = made
    return adapter


def modules(transformer: nn.Module) -> list[nn.Module]:
    """The adapter's parts: its projection, then its attention, block by block."""
    found: Any = transformer
    processors = found.attn_processors.values()
    return [found.encoder_hid_proj, *(each for each in processors if isinstance(each, nn.Module) and hasattr(each, "to_k_ip"))]


def attention_inputs(transformer: nn.Module, conditioning: Conditioning) -> dict[str, list[Tensor]] | None:
    """What the blocks are handed of the rows' references; None where the rows have none."""
    embeds = conditioning.tensors.get(Conditioning.REFERENCE)
    if embeds is None:
        return None
    tokens: list[Tensor] = transformer.get_submodule("encoder_hid_proj")([embeds[:, None]])
    return {"ip_hidden_states": tokens}
