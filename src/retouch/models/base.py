"""Base classes of the recipe's sections of image models.

Recipes are read without torch, so this module and every ``family.py`` import torch inside the methods that compute. A published
model is *described* part by part, ``{"transformer": {"class": ..., "config": ...}, "vae": ..., ...}``, so that a step can be
rehearsed before any weight is loaded.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, JsonValue

from retouch.config.imports import build_class, import_class, methods_of
from retouch.config.live import LIVE, live_object
from retouch.config.section import ClassPath, Pixels, Section
from retouch.models.common.comfyui_lora import ComfyUINames
from retouch.protocols import DenoisingModel

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from torch import nn

    from retouch.protocols import AutoregressiveModel

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
Size: TypeAlias = tuple[int, int]
"""(height, width) in px."""
PartConfigs: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The described parts of a model by name. A part has a "class" and a "config"."""
MEGAPIXEL = (1024, 1024)
Area: TypeAlias = Annotated[int, Field(ge=32 * 32)]
"""Area in px of a resized image, whose sides are multiples of 32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskInputs:
    """The inputs of a task that a model reads.

    ``images``: minimum and maximum number of source images. ``mask``: whether it reads a mask of the first source image.
    ``responses``: whether it can also read a writer's response to the task.
    """

    images: tuple[int, int]
    mask: bool = False
    responses: bool = False

    def __str__(self) -> str:
        least, most = self.images
        images = "no image" if most == 0 else "one image" if most == 1 else f"{least} to {most} images"
        return f"{images} and a mask" if self.mask else images


class ImageModel(Section):
    """Base of the image models that a recipe can name, built in or your own. Subclasses override ``build``.

    A class that derives directly from this one is not rehearsed, and its LoRA must name its targets. A model in the layout of a
    diffusers pipeline derives from ``DiffusersModel``.
    """

    kind: str = "import"

    takes: ClassVar[TaskInputs | None] = None
    """The inputs of a task that the model reads; None if they are not known before the model is built."""
    lora_targets: ClassVar[tuple[str, ...]] = ()
    """Endings of the names of the linear layers that get a LoRA if the recipe names none; if empty, the recipe must name some."""
    pipeline: ClassVar[str | None] = None
    """The diffusers pipeline whose ``save_lora_weights`` writes a LoRA of the model; None: no file for diffusers is written."""
    comfyui: ClassVar[ComfyUINames | None] = None
    """The names of the model's modules in a LoRA for ComfyUI; None: no file for ComfyUI is written."""
    uses_image_tokens: ClassVar[bool | None] = None
    """Whether the model reads and generates images as tokens; None if this is not known before the model is built."""
    ip_adapter_blocks: ClassVar[tuple[Literal["double", "all"], ...]] = ()
    """The values of ``policy.train.blocks`` that the model supports; if empty, it cannot have an IP-Adapter."""

    def build(self, *, device: torch.device) -> DenoisingModel:
        """Build the model with its weights; everything except the transformer is frozen. Downloads missing weights.

        Raises ValueError if its folder contains another model.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no build")

    def find_weights(self) -> tuple[Path | None, bool]:
        """Return the local folder of the weights (None if there is none), and whether all weights are on this machine.

        Does not use the network.

        Raises ValueError for a path that can be neither a folder nor a Hugging Face id.
        """
        return None, True

    @property
    def source(self) -> str:
        """The name of the weights in messages."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    # For editors that read a language model's response to the task (``takes.responses``)

    def writer_for(self, editor: DenoisingModel, writer: AutoregressiveModel) -> AutoregressiveModel:
        """Return the language model ``writer`` with prompts that are exactly the tokens that the editor reads before a response.

        Raises ValueError if the two have different tokenizers.
        """
        raise NotImplementedError(f"{type(self).__name__} reads no responses")

    def share_encoder(self, editor: DenoisingModel, writer: nn.Module, *, policy_encodes: bool, base_frozen: bool) -> None:
        """Replace the editor's text encoder by the writer's module if both encode in the same way, so that it is in memory once.

        ``policy_encodes``: the policy encodes the responses, so the module always replaces the text encoder. ``base_frozen``: the
        writer's base weights stay frozen.
        """

    def response_editor(
        self,
        editor: DenoisingModel,
        writer: nn.Module,
        *,
        frozen: bool,
        guided: bool,
        published: Callable[[], AbstractContextManager[None]] | None,
    ) -> Any:
        """Return the editor as a ``retouch.renderers.responses.ResponseEditor``.

        ``frozen``: the editor's own text encoder encodes responses; otherwise the policy's module ``writer`` does. ``guided``: a
        negative branch is encoded too. ``published``: opens a context with the policy's weights from before training, if they are
        kept. Raises ValueError if the editor cannot use the policy's hidden states.
        """
        raise NotImplementedError(f"{type(self).__name__} reads no responses")


class ImportedModel(ImageModel):
    """A model class of your own (``retouch.protocols.DenoisingModel``)."""

    kind: Literal["import"] = "import"
    class_: ClassPath = Field(alias="class")
    """The class, as ``package.module:Class``."""
    args: dict[str, JsonValue] = Field(default={})
    """Keyword arguments of its constructor, or the fields of a class that derives from ``retouch.models.base.ImageModel``."""

    def build(self, *, device: torch.device) -> DenoisingModel:
        members = methods_of(DenoisingModel)
        made: DenoisingModel = build_class(self.class_, self.args, device=device, what="image model", members=members)
        return made

    @property
    def source(self) -> str:
        return self.class_


class DiffusersModel(ImageModel):
    """A model in the layout of its diffusers pipeline."""

    path: str
    """Folder or Hugging Face id of the pipeline; ``python:...`` if a script passed a loaded pipeline to the run."""
    size: Pixels | None = None
    """Height and width of the output images in pixels; with null, an editor derives them from its source image. The images of one
    batch must then have one size, so data with images of several sizes need this key, or ``data.size``."""
    dtype: Dtype = "bfloat16"
    """Type of the frozen weights and of the forward pass; log-probabilities are fp32 in any case."""
    vae_slicing: bool = Field(default=False, exclude_if=operator.not_)
    """Encode and decode one image at a time: less memory, and the same images up to rounding."""
    vae_tiling: bool = Field(default=False, exclude_if=operator.not_)
    """Encode and decode large images in overlapping tiles that are blended: less memory, and slightly different images."""

    takes: ClassVar[TaskInputs] = TaskInputs(images=(0, 0))
    uses_image_tokens = False
    packaged: ClassVar[bool] = False
    """Whether Retouch contains the weights, in a layout of their own that no pipeline of diffusers reads."""
    adapter: ClassVar[str]
    """The class that runs the model, as ``package.module:Class``; it has a method ``from_pretrained``."""
    pipeline: ClassVar[str]
    configurations: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Published configurations: (text, JSON file next to the family's module). The model has the first configuration whose text
    occurs in the lower-case name of ``path``."""

    def build(self, *, device: torch.device) -> DenoisingModel:
        from retouch.models.common.pretrained import fetch_weights

        if self.path.startswith(LIVE):
            return self.load(live_object(self.path, key="model.path"), device=device)
        return self.load(fetch_weights(self.path), device=device)

    def load(self, source: Path | DiffusionPipeline, *, device: torch.device) -> DenoisingModel:
        """Load the model from a local folder, or take it from a loaded pipeline."""
        import torch

        options = {"dtype": getattr(torch, self.dtype), "device": device, "size": self.size, **self.options(source)}
        made: DenoisingModel = self.adapter_class().from_pretrained(source, **options)
        if self.vae_slicing or self.vae_tiling:
            self.limit_vae(made.latents.vae)  # type: ignore[attr-defined]
        return made

    def limit_vae(self, vae: Any) -> None:
        """Enable slicing and tiling of the autoencoder if ``vae_slicing`` and ``vae_tiling`` are set."""
        if self.vae_slicing:
            vae.enable_slicing()
        if self.vae_tiling:
            vae.enable_tiling()

    def options(self, source: Any) -> dict[str, Any]:
        """Further arguments of ``from_pretrained``, besides ``source`` (a folder or a loaded pipeline), dtype, device and size."""
        return {}

    @classmethod
    def adapter_class(cls) -> Any:
        """Return the class that runs the model. Imports torch."""
        return import_class(cls.adapter)

    def find_weights(self) -> tuple[Path | None, bool]:
        from retouch.models.common.pretrained import find_weights

        if self.path.startswith(LIVE):
            return None, True
        folder = find_weights(self.path)
        return folder, folder is not None

    @property
    def source(self) -> str:
        return self.path

    @property
    def has_size(self) -> bool:
        """Whether the size of the output images is known: from the recipe, or from the tasks' source images."""
        return self.size is not None or self.takes.images[1] > 0

    def published(self) -> PartConfigs | None:
        """Describe the published model of this path part by part; None if its configuration is not known."""
        name = Path(self.path).name.lower()
        owner = next(cls for cls in type(self).__mro__ if "configurations" in vars(cls))
        file = next((file for part, file in self.configurations if part in name), None)
        if file is None:
            return None
        text = (files(owner.__module__.rpartition(".")[0]) / file).read_text(encoding="utf-8")
        parts: PartConfigs = json.loads(text)["parts"]
        return parts

    @property
    def planned_size(self) -> Size:
        """The (height, width) in px that a rehearsal assumes for source images, and for the output if ``size`` is null."""
        return MEGAPIXEL
