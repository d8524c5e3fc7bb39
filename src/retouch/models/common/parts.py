"""Parts of models: from local folders (safetensors only, known classes only, no code from the folder) or from loaded pipelines; how
frozen parts compute; and copies from the host to a device."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ModelMixin
from torch import Tensor, nn

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline

Source: TypeAlias = "Path | str | DiffusionPipeline"
"""A local diffusers folder, or a loaded pipeline."""

LOCAL: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
"""Arguments of every ``from_pretrained`` call that loads weights."""


def diffusers_folder(path: Path | str) -> Path:
    """The folder of a diffusers pipeline. Raises ValueError for another folder."""
    root = Path(path)
    if not (root / "model_index.json").is_file():
        raise ValueError(f"{root} is not a diffusers folder (no model_index.json); download the model and set its local path")
    return root


def load_parts(source: Source, *, dtype: torch.dtype, device: torch.device | str, **kinds: Any) -> dict[str, Any]:
    """The parts of a pipeline by their names, and the configurations "scheduler" and "index" (``model_index.json``).

    ``kinds``: the class of each part. Modules of a folder are loaded in ``dtype``; those of a loaded pipeline keep theirs. All are
    put on ``device``; all but the transformer are frozen. Raises ValueError if the folder is not a diffusers folder, or if the
    pipeline lacks a part.
    """
    if not isinstance(source, Path | str):
        from retouch.models.common.loaded import pipeline_parts

        return pipeline_parts(source, device, kinds)
    root = diffusers_folder(source)
    parts: dict[str, Any] = {}
    for name, kind in kinds.items():
        if not issubclass(kind, nn.Module):
            parts[name] = kind.from_pretrained(root / name, local_files_only=True)
            continue
        dtype_argument = {"torch_dtype" if issubclass(kind, ModelMixin) else "dtype": dtype}
        parts[name] = kind.from_pretrained(root / name, **dtype_argument, **LOCAL).to(device)
        if name != "transformer":
            parts[name].requires_grad_(False).eval()
    scheduler = FlowMatchEulerDiscreteScheduler.load_config(root / "scheduler", local_files_only=True)
    index = json.loads((root / "model_index.json").read_text(encoding="utf-8"))
    return {**parts, "scheduler": scheduler, "index": index}


def load_image_processor(source: Source) -> Any:
    """The image processor of a pipeline with a Qwen vision-language model, in its PIL version, which needs no torchvision."""
    if not isinstance(source, Path | str):
        from retouch.models.common.loaded import pil_image_processor

        return pil_image_processor(source.components["processor"])
    from transformers import Qwen2VLImageProcessorPil

    return Qwen2VLImageProcessorPil.from_pretrained(Path(source) / "processor", local_files_only=True)


def part_config(source: Source, name: str, kind: Any) -> Mapping[str, Any]:
    """The configuration of a part of class ``kind``, without loading its weights."""
    in_folder = isinstance(source, Path | str)
    found: Mapping[str, Any] = kind.load_config(diffusers_folder(source) / name) if in_folder else source.components[name].config
    return found


@contextmanager
def evaluating(*modules: nn.Module) -> Iterator[None]:
    """Eval mode (no dropout) and no gradient inside the block; each module's mode is restored at its end."""
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
    """The CPU tensor in page-locked memory, from which a copy to a GPU is several times faster; itself if ``device`` is no GPU."""
    return tensor if device.type != "cuda" or tensor.is_pinned() else tensor.pin_memory()


def to_device(tensor: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor on ``device``, copied from page-locked memory, so that the host does not wait for the copy.

    Whatever the device computes next on the current stream waits for the copy. The host may release the tensor at once, because
    torch reuses page-locked memory only when the copies from it are finished. But the host must never write to it again: the device
    might not have read it yet. Copies in the other direction always wait, so the host never reads a value before it has arrived.
    """
    ahead = tensor.device.type == "cpu" and device.type not in ("cpu", "mps")
    source = page_locked(tensor, device) if ahead else tensor
    return source.to(device, tensor.dtype if dtype is None else dtype, non_blocking=ahead)


def compute_device(module: nn.Module) -> torch.device:
    """The device on which a module computes. Sharded weights may wait for it in CPU memory."""
    weight = next(module.parameters())
    mesh = getattr(weight, "device_mesh", None)
    if mesh is None or mesh.device_type == weight.device.type:
        return weight.device
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


@contextmanager
def without_tf32() -> Iterator[None]:
    """Inside the block, a GPU computes products and convolutions of fp32 in fp32, because a nearest neighbour can depend on it."""
    kept = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = kept
