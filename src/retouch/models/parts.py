"""Loads the parts of models from local folders (safetensors only, known classes only, no code from the folder) or takes them from
loaded pipelines; hashes and runs frozen parts; and copies tensors from the host to a device."""

import copy
import hashlib
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ModelMixin, SchedulerMixin
from numpy._core import multiarray
from torch import Tensor, nn

from retouch.models.quantized import plain_tensors
from retouch.records.files import read_json

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

Source: TypeAlias = "Path | str | DiffusionPipeline"
"""A local diffusers folder, or a loaded pipeline."""

Scheduler: TypeAlias = Mapping[str, Any] | SchedulerMixin
"""A pipeline's scheduler, or its configuration."""

LOCAL: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
"""Arguments of every ``from_pretrained`` call that loads weights."""

_TYPES = ("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64")
_PLAIN = [type(np.dtype(name)) for name in _TYPES]
# The same function under the names that numpy 2 and numpy 1 write into a file.
_ARRAYS = [(multiarray._reconstruct, f"numpy.{where}.multiarray._reconstruct") for where in ("_core", "core")]
_FORBIDDEN = torch.serialization.pickle.UnpicklingError  # type: ignore[attr-defined]


def diffusers_folder(path: Path | str) -> Path:
    """Return the folder as a ``Path``. Raises ValueError if it is not the folder of a diffusers pipeline."""
    root = Path(path)
    if not (root / "model_index.json").is_file():
        raise ValueError(f"{root} is not a diffusers folder (no model_index.json); download the model and set its local path")
    return root


def load_parts(source: Source, *, dtype: torch.dtype, device: torch.device | str, **kinds: Any) -> dict[str, Any]:
    """Return the parts of a pipeline by name, its scheduler, and the configuration "index" (``model_index.json``).

    ``kinds``: the class of each part. Modules from a folder are loaded in ``dtype``; modules of a loaded pipeline keep their dtype.
    All modules are moved to ``device``; all except the transformer are frozen. Raises ValueError if the folder is not a diffusers
    folder, if the pipeline lacks a part, and as ``euler_scheduler``.
    """
    if not isinstance(source, Path | str):
        from retouch.models.loaded import pipeline_parts

        euler_scheduler(source.scheduler, key="model.scheduler")
        return pipeline_parts(source, device, kinds)
    root = diffusers_folder(source)
    index = read_json(root / "model_index.json")
    config = FlowMatchEulerDiscreteScheduler.load_config(root / "scheduler", local_files_only=True)
    _, name = index.get("scheduler", (None, None))  # the class with which diffusers loads the configuration
    scheduler = euler_scheduler({**config, **({} if name is None else {"_class_name": name})}, key=f"{root}: scheduler")
    parts: dict[str, Any] = {}
    for name, kind in kinds.items():
        if not issubclass(kind, nn.Module):
            parts[name] = kind.from_pretrained(root / name, local_files_only=True)
            continue
        dtype_argument = {"torch_dtype" if issubclass(kind, ModelMixin) else "dtype": dtype}
        parts[name] = kind.from_pretrained(root / name, **dtype_argument, **LOCAL).to(device)
        if name != "transformer":
            parts[name].requires_grad_(False).eval()
    return {**parts, "scheduler": scheduler, "index": index}


def euler_scheduler(given: Scheduler, *, key: str) -> FlowMatchEulerDiscreteScheduler:
    """Copy a scheduler, or build it from its configuration. A model trains on exactly the noise levels of the result.

    ``key``: its name in messages. Raises ValueError for another class, and for settings with which its steps are not Euler steps
    from noise at sigma 1 to an image at sigma 0.
    """
    usual = FlowMatchEulerDiscreteScheduler
    config: Mapping[str, Any] = given if isinstance(given, Mapping) else given.config
    name = config.get("_class_name", usual.__name__) if config is given else type(given).__name__
    if name != usual.__name__ or (config is not given and type(given) is not usual):
        raise ValueError(
            f"{key}: a {name} takes other steps than those that are trained; give the pipeline a scheduler with which its images "
            f"are still good, such as {usual.__name__}.from_config(pipe.scheduler.config)"
        )
    for setting, only in (("num_train_timesteps", 1000), ("invert_sigmas", False), ("stochastic_sampling", False)):
        if (value := config.get(setting, only)) != only:
            raise ValueError(f"{key}.{setting}: {value!r} is not supported; a run trains with {only!r}")
    return usual.from_config(dict(config)) if isinstance(given, Mapping) else copy.deepcopy(given)


def load_restricted(path: Path) -> Any:
    """The contents of a file that torch saved. Raises ValueError if it contains anything but plain values, and for other files."""
    # For the whole process: torch's context manager for this list is not safe where several threads read features.
    torch.serialization.add_safe_globals([*_ARRAYS, *_PLAIN, np.ndarray, np.dtype])
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except _FORBIDDEN:
        raise ValueError(f"{path}: contains more than numbers, texts and arrays, and is not opened") from None
    except (RuntimeError, ValueError, EOFError, KeyError, OSError) as error:
        reason = f" ({str(error).splitlines()[0]:.80})" if str(error) else ""
        raise ValueError(f"{path}: not a file that torch saved{reason}") from None


def bits_hash(tensor: Tensor) -> Tensor:
    """A hash of the bits of a tensor, an int64 scalar on its device; the same on every device.

    It is the sum, modulo 2**64, of the 32-bit words times odd numbers that depend on their places. So another value of one element
    always changes it, and another order of elements almost surely. ``meta`` tensors have no bits.
    """
    parts = list(plain_tensors(tensor))
    if parts[0] is tensor and len(parts) == 1:
        return _bits_hash(tensor)
    hashes = torch.stack([_bits_hash(each) for each in parts])
    return (hashes * _odd_numbers(len(parts), hashes.device)).sum()


def _bits_hash(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():  # a piece of diffusers' GGUF parameter would be such a parameter
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(flat) % 4 or flat.storage_offset() % 4:
        flat = torch.nn.functional.pad(flat, (0, -len(flat) % 4)).clone()
    words = flat.view(torch.int32)
    whole = len(words) // _ROW
    at_once = 1 if tensor.device.type == "cpu" else 256
    factors = _odd_numbers(min(len(words), _ROW), tensor.device)
    chunks = words[: whole * _ROW].view(whole, _ROW).split(at_once) if whole else ()
    rows = [(each * factors).sum(1) for each in chunks]
    rows.append((words[whole * _ROW :] * factors[: len(words) - whole * _ROW]).sum()[None])
    sums = torch.cat(rows)
    return (sums * _odd_numbers(len(sums), tensor.device)).sum()


_ROW = 2**15


def _odd_numbers(count: int, device: torch.device) -> Tensor:
    """The same ``count`` odd 64-bit numbers on every device: SplitMix64 (Steele et al. 2014, "Fast splittable pseudorandom number
    generators") of 1, 2, ..."""
    mixed = torch.arange(1, count + 1, dtype=torch.int64, device=device) * -7046029254386353131
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685), (31, 1)):
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))) * factor
    return mixed | 1


def frozen_hashes(model: Any) -> dict[str, str]:
    """A hash of the frozen weights of each module that a model object holds, by the module's name in the object ("transformer",
    "vae", "text.t5", ...). Trained weights, such as those of a LoRA, and modules without weights are left out."""
    found = {}
    for name, module in _modules(model).items():
        state = {key.replace(".base_layer", ""): value for key, value in module.state_dict(keep_vars=True).items()}
        frozen = {key: value for key, value in sorted(state.items()) if isinstance(value, Tensor) and not value.requires_grad}
        # Small models have no threads: in a forked process, several that use torch for the first time would race.
        is_large = sum(value.nbytes for value in frozen.values()) > 2**30
        with ThreadPoolExecutor(8) as threads, torch.no_grad():
            hashes = list((threads.map if is_large else map)(lambda value: int(bits_hash(value)), frozen.values()))
        lines = [
            f"{key} {value.dtype} {list(value.shape)} {each}" for (key, value), each in zip(frozen.items(), hashes, strict=True)
        ]
        if lines:
            found[name] = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
    return found


def _modules(model: Any) -> dict[str, nn.Module]:
    """The modules of a model object and of the objects that it holds, except those of installed packages."""
    found: dict[str, nn.Module] = {}
    seen: dict[int, Any] = {}

    def search(value: Any, path: tuple[str, ...]) -> None:
        package = type(value).__module__.partition(".")[0]
        inner: Mapping[str, Any] = {}
        if isinstance(value, list | tuple):
            inner = {str(place): each for place, each in enumerate(value)}
        elif isinstance(value, dict):
            inner = {str(key): each for key, each in value.items()}
        elif package not in (*sys.stdlib_module_names, "torch", "transformers", "diffusers", "tokenizers", "PIL", "numpy"):
            inner = getattr(value, "__dict__", {})
        if id(value) in seen:
            return
        seen[id(value)] = value
        if isinstance(value, nn.Module):
            named = [part.lstrip("_") for part in path if part not in ("model", "module", "latents")]
            found[".".join(named) or "transformer"] = value
            return
        for key, each in inner.items():
            search(each, (*path, key))

    search(model, ())
    return found


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Inside the block, the modules are in eval mode (no dropout), without gradient; at its end, their modes are restored."""
    training = [module for module in modules if module.training]
    for module in training:
        module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.train()


def page_locked(tensor: Tensor, device: torch.device) -> Tensor:
    """Return the CPU tensor in page-locked memory, from which a copy to a GPU is several times faster.

    The tensor is returned unchanged if ``device`` is not a CUDA GPU.
    """
    return tensor if device.type != "cuda" or tensor.is_pinned() else tensor.pin_memory()


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy the tensor to ``device`` from page-locked memory, so that the host does not wait for the copy.

    Later computations on the device's current stream wait for the copy. The host may release the tensor immediately, because torch
    reuses page-locked memory only when the copies from it are finished. But the host must never write to the tensor again, because
    the device might not have read it yet. The host always waits for copies from the device, so it never reads a value too early.
    """
    ahead = tensor.device.type == "cpu" and device.type not in ("cpu", "mps")
    source = page_locked(tensor, device) if ahead else tensor
    return source.to(device, tensor.dtype if dtype is None else dtype, non_blocking=ahead)


def compute_device(module: nn.Module) -> torch.device:
    """The device on which a module computes; its sharded weights may be stored in CPU memory."""
    weight = next(module.parameters())
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None or mesh.device_type == weight.device.type:
        return weight.device
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """The blocks of a transformer or the decoder layers of a language model, in their order; none if they are not known."""
    names = getattr(module, "_repeated_blocks", None) or getattr(module, "_no_split_modules", None) or ()
    whole: Any = module
    root = whole.get_decoder() if hasattr(module, "get_decoder") else module
    return [inner for inner in root.modules() if type(inner).__name__ in names]


def sharded_root(module: nn.Module) -> nn.Module:
    """The submodule that holds all blocks and is called as a whole: a language model's decoder, otherwise the module itself."""
    inner: Any = module
    if hasattr(module, "get_output_embeddings") and hasattr(module, "model"):
        inner = getattr(module.model, "language_model", module.model)
    found: nn.Module = inner
    return found


def called_separately(module: nn.Module) -> set[nn.Parameter]:
    """Weights that are called on their own and are not in a block: a language model's embeddings, an IP-Adapter's projection."""
    made: Any = module
    if sharded_root(module) is module:
        return {weight for name, weight in module.named_parameters() if name.startswith("encoder_hid_proj.")}
    parts = made.get_input_embeddings(), made.get_output_embeddings()
    return {part.weight for part in parts if getattr(part, "weight", None) is not None}
