"""The recipe's section of Janus-Pro, a policy that generates images as tokens."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from retouch.models.base import PartConfigs, TaskInputs
from retouch.models.language import PretrainedLanguageModel, TokenKind

if TYPE_CHECKING:
    import torch

    from retouch.protocols import AutoregressiveModel


class JanusModel(PretrainedLanguageModel):
    """Janus-Pro, text to image: every completion has exactly as many codes as one image of the model.

    Source: Janus-Pro (arXiv 2501.17811); weights deepseek-community/Janus-Pro-1B and -7B.
    """

    kind: Literal["janus"] = "janus"
    weights: str | None = None
    """Folder ``writer`` of an export of full weights, which replaces the weights of the trained modules."""

    takes = TaskInputs(images=(0, 0))

    @property
    def token_kinds(self) -> frozenset[TokenKind]:
        return frozenset({"vision"})

    @property
    def image_grammar(self) -> bool:
        return True

    def build(self, *, device: torch.device, gradient_checkpointing: bool) -> AutoregressiveModel:
        from retouch.models.janus.model import load_janus

        return load_janus(
            self.fetch_weights(),
            weights=None if self.weights is None else Path(self.weights),
            dtype=self.torch_dtype,
            attention=self.attention,
            device=device,
            gradient_checkpointing=gradient_checkpointing,
        )

    def describe(self, folder: Path | None) -> PartConfigs | None:
        """None: the model is not rehearsed."""
        return None
