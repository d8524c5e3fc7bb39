"""IP-Adapters (arXiv 2308.06721) on the transformer of Flux or Qwen-Image: a frozen CLIP (arXiv 2103.00020) or SigLIP (arXiv
2303.15343) turns the reference image into a vector, this becomes a few tokens, and the transformer's blocks attend to them.

The adapter is part of the transformer (``encoder_hid_proj`` and the blocks' attention processors), so its weights are trained,
copied, saved and swapped like all others. It initially adds exactly 0, because the weights of its values are 0. In single blocks,
where text and image are one sequence, text attends to the reference too. ``ip_adapter.safetensors`` has these names:

    image_proj.proj.weight, .bias                  a linear projection, or
    image_proj.proj.0.weight, ... proj.2.bias      the two layers of an MLP
    image_proj.norm.weight, .bias                  LayerNorm of the tokens
    image_proj.mlp. ..., image_proj.qformer. ...   an MLP and a Q-Former, whose tokens are added
    ip_adapter.<k>.to_k_ip.weight, .to_v_ip.weight keys and values of block k: double blocks first, then single ones
    ip_adapter.<k>.to_k_ip.bias, .to_v_ip.bias     only in the layout that diffusers loads

An adapter with 4 or 16 tokens, a linear projection and only double blocks uses diffusers' own class, and ``load_ip_adapter`` of
diffusers' Flux pipelines can load it. Others have the layout and names of the larger adapters for FLUX.1: no bias, normed keys, and
an output that is added before the output projection. Files with the names of XLabs' adapters can be read too.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from diffusers import FluxTransformer2DModel, QwenImageTransformer2DModel
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.embeddings import ImageProjection, MultiIPAdapterImageProjection, apply_rotary_emb
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from diffusers.models.transformers.transformer_qwenimage import apply_rotary_emb_qwen
from jaxtyping import Float
from PIL.Image import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from retouch.core.random import generator
from retouch.models.parts import LOCAL
from retouch.models.pipeline import ModelWrapper
from retouch.models.quantized import compute_dtype
from retouch.protocols import DenoisingModel
from retouch.records.files import read_json
from retouch.types import Conditioning, Task

FILE = "ip_adapter.safetensors"
_MLP, _QFORMER = "image_proj.mlp.", "image_proj.qformer."
_XLABS_NAMES = (
    ("ip_adapter_proj_model.", "image_proj."),
    ("double_blocks.", "ip_adapter."),
    ("processor.", ""),
    ("ip_adapter_double_stream_k_proj", "to_k_ip"),
    ("ip_adapter_double_stream_v_proj", "to_v_ip"),
)


def write(transformer: nn.Module, folder: Path) -> Path:
    """Write the adapter's current weights; returns the file."""
    file = folder / FILE
    save_file({name: tensor.detach().clone().contiguous() for name, tensor in _named(transformer).items()}, file)
    return file


@torch.no_grad()
def read(transformer: nn.Module, path: Path) -> None:
    """Load the weights of a file, or of ``ip_adapter.safetensors`` in a folder, into the transformer's adapter. If the adapter has
    an MLP and the file has an MLP and a Q-Former, only the MLP is loaded.

    Raises ValueError for a file of another kind, and for an adapter with other settings.
    """
    file = path / FILE if path.is_dir() else path
    if not file.is_file() or file.suffix != ".safetensors":
        raise ValueError(f"{path} is neither a folder with {FILE} nor a .safetensors file; other formats are not read")
    try:
        loaded = load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    stored = {}
    for name, tensor in loaded.items():
        for xlabs_name, own_name in _XLABS_NAMES:
            name = name.replace(xlabs_name, own_name)
        stored[name] = tensor
    own = _named(transformer)
    if f"{_MLP}norm.weight" in stored and f"{_MLP}norm.weight" not in own:
        stored = {name.replace(_MLP, "image_proj."): each for name, each in stored.items() if not name.startswith(_QFORMER)}
    differing = sorted(stored.keys() ^ own.keys()) or sorted(name for name in own if stored[name].shape != own[name].shape)
    if differing:
        raise ValueError(f"{file} is an adapter with other settings than the recipe's; the first difference is {differing[0]}")
    for name, tensor in own.items():
        tensor.copy_(stored[name])


def _named(transformer: nn.Module) -> dict[str, Tensor]:
    """The adapter's tensors by their names in a file."""
    found: list[Any] = modules(transformer)
    projection = found[0].image_projection_layers[0].state_dict()
    named = {f"image_proj.{name.replace('image_embeds.', 'proj.')}": tensor for name, tensor in projection.items()}
    for k, processor in enumerate(found[1:]):
        for name, tensor in processor.state_dict().items():
            named[f"ip_adapter.{k}.{name.replace('_ip.0.', '_ip.')}"] = tensor
    return named


class Float32Linear(nn.Linear):
    """A linear layer with fp32 weights, so that small updates are not rounded away, and an output of ``output_dtype``."""

    def __init__(self, width: int, out_width: int, *, bias: bool, output_dtype: torch.dtype) -> None:
        super().__init__(width, out_width, bias=bias, dtype=torch.float32)
        self.output_dtype = output_dtype

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.float()).to(self.output_dtype)


class ReferenceAttention(nn.Module):
    """Base class of both families' attention processors. ``base``: the original processor, which is used alone if ``scale`` is 0 or
    there is no reference. A processor gets its attention module as an argument and does not contain the module's weights.

    Source: IP-Adapter (Ye et al. 2023, arXiv 2308.06721), decoupled cross-attention.
    """

    def __init__(self, base: Any, *, width: int, heads: int, head_width: int, scale: float, output_dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.scale = scale
        self.heads = (heads, head_width)
        self.to_k_ip = Float32Linear(width, heads * head_width, bias=False, output_dtype=output_dtype)
        self.to_v_ip = Float32Linear(width, heads * head_width, bias=False, output_dtype=output_dtype)
        self.backend: AttentionBackendName | None = None

    @property
    def _attention_backend(self) -> AttentionBackendName | None:
        """The attribute that diffusers' ``set_attention_backend`` sets on a processor."""
        return self.backend

    @_attention_backend.setter
    def _attention_backend(self, backend: AttentionBackendName | None) -> None:
        self.backend = self.base._attention_backend = backend

    def attend(self, query: Float[Tensor, "r s h d"], reference: Float[Tensor, "r 1 n w"]) -> Float[Tensor, "r s hd"]:
        """Return the scaled attention output for the reference tokens; queries are normed and not rotated."""
        tokens = reference.flatten(1, 2)
        key = rms_norm(self.to_k_ip(tokens).unflatten(-1, self.heads).float(), self.heads[1:], eps=1e-5).to(query.dtype)
        value = self.to_v_ip(tokens).unflatten(-1, self.heads)
        found: Tensor = dispatch_attention_fn(query, key, value, backend=self.backend)
        return self.scale * found.flatten(2).to(query.dtype)


class FluxReferenceAttention(ReferenceAttention):
    """Attention to a reference in Flux; the queries are the image stream in double blocks, the whole sequence in single blocks."""

    def __call__(  # diffusers reads the names of a processor's arguments here
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        ip_hidden_states: list[Tensor] | None = None,
    ) -> Any:
        if ip_hidden_states is None or self.scale == 0:
            return self.base(attn, hidden_states, encoder_hidden_states, attention_mask, image_rotary_emb)
        query = attn.norm_q(attn.to_q(hidden_states).unflatten(-1, self.heads))
        key = attn.norm_k(attn.to_k(hidden_states).unflatten(-1, self.heads))
        value = attn.to_v(hidden_states).unflatten(-1, self.heads)
        found = self.attend(query, ip_hidden_states[0])
        if encoder_hidden_states is not None:
            text = attn.add_q_proj(encoder_hidden_states), attn.add_k_proj(encoder_hidden_states)
            query = torch.cat([attn.norm_added_q(text[0].unflatten(-1, self.heads)), query], dim=1)
            key = torch.cat([attn.norm_added_k(text[1].unflatten(-1, self.heads)), key], dim=1)
            value = torch.cat([attn.add_v_proj(encoder_hidden_states).unflatten(-1, self.heads), value], dim=1)
        if image_rotary_emb is not None:
            query, key = (apply_rotary_emb(each, image_rotary_emb, sequence_dim=1) for each in (query, key))
        output = dispatch_attention_fn(query, key, value, attn_mask=attention_mask, backend=self.backend).flatten(2).to(query.dtype)
        if encoder_hidden_states is None:
            return output + found
        text_output, image = output.tensor_split([encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](image + found)), attn.to_add_out(text_output.contiguous())


class QwenReferenceAttention(ReferenceAttention):
    """Attention to a reference in Qwen-Image; the queries are the image stream, including the tokens of source images."""

    def __call__(  # diffusers reads the names of a processor's arguments here
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        encoder_hidden_states_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
        ip_hidden_states: list[Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        if ip_hidden_states is None or self.scale == 0:
            return self.base(
                attn, hidden_states, encoder_hidden_states, encoder_hidden_states_mask, attention_mask, image_rotary_emb
            )
        queries = [attn.norm_added_q(attn.add_q_proj(encoder_hidden_states).unflatten(-1, self.heads))]
        queries.append(attn.norm_q(attn.to_q(hidden_states).unflatten(-1, self.heads)))
        keys = [attn.norm_added_k(attn.add_k_proj(encoder_hidden_states).unflatten(-1, self.heads))]
        keys.append(attn.norm_k(attn.to_k(hidden_states).unflatten(-1, self.heads)))
        values = [attn.add_v_proj(encoder_hidden_states), attn.to_v(hidden_states)]
        found = self.attend(queries[1], ip_hidden_states[0])
        if image_rotary_emb is not None:
            angles = image_rotary_emb[::-1]  # diffusers passes (image, text)
            queries = [apply_rotary_emb_qwen(each, of, use_real=False) for each, of in zip(queries, angles, strict=True)]
            keys = [apply_rotary_emb_qwen(each, of, use_real=False) for each, of in zip(keys, angles, strict=True)]
        mask = None
        if encoder_hidden_states_mask is not None:
            image_mask = encoder_hidden_states_mask.new_ones(hidden_states.shape[:2], dtype=torch.bool)
            mask = torch.cat([encoder_hidden_states_mask.bool(), image_mask], dim=1)[:, None, None]
        value = torch.cat(values, dim=1).unflatten(-1, self.heads)
        output = dispatch_attention_fn(
            torch.cat(queries, dim=1), torch.cat(keys, dim=1), value, attn_mask=mask, backend=self.backend
        )
        text, image = output.flatten(2).to(values[0].dtype).tensor_split([encoder_hidden_states.shape[1]], dim=1)
        return attn.to_out[1](attn.to_out[0](image + found)), attn.to_add_out(text.contiguous())


_CLIP = (CLIPVisionModelWithProjection, CLIPImageProcessorPil, "image_embeds")
_SIGLIP = (SiglipVisionModel, SiglipImageProcessorPil, "pooler_output")
_KINDS: dict[str, tuple[Any, Any, str]] = {
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
}


class ImageEncoder:
    """Encodes images as CLIP's projected embedding (as diffusers' pipelines do) or SigLIP's pooled output.

    ``width``: width of the vector. The folder may contain the whole two-tower model or only the vision model.
    """

    def __init__(self, model: nn.Module, processor: Any, *, field: str, width: int) -> None:
        self.model = model.requires_grad_(False).eval()
        self.width = width
        self._processor = processor
        self._field = field

    @classmethod
    def from_pretrained(cls, path: Path | str, *, dtype: torch.dtype, device: torch.device | str) -> "ImageEncoder":
        """Load the encoder from a local folder (safetensors, no remote code). Raises ValueError for another kind of model."""
        folder = Path(path)
        model_class, processor_class, field = _KINDS[_config(folder)["model_type"]]
        settings: dict[str, Any] = {"dtype": dtype}
        width = embed_width(folder)
        if model_class is CLIPVisionModelWithProjection:
            settings["config"] = CLIPVisionConfig.from_pretrained(folder, local_files_only=True, projection_dim=width)
        model = model_class.from_pretrained(folder, **settings, **LOCAL).to(device)
        return cls(model, processor_class.from_pretrained(folder, local_files_only=True), field=field, width=width)

    @torch.no_grad()
    def embed(self, images: Sequence[Image]) -> Float[Tensor, "r d"]:
        """Return one fp32 vector per image. Images may have any size; the encoder's image processor resizes them."""
        rgb = [image.convert("RGB") for image in images]
        pixels = self._processor(images=rgb, input_data_format="channels_last", return_tensors="pt")["pixel_values"]
        weight = next(self.model.parameters())
        embeds: Tensor = getattr(self.model(pixels.to(weight)), self._field)
        return embeds.float()


def embed_width(path: Path | str) -> int:
    """Return the width of the vectors of the encoder in a folder: CLIP's ``projection_dim``, or the width of SigLIP's vision tower.

    Raises ValueError for another kind of model.
    """
    config = _config(Path(path))
    match config["model_type"]:  # missing values are transformers' defaults
        case "clip":
            return int(CLIPConfig(**config).projection_dim)
        case "siglip":
            return int(SiglipConfig(**config).vision_config.hidden_size)
        case "clip_vision_model":
            return int(CLIPVisionConfig(**config).projection_dim)
    return int(SiglipVisionConfig(**config).hidden_size)


def _config(folder: Path) -> dict[str, Any]:
    place = folder / "config.json"
    if not place.is_file():
        raise ValueError(f"policy.train.encoder: {folder} contains no model (config.json)")
    config = dict(read_json(place))
    if (kind := config.get("model_type")) not in _KINDS:
        raise ValueError(f"policy.train.encoder: {folder} contains a model of type {kind!r}; use one of type {', '.join(_KINDS)}")
    return config


class ReferenceModel(ModelWrapper[DenoisingModel]):
    """``model``, also conditioned on each task's reference image (implements ``DenoisingModel``).

    The negative branch of guidance gets zeros as its reference, like rows with a dropped reference in supervised learning.
    ``encode`` raises ValueError for a task without a reference.

    Source: IP-Adapter (Ye et al. 2023, arXiv 2308.06721).
    """

    def __init__(self, model: DenoisingModel, encoder: ImageEncoder) -> None:
        super().__init__(model)
        self.encoder = encoder

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        references = []
        for task in tasks:
            if task.reference is None:
                raise ValueError(f"task {task.id!r} has no reference image, which an IP-Adapter needs; add one to the data")
            references.append(task.reference)
        return _with_reference(self.model.encode(tasks), self.encoder.embed(references))

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        return _with_reference(self.model.encode_negative(tasks), torch.zeros(len(tasks), self.encoder.width))


def _with_reference(conditioning: Conditioning, embeds: Float[Tensor, "p d"]) -> Conditioning:
    device = next(iter(conditioning.tensors.values())).device
    return replace(conditioning, tensors={**conditioning.tensors, Conditioning.REFERENCE: embeds.to(device)})


_ROWS_OF_16_TOKENS = 65536
_KEYS = 32
_QFORMER_HEADS = 8


@runtime_checkable
class AdapterSettings(Protocol):
    """The settings of an adapter (``retouch.models.train.IpAdapter`` documents them)."""

    tokens: int
    projection: Literal["linear", "mlp", "qformer"]
    blocks: Literal["double", "all"]
    scale: float


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
    width, dtype = int(transformer.config.joint_attention_dim), compute_dtype(transformer)
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
