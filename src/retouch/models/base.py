"""Base classes of the recipe's sections of image models and of language models.

Recipes are read without torch, so the modules with sections import torch inside the methods that compute. A published model is
*described* part by part, ``{"transformer": {"class": ..., "config": ...}, "vae": ..., ...}``, so that a step can be tried
before any weight is loaded; the part of a language model is ``writer``.
"""

from __future__ import annotations

import importlib.util
import inspect
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, JsonValue, field_validator

from retouch.config.imports import build_class, import_class, methods_of
from retouch.config.section import LIVE, ClassPath, Pixels, Section, live_object
from retouch.models.pretrained import MODEL, PIPELINE, fetch_weights, find_weights
from retouch.protocols import AutoregressiveModel, DenoisingModel
from retouch.records.files import read_json

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]
Bits: TypeAlias = Literal["8bit", "4bit"]
Size: TypeAlias = tuple[int, int]
"""(height, width) in px."""
PartConfigs: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The described parts of a model by name. A part has a "class" and a "config"."""
MEGAPIXEL, USUAL_SIZE = (1024, 1024), (512, 512)
Area: TypeAlias = Annotated[int, Field(ge=32 * 32)]
"""Area in px of a resized image, whose sides are multiples of 32."""
Attention: TypeAlias = Literal["sdpa", "flash_attention_2", "flash_attention_3", "eager"]
_PACKAGES = {"flash_attention_2": ("flash_attn", "flash-attn"), "flash_attention_3": ("flash_attn_interface", "flash-attn-3")}
"""The module and the package of each attention implementation that is not part of torch."""
TokenKind: TypeAlias = Literal["text", "vision"]
CONFIGS = Path(str(files("retouch.models"))) / "configs"
"""The packaged configurations of published models that are not in the folder of a family."""
COMFYUI_FILE = "comfyui_lora.safetensors"
KOHYA = "lora_unet_"  # the prefix of names as kohya's sd-scripts write them, with underscores
TURNS = "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n"
"""A dialogue in Qwen's chat template, up to the reply."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class ComfyUINames:
    """ComfyUI's names of a family's modules in a LoRA (see ``retouch.models.lora.comfyui_tensors``).

    ``prefix``: the text in front of a module's path in diffusers' denoiser; after ``KOHYA``, the path has underscores. ``joined``:
    used instead of ``prefix`` if one module of ComfyUI computes the outputs of several modules of diffusers; maps ComfyUI's module
    to the modules of diffusers, in the order of their outputs. ``*`` is the number of a block. The names in ``joined`` are written
    after ``KOHYA``.
    """

    prefix: str = ""
    joined: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Usual:
    """Settings with which a published model makes good images, from its model card or its pipeline.

    ``guidance``: the scale of classifier-free guidance; 1 for models that are sampled without it. ``steps``: denoising steps of a
    rollout; models that were distilled to few steps need no more.
    """

    guidance: float = 1.0
    steps: int = 10


SINGLE_FILES = (".safetensors", ".gguf", ".ckpt")


class ModelSection(Section):
    """What sections of image models and of language models have in common."""

    kind: str = "import"

    takes: ClassVar[TaskInputs | None] = None
    """The inputs of a task that the model reads; None if they are not known before the model is built, or not checked."""
    lora_targets: ClassVar[tuple[str, ...]] = ()
    """Endings of the names of the linear layers that get a LoRA if the recipe names none; if empty, the recipe must name some."""
    pipeline: ClassVar[str | None] = None
    """The diffusers pipeline whose ``save_lora_weights`` writes a LoRA of the model; None: no file for diffusers is written."""
    comfyui: ClassVar[ComfyUINames | None] = None
    """The names of the model's modules in a LoRA for ComfyUI; None: no file for ComfyUI is written."""

    def targets_in(self, module: Any) -> tuple[str, ...]:
        """The layers of the loaded ``module`` that get a LoRA if the recipe names none."""
        return self.lora_targets

    def find_weights(self) -> tuple[Path | None, bool]:
        """Return the local folder of the weights (None if there is none), and whether all weights are on this machine.

        Does not use the network. Raises ValueError for a path that can be neither a folder nor a Hugging Face id.
        """
        return None, True

    def fetch_weights(self) -> Any:
        """Return what the model is loaded from: the folder of its weights, or loaded parts. Downloads missing weights.

        Raises ValueError if that fails, or if files are missing or damaged.
        """
        return None

    @property
    def source(self) -> str:
        """The name of the weights in messages."""
        return f"{type(self).__module__}:{type(self).__qualname__}"


class ImageModel(ModelSection):
    """Base of the image models that a recipe can name, built in or your own. Subclasses override ``build``.

    A class that derives directly from this one has no dry run, and its LoRA must name its targets. A model in the layout of a
    diffusers pipeline derives from ``DiffusersModel``.
    """

    uses_image_tokens: ClassVar[bool | None] = None
    """Whether the model reads and generates images as tokens; None if this is not known before the model is built."""
    ip_adapter_blocks: ClassVar[tuple[Literal["double", "all"], ...]] = ()
    """The values of ``policy.train.blocks`` that the model supports; if empty, it cannot have an IP-Adapter."""

    def build(self, *, device: torch.device) -> DenoisingModel:
        """Build the model with its weights; everything except the transformer is frozen. Downloads missing weights.

        Raises ValueError if its folder contains another model.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no build")


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
    size: Pixels | None = Field(default=None, validate_default=True)
    """Height and width of the output images in pixels. With null, an editor derives them from its source image: the images of one
    batch must then have one size, so data with images of several sizes need this key, or ``data.size``. Other models make images of
    512 x 512 px with null, the size at which published runs train them."""
    dtype: Dtype = "bfloat16"
    """Type of the frozen weights and of the forward pass; log-probabilities are fp32 in any case."""
    weights: str | None = Field(default=None, exclude_if=operator.not_)
    """A file, ``.safetensors`` or ``.gguf``, with other weights of the denoiser, in the layout of diffusers or of ComfyUI. Of a
    whole checkpoint, only the denoiser is read."""
    loras: dict[str, float] = Field(default={}, exclude_if=operator.not_)
    """Files of LoRAs, each with its scale, that are merged into the denoiser before anything is trained; every format that the
    pipeline's ``load_lora_weights`` reads."""
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
    hub_ids: ClassVar[tuple[str, ...]] = ()
    """The family's published weights, which need no request to the Hub to be recognised."""
    configurations: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Published configurations: (text, JSON file in the folder of the family). The model has the first configuration whose text
    occurs in the lower-case name of ``path``."""
    usual: ClassVar[tuple[tuple[str, Usual], ...]] = ()
    """Settings of the family's models: the first whose text occurs in the lower-case name of ``path``."""
    planned_size: ClassVar[Size] = MEGAPIXEL
    """The (height, width) in px that a dry run assumes for source images, and for the output if ``size`` is null."""

    @field_validator("size")
    @classmethod
    def _usual_size(cls, size: Size | None) -> Size | None:
        return USUAL_SIZE if size is None and cls.takes.images[1] == 0 and not cls.packaged else size

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    def build(self, *, device: torch.device) -> DenoisingModel:
        return self.load(self.fetch_weights(), device=device)

    def fetch_weights(self) -> Any:
        self.require_files()
        if self.path.startswith(LIVE):
            return live_object(self.path, key="model.path")
        return fetch_weights(self.path, self.files_of_pipeline(local=False) or PIPELINE)

    def files_of_pipeline(self, *, local: bool) -> Sequence[str] | None:
        """The files of the pipeline that a run needs. ``local``: do not use the network; None if they are not known then."""
        return PIPELINE

    def require_files(self) -> None:
        """Raise ValueError if ``path`` is a file, and if a file of ``weights`` or ``loras`` is missing or has another format."""
        if self.path.endswith(SINGLE_FILES):
            raise ValueError(
                f"policy.model.path: {self.path} is a single file; path is the folder or Hub id of the pipeline, and the file is "
                "policy.model.weights"
            )
        for key, file, formats in (
            *([("weights", self.weights, (".safetensors", ".gguf"))] if self.weights else []),
            *(("loras", file, (".safetensors",)) for file in self.loras),
        ):
            if not file.endswith(formats):
                raise ValueError(f"policy.model.{key}: {file} is no {' or '.join(formats)} file")
            if not Path(file).is_file():
                raise ValueError(f"policy.model.{key}: there is no file {file}")

    def load(self, source: Path | DiffusionPipeline, *, device: torch.device) -> DenoisingModel:
        """Load the model from a local folder, or take it from a loaded pipeline."""
        import torch

        options = {"dtype": getattr(torch, self.dtype), "device": device, "size": self.size, **self.options(source)}
        made: DenoisingModel = self.adapter_class().from_pretrained(source, **options)
        if self.weights is not None or self.loras:
            single_file = import_module("retouch.models.single_file")  # it imports torch
            if self.weights is not None:
                single_file.replace_weights(made.module, self.weights, folder=source)
            for file, scale in self.loras.items():
                single_file.merge_lora(made.module, file, scale=scale, pipeline=self.pipeline)
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
        self.require_files()
        if self.path.startswith(LIVE):
            return None, True
        files = self.files_of_pipeline(local=True)
        folder = None if files is None else find_weights(self.path, files)
        return folder, folder is not None

    @property
    def source(self) -> str:
        return self.path

    @classmethod
    def usual_settings(cls, path: str | None) -> Usual:
        """Return the settings of the published model of this path."""
        name = Path(path or "").name.lower()
        found = (settings for part, settings in cls.usual if part in name)
        return Usual() if cls.packaged else next(found, Usual())

    def published(self) -> PartConfigs | None:
        """Describe the published model of this path part by part; None if its configuration is not known."""
        name = Path(self.path).name.lower()
        file = next((file for part, file in self.configurations if part in name), None)
        if file is None:
            return None
        owner = next(cls for cls in type(self).__mro__ if "configurations" in vars(cls))
        parts: PartConfigs = read_json(Path(inspect.getfile(owner)).parent / file)["parts"]
        return parts


class LanguageModel(ModelSection):
    """Base of the language models that a recipe can train, built in or your own. Subclasses override ``build``.

    A class that derives directly from this one has no dry run, and its LoRA must name its targets. A model in transformers'
    layout derives from ``PretrainedLanguageModel``.
    """

    token_kinds: ClassVar[frozenset[TokenKind] | None] = None
    """Kinds of tokens that the model generates; None if they are not known before the model is built."""
    image_grammar: ClassVar[bool] = False
    """Whether the model generates image tokens under a grammar, so that every image is complete."""
    base_model: ClassVar[str | None] = None
    """Folder or Hugging Face id of the weights, which a server must have too; None if it is not known."""

    def build(self, *, device: torch.device, gradient_checkpointing: bool) -> AutoregressiveModel:
        """Build the model with frozen weights. Downloads missing weights.

        ``gradient_checkpointing``: updates recompute activations in the backward pass. Raises ValueError if its folder contains
        another model.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no build")

    @property
    def uses_image_tokens(self) -> bool | None:
        """Whether the model reads and generates images as tokens; None if this is not known before the model is built."""
        return None if self.token_kinds is None else "vision" in self.token_kinds

    def editor_problems(self) -> Iterator[str]:
        """Messages that say why the model cannot write responses for an image editor (``renderer.kind: response``)."""
        yield (
            f"policy.model.kind: the editor reads the writer's token ids and images, so {self.kind} cannot be used with "
            "it; use qwen-vl, or renderer.kind prompt"
        )

    def prompt_problems(self) -> Iterator[str]:
        """Messages that say why the model cannot write prompts for a text-to-image model (``renderer.kind: prompt``)."""
        yield from ()

    def require_attention(self, device: torch.device) -> None:
        """Raise ValueError if the model's attention implementation does not work on the device."""

    def describe(self, folder: Path | None) -> PartConfigs | None:
        """Describe the model's parts, from ``folder`` or, if that is None, as published; None if they are not known.

        Raises ValueError if the folder does not contain such a model.
        """
        return None


class ImportedLanguageModel(LanguageModel):
    """A model class of your own (``retouch.protocols.AutoregressiveModel``)."""

    kind: Literal["import"] = "import"
    class_: ClassPath = Field(alias="class")
    """The class, as ``package.module:Class``."""
    args: dict[str, JsonValue] = Field(default={})
    """Keyword arguments of its constructor, or the fields of a class derived from ``retouch.models.base.LanguageModel``."""

    def build(self, *, device: torch.device, gradient_checkpointing: bool) -> AutoregressiveModel:
        members = methods_of(AutoregressiveModel)
        model: AutoregressiveModel = build_class(self.class_, self.args, device=device, what="language model", members=members)
        return model

    @property
    def source(self) -> str:
        return self.class_


class PretrainedLanguageModel(LanguageModel):
    """A model in transformers' layout."""

    path: str
    """Folder or Hugging Face id of the model; ``python:...`` if a script passed a loaded model to the run."""
    dtype: Dtype = "bfloat16"
    """Type of the frozen weights and of the forward pass; log-probabilities are fp32 in any case."""
    attention: Attention = "sdpa"
    """Attention implementation (transformers' ``attn_implementation``); ``flash_attention_2`` needs the package flash-attn,
    ``flash_attention_3`` needs FlashAttention 3 and a Hopper GPU."""

    # Only layers of the language model: the layers of vision towers have other names.
    lora_targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    token_kinds: ClassVar[frozenset[TokenKind]] = frozenset({"text"})

    @property
    def source(self) -> str:
        return self.path

    @property
    def base_model(self) -> str | None:  # type: ignore[override]
        return self.path.removeprefix(LIVE)

    def find_weights(self) -> tuple[Path | None, bool]:
        if self.path.startswith(LIVE):
            return None, True
        folder = find_weights(self.path, MODEL)
        return folder, folder is not None

    def require_attention(self, device: torch.device) -> None:
        if not (self.path or "").startswith(LIVE):  # a loaded model keeps its attention; the path may be None
            require_attention(self.attention, dtype=self.torch_dtype, device=device)

    def fetch_weights(self) -> Any:
        if self.path.startswith(LIVE):
            return live_object(self.path, key="policy.model.path")
        folder = fetch_weights(self.path, MODEL)
        if not any(folder.glob("*.safetensors")):
            raise ValueError(f"policy.model.path: {folder} has no safetensors file; other weight formats are not read")
        return folder

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def describe(self, folder: Path | None) -> PartConfigs | None:
        part = packaged_config("writers", self.path) if folder is None else read_description(folder)
        return None if part is None else {"writer": part}

    @property
    def planned_size(self) -> Size:
        """(height, width) in px of the images that a model of image tokens reads and generates."""
        raise NotImplementedError(f"{type(self).__name__} generates no image tokens")


def require_attention(attention: Attention, *, dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError if FlashAttention is requested and not available here."""
    if attention not in _PACKAGES:
        return
    module, package = _PACKAGES[attention]
    reason = None
    if importlib.util.find_spec(module) is None:
        reason = f"the package {package} is not installed"
    elif device.type != "cuda":
        reason = f"it needs a CUDA device, not {device}"
    elif dtype.itemsize > 2:
        reason = f"it needs a 16-bit dtype, not {str(dtype).removeprefix('torch.')}"
    if reason is not None:
        raise ValueError(f"policy.model.attention: {attention}: {reason}; use sdpa, which has similar kernels, or eager")


def packaged_config(folder: Literal["writers", "judges", "encoders"], name: str) -> dict[str, Any] | None:
    """Describe a published model by its Hub id or the last part of it; None if its configuration is not packaged.

    ``folder``: "writers" for language models, "judges" for models of rewards, "encoders" for image encoders of IP-Adapters.
    """
    file = CONFIGS / folder / f"{name.rpartition('/')[2].lower()}.json"
    return dict(read_json(file)) if file.is_file() else None


def read_description(folder: Path) -> dict[str, Any]:
    """Describe the model in a local transformers folder. Raises ValueError if the folder contains no model."""
    file = folder / "config.json"
    config = read_json(file) if file.is_file() else {}
    if not config.get("architectures"):
        raise ValueError(f"{folder} contains no model: it has no config.json that names a class in architectures")
    return {"class": config["architectures"][0], "config": config}
