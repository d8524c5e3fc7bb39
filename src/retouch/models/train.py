"""The sections of ``policy.train``: all weights of a model, low-rank adapters, or an IP-Adapter."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pydantic import Field

from retouch.config.section import Count, Positive, Section, Share
from retouch.models.pretrained import fetch_encoder

if TYPE_CHECKING:
    import torch
    from torch import nn

    from retouch.models.base import ComfyUINames
    from retouch.protocols import DenoisingModel

Format: TypeAlias = Literal["all", "diffusers", "peft", "comfyui"]
"""The format in which a LoRA is written; ``all``: every format that exists for its model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportFiles:
    """The files that an export writes.

    ``folder``: subfolder for full weights. ``pipeline``: name of the diffusers pipeline that loads a LoRA, or None. ``comfyui``:
    the names of a LoRA's tensors in ComfyUI, or None. ``format``: the formats of a LoRA.
    """

    folder: str
    pipeline: str | None = None
    comfyui: ComfyUINames | None = None
    format: Format = "all"


class TrainSection(Section):
    """Base of the sections that say which weights train. Subclasses also have ``lora``: the LoRA that trains, or None."""

    reference_is_base: ClassVar[bool] = False
    """Whether the reference policy is the model without the trained weights, so that no copy of weights is kept for it."""
    reads_reference: ClassVar[bool] = False
    """Whether the model is conditioned on each task's reference image."""
    reference_dropout: ClassVar[float] = 0.0
    """Share of tasks whose reference image is dropped in supervised phases."""

    def require_files(self) -> None:
        """Raise ValueError if the adapter to start from does not exist."""
        start = getattr(self, "init_from", None)
        if start is not None and not Path(start).exists():
            raise ValueError(f"policy.train.init_from: there is no file or folder {start}")

    def with_inputs(self, model: DenoisingModel, *, dtype: str, device: torch.device) -> DenoisingModel:
        """Extend the model by the inputs that the trained weights read in addition to the model's own inputs."""
        return model

    def trained_dtype(self, dtype: str) -> str:
        """The dtype of the trained weights in the forward pass of a model in ``dtype``."""
        return "float32"

    @abstractmethod
    def make_trainable(self, module: nn.Module, *, targets: Sequence[str], seed: int) -> None:
        """Make the weights of this section trainable, freeze the others, and set eval mode.

        ``targets``: the family's usual LoRA targets (see ``Lora.layers``).
        """

    @abstractmethod
    def export(self, module: Any, to: Path, written: ExportFiles) -> None:
        """Write the trained weights into the folder ``to``."""


class FullWeights(TrainSection):
    """All weights of the transformer train.

    Example::

        >>> retouch.FullWeights().kind
        'full'
    """

    kind: Literal["full"] = "full"

    lora: ClassVar[None] = None

    def trained_dtype(self, dtype: str) -> str:
        return dtype

    def make_trainable(self, module: nn.Module, *, targets: Sequence[str], seed: int) -> None:
        from retouch.models.quantized import is_quantized

        if any(is_quantized(weight) for weight in module.parameters()):
            raise ValueError("policy.train.kind: quantised weights cannot train; use lora, or load the model in bfloat16")
        module.requires_grad_(True).eval()

    def export(self, module: Any, to: Path, written: ExportFiles) -> None:
        module.save_pretrained(to / written.folder)


class Lora(TrainSection):
    """Low-rank adapters train; the model's own weights are frozen and serve as the reference.

    Source: LoRA (Hu et al. 2021, arXiv 2106.09685).

    Example::

        >>> retouch.Lora(rank=32, targets=["to_q", "to_v"]).alpha
        64.0
    """

    kind: Literal["lora"] = "lora"
    rank: Count
    """Inner width of each adapter."""
    alpha: Positive = Field(default_factory=lambda given: 2.0 * given["rank"])
    """The adapter's output is scaled by alpha / rank; the default is 2 * rank."""
    targets: tuple[str, ...] | None = None
    """Names of the linear layers that get an adapter, as endings of their paths; null takes the usual targets of the family."""
    init_from: str | None = None
    """Folder of an existing LoRA to continue from, with the same rank, alpha and targets; null starts at zero. It is a plain LoRA
    in the format of diffusers or PEFT, with its alpha in the file's metadata or in ``adapter_config.json``. Other kinds (DoRA,
    PiSSA, biases, an alpha for each layer) are errors."""
    dropout: Share = 0.0
    """Share of an adapter's inputs that are dropped; anything above 0 makes the ratio differ from 1 at the first step."""
    weights: Literal["base", "float32"] = Field(default="base", exclude_if=lambda weights: weights == "base")
    """Type of the adapters in a bfloat16 model: with ``base`` they compute in bfloat16, and the optimizer updates fp32 master
    weights; with ``float32`` they compute in fp32, which takes more time and memory. In other models the adapters are in fp32."""

    reference_is_base = True

    def trained_dtype(self, dtype: str) -> str:
        return dtype if dtype == "bfloat16" and self.weights == "base" else "float32"

    @property
    def lora(self) -> Lora:
        return self

    def layers(self, usual: Sequence[str]) -> Sequence[str]:
        """The layers that get an adapter, as endings of their paths: ``targets``, or ``usual`` if that is null.

        ``usual``: the usual targets of the model's family. Raises ValueError if both name no layer.
        """
        if self.targets is None and not usual:
            raise ValueError(
                "policy.train.targets: a model of your own has no usual LoRA targets; name the linear layers that get an adapter "
                "by the endings of their names, such as ['to_q', 'to_v']"
            )
        return usual if self.targets is None else self.targets

    def make_trainable(self, module: nn.Module, *, targets: Sequence[str], seed: int) -> None:
        from peft import LoraConfig

        from retouch.models.lora import add_lora

        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            init_lora_weights="gaussian",
            target_modules=list(self.layers(targets)),
        )
        module.requires_grad_(False).eval()
        init_from = None if self.init_from is None else Path(self.init_from)
        add_lora(module, config, init_from=init_from, seed=seed, in_fp32=self.weights == "float32")

    def export(self, module: Any, to: Path, written: ExportFiles) -> None:
        from retouch.models.lora import write_lora

        write_lora(module, to, pipeline=written.pipeline, comfyui=written.comfyui, format=written.format)


class IpAdapter(TrainSection):
    """Trains an IP-Adapter (arXiv 2308.06721), with which the model attends to each task's reference image, and optionally a LoRA;
    the model's own weights are frozen. The reference policy of a KL is the policy at the start of the run, or after a supervised
    phase.

    ``load_ip_adapter`` of diffusers' Flux pipelines reads 4 tokens, or 16 of a full-size model, with a linear projection in double
    blocks.

    Example::

        >>> retouch.IpAdapter(encoder="openai/clip-vit-large-patch14", lora=retouch.Lora(rank=8, alpha=16)).tokens
        4
    """

    kind: Literal["ip-adapter"] = "ip-adapter"
    encoder: str
    """Folder or Hugging Face id of the frozen CLIP or SigLIP model that encodes references (diffusers supports CLIP);
    ``playground`` is the built-in one."""
    tokens: Count = 4
    """Number of tokens per reference; 4, 16 and 128 are usual."""
    projection: Literal["linear", "mlp", "qformer"] = "linear"
    """Projection of the embedding to tokens: one layer, an MLP with two, or the sum of such an MLP and a Q-Former, as in
    Calligrapher."""
    blocks: Literal["double", "all"] = "double"
    """Blocks that attend to the tokens: those with a separate image stream, or Flux's single blocks too."""
    scale: Positive = 1.0
    """Factor of the attention to the reference."""
    dropout: Share = 0.0
    """Share of tasks whose reference is dropped in supervised phases, for guidance; other phases always use it."""
    init_from: str | None = None
    """File, or folder with an ``ip_adapter.safetensors``, with the initial weights; null starts from the model without an
    adapter."""
    lora: Lora | None = None
    """A LoRA that is trained too; null trains only the adapter."""

    reads_reference = True

    @property
    def reference_dropout(self) -> float:  # type: ignore[override]
        return self.dropout

    def make_trainable(self, module: nn.Module, *, targets: Sequence[str], seed: int) -> None:
        """Add the trainable adapter. Raises ValueError if ``init_from`` is an adapter with other tokens, projection or blocks."""
        from retouch.models import ip_adapter

        module.requires_grad_(False).eval()
        if self.lora is not None:
            self.lora.make_trainable(module, targets=targets, seed=seed)
        width = ip_adapter.embed_width(fetch_encoder(self.encoder))
        ip_adapter.attach(module, self, embed_width=width, seed=seed)
        if self.init_from is not None:
            try:
                ip_adapter.read(module, Path(self.init_from))
            except ValueError as error:
                raise ValueError(f"policy.train.init_from: {error}") from None

    def with_inputs(self, model: DenoisingModel, *, dtype: str, device: torch.device) -> DenoisingModel:
        """Return the model, also conditioned on each task's reference. Loads the image encoder in ``dtype``."""
        import torch

        from retouch.models.ip_adapter import ImageEncoder, ReferenceModel

        encoder = ImageEncoder.from_pretrained(fetch_encoder(self.encoder), dtype=getattr(torch, dtype), device=device)
        return ReferenceModel(model, encoder)

    def export(self, module: Any, to: Path, written: ExportFiles) -> None:
        """Write ``ip_adapter.safetensors``, and ``ip_adapter.json`` with its settings and whether diffusers can load it."""
        from retouch.models import ip_adapter

        ip_adapter.write(module, to)
        about = self.model_dump(include={"tokens", "projection", "blocks", "scale"})
        about |= {"encoder": self.encoder, "diffusers": ip_adapter.loadable_by_diffusers(module, self)}
        (to / "ip_adapter.json").write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if self.lora is not None:
            self.lora.export(module, to, written)
