"""An IP-Adapter (arXiv 2308.06721) on the transformer of Flux or Qwen-Image: an image embedding becomes a few tokens, to which the
transformer's blocks attend.

The adapter is part of the transformer (``encoder_hid_proj`` and the blocks' attention processors), so its weights are trained,
copied, saved and swapped like all others. It initially adds exactly 0, because the weights of its values are 0.
"""

from typing import Any, Literal, Protocol, runtime_checkable

import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from jaxtyping import Float
from torch import Tensor, nn

from retouch.core.random import generator
from retouch.models.ip_adapter.attention import Float32Linear, FluxReferenceAttention, QwenReferenceAttention

_ROWS_OF_16_TOKENS = 65536
_KEYS = 32
_QFORMER_HEADS = 8


@runtime_checkable
class AdapterSettings(Protocol):
    """The settings of an adapter (``retouch.models.ip_adapter.section.IpAdapter``)."""

    @property
    def tokens(self) -> int:
        """Number of tokens per reference image."""
        ...

    @property
    def projection(self) -> Literal["linear", "mlp", "qformer"]:
        """The projection of the embedding to tokens: one layer, an MLP with two, or an MLP and a Q-Former."""
        ...

    @property
    def blocks(self) -> Literal["double", "all"]:
        """The blocks that attend to the tokens: Flux has double and single blocks, Qwen-Image only double ones."""
        ...

    @property
    def scale(self) -> float:
        """Factor of the attention to the tokens."""
        ...


class MLPProjection(nn.Module):
    """Projects an embedding to tokens with a hidden layer of twice its width and a final LayerNorm."""

    def __init__(self, embed_width: int, width: int, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.proj = nn.Sequential(nn.Linear(embed_width, 2 * embed_width), nn.GELU(), nn.Linear(2 * embed_width, tokens * width))
        self.norm = nn.LayerNorm(width)

    def forward(self, embeds: Float[Tensor, "r d"]) -> Float[Tensor, "r n w"]:
        tokens: Tensor = self.norm(self.proj(embeds).unflatten(-1, (self.tokens, -1)))
        return tokens


class QFormerProjection(nn.Module):
    """The tokens of an MLP plus those of a Q-Former, as in Calligrapher (arXiv 2506.24123)."""

    def __init__(self, embed_width: int, width: int, tokens: int) -> None:
        super().__init__()
        self.mlp = MLPProjection(embed_width, width, tokens)
        self.qformer = _QFormer(embed_width, width, tokens)

    def forward(self, embeds: Float[Tensor, "r d"]) -> Float[Tensor, "r n w"]:
        tokens: Tensor = self.mlp(embeds) + self.qformer(embeds)
        return tokens


class _QFormer(nn.Module):
    """A learned query for each token attends to ``_KEYS`` vectors that an MLP computes from the embedding. The parameters have the
    names of Calligrapher's checkpoint."""

    def __init__(self, embed_width: int, width: int, tokens: int) -> None:
        super().__init__()
        self.query_embeds = nn.Parameter(torch.randn(tokens, width))
        self.id_proj = nn.Sequential(nn.Linear(embed_width, 2 * embed_width), nn.GELU(), nn.Linear(2 * embed_width, _KEYS * width))
        self.cross_attn = nn.MultiheadAttention(width, _QFORMER_HEADS, batch_first=True)
        self.cross_attn_norm = nn.LayerNorm(width)
        self.norm = nn.LayerNorm(width)

    def forward(self, embeds: Float[Tensor, "r d"]) -> Float[Tensor, "r n w"]:
        keys = self.id_proj(embeds).unflatten(-1, (_KEYS, -1))
        queries = self.query_embeds.expand(len(embeds), -1, -1)
        attended, _ = self.cross_attn(queries, keys, keys, need_weights=False)
        tokens: Tensor = self.norm(self.cross_attn_norm(attended + queries))
        return tokens


def loadable_by_diffusers(transformer: nn.Module, settings: AdapterSettings) -> bool:
    """Whether ``load_ip_adapter`` of diffusers' Flux pipelines can load the adapter. It assumes 16 tokens if the projection has
    65536 rows, and 4 tokens otherwise."""
    if not isinstance(transformer, FluxTransformer2DModel) or settings.projection != "linear" or settings.blocks != "double":
        return False
    rows = settings.tokens * int(transformer.config.joint_attention_dim)
    return settings.tokens == (16 if rows == _ROWS_OF_16_TOKENS else 4)


def attach(transformer: nn.Module, settings: AdapterSettings, *, embed_width: int, seed: int) -> None:
    """Add a new, trainable adapter in fp32 to the transformer, with initial weights from the seed. Other weights do not change.

    Raises ValueError for a transformer of another family, and for single blocks of a transformer without them.

    Source: IP-Adapter (Ye et al. 2023, arXiv 2308.06721); diffusers' FluxIPAdapterAttnProcessor.
    """
    if not isinstance(transformer, FluxTransformer2DModel | QwenImageTransformer2DModel):
        raise ValueError(f"IP-Adapters are supported for Flux and Qwen-Image, not for {type(transformer).__name__}")
    if settings.blocks == "all" and isinstance(transformer, QwenImageTransformer2DModel):
        raise ValueError("policy.train.blocks: Qwen-Image has only double blocks; use 'double'")
    device, width = transformer.device, int(transformer.config.joint_attention_dim)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "ip-adapter").initial_seed())
        projection: nn.Module
        if settings.projection == "linear":
            projection = ImageProjection(embed_width, cross_attention_dim=width, num_image_text_embeds=settings.tokens)
        else:
            kind = MLPProjection if settings.projection == "mlp" else QFormerProjection
            projection = kind(embed_width, width, settings.tokens)
        processors = {
            name: base if name.startswith("single_") and settings.blocks == "double" else _processor(transformer, settings, base)
            for name, base in transformer.attn_processors.items()
        }
    transformer.encoder_hid_proj = MultiIPAdapterImageProjection([projection.to(device)])
    transformer.set_attn_processor(processors)
    for adapted in modules(transformer):
        adapted.to(device).requires_grad_(True)


def _processor(
    transformer: FluxTransformer2DModel | QwenImageTransformer2DModel, settings: AdapterSettings, base: Any
) -> nn.Module:
    width, dtype = int(transformer.config.joint_attention_dim), next(transformer.parameters()).dtype
    processor: Any
    if loadable_by_diffusers(transformer, settings):
        processor = FluxIPAdapterAttnProcessor(transformer.inner_dim, width, num_tokens=(settings.tokens,), scale=settings.scale)
        for name in ("to_k_ip", "to_v_ip"):
            setattr(processor, name, nn.ModuleList([Float32Linear(width, transformer.inner_dim, bias=True, output_dtype=dtype)]))
        nn.init.zeros_(processor.to_v_ip[0].bias)
        nn.init.zeros_(processor.to_v_ip[0].weight)
    else:
        kind = FluxReferenceAttention if isinstance(transformer, FluxTransformer2DModel) else QwenReferenceAttention
        heads, head_width = transformer.config.num_attention_heads, transformer.config.attention_head_dim
        processor = kind(base, width=width, heads=heads, head_width=head_width, scale=settings.scale, output_dtype=dtype)
        nn.init.zeros_(processor.to_v_ip.weight)
    module: nn.Module = processor
    return module


def modules(transformer: nn.Module) -> list[nn.Module]:
    """Return the modules of the adapter: the projection, then the attention processor of each block."""
    found: Any = transformer
    processors = found.attn_processors.values()
    return [found.encoder_hid_proj, *(each for each in processors if isinstance(each, nn.Module) and hasattr(each, "to_k_ip"))]
