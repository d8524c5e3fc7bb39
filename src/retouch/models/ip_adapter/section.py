"""The recipe's section of an IP-Adapter: it puts the adapter on the transformer, encodes references for it, and exports it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from retouch.config.section import Count, Positive, Share
from retouch.models.train import ExportFiles, Lora, TrainSection

if TYPE_CHECKING:
    import torch
    from torch import nn

    from retouch.protocols import DenoisingModel


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
        from retouch.models.common.pretrained import fetch_encoder
        from retouch.models.ip_adapter import adapter as files
        from retouch.models.ip_adapter.adapter import attach, embed_width

        module.requires_grad_(False).eval()
        if self.lora is not None:
            self.lora.make_trainable(module, targets=targets, seed=seed)
        attach(module, self, embed_width=embed_width(fetch_encoder(self.encoder)), seed=seed)
        if self.init_from is not None:
            try:
                files.read(module, Path(self.init_from))
            except ValueError as error:
                raise ValueError(f"policy.train.init_from: {error}") from None

    def with_inputs(self, model: DenoisingModel, *, dtype: str, device: torch.device) -> DenoisingModel:
        """Return the model, also conditioned on each task's reference. Loads the image encoder in ``dtype``."""
        import torch

        from retouch.models.common.pretrained import fetch_encoder
        from retouch.models.ip_adapter.adapter import ImageEncoder, ReferenceModel

        encoder = ImageEncoder.from_pretrained(fetch_encoder(self.encoder), dtype=getattr(torch, dtype), device=device)
        return ReferenceModel(model, encoder)

    def export(self, module: Any, to: Path, written: ExportFiles) -> None:
        """Write ``ip_adapter.safetensors``, and ``ip_adapter.json`` with its settings and whether diffusers can load it."""
        from retouch.models.ip_adapter import adapter as files
        from retouch.models.ip_adapter.adapter import loadable_by_diffusers

        files.write(module, to)
        about = self.model_dump(include={"tokens", "projection", "blocks", "scale"})
        about |= {"encoder": self.encoder, "diffusers": loadable_by_diffusers(module, self)}
        (to / "ip_adapter.json").write_text(json.dumps(about, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if self.lora is not None:
            self.lora.export(module, to, written)
