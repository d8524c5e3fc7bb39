"""One edit as image tokens: what a feature file holds, in safetensors or in the source's own ``.pth``.

A safetensors file has the tensors ``original_image`` and ``edited_image``, codes (h, w), and its metadata the texts ``edit_id``,
``instruction``, ``CoT`` (JSON: a text, a map of texts, or null) and ``task`` (JSON: what else is known of it). A ``.pth`` is a
dictionary with the first five.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from retouch.data.sources.restricted import load_restricted
from retouch.types import Json

LONGEST_THOUGHT = 1750
"""Characters of a chain of thought; what is longer is cut (EARL)."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Feature:
    """``source``, ``target``: codes of the picture to edit, and of the edited one where there is one. ``thought``: what is thought
    before it is drawn. ``task``: JSON of what else the task had (``text``, ``tags``, ``meta``, and ``pictures`` by name of file).
    """

    id: str
    instruction: str
    source: Int[Tensor, "h w"]
    target: Int[Tensor, "h w"] | None = None
    thought: str | None = None
    task: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The safetensors file."""
        codes = {"original_image": self.source, "edited_image": self.target}
        tensors = {name: grid.to(torch.int32).cpu().contiguous() for name, grid in codes.items() if grid is not None}
        texts = {
            "edit_id": self.id,
            "instruction": self.instruction,
            "CoT": json.dumps(self.thought),
            "task": json.dumps(self.task),
        }
        return safetensors.torch.save(tensors, metadata=texts)


def read_feature(path: Path, *, trusted: bool) -> Feature:
    """The edit in a feature file. ``trusted``: a ``.pth`` may be opened, by the restricted loader.

    ValueError, naming the file: it is of another kind or damaged, lacks a part, or its codes are no two grids of one size.
    """
    if path.suffix == ".safetensors":
        fields = _safetensors(path)
    elif path.suffix == ".pth" and trusted:
        fields = load_restricted(path)
    elif path.suffix == ".pth":
        raise ValueError(
            f"{path}: a file that torch pickled; say data.trusted: true where you trust who made it (torch's restricted loader "
            "opens it), or make safetensors with `retouch data tokenize`"
        )
    else:
        raise ValueError(f"{path}: features are .safetensors or .pth files")
    if not isinstance(fields, Mapping):
        raise ValueError(f"{path}: holds a {type(fields).__name__} where a map of an edit's parts belongs")
    lacking = [name for name in ("edit_id", "instruction", "original_image") if fields.get(name) is None]
    if lacking:
        raise ValueError(f"{path}: has no {lacking[0]}; a feature has edit_id, instruction, original_image and edited_image")
    if not isinstance(fields["instruction"], str) or not fields["instruction"].strip():
        raise ValueError(f"{path}: its instruction is no text")
    task = fields.get("task") or {}
    if not isinstance(task, Mapping) or not all(isinstance(task.get(part, {}), Mapping) for part in ("tags", "meta", "pictures")):
        raise ValueError(f"{path}: what it says of its task is no map; make it again")
    source = _grid(path, "original_image", fields["original_image"])
    target = None if fields.get("edited_image") is None else _grid(path, "edited_image", fields["edited_image"])
    if target is not None and target.shape != source.shape:
        raise ValueError(f"{path}: edited_image is {_shape(target)} codes, and original_image {_shape(source)}")
    return Feature(
        id=str(fields["edit_id"]),
        instruction=fields["instruction"],
        source=source,
        target=target,
        thought=thought_of(fields.get("CoT")),
        task=task,
    )


def thought_of(told: Json) -> str | None:
    """A chain of thought as text of at most ``LONGEST_THOUGHT`` characters: of a map its texts in order, a line each."""
    if isinstance(told, Mapping):
        told = "\n".join(each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in told.values())
    return told[:LONGEST_THOUGHT] if isinstance(told, str) and told.strip() else None


def _safetensors(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt") as file:
            texts = file.metadata() or {}
            fields: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        return {**fields, **texts, **{name: json.loads(texts.get(name, "null")) for name in ("CoT", "task")}}
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise ValueError(f"{path}: damaged ({str(error).splitlines()[0]:.80}); make it again") from None


def _grid(path: Path, name: str, codes: Any) -> Int[Tensor, "h w"]:
    grid = torch.from_numpy(codes) if isinstance(codes, np.ndarray) and codes.dtype.kind in "iu" else codes
    if not isinstance(grid, Tensor) or grid.is_floating_point() or grid.is_complex() or grid.dtype == torch.bool:
        raise ValueError(f"{path}: {name} is no grid of whole numbers")
    if grid.ndim == 3 and grid.shape[0] == 1:
        grid = grid[0]
    if grid.ndim != 2 or not grid.numel():
        raise ValueError(f"{path}: {name} has the shape {tuple(grid.shape)}; codes are rows of a picture, (height, width)")
    if int(grid.min()) < 0:
        raise ValueError(f"{path}: {name} has the code {int(grid.min())}; codes count from 0")
    return grid.long()


def _shape(grid: Tensor) -> str:
    return f"{grid.shape[0]}x{grid.shape[1]}"
