"""Feature files: one edit as image tokens, as a safetensors file or in EARL's ``.pth`` format.

A safetensors file has the tensors ``original_image`` and ``edited_image``, codes (h, w), and in its metadata the texts ``edit_id``,
``instruction``, ``CoT`` (JSON: a text, a map of texts, or null) and ``task`` (JSON: the task's other fields). A ``.pth`` file is a
dictionary with the first five. Only torch's restricted loader opens it: it reads numbers, texts, tensors and plain numpy arrays.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from jaxtyping import Int
from safetensors import SafetensorError, safe_open
from torch import Tensor

from retouch.data.rows import thought_of
from retouch.models.parts import load_restricted


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Feature:
    """One edit as image tokens. ``source``, ``target``: the codes of the source image, and of the edited image if there is one.
    ``thought``: the chain of thought before the edited image. ``task``: the other fields of the task as JSON (``text``, ``tags``,
    ``meta``, and ``pictures``: the file names of the images).
    """

    id: str
    instruction: str
    source: Int[Tensor, "h w"]
    target: Int[Tensor, "h w"] | None = None
    thought: str | None = None
    task: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The content of the safetensors file."""
        codes = {"original_image": self.source, "edited_image": self.target}
        tensors = {name: grid.to(torch.int32).cpu().contiguous() for name, grid in codes.items() if grid is not None}
        texts = {
            "edit_id": self.id,
            "instruction": self.instruction,
            "CoT": json.dumps(self.thought),
            "task": json.dumps(self.task),
        }
        content: bytes = safetensors.torch.save(tensors, metadata=texts)
        return content


def read_feature(path: Path, *, trusted: bool, thought_keys: Sequence[str] = ()) -> Feature:
    """Read the edit in a feature file. ``trusted``: whether the restricted loader may open a ``.pth`` file. ``thought_keys``: the
    keys to use of a chain of thought that is a map.

    Raises ValueError with the name of the file for any other file type, a damaged file, a missing part, and codes that are not
    grids of the same size.
    """
    if path.suffix == ".safetensors":
        fields = _safetensors(path)
    elif path.suffix == ".pth" and trusted:
        fields = load_restricted(path)
    elif path.suffix == ".pth":
        raise ValueError(
            f"{path}: this file was pickled by torch; set data.trusted: true if you trust its author (torch's restricted loader "
            "opens it), or make safetensors files with `retouch data tokenize`"
        )
    else:
        raise ValueError(f"{path}: features are .safetensors or .pth files")
    if not isinstance(fields, Mapping):
        raise ValueError(f"{path}: contains a {type(fields).__name__}; it should be a map of an edit's parts")
    lacking = [name for name in ("edit_id", "instruction", "original_image") if fields.get(name) is None]
    if lacking:
        raise ValueError(f"{path}: has no {lacking[0]}; a feature has edit_id, instruction, original_image and edited_image")
    if not isinstance(fields["instruction"], str) or not fields["instruction"].strip():
        raise ValueError(f"{path}: its instruction is not a text")
    task = fields.get("task") or {}
    if not isinstance(task, Mapping) or not all(isinstance(task.get(part, {}), Mapping) for part in ("tags", "meta", "pictures")):
        raise ValueError(f"{path}: its task is not a map; make the file again")
    if not all(isinstance(text, str) for text in (task.get("text") or "", *task.get("tags", {}).values())):
        raise ValueError(f"{path}: a text or a tag of its task is not a text; make the file again")
    source = _grid(path, "original_image", fields["original_image"])
    target = None if fields.get("edited_image") is None else _grid(path, "edited_image", fields["edited_image"])
    if target is not None and target.shape != source.shape:
        raise ValueError(f"{path}: edited_image is {_shape(target)} codes, and original_image {_shape(source)}")
    return Feature(
        id=str(fields["edit_id"]),
        instruction=fields["instruction"],
        source=source,
        target=target,
        thought=_thought(path, fields.get("CoT"), thought_keys),
        task=task,
    )


def _safetensors(path: Path) -> dict[str, Any]:
    try:
        with safe_open(path, framework="pt") as file:
            texts = file.metadata() or {}
            fields: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is no mapping
        return {**fields, **texts, **{name: json.loads(texts.get(name, "null")) for name in ("CoT", "task")}}
    except (SafetensorError, json.JSONDecodeError, OSError) as error:
        raise ValueError(f"{path}: damaged ({str(error).splitlines()[0]:.80}); make it again") from None


def _thought(path: Path, value: Any, keys: Sequence[str]) -> str | None:
    try:
        return thought_of(value, keys=keys)
    except ValueError as error:
        raise ValueError(f"{path}: its CoT {error}") from None


def _grid(path: Path, name: str, codes: Any) -> Int[Tensor, "h w"]:
    grid = torch.from_numpy(codes) if isinstance(codes, np.ndarray) and codes.dtype.kind in "iu" else codes
    if not isinstance(grid, Tensor) or grid.is_floating_point() or grid.is_complex() or grid.dtype == torch.bool:
        raise ValueError(f"{path}: {name} is not a grid of whole numbers")
    if grid.ndim == 3 and grid.shape[0] == 1:
        grid = grid[0]
    if grid.ndim != 2 or not grid.numel():
        raise ValueError(f"{path}: {name} has the shape {tuple(grid.shape)}; codes should be (height, width)")
    if int(grid.min()) < 0:
        raise ValueError(f"{path}: {name} has the code {int(grid.min())}; codes count from 0")
    return grid.long()


def _shape(grid: Tensor) -> str:
    return f"{grid.shape[0]}x{grid.shape[1]}"
