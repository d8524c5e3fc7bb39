"""The sections of the playground's image models: published families with few parameters, whose weights are packaged."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from retouch.config.section import Pixels
from retouch.models.base import DiffusersModel, Dtype, Size
from retouch.records.files import read_json
from retouch_models.flux import FluxFillModel
from retouch_models.qwen_image import QwenImageEditModel, QwenImageModel
from retouch_worlds.playground import playground_weights
from retouch_worlds.playground.scenes import SIZE

if TYPE_CHECKING:
    import torch

    from retouch.protocols import DenoisingModel


class PlaygroundFamily(DiffusersModel):
    """Base class of the sections of the playground's image models."""

    path: str | None = None  # type: ignore[assignment]
    """Folder of other weights of the same shape; null takes the packaged weights."""
    size: Pixels | None = None
    """Height and width of the output images in pixels; null takes the size of the playground's images."""
    dtype: Dtype = "float32"
    """Type of the frozen weights and of the forward pass; log-probabilities are fp32 in any case."""

    packaged = True
    shipped: ClassVar[str]
    """Name of the packaged folder of the model's weights."""
    built_by: ClassVar[tuple[str, str]]
    """The model's name in messages, and the command that builds its weights."""
    stated: ClassVar[tuple[str, ...]]
    """Options of ``from_pretrained`` that are stored in ``adapter.json`` next to the weights."""

    @property
    def folder(self) -> Path:
        """The folder of the model's weights."""
        return Path(self.path) if self.path else playground_weights(self.shipped)

    def find_weights(self) -> tuple[Path | None, bool]:
        return self.folder, True

    def fetch_weights(self) -> Path:
        return self.folder

    @property
    def source(self) -> str:
        return self.path or "the built-in model"

    def build(self, *, device: torch.device) -> DenoisingModel:
        if not (self.folder / "adapter.json").is_file():
            raise ValueError(f"{self.folder} contains no playground {self.built_by[0]}; build it with `{self.built_by[1]}`")
        return self.load(self.folder, device=device)

    def options(self, source: Path) -> dict[str, Any]:
        stated = read_json(source / "adapter.json")
        return {**super().options(source), **{key: stated[key] for key in self.stated}}

    @property
    def planned_size(self) -> Size:  # type: ignore[override]
        return SIZE, SIZE


class PlaygroundModel(PlaygroundFamily, QwenImageEditModel):
    """The built-in tiny editor."""

    kind: Literal["playground"] = "playground"  # type: ignore[assignment]

    shipped = "editor"
    built_by = ("model", "retouch tools playground")
    stated = ("template", "condition_area", "source_area")


class PlaygroundTextToImage(PlaygroundFamily, QwenImageModel):
    """The built-in tiny text-to-image model: as a policy, or as the image model behind a writer (``renderer.kind: prompt``)."""

    kind: Literal["playground-text-to-image"] = "playground-text-to-image"  # type: ignore[assignment]

    shipped = "text_to_image"
    built_by = ("text-to-image model", "retouch tools playground --text-to-image")
    stated = ("template", "size")

    def options(self, source: Path) -> dict[str, Any]:
        stated = super().options(source)
        return {**stated, "size": self.size or tuple(stated["size"])}


class PlaygroundWords(PlaygroundFamily, FluxFillModel):
    """The built-in tiny model that renders words on signs, for ``playground-words`` data."""

    kind: Literal["playground-words"] = "playground-words"  # type: ignore[assignment]

    shipped = "words"
    built_by = ("model that renders words", "retouch tools playground --words")
    stated = ("max_sequence_length",)

    @property
    def planned_size(self) -> Size:  # type: ignore[override]
        from retouch_worlds.playground.words import HEIGHT, WIDTH

        return HEIGHT, WIDTH
