"""Loads models without weights: the real classes, built from their configurations on the fake accelerator.

For a published model, a folder with configurations but no weights is written, and models are built from it. Everything else is the
code of a run: the recipe's loaders, adapters and checks.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import diffusers
import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import Emu3VQVAE

from retouch.models.base import DiffusersModel, PartConfigs
from retouch.models.common.pretrained import find_encoder
from retouch.models.emu3 import load as emu3
from retouch.models.emu3.family import Emu3Model
from retouch.models.ip_adapter.adapter import vision_part
from retouch.models.language import PretrainedLanguageModel
from retouch.models.offloading.store import EmbeddingStore
from retouch.models.sizes import image_encoder
from retouch.recipe.recipe import Recipe
from retouch_plan.rehearsal.depth import Counts, reduce_layers, with_blocks
from retouch_plan.rehearsal.fake.tensors import DEVICE, FakeTensor, on_host
from retouch_plan.rehearsal.fake.tokenizers import stand_in, tokenizer_files, write_emu3

SCHEDULER = {"_class_name": "FlowMatchEulerDiscreteScheduler", "num_train_timesteps": 1000, "shift": 3.0}
_PROCESSOR = {
    "do_resize": True,
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


class UnknownConfiguration(ValueError):
    """The configuration of a model is not known, so the recipe cannot be rehearsed."""


def without_paths(recipe: Recipe, folder: Path) -> Recipe:
    """Return the recipe with folders of configurations instead of paths of weights that are not on this machine.

    Raises UnknownConfiguration if the configuration of a model is not known.
    """
    train, encoder = recipe.policy.train, getattr(recipe.policy.train, "encoder", None)
    if encoder is not None and find_encoder(encoder) is None:
        described = image_encoder(encoder)
        if described is None:
            message = f"policy.train.encoder: the configuration of {encoder} is not known; download its configuration files"
            raise UnknownConfiguration(message)
        target = write_single(folder / "encoder" / Path(encoder).name, vision_part(described))
        train = train.model_copy(update={"encoder": str(target), "init_from": None})
    elif hasattr(train, "init_from"):
        train = train.model_copy(update={"init_from": None})
    model = _described(recipe.policy.model, folder, "policy.model")
    # The fake accelerator replaces attention and compiles nothing: the speed of compiled blocks is modelled instead.
    changed: dict[str, Any] = {"policy": recipe.policy.for_inference().model_copy(update={"model": model, "train": train})}
    if recipe.renderer is not None and recipe.renderer.image_model is not None:
        behind = _described(recipe.renderer.image_model, folder, "renderer.model")
        changed["renderer"] = recipe.renderer.model_copy(update={"model": behind})
    return recipe.model_copy(update=changed)


def _described(model: Any, folder: Path, key: str) -> Any:
    if not isinstance(model, DiffusersModel | PretrainedLanguageModel):
        return model
    with suppress(ValueError):  # the path may be the folder of a run that does not exist yet
        if model.find_weights()[0] is not None:
            return model
    described = model.published() if isinstance(model, DiffusersModel) else model.describe(None)
    if described is None:
        message = f"{key}.path: the configuration of {model.source} is not known; download its configuration files"
        raise UnknownConfiguration(message)
    target = folder / key / Path(model.path).name
    if isinstance(model, DiffusersModel):
        write_folder(target, described)
        return model.model_copy(update={"path": str(target)})
    write_single(target, described["writer"])
    if not isinstance(model, Emu3Model):
        return model.model_copy(update={"path": str(target)})
    autoencoder = write_single(folder / "autoencoder", described["autoencoder"])
    paths = {"path": target, "tokenizer": write_emu3(folder / "tokenizer"), "autoencoder": autoencoder}
    return model.model_copy(update={name: str(path) for name, path in paths.items()})


def write_folder(folder: Path, described: PartConfigs) -> Path:
    """Write a folder in the layout of a diffusers pipeline, with the configurations of these parts and without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model_index.json").write_text(json.dumps({"_class_name": "DiffusionPipeline"}), encoding="utf-8")
    for name, part in {**described, "scheduler": {"config": SCHEDULER}}.items():
        (folder / name).mkdir(exist_ok=True)
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        (folder / name / file).write_text(json.dumps(_with_class(part)), encoding="utf-8")
    (folder / "processor").mkdir(exist_ok=True)
    (folder / "processor" / "preprocessor_config.json").write_text(json.dumps(_processor(described)), encoding="utf-8")
    return folder


def write_single(folder: Path, part: Mapping[str, Any]) -> Path:
    """Write a folder in transformers' layout, with the configuration of one model and an empty file of weights."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_with_class(part)), encoding="utf-8")
    (folder / "preprocessor_config.json").write_text(json.dumps(_processor({"writer": part})), encoding="utf-8")
    return folder


def _with_class(part: Mapping[str, Any]) -> dict[str, Any]:
    config = dict(part["config"])
    name = part.get("class")
    found: Any = getattr(transformers, name, None) if name else None
    if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel):
        configuration: Any = found.config_class  # type: ignore[attr-defined]
        return {"model_type": configuration.model_type, **config, "architectures": [name]}
    return config if name is None else {**config, "_class_name": name}


def _processor(described: PartConfigs) -> dict[str, Any]:
    """Return the configuration of the image processor, with the patch or image size of the vision model that reads its images."""
    encoders = [part["config"]["image_size"] for part in described.values() if isinstance(part["config"].get("image_size"), int)]
    if encoders:
        square = {"height": encoders[0], "width": encoders[0]}
        return {"do_resize": True, "size": square, "do_center_crop": True, "crop_size": square}
    towers = [part["config"]["vision_config"] for part in described.values() if "vision_config" in part["config"]]
    vision = towers[0] if towers else {}
    found = {name: vision[name] for name in ("patch_size", "temporal_patch_size") if name in vision}
    merge = {"merge_size": vision["spatial_merge_size"]} if "spatial_merge_size" in vision else {}
    return {**_PROCESSOR, **found, **merge}


@contextmanager
def without_weights(
    device: torch.device, *, on_module: Callable[[str, nn.Module], None], blocks: Counts = MappingProxyType({})
) -> Iterator[None]:
    """Inside the context, ``from_pretrained`` builds models from their configurations, with fake weights on ``device``.

    ``blocks``: the number of blocks of the stacks that are not built whole. ``on_module``: called with the folder's name and the
    module of each model that is built or moved.
    """
    loaded: dict[nn.Module, str] = {}

    def blocks_of(folder: Any) -> dict[str, int]:
        return {key: count for (part, key), count in blocks.items() if part == str(folder)}

    def diffusers_model(cls: Any, folder: Any, **options: Any) -> nn.Module:
        dtype = options.get("torch_dtype") or torch.float32
        with fake_parameters(device, dtype):
            module = cls.from_config(with_blocks(cls.load_config(folder), blocks_of(folder)))
        keep(cls, module)
        return finished(module, folder, dtype)

    def transformers_model(cls: Any, folder: Any, **options: Any) -> nn.Module:
        config = options.get("config") or cls.config_class.from_pretrained(folder)
        reduce_layers(config, blocks_of(folder))
        if options.get("attn_implementation"):
            config._attn_implementation = options["attn_implementation"]
        dtype = options.get("dtype") or torch.float32
        with fake_parameters(device, dtype):
            module = cls(config)
        keep(cls, module)
        return finished(module, folder, dtype)

    def keep(cls: Any, module: nn.Module) -> None:
        kept = _in_fp32(cls)
        for name, parameter in module.named_parameters() if kept else ():
            if any(part in name.split(".") for part in kept):
                parameter.data = parameter.data.float()

    def finished(module: nn.Module, folder: Any, dtype: torch.dtype) -> nn.Module:
        """Finish a module. Buffers that a checkpoint stores get the dtype of the weights; other buffers keep their dtype."""
        stored = module.state_dict().keys()
        for name, buffer in module.named_buffers():
            if name in stored and buffer.dtype.is_floating_point:
                buffer.data = buffer.data.to(dtype)
        loaded[module] = Path(folder).name
        on_module(loaded[module], module)
        return module.eval()

    def autoencoder(folder: Path) -> nn.Module:
        with fake_parameters(device, torch.float32):
            module = Emu3VQVAE(Emu3VQVAE.config_class.from_pretrained(folder))
        return finished(module, Path(folder), torch.float32)

    def to(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """Like ``nn.Module.to``, which cannot move the data of a fake tensor to another device."""
        target = torch._C._nn._parse_to(*args, **kwargs)[0]
        if target is not None and _move(module, target):
            for each in module.modules():
                if each in loaded:
                    on_module(loaded[each], each)
        moved: nn.Module = _TO(module, *args, **kwargs)
        return moved

    def tokenizer(cls: Any, folder: Any, **options: Any) -> Any:
        own = _TOKENIZER(cls, folder, **options) if tokenizer_files(Path(folder)) else None
        return stand_in(cls, Path(folder)) if own is None else own

    with ExitStack() as stack:
        replacements: tuple[tuple[type, Any], ...] = (
            (diffusers.ModelMixin, diffusers_model),
            (transformers.PreTrainedModel, transformers_model),
            (transformers.PreTrainedTokenizerBase, tokenizer),
        )
        for target, replacement in replacements:
            stack.enter_context(patch.object(target, "from_pretrained", classmethod(replacement)))
        stack.enter_context(patch.object(transformers.PreTrainedModel, "initialize_weights", lambda *_, **__: None))
        stack.enter_context(patch.object(EmbeddingStore, "of_user", classmethod(lambda cls: _InMemory())))
        stack.enter_context(patch("retouch.models.offloading.prompt_embeddings.describe", lambda text: None))
        stack.enter_context(patch.object(emu3, "load_autoencoder", autoencoder))
        stack.enter_context(patch.object(nn.Module, "to", to))
        yield


class _InMemory(EmbeddingStore):
    """Keeps the prompt embeddings of a rehearsal in memory: tensors without data must not be stored on disk."""

    def __init__(self) -> None:
        super().__init__(Path(), limit=0)
        self._kept: dict[str, dict[str, Tensor]] = {}

    def read(self, key: str) -> dict[str, Tensor] | None:
        return self._kept.get(key)

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        self._kept[key] = dict(tensors)


_INITIALISERS = (
    *("uniform_", "normal_", "trunc_normal_", "constant_", "ones_", "zeros_", "eye_", "orthogonal_"),
    *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
)
_TOKENIZER = transformers.PreTrainedTokenizerBase.from_pretrained.__func__
_TO = nn.Module.to


def _move(module: nn.Module, device: torch.device) -> bool:
    """Move fake weights to another device. Returns whether there were any. Shared weights stay shared."""
    moved: dict[int, Any] = {}
    for each in module.modules():
        tables: tuple[dict[str, Any], ...] = each._parameters, each._buffers
        for table in tables:
            for name, tensor in table.items():
                if isinstance(tensor, FakeTensor) and tensor.device != device:
                    if id(tensor) not in moved:
                        data = (
                            torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
                            if device.type == DEVICE
                            else on_host(tensor)
                        )
                        moved[id(tensor)] = nn.Parameter(data, tensor.requires_grad) if name in each._parameters else data
                    table[name] = moved[id(tensor)]
    return bool(moved)


@contextmanager
def fake_parameters(device: torch.device, dtype: torch.dtype | None = None) -> Iterator[None]:
    """Inside the context, parameters of new modules are fake, on ``device`` and in ``dtype`` (None: their own dtype); buffers are
    real and on the host."""
    register = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not isinstance(parameter, FakeTensor):
            kind = dtype if dtype is not None and parameter.dtype.is_floating_point else parameter.dtype
            data = torch.empty(parameter.shape, dtype=kind, device=device)
            parameter = nn.Parameter(data, requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    with ExitStack() as stack:
        stack.enter_context(patch.object(nn.Module, "register_parameter", registered))
        for name in _INITIALISERS:
            stack.enter_context(patch.object(nn.init, name, lambda tensor, *_, **__: tensor))
        yield


def _in_fp32(cls: Any) -> tuple[str, ...]:
    """Return the layers that a model class keeps in fp32 when it is loaded in bfloat16."""
    if issubclass(cls, diffusers.ModelMixin):
        return tuple(getattr(cls, "_keep_in_fp32_modules", None) or ())
    return tuple(getattr(cls, "_keep_in_fp32_modules_strict", None) or ())
