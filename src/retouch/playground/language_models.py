"""The playground's language models in a recipe: published families in small, whose weights ship with the package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from retouch.models.base import Described, Dtype, Size
from retouch.models.emu3.family import Emu3Family
from retouch.models.language import PretrainedLanguageModel
from retouch.models.qwen_vl.family import QwenFamily
from retouch.playground.models import playground_weights

if TYPE_CHECKING:
    import torch

    from retouch.protocols import AutoregressiveModel


class PlaygroundLanguageModel(PretrainedLanguageModel):
    """What the playground's language models have in common."""

    path: str | None = None  # type: ignore[assignment]
    """Folder of other weights; null takes those that ship with the package."""
    dtype: Dtype = "float32"
    """Type of the frozen weights and of the forward pass; log-probabilities are fp32 in any case."""

    marker: ClassVar[str] = "config.json"
    """A file that its folder must contain."""
    built_by: ClassVar[tuple[str, str]]
    """What messages call it, and the command that builds its weights."""

    @property
    def shipped(self) -> Path:
        """The folder of its weights in the package."""
        raise NotImplementedError

    @property
    def folder(self) -> Path:
        """Where its weights are."""
        return Path(self.path) if self.path else self.shipped

    @property
    def source(self) -> str:
        return self.path or "the built-in model"

    def find_weights(self) -> tuple[Path | None, bool]:
        return self.folder, True

    def fetch_weights(self) -> Path:
        if not (self.folder / self.marker).is_file():
            raise ValueError(f"{self.folder} holds no playground {self.built_by[0]}; `{self.built_by[1]}` makes it")
        return self.folder


class PlaygroundWriter(PlaygroundLanguageModel, QwenFamily):
    """The built-in tiny Qwen2.5-VL, which writes for the playground's editor."""

    kind: Literal["playground-writer"] = "playground-writer"

    built_by = ("writer", "retouch playground build --writer")

    @property
    def shipped(self) -> Path:
        return playground_weights("writer")

    def build(self, *, device: torch.device, gradient_checkpointing: bool) -> AutoregressiveModel:
        return self.load(self.fetch_weights(), device=device, gradient_checkpointing=gradient_checkpointing)

    def editor_problems(self) -> Iterator[str]:
        yield from ()

    def prompt_problems(self) -> Iterator[str]:
        yield "policy.model.kind: playground-writer writes for an editor; take playground-enhancer, or renderer.kind response"


class PlaygroundEnhancer(PlaygroundLanguageModel, QwenFamily):
    """The built-in tiny Qwen2-VL, which says people's requests in the words of the playground's text-to-image model; it reads no
    images."""

    kind: Literal["playground-enhancer"] = "playground-enhancer"

    marker = "adapter.json"
    built_by = ("enhancer", "retouch playground build --text-to-image")

    @property
    def shipped(self) -> Path:
        return playground_weights("enhancer")

    def build(self, *, device: torch.device, gradient_checkpointing: bool) -> AutoregressiveModel:
        folder = self.fetch_weights()
        template = json.loads((folder / "adapter.json").read_text(encoding="utf-8"))["template"]
        return self.load(folder, device=device, gradient_checkpointing=gradient_checkpointing, template=template)


class PlaygroundEmu3(PlaygroundLanguageModel, Emu3Family):
    """The built-in tiny Emu3, which edits the playground's images."""

    kind: Literal["playground-emu3"] = "playground-emu3"
    start: Literal["s", "sc", "sc-unfinished"] = "sc"
    """Which of the packaged weights: trained on single edits (s), or also on some of two and three (sc), in the last case on
    demonstrations that mostly lack one of them (sc-unfinished)."""

    built_by = ("Emu3", "retouch playground build --emu3")

    @property
    def shipped(self) -> Path:
        return playground_weights("emu3") / self.start

    @property
    def size(self) -> Size | None:
        """The playground's own."""
        return None

    @property
    def planned_size(self) -> Size:
        from retouch.playground.world.scenes import SIZE

        return SIZE, SIZE

    def build(self, *, device: torch.device, gradient_checkpointing: bool) -> AutoregressiveModel:
        parts = playground_weights("emu3")
        return self.load(
            self.fetch_weights(),
            tokenizer=parts / "tokenizer",
            autoencoder=parts / "autoencoder",
            device=device,
            gradient_checkpointing=gradient_checkpointing,
        )

    def describe(self, folder: Path | None) -> Described:
        return self.describe_parts(folder, playground_weights("emu3") / "autoencoder")
