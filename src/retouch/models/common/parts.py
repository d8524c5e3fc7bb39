"""Parts of models: loaded from local folders (safetensors only, known classes only, no code from the folder), and run frozen."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, ModelMixin
from torch import nn

LOCAL: dict[str, Any] = {"local_files_only": True, "use_safetensors": True}
"""Arguments of every ``from_pretrained`` call that loads weights."""


def diffusers_folder(path: Path | str) -> Path:
    """The folder of a diffusers pipeline. Raises ValueError for another folder."""
    root = Path(path)
    if not (root / "model_index.json").is_file():
        raise ValueError(f"{root} is not a diffusers folder (no model_index.json); download the model and set its local path")
    return root


def load_parts(path: Path | str, *, dtype: torch.dtype, device: torch.device | str, **kinds: Any) -> dict[str, Any]:
    """The parts of a local diffusers folder by their names, and the configurations "scheduler" and "index" (``model_index.json``).

    ``kinds``: the class of each part. Modules are loaded in ``dtype`` on ``device``; all but the transformer are frozen. Raises
    ValueError if this is not a diffusers folder.
    """
    root = diffusers_folder(path)
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
