"""Base classes of the recipe's sections of language models, which are trained as policies.

Recipes are read without torch, so this module and every ``family.py`` import torch inside the methods that compute. A model is
*described* part by part, ``{"writer": {"class": ..., "config": ...}, ...}``, so that a step can be rehearsed before any weight is
loaded; ``writer`` is the language model.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from pydantic import Field, JsonValue

from retouch.config.imports import build_class, methods_of
from retouch.config.live import LIVE, live_object
from retouch.config.section import ClassPath, Section
from retouch.models.base import Dtype, PartConfigs, Size, TaskInputs
from retouch.protocols import AutoregressiveModel
from retouch.records.files import read_json

if TYPE_CHECKING:
    import torch

    from retouch.models.common.loaded import LoadedLanguageModel

Attention: TypeAlias = Literal["sdpa", "flash_attention_2", "flash_attention_3", "eager"]
_PACKAGES = {"flash_attention_2": ("flash_attn", "flash-attn"), "flash_attention_3": ("flash_attn_interface", "flash-attn-3")}
"""The module and the package of each attention implementation that is not part of torch."""
TokenKind: TypeAlias = Literal["text", "vision"]


class LanguageModel(Section):
    """Base of the language models that a recipe can train, built in or your own. Subclasses override ``build``.

    A class that derives directly from this one is not rehearsed, and its LoRA must name its targets. A model in transformers'
    layout derives from ``PretrainedLanguageModel``.
    """

    kind: str = "import"

    takes: ClassVar[TaskInputs | None] = None
    """The inputs of a task that a model of image tokens reads; None if tasks are not checked before the run."""
    lora_targets: ClassVar[tuple[str, ...]] = ()
    """Endings of the names of the linear layers that get a LoRA if the recipe names none; if empty, the recipe must name some."""
    pipeline: ClassVar[None] = None
    comfyui: ClassVar[None] = None
    """A LoRA of a language model is not written for diffusers or ComfyUI."""

    def build(self, *, device: torch.device, gradient_checkpointing: bool) -> AutoregressiveModel:
        """Build the model with frozen weights. Downloads missing weights.

        ``gradient_checkpointing``: updates recompute activations in the backward pass. Raises ValueError if its folder contains
        another model.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no build")

    @property
    def token_kinds(self) -> frozenset[TokenKind] | None:
        """Kinds of tokens that the model generates; None if they are not known before the model is built."""
        return None

    @property
    def uses_image_tokens(self) -> bool | None:
        """Whether the model reads and generates images as tokens; None if this is not known before the model is built."""
        return None if self.token_kinds is None else "vision" in self.token_kinds

    @property
    def image_grammar(self) -> bool:
        """Whether the model generates image tokens under a grammar, so that every image is complete."""
        return False

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

    @property
    def base_model(self) -> str | None:
        """Folder or Hugging Face id of the weights, which a server must have too; None if it is not known."""
        return None

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
    """Keyword arguments of its constructor, or the fields of a class derived from ``retouch.models.language.LanguageModel``."""

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

    @property
    def token_kinds(self) -> frozenset[TokenKind]:
        return frozenset({"text"})

    @property
    def source(self) -> str:
        return self.path

    @property
    def base_model(self) -> str | None:
        return self.path.removeprefix(LIVE)

    def find_weights(self) -> tuple[Path | None, bool]:
        from retouch.models.common.pretrained import find_language_model

        if self.path.startswith(LIVE):
            return None, True
        folder = find_language_model(self.path)
        return folder, folder is not None

    def require_attention(self, device: torch.device) -> None:
        if not (self.path or "").startswith(LIVE):  # a loaded model keeps its attention; the path may be None
            require_attention(self.attention, dtype=self.torch_dtype, device=device)

    def fetch_weights(self) -> Path | LoadedLanguageModel:
        """Return the folder of the weights, or the loaded model. Downloads missing weights; raises ValueError if that fails, or if
        files are missing or damaged."""
        from retouch.models.common.pretrained import fetch_language_model

        if self.path.startswith(LIVE):
            loaded: LoadedLanguageModel = live_object(self.path, key="policy.model.path")
            return loaded
        folder = fetch_language_model(self.path)
        if not any(folder.glob("*.safetensors")):
            raise ValueError(f"policy.model.path: {folder} has no safetensors file; other weight formats are not read")
        return folder

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def describe(self, folder: Path | None) -> PartConfigs | None:
        part = published_language_model(self.path) if folder is None else read_description(folder)
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


def published_language_model(name: str) -> dict[str, Any] | None:
    """Describe a published language model by its id or the last part of the id; None if its configuration is not known."""
    file = Path(str(files("retouch.models"))) / "configs" / "writers" / f"{name.rpartition('/')[2].lower()}.json"
    return dict(read_json(file)) if file.is_file() else None


def read_description(folder: Path) -> dict[str, Any]:
    """Describe the model in a local transformers folder. Raises ValueError if the folder contains no model."""
    file = folder / "config.json"
    config = read_json(file) if file.is_file() else {}
    if not config.get("architectures"):
        raise ValueError(f"{folder} contains no model: it has no config.json that names a class in architectures")
    return {"class": config["architectures"][0], "config": config}
