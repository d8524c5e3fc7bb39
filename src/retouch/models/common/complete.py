"""Checks that the folder of a model is complete before anything of it is loaded: an interrupted download is the usual reason."""

import json
from collections.abc import Iterator
from pathlib import Path

from retouch.records.files import read_json

_LFS_POINTER = b"version "
_LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors format."""
_WEIGHTS = ("transformer", "vae", "text_encoder", "text_encoder_2")
_SETTINGS = ("scheduler", "processor", "tokenizer", "tokenizer_2")
PARTS = (*_WEIGHTS, *_SETTINGS, "text_encoder_3", "tokenizer_3")
"""The folders of a pipeline; the last two may be missing."""


class IncompleteWeights(ValueError):
    """Files of a model's folder are missing or damaged. ``command`` downloads them again."""

    def __init__(self, text: str, command: str) -> None:
        super().__init__(f"{text}. Download the model again: `{command}`")
        self.command = command


def require_complete(folder: Path, *, path: str, key: str) -> None:
    """Raise IncompleteWeights, which names every file, if files of a diffusers or transformers folder are missing or damaged.

    Only file sizes, the headers of safetensors files and JSON files are read. ``path``: the folder or the Hub id that the recipe's
    ``key`` names. Parts of a pipeline that a family can do without (the third text encoder of Stable Diffusion 3) may be missing.
    """
    if problems := find_problems(folder):
        command = f"hf download ID --local-dir {path}" if Path(path).is_dir() else f"hf download {path}"
        raise IncompleteWeights(f"{key}: {folder} is incomplete: {'; '.join(problems)}", command)


def find_problems(folder: Path) -> list[str]:
    """Name each file that is missing or damaged, and say what is wrong with it."""
    return [*_missing(folder), *_damaged(folder)]


def _missing(folder: Path) -> Iterator[str]:
    """Parts that ``model_index.json`` names and that have no files, and weights that an index names."""
    index = _json(folder / "model_index.json")
    for part, entry in index.items():
        if part not in (*_WEIGHTS, *_SETTINGS) or not isinstance(entry, list) or entry[:1] == [None]:
            continue
        if not (folder / part).is_dir():
            yield f"{part} is missing"
        elif not any((folder / part).glob("*.json")):
            yield f"{part} has no configuration"
        elif part in _WEIGHTS and not any((folder / part).glob("*.safetensors*")):
            yield f"{part} has no safetensors file"
    for file in _files(folder, "*.safetensors.index.json"):
        shards = _json(file).get("weight_map")
        for name in sorted(set(shards.values()) if isinstance(shards, dict) else ()):
            if not (file.parent / name).is_file():
                yield f"{_name(folder, file.parent / name)} is missing"


def _damaged(folder: Path) -> Iterator[str]:
    for file in _files(folder, "*.json"):
        try:
            read_json(file)
        except ValueError:
            yield f"{_name(folder, file)} is not valid JSON"
    for file in _files(folder, "*.safetensors"):
        problem = _problem(file)
        if problem is not None:
            yield f"{_name(folder, file)} {problem}"


def _problem(file: Path) -> str | None:
    """What is wrong with the header or the size of a safetensors file."""
    there = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        if start == _LFS_POINTER:
            return "is a Git LFS pointer (run `git lfs pull`)"
        length = int.from_bytes(start, "little")
        if there < 8 or length > _LONGEST_HEADER:
            return f"is not a safetensors file ({there} bytes)"
        text = opened.read(length)
    if len(text) < length:
        return f"has {there} bytes and needs more than {8 + length}"
    try:
        tensors = [value for name, value in json.loads(text).items() if name != "__metadata__"]
        wanted = 8 + length + max((value["data_offsets"][1] for value in tensors), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        return "has a damaged header"
    return None if there == wanted else f"has {there} of {wanted} bytes"


def _files(folder: Path, pattern: str) -> list[Path]:
    """The files of the folder, and of its parts if it is a pipeline."""
    parts = PARTS if (folder / "model_index.json").is_file() else ()
    return [file for place in (folder, *(folder / part for part in parts)) for file in sorted(place.glob(pattern))]


def _name(folder: Path, file: Path) -> str:
    return file.relative_to(folder).as_posix()


def _json(file: Path) -> dict[str, object]:
    """The object in a JSON file; empty if there is none, or if it is damaged (which ``_damaged`` reports)."""
    try:
        found = read_json(file) if file.is_file() else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
