"""The recipe's section of an image model, and what shared code asks of its family.

Recipes are read without torch, so this module and every ``family.py`` import it inside the methods that compute. A model is
*described* part by part: ``{"transformer": {"class": ..., "config": ...}, "vae": ..., ...}``, as its folder or a published
configuration says, so that its memory can be planned before any weight is loaded.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, JsonValue

from retouch.config.imports import build_class, import_class, methods_of
from retouch.config.live import LIVE, live_object
from retouch.config.section import ClassPath, Pixels, Section
from retouch.models.common.comfyui_lora import ComfyUINames
from retouch.protocols import DenoisingModel

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from torch import Tensor, nn

    from retouch.protocols import AutoregressiveModel

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
Size: TypeAlias = tuple[int, int]
Part: TypeAlias = Mapping[str, Any]
Described: TypeAlias = Mapping[str, Part]

MEGAPIXEL = (1024, 1024)
INSTRUCTION_TOKENS = 256
"""Tokens that an instruction is planned with where the model sets no length."""
# Bytes that autograd saves for one block per token and channel, by bytes per number: measured on the families here with
# torch.autograd.graph.saved_tensors_hooks (norms and rotary positions are kept in fp32 in either case).
TWO_STREAMS = {2: 60, 4: 100}
ONE_STREAM = {2: 50, 4: 85}


@dataclass(frozen=True, slots=True, kw_only=True)
class Takes:
    """What a model reads of a task. ``images``: fewest and most source images. ``mask``: a mask of the first source image.

    ``responses``: it also reads a writer's response to the task.
    """

    images: tuple[int, int]
    mask: bool = False
    responses: bool = False

    def __str__(self) -> str:
        least, most = self.images
        images = "no image" if most == 0 else "one image" if most == 1 else f"{least} to {most} images"
        return f"{images} and a mask" if self.mask else images


@dataclass(frozen=True, slots=True)
class Blocks:
    """``count`` equal blocks; ``saved``: bytes that autograd keeps of one, per token and channel, by bytes per number."""

    count: int
    saved: Mapping[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A transformer's shape. ``width``: channels of a token in a block. ``latents`` and ``text``: channels of its two inputs."""

    blocks: tuple[Blocks, ...]
    width: int
    latents: int
    text: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageBatch:
    """A batch of images to sample.

    ``rows``: images at once, of ``size`` (height, width) px. ``sources``: source images of each, of ``source`` px. ``text``: tokens
    of its conditioning.
    """

    rows: int
    size: Size
    source: Size
    sources: int
    text: int
    dtype: torch.dtype

    def empty(self, *shape: int) -> Tensor:
        """(rows, *shape) of the batch's dtype, on the meta device."""
        import torch

        return torch.empty(self.rows, *shape, dtype=self.dtype, device="meta")

    def times(self) -> Tensor:
        """(rows,) of fp32, on the meta device: one noise level a row."""
        import torch

        return torch.empty(self.rows, device="meta")


class ImageModel(Section):
    """Base of the image models that a recipe can name, built in or your own: override ``build``.

    A class that derives from this one alone is opaque: its memory is not planned, and a LoRA must name its targets. A model in the
    layout of a diffusers pipeline derives from ``DiffusersModel``.
    """

    kind: str = "import"

    takes: ClassVar[Takes | None] = None
    """What it reads of a task; None if only the model itself knows."""
    lora_targets: ClassVar[tuple[str, ...]] = ()
    """The linear layers that get an adapter where the recipe names none, as endings of their names; empty: the recipe must."""
    pipeline: ClassVar[str | None] = None
    """The class in diffusers whose ``save_lora_weights`` writes a LoRA of it; None writes PEFT's format alone."""
    comfyui: ClassVar[ComfyUINames | None] = None
    """The names of its modules in a LoRA for ComfyUI; None writes no such file."""
    uses_image_tokens: ClassVar[bool | None] = None
    """Whether it reads and generates images as tokens; None if only the model itself knows."""
    ip_adapter_blocks: ClassVar[tuple[Literal["double", "all"], ...]] = ()
    """The blocks on which an IP-Adapter can be; empty: it takes none."""

    def build(self, *, device: torch.device) -> DenoisingModel:
        """The model with its weights, all of it frozen but for the transformer. Downloads what is not on this machine.

        Raises ValueError if its folder holds something else.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no build")

    def find_weights(self) -> tuple[Path | None, bool]:
        """The folder of its weights, if it has one here, and whether all of them are on this machine. Does not use the network.

        Raises ValueError for a path that can be neither a folder nor a Hugging Face id.
        """
        return None, True

    @property
    def source(self) -> str:
        """What messages call its weights."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    # For editors that read a language model's response to the task (``takes.responses``)

    def writer_for(self, editor: DenoisingModel, writer: AutoregressiveModel) -> AutoregressiveModel:
        """The language model ``writer``, with prompts that are exactly what the editor reads before a response.

        Raises ValueError if the two have different tokenizers.
        """
        raise NotImplementedError(f"{type(self).__name__} reads no responses")

    def share_encoder(self, editor: DenoisingModel, writer: nn.Module, *, policy_encodes: bool, base_frozen: bool) -> None:
        """Replace the editor's text encoder by the module of the writer if that encodes the same, so that it is held once.

        ``policy_encodes``: the policy encodes responses. ``base_frozen``: the writer's base weights do not train.
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
        """The editor as ``retouch.renderers.responses.ResponseEditor``.

        ``frozen``: its own text encoder encodes responses, else the policy's module ``writer``. ``guided``: with a negative branch.
        ``published``: opens a context with the policy's weights from before training, if they are kept. Raises ValueError if the
        editor cannot use the policy's hidden states.
        """
        raise NotImplementedError(f"{type(self).__name__} reads no responses")


class ImportedModel(ImageModel):
    """A model adapter of your own (``retouch.protocols.DenoisingModel``)."""

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
    """A model in the layout of its diffusers pipeline.

    The defaults are those of a transformer with a text and an image stream on AutoencoderKL's latents, 2 x 2 to a token.
    """

    path: str
    """Folder or Hugging Face id of the pipeline; ``python:...`` in the recipe of a run that was given a loaded pipeline."""
    size: Pixels | None = None
    """Height and width of the images it makes, in pixels; an editor with null takes its source's."""
    dtype: Dtype = "bfloat16"
    """Type of the frozen weights and of the forward pass; log-probabilities are fp32 in any case."""
    vae_slicing: bool = Field(default=False, exclude_if=operator.not_)
    """Encode and decode one image at a time: less memory, the same images to rounding."""
    vae_tiling: bool = Field(default=False, exclude_if=operator.not_)
    """Encode and decode large images in overlapping tiles that are blended: less memory, and slightly different images."""

    takes: ClassVar[Takes] = Takes(images=(0, 0))
    uses_image_tokens = False
    adapter: ClassVar[str]
    """The class that runs it, as ``package.module:Class``, with ``from_pretrained``."""
    pipeline: ClassVar[str]
    configurations: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Published configurations: (text, JSON file beside the family's module). The first whose text is part of the path's name, in
    lower case, is the model's."""
    loaded_as: ClassVar[tuple[tuple[str, str], ...]] = ()
    """(part, class) of each part that is loaded as another class than its folder names: a language model without its head."""
    text_tokens: ClassVar[int | None] = None
    """Tokens that a prompt becomes at most; None: as many as it has."""

    def build(self, *, device: torch.device) -> DenoisingModel:
        from retouch.models.common.pretrained import fetch_weights

        if self.path.startswith(LIVE):
            return self.load(live_object(self.path, key="model.path"), device=device)
        return self.load(fetch_weights(self.path), device=device)

    def load(self, source: Path | DiffusionPipeline, *, device: torch.device) -> DenoisingModel:
        """The model in a local folder, or of a loaded pipeline."""
        import torch

        options = {"dtype": getattr(torch, self.dtype), "device": device, "size": self.size, **self.options(source)}
        made: DenoisingModel = self.adapter_class().from_pretrained(source, **options)
        if self.vae_slicing or self.vae_tiling:
            self.limit_vae(made.latents.vae)  # type: ignore[attr-defined]
        return made

    def limit_vae(self, vae: Any) -> None:
        """Let the autoencoder compute in slices and tiles, as ``vae_slicing`` and ``vae_tiling`` say."""
        if self.vae_slicing:
            vae.enable_slicing()
        if self.vae_tiling:
            vae.enable_tiling()

    def options(self, source: Any) -> dict[str, Any]:
        """What ``from_pretrained`` is given besides ``source`` (a folder or a loaded pipeline), dtype, device and size."""
        return {}

    @classmethod
    def adapter_class(cls) -> Any:
        """The class that runs it. Imports torch."""
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
        """Whether the size of its images is known: from the recipe, or from the tasks' source images."""
        return self.size is not None or self.takes.images[1] > 0

    def published(self) -> Described | None:
        """The published model of this path, described part by part; None if its configuration is not known."""
        name = Path(self.path).name.lower()
        owner = next(cls for cls in type(self).__mro__ if "configurations" in vars(cls))
        file = next((file for part, file in self.configurations if part in name), None)
        if file is None:
            return None
        text = (files(owner.__module__.rpartition(".")[0]) / file).read_text(encoding="utf-8")
        parts: Described = json.loads(text)["parts"]
        return parts

    # What a plan of its memory asks

    @property
    def planned_size(self) -> Size:
        """(height, width) in px of source images, and of the output where ``size`` is null."""
        return MEGAPIXEL

    def tokens(self, described: Described, *, sources: int) -> int:
        """Tokens of one row: its text, its output, and ``sources`` source images."""
        output = self.image_tokens(self.size or self.planned_size, described)
        return output + (self.text_tokens or INSTRUCTION_TOKENS) + sources * self.source_tokens(described)

    def source_tokens(self, described: Described) -> int:
        """Tokens that one source image adds to a row."""
        return self.image_tokens(self.planned_size, described) + self.condition_tokens(described)

    def image_tokens(self, size: Size, described: Described) -> int:
        """Tokens of an image of ``size`` px."""
        side = self.token_pixels(described)
        return (size[0] // side) * (size[1] // side)

    def token_pixels(self, described: Described) -> int:
        """Side in px of a token."""
        return 2 * self.latent_pixels(described["vae"])

    def latent_pixels(self, vae: Part) -> int:
        """Side in px of a latent."""
        return int(2 ** (len(vae["config"]["block_out_channels"]) - 1))

    def condition_tokens(self, described: Described) -> int:
        """Tokens of the text encoder that a source image becomes."""
        return 0

    def shape(self, transformer: Part) -> Shape:
        config = transformer["config"]
        return Shape(
            blocks=(Blocks(config["num_layers"], TWO_STREAMS), Blocks(config.get("num_single_layers", 0), ONE_STREAM)),
            width=config["num_attention_heads"] * config["attention_head_dim"],
            latents=config["in_channels"],
            text=config["joint_attention_dim"],
        )

    def one_of_each_block(self, transformer: Part) -> Part:
        """The transformer with one block of each sort."""
        config = transformer["config"]
        counts = ("num_layers", "num_single_layers", "n_layers", "n_refiner_layers")
        return {**transformer, "config": {**config, **{key: 1 for key in counts if key in config}}}

    def step_inputs(self, described: Described, batch: ImageBatch) -> dict[str, Any]:
        """Everything that the transformer is given in one step of sampling, on the meta device. The latents come first."""
        raise NotImplementedError(f"{type(self).__name__} defines no step_inputs")

    def latents(self, vae: Part, batch: ImageBatch) -> Tensor:
        """What the autoencoder decodes, on the meta device."""
        side = self.latent_pixels(vae)
        return batch.empty(vae["config"]["latent_channels"], batch.size[0] // side, batch.size[1] // side)

    def prepare_vae(self, vae: nn.Module) -> None:
        """Do to the autoencoder what the adapter does to it."""
