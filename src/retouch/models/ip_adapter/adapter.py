"""An IP-Adapter on the transformer of Flux or Qwen-Image: a picture's embedding becomes a few tokens, to which blocks attend.

The adapter is part of the transformer (``encoder_hid_proj`` and the blocks' attention processors), so that its weights are trained,
copied, saved and swapped as any others. It begins by adding exactly 0: its values are 0.
"""

from typing import Any, Literal, Protocol, runtime_checkable

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


@runtime_checkable
class AdapterSettings(Protocol):
    """The settings of an adapter (``retouch.models.ip_adapter.section.IpAdapter``)."""

    @property
    def tokens(self) -> int:
        """Tokens that an embedding becomes."""
        ...

    @property
    def projection(self) -> Literal["linear", "mlp"]:
        """What makes them: one layer, or two."""
        ...

    @property
    def blocks(self) -> Literal["double", "all"]:
        """The blocks that attend to them: Flux has double and single ones, Qwen-Image double ones alone."""
        ...

    @property
    def scale(self) -> float:
        """Factor of the attention to them."""
        ...


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


def read_by_diffusers(transformer: nn.Module, settings: AdapterSettings) -> bool:
    """Whether the adapter is one that a Flux pipeline's ``load_ip_adapter`` reads: it takes 16 tokens for what has 65536 rows, and
    everything else for 4."""
    if not isinstance(transformer, FluxTransformer2DModel) or settings.projection != "linear" or settings.blocks != "double":
        return False
    rows = settings.tokens * int(transformer.config.joint_attention_dim)
    return settings.tokens == (16 if rows == _SIXTEEN else 4)


def attach(transformer: nn.Module, settings: AdapterSettings, *, embed_width: int, seed: int) -> None:
    """Put a new adapter on the transformer, drawn from the seed, in fp32 and trainable. The rest stays as it is.

    ValueError for a transformer that has no such attention, and for single blocks where there are none.
    """
    if not isinstance(transformer, FluxTransformer2DModel | QwenImageTransformer2DModel):
        raise ValueError(f"an IP-Adapter is for Flux and Qwen-Image here, and not for {type(transformer).__name__}")
    if settings.blocks == "all" and isinstance(transformer, QwenImageTransformer2DModel):
        raise ValueError("Qwen-Image has double blocks alone; take blocks 'double'")
    device, width = transformer.device, int(transformer.config.joint_attention_dim)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "ip-adapter").initial_seed())
        made: nn.Module
        if settings.projection == "linear":
            made = ImageProjection(embed_width, cross_attention_dim=width, num_image_text_embeds=settings.tokens)
        else:
            made = MlpProjection(embed_width, width, settings.tokens)
        processors = {
            name: base if name.startswith("single_") and settings.blocks == "double" else _processor(transformer, settings, base)
            for name, base in transformer.attn_processors.items()
        }
    transformer.encoder_hid_proj = MultiIPAdapterImageProjection([made.to(device)])
    transformer.set_attn_processor(processors)
    for adapted in modules(transformer):
        adapted.to(device).requires_grad_(True)


def _processor(
    transformer: FluxTransformer2DModel | QwenImageTransformer2DModel, settings: AdapterSettings, base: Any
) -> nn.Module:
    width, result = int(transformer.config.joint_attention_dim), next(transformer.parameters()).dtype
    made: Any
    if read_by_diffusers(transformer, settings):
        made = FluxIPAdapterAttnProcessor(transformer.inner_dim, width, num_tokens=(settings.tokens,), scale=settings.scale)
        for name in ("to_k_ip", "to_v_ip"):
            setattr(made, name, nn.ModuleList([WideLinear(width, transformer.inner_dim, bias=True, result=result)]))
        nn.init.zeros_(made.to_v_ip[0].bias)
        nn.init.zeros_(made.to_v_ip[0].weight)
    else:
        kind = FluxReferenceAttention if isinstance(transformer, FluxTransformer2DModel) else QwenReferenceAttention
        heads, head_width = transformer.config.num_attention_heads, transformer.config.attention_head_dim
        made = kind(base, width=width, heads=heads, head_width=head_width, scale=settings.scale, result=result)
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
