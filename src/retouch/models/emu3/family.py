"""The recipe's section of Emu3, a policy that reads and generates images as tokens."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from retouch.config.section import Pixels
from retouch.models.base import PartConfigs, Size, TaskInputs
from retouch.models.language import PretrainedLanguageModel, TokenKind

if TYPE_CHECKING:
    import torch

    from retouch.models.common.loaded import LoadedLanguageModel
    from retouch.protocols import AutoregressiveModel


class Emu3Family(PretrainedLanguageModel):
    """Base class of the sections of Emu3 and of the playground's tiny Emu3."""

    think: bool = False
    """Allow text before the image ("Let's think step by step")."""
    grammar: bool = True
    """Only complete images of the model's size can be generated; with false, the model may generate malformed images, which get the
    lowest reward."""

    takes = TaskInputs(images=(1, 1))

    @property
    def token_kinds(self) -> frozenset[TokenKind]:
        return frozenset({"text", "vision"} if self.think else {"vision"})

    @property
    def image_grammar(self) -> bool:
        return self.grammar

    def load(self, source: Path | LoadedLanguageModel, *, device: torch.device, **options: Any) -> AutoregressiveModel:
        """Load the model from local folders, or take a loaded one. ``options``: further arguments of ``load_emu3``."""
        from retouch.models.emu3.load import load_emu3
        from retouch.models.emu3.model import DRAW, THINK

        editor: AutoregressiveModel = load_emu3(
            source,
            size=self.planned_size,
            prefill=THINK if self.think else DRAW,
            grammar=self.grammar,
            dtype=self.torch_dtype,
            device=device,
            attention=self.attention,
            **options,
        )
        return editor

    def describe_parts(self, folder: Path | None, autoencoder: Path | None) -> PartConfigs:
        """Describe ``writer`` and ``autoencoder`` from their folders, or as published if one of them is not on this machine."""
        from retouch.models.emu3.load import parts_of_emu3

        if folder is None or autoencoder is None:
            parts: PartConfigs = json.loads((files("retouch.models.emu3") / "emu3.json").read_text(encoding="utf-8"))["parts"]
            return parts
        return parts_of_emu3(folder, autoencoder=autoencoder)


class Emu3Model(Emu3Family):
    """Emu3 as an editor (EARL): it reads the source image as tokens, and generates the edited image as tokens.

    Source: Emu3 (arXiv 2409.18869) and EARL (arXiv 2508.01119); weights BAAI/Emu3-Gen.
    """

    kind: Literal["emu3"] = "emu3"
    path: str
    """Folder or Hugging Face id of the model, in transformers' layout or in the original one (BAAI's, EARL's checkpoints)."""
    tokenizer: str | None = None
    """Folder or id of the tokenizer; null takes the model's. The original tokenizer is Python code, which is never executed;
    Emu3-community/Emu3-Gen-hf has a converted one."""
    autoencoder: str | None = None
    """Folder or id of the autoencoder; null takes the model's. In the original layout, it is a separate repository:
    BAAI/Emu3-VisionTokenizer. Its codes are always computed in fp32."""
    size: Pixels = (256, 256)
    """Height and width of the images in pixels."""

    def build(self, *, device: torch.device, gradient_checkpointing: bool) -> AutoregressiveModel:
        from retouch.models.common.pretrained import fetch_language_model, fetch_tokenizer

        return self.load(
            self.fetch_weights(),
            tokenizer=None if self.tokenizer is None else fetch_tokenizer(self.tokenizer),
            autoencoder=None if self.autoencoder is None else fetch_language_model(self.autoencoder),
            device=device,
            gradient_checkpointing=gradient_checkpointing,
        )

    def find_weights(self) -> tuple[Path | None, bool]:
        from retouch.models.common.pretrained import find_language_model, find_tokenizer

        folder, found = super().find_weights()
        tokenizer_found = self.tokenizer is None or find_tokenizer(self.tokenizer) is not None
        autoencoder_found = self.autoencoder is None or find_language_model(self.autoencoder) is not None
        return folder, found and tokenizer_found and autoencoder_found

    def describe(self, folder: Path | None) -> PartConfigs:
        from retouch.models.common.pretrained import find_language_model

        return self.describe_parts(folder, folder if self.autoencoder is None else find_language_model(self.autoencoder))

    @property
    def planned_size(self) -> Size:
        return self.size
