"""LoRA (arXiv 2106.09685) on a transformer: adds it, loads it from a folder, and writes it for PEFT, diffusers and ComfyUI."""

import json
import logging
import math
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import WeakSet

import diffusers
import torch
from diffusers.utils.peft_utils import recurse_remove_peft_layers
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.other import get_pattern_key
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from retouch.core.random import generator
from retouch.models.base import COMFYUI_FILE, KOHYA, ComfyUINames
from retouch.models.quantized import compute_dtype
from retouch.records.files import read_json

log = logging.getLogger("retouch")

_ADDED: WeakSet[nn.Module] = WeakSet()
"""Layers whose adapters ``add_lora`` added; adapters that other code added are never removed."""
_FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors", "weights.safetensors")
_KEEP_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of ``init_lora_weights`` that leave the base weights as they are."""
DESCRIPTIVE = ("task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode")
"""Fields of a LoRA's configuration that do not change what it computes."""
_LAYERS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
"""Fields of a stored configuration that follow from its tensors."""
_READ = (
    *DESCRIPTIVE,
    *_LAYERS,
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "init_lora_weights", "lora_dropout"),
)


def add_lora(module: nn.Module, config: LoraConfig, *, init_from: Path | None, seed: int, in_fp32: bool = False) -> None:
    """Add LoRA weights to the module. They are the only trainable weights.

    The LoRA weights are in fp32; unless ``in_fp32``, those of bfloat16 layers are in bfloat16, and the stepper keeps fp32 master
    weights for them.

    The initial values are drawn from the seed as the configuration says, without changing the global generator, or loaded from the
    folder ``init_from``. Raises ValueError if that folder has no LoRA of this rank, alpha and these targets, or if
    its configuration gives the weights another meaning.

    Source: LoRA (Hu et al. 2021, arXiv 2106.09685), by PEFT.
    """
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TorchaoLoraLinear was instantiated")  # it says that merges raise, and nothing merges
        torch.manual_seed(generator(seed, "lora").initial_seed())
        try:
            # Some models of diffusers have no method of their own for it.
            getattr(module, "add_adapter", partial(inject_adapter_in_model, model=module))(config)
        except ValueError as error:
            module._hf_peft_config_loaded = False  # type: ignore[assignment]  # add_adapter sets it before it looks for the layers
            raise ValueError(f"policy.train.targets: {error}") from error
    _ADDED.update(layer for layer in module.modules() if isinstance(layer, BaseTunerLayer))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if parameter.requires_grad and (in_fp32 or parameter.dtype != torch.bfloat16):
            parameter.data = parameter.data.float()
    if not in_fp32 and compute_dtype(module) == torch.bfloat16:
        adapted: list[Any] = own_layers(module, key="model")
        for layer in adapted:
            if not layer.base_layer.weight.is_floating_point():  # PEFT takes fp32 over codes
                for part in (layer.lora_A, layer.lora_B):
                    part.to(torch.bfloat16)
    if init_from is not None:
        _load(module, init_from)


def remove_lora(module: nn.Module, *, key: str) -> None:
    """Remove the adapters that an earlier run in this process added, so that the module has the weights from before that run.

    ``key``: the module's name in the message. Raises ValueError if the module has adapters that ``add_lora`` did not add.
    """
    if own_layers(module, key=key):
        recurse_remove_peft_layers(module)
        for name in ("peft_config", "_hf_peft_config_loaded"):
            vars(module).pop(name, None)


def attention_layers(module: nn.Module) -> tuple[str, ...]:
    """The linear layers of all attention modules, as endings of their paths; of a module without any, all linear layers.

    An ending that also fits another kind of layer is replaced by whole paths.
    """
    every = dict(module.named_modules())
    attention = {name: part for name, part in module.named_modules() if "Attention" in type(part).__name__ and "." in name}
    inner = {name: part for name, part in attention.items() if not any(other.startswith(f"{name}.") for other in attention)}
    found = set()
    for name, part in inner.items():
        for path in (path for path, layer in part.named_modules() if isinstance(layer, nn.Linear)):
            ending = f"{name.rpartition('.')[2]}.{path}"
            alike = (layer for other, layer in every.items() if other.endswith(f".{ending}"))
            found.add(ending if all(isinstance(layer, nn.Linear) for layer in alike) else f"{name}.{path}")
    return tuple(sorted(found or {path for path, layer in every.items() if isinstance(layer, nn.Linear)}))


def part_of_pipeline(module: nn.Module) -> str:
    """The name of a denoiser in its pipeline: "unet" or "transformer"."""
    return "unet" if isinstance(module, diffusers.UNet2DConditionModel) else "transformer"


def own_layers(module: nn.Module, *, key: str) -> list[nn.Module]:
    """Return the layers with an adapter of ``add_lora``. Raises ValueError if the module has adapters of another origin."""
    layers = [layer for layer in module.modules() if isinstance(layer, BaseTunerLayer)]
    if any(layer not in _ADDED for layer in layers):
        raise ValueError(f"{key} has a LoRA already; fuse it (pipe.fuse_lora() and pipe.unload_lora_weights()), or unload it")
    return layers


def _load(module: nn.Module, folder: Path) -> None:
    file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    if file is None:
        raise ValueError(f"policy.train.init_from: {folder} has none of {', '.join(_FILES)}")
    tensors = load_file(file)
    given = {_plain_name(name): tensor for name, tensor in tensors.items()}
    wanted = {_plain_name(name): p.shape for name, p in module.named_parameters() if p.requires_grad}
    own: Any = module.peft_config["default"]  # type: ignore[index]
    # The configuration, in PEFT's fields, is in the metadata of diffusers' file, or in a file next to it.
    with safe_open(file, framework="pt") as content:
        stored = json.loads((content.metadata() or {}).get("lora_adapter_metadata", "{}"))
    config = file.with_name("adapter_config.json")
    if not stored and config.is_file():
        stored = read_json(config)
    if not isinstance(stored, dict):
        raise ValueError(f"policy.train.init_from: the configuration of {file} must be a JSON object")
    stored = {name.removeprefix("transformer."): value for name, value in stored.items()}
    _require_same_meaning(stored, own, sorted({name.partition(".lora_")[0] for name in wanted}), file)
    different = sorted(given.keys() ^ wanted.keys()) or sorted(name for name in wanted if given[name].shape != wanted[name])
    if different or len(given) != len(tensors):
        first = different[0] if different else "two tensors of one name"
        raise ValueError(
            f"policy.train.init_from: {file} does not fit the recipe's rank and targets, first at {first}; it must have "
            "one adapter with the names of diffusers or PEFT"
        )
    set_peft_model_state_dict(module, given, adapter_name="default")


def _require_same_meaning(stored: Mapping[str, Any], own: LoraConfig, layers: Iterable[str], file: Path) -> None:
    """Raise ValueError if the configuration ``stored`` with a LoRA gives its weights another meaning than ``own`` does."""
    problems = [
        f"{name} {value!r} is not supported; convert it to a plain LoRA"
        for name, (value, _) in unusual_fields(stored, LoraConfig().to_dict(), known=_READ).items()
    ]
    ranks, alphas = stored.get("rank_pattern") or {}, stored.get("alpha_pattern") or {}
    if (start := stored.get("init_lora_weights", True)) not in _KEEP_BASE:
        problems.append(f"init_lora_weights {start!r} has changed the base weights too; convert it to a plain LoRA")
    if stored.get("lora_alpha") is None:
        problems.append(
            "no alpha is stored with it, so the scale of its output is unknown; write the alpha with which it was trained into "
            f'an adapter_config.json next to it, such as {{"r": {own.r}, "lora_alpha": {own.lora_alpha:g}}}'
        )
    elif not all(isinstance(value, int | float) and value > 0 for value in (stored["lora_alpha"], *alphas.values())):
        problems.append("an alpha must be a number above 0")
    if problems:
        raise ValueError(f"policy.train.init_from: {file}: {'; '.join(problems)}")
    found: dict[float, str] = {}
    for layer in layers:
        rank = ranks.get(get_pattern_key(ranks, layer), stored.get("r", own.r))
        if rank != own.r:
            raise ValueError(f"policy.train.init_from: {file} has rank {rank} at {layer}, and the recipe's rank is {own.r}")
        alpha = float(alphas.get(get_pattern_key(alphas, layer), stored["lora_alpha"]))
        # PEFT's scale is alpha / rank; that of rsLoRA (arXiv 2312.03732) is alpha / sqrt(rank).
        found.setdefault(alpha * math.sqrt(rank) if stored.get("use_rslora") else alpha, layer)
    if len(found) > 1:
        each = " and ".join(f"{alpha:g} at {layer}" for alpha, layer in list(found.items())[:2])
        raise ValueError(f"policy.train.init_from: {file} has a different alpha for each layer ({each}), and policy.train has one")
    (alpha,) = found
    if not math.isclose(alpha, own.lora_alpha):
        raise ValueError(
            f"policy.train.init_from: {file} was trained with alpha {alpha:g}, and the recipe's alpha {own.lora_alpha:g} would "
            f"scale its effect by {own.lora_alpha / alpha:g}; set policy.train.alpha to {alpha:.17g}"
        )


def unusual_fields(fields: Mapping[str, Any], defaults: Mapping[str, Any], *, known: Container[str]) -> dict[str, tuple[Any, Any]]:
    """The (value, default) of each field of a LoRA's configuration that is not its default; ``known`` fields are left out.

    The default of a field that this version of PEFT does not have is an empty value.
    """
    both = {name: (value, defaults.get(name)) for name, value in fields.items() if name not in known}
    return {name: (value, default) for name, (value, default) in both.items() if value != default and (value or default)}


def _plain_name(name: str) -> str:
    return name.removeprefix("base_model.model.").removeprefix("transformer.").replace(".default.", ".")


def write_lora(
    module: Any,
    to: Path,
    *,
    pipeline: str | None,
    comfyui: ComfyUINames | None = None,
    format: Literal["all", "diffusers", "peft", "comfyui"] = "all",
) -> None:
    """Write the module's LoRA into the folder ``to``: for PEFT, for the diffusers pipeline named ``pipeline``, and for ComfyUI with
    the names ``comfyui``.

    ``format``: ``all`` writes PEFT's format, diffusers' if ``pipeline`` is given, and ComfyUI's if ``comfyui`` is given. If an
    adapted module has no name in ComfyUI, ``all`` skips ComfyUI's file with a warning, and ``comfyui`` raises ValueError.
    """
    config = copy(module.peft_config["default"])
    if isinstance(config.target_modules, set):
        config.target_modules = sorted(config.target_modules)  # the order of a set differs between processes
    # Without this argument, peft asks the Hugging Face Hub whether the vocabulary was changed.
    state = get_peft_model_state_dict(module, save_embedding_layers=False)
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
    if format in ("all", "peft"):
        config.save_pretrained(to)
        save_file({f"base_model.model.{name}": tensor for name, tensor in tensors.items()}, to / "adapter_model.safetensors")
    pipeline_class: Any = None if pipeline is None else getattr(diffusers, pipeline)
    # Some pipelines have the method, and a model that cannot load what it writes.
    loads = hasattr(pipeline_class, "save_lora_weights") and hasattr(module, "load_lora_adapter")
    if loads and format in ("all", "diffusers"):
        part = part_of_pipeline(module)
        layers = {f"{part}_lora_layers": tensors, f"{part}_lora_adapter_metadata": config.to_dict()}
        pipeline_class.save_lora_weights(to, **layers)
        # The metadata are written in random order; sorted, so that two exports of the same weights are equal. The file starts with
        # the length of its header, eight bytes little-endian, and the header, JSON padded with spaces.
        file = to / "pytorch_lora_weights.safetensors"
        content = file.read_bytes()
        end = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:end])
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        written = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        written += b" " * (-len(written) % 8)
        file.write_bytes(len(written).to_bytes(8, "little") + written + content[end:])
    if comfyui is not None and format in ("all", "comfyui"):
        try:
            named = comfyui_tensors(tensors, module, comfyui, alpha=config.lora_alpha)
        except ValueError as error:
            if format == "comfyui":
                raise
            log.warning("no file for ComfyUI was written: %s", error)
            return
        save_file(named, to / COMFYUI_FILE, metadata={"format": "pt"})


def comfyui_tensors(tensors: Mapping[str, Tensor], module: nn.Module, names: ComfyUINames, *, alpha: float) -> dict[str, Tensor]:
    """Return the tensors of a LoRA under ComfyUI's names.

    ComfyUI identifies them by the module names of its own models (``diffusion_model.<module>``, or ``lora_unet_<module>`` with
    underscores, as kohya's sd-scripts writes them), and for some families also by the names of diffusers' transformer
    (``transformer.<module>``). It does not read the metadata in which diffusers stores alpha, so each module has a tensor
    ``<name>.alpha``; the adapter's output is scaled by alpha / rank.

    ``tensors``: ``<path>.lora_A.weight`` (rank, in) and ``<path>.lora_B.weight`` (out, rank), by the path of each adapted module in
    ``module``. If ComfyUI joins several modules, their adapters become one adapter, whose rank is the sum of their ranks. Raises
    ValueError for a module that has no name in ComfyUI.
    """
    pairs = {
        name.removesuffix(".lora_A.weight"): (down, tensors[name.replace(".lora_A.", ".lora_B.")])
        for name, down in tensors.items()
        if name.endswith(".lora_A.weight")
    }
    assert len(tensors) == 2 * len(pairs), "a LoRA has two matrices for each module, and nothing else"
    made: dict[str, Tensor] = {}

    def put(name: str, down: Tensor, up: Tensor, count: int = 1) -> None:
        name, a, b = (name.replace(".", "_"), "down", "up") if name.startswith(KOHYA) else (name, "A", "B")
        made[f"{name}.lora_{a}.weight"], made[f"{name}.lora_{b}.weight"] = down, up
        made[f"{name}.alpha"] = torch.tensor(float(alpha * count))

    if not names.joined:
        for path, pair in pairs.items():
            put(names.prefix + path, *pair)
        return made
    owners = {part: (name, parts) for name, parts in names.joined.items() for part in parts}
    joined: dict[str, list[str]] = {}  # ComfyUI's modules that have an adapter, each with the modules of diffusers that it joins
    for path in pairs:
        number = next((piece for piece in path.split(".") if piece.isdigit()), "")
        pattern = path.replace(f".{number}.", ".*.", 1) if path not in owners else path
        if pattern not in owners:
            raise ValueError(f"{path} has no name in ComfyUI; leave it out of policy.train.targets, or export without comfyui")
        name, parts = owners[pattern]
        joined[name.replace("*", number, 1)] = [part.replace("*", number, 1) for part in parts]
    for name, paths in joined.items():
        layers: list[Any] = [module.get_submodule(path) for path in paths]
        put(KOHYA + name, *_join([pairs.get(path) for path in paths], [int(layer.out_features) for layer in layers]))
    return made


def _join(pairs: Sequence[tuple[Tensor, Tensor] | None], outputs: Sequence[int]) -> tuple[Tensor, Tensor, int]:
    """Join the adapters of several modules with the same input into one: (down, up, number of adapters).

    ``pairs``: the (down, up) matrices of each module, or None for a module without an adapter. ``outputs``: their output widths.
    """
    if len(pairs) == 1 and pairs[0] is not None:
        return *pairs[0], 1
    present = [pair for pair in pairs if pair is not None]
    down = torch.cat([pair[0] for pair in present])
    up = down.new_zeros(sum(outputs), len(down))
    row = column = 0
    for pair, count in zip(pairs, outputs, strict=True):
        if pair is not None:
            rank = pair[1].shape[1]
            up[row : row + count, column : column + rank] = pair[1]
            column += rank
        row += count
    return down, up, len(present)
