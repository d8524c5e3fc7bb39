"""The sections of the playground's language models: published families with few parameters, whose weights are packaged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from retouch.models.base import Dtype, PartConfigs, PretrainedLanguageModel, Size
from retouch.records.files import read_json
from retouch_models.language import Emu3Family, QwenFamily
from retouch_worlds.playground import playground_weights
from retouch_worlds.playground.scenes import SIZE

if TYPE_CHECKING:
    import torch

    from retouch.protocols import AutoregressiveModel


class PlaygroundLanguageModel(PretrainedLanguageModel):
    """Base class of the sections of the playground's language models."""

    path: str | None = None  # type: ignore[assignment]
    """Folder of other weights; null takes the packaged weights."""
    dtype: Dtype = "float32"
    """Type of the frozen weights and of the forward pass; log-probabilities are fp32 in any case."""

    marker: ClassVar[str] = "config.json"
    """A file that the folder of the weights must contain."""
    built_by: ClassVar[tuple[str, str]]
    """The model's name in messages, and the command that builds its weights."""
    shipped: ClassVar[str]
    """Name of the packaged folder of the model's weights."""

    @property
    def folder(self) -> Path:
        """The folder of the model's weights."""
        return Path(self.path) if self.path else playground_weights(self.shipped)

    @property
    def source(self) -> str:
        return self.path or "the built-in model"

    @property
    def base_model(self) -> str:  # type: ignore[override]
        return str(self.folder)

    def find_weights(self) -> tuple[Path | None, bool]:
        return self.folder, True

    def fetch_weights(self) -> Path:
        if not (self.folder / self.marker).is_file():
            raise ValueError(f"{self.folder} contains no playground {self.built_by[0]}; build it with `{self.built_by[1]}`")
        return self.folder


class PlaygroundWriter(PlaygroundLanguageModel, QwenFamily):
    """The built-in tiny Qwen2.5-VL, which writes responses for the playground's editor."""

    kind: Literal["playground-writer"] = "playground-writer"

    built_by = ("writer", "retouch tools playground --writer")
    shipped = "writer"

    def build(self, *, device: torch.device, gradient_checkpointing: bool) -> AutoregressiveModel:
        return self.load(self.fetch_weights(), device=device, gradient_checkpointing=gradient_checkpointing)

    def editor_problems(self) -> Iterator[str]:
        yield from ()

    def prompt_problems(self) -> Iterator[str]:
        yield "policy.model.kind: playground-writer writes for an editor; use playground-enhancer, or renderer.kind response"


class PlaygroundEnhancer(PlaygroundLanguageModel, QwenFamily):
    """The built-in tiny Qwen2-VL, which rewrites users' requests with the words that the playground's text-to-image model knows; it
    reads no images."""

    kind: Literal["playground-enhancer"] = "playground-enhancer"

    marker = "adapter.json"
    built_by = ("enhancer", "retouch tools playground --text-to-image")
    shipped = "enhancer"

    def build(self, *, device: torch.device, gradient_checkpointing: bool) -> AutoregressiveModel:
        folder = self.fetch_weights()
        template = read_json(folder / "adapter.json")["template"]
        return self.load(folder, device=device, gradient_checkpointing=gradient_checkpointing, template=template)


class PlaygroundEmu3(PlaygroundLanguageModel, Emu3Family):
    """The built-in tiny Emu3, which edits the playground's images."""

    kind: Literal["playground-emu3"] = "playground-emu3"
    start: Literal["s", "s-distractors", "sc", "sc-unfinished"] = "sc"
    """The packaged weights: ``s`` was trained on single edits, ``sc`` also on some instructions with two or three edits.
    ``s-distractors`` continues from ``s``, on single edits whose instructions also request edits of things that are not in the
    image. ``sc-unfinished`` continues from ``sc``, on demonstrations of several edits, most of which lack one edit."""

    built_by = ("Emu3", "retouch tools playground --emu3")
    shipped = "emu3"

    @property
    def folder(self) -> Path:
        """The folder of the model's weights."""
        return Path(self.path) if self.path else playground_weights(self.shipped) / self.start

    @property
    def size(self) -> Size | None:
        """None: the model uses the size of the playground's images."""
        return None

    @property
    def planned_size(self) -> Size:
        return SIZE, SIZE

    def build(self, *, device: torch.device, gradient_checkpointing: bool) -> AutoregressiveModel:
        parts = playground_weights(self.shipped)
        return self.load(
            self.fetch_weights(),
            tokenizer=parts / "tokenizer",
            autoencoder=parts / "autoencoder",
            device=device,
            gradient_checkpointing=gradient_checkpointing,
        )

    def describe(self, folder: Path | None) -> PartConfigs:
        return self.describe_parts(folder, playground_weights(self.shipped) / "autoencoder")
