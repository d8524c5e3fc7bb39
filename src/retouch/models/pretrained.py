"""Finds the weights of a published model in a local folder or in the cache of the Hugging Face Hub, or downloads them (safetensors
and JSON only), and checks that they are complete: an interrupted download is the usual reason if they are not."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retouch.config import wings
from retouch.records.files import read_json

_WEIGHTS = ("transformer", "vae", "text_encoder", "text_encoder_2")
_SETTINGS = ("scheduler", "processor", "tokenizer", "tokenizer_2")
_PARTS = (*_WEIGHTS, *_SETTINGS, "text_encoder_3", "tokenizer_3")
"""The folders of a pipeline; the last two may be missing."""
PIPELINE = ("model_index.json", *(f"{part}/*" for part in _PARTS))
"""The files of a diffusers pipeline."""
TOKENIZER = ("*.json", "*.txt", "*.jinja")
"""The files of a tokenizer or a processor alone: weights may be missing."""
DENOISER = ("transformer/*", "*/config.json")
"""The files of a pipeline's denoiser, and what they are compared by: its other parts' configurations."""
MODEL = ("*.safetensors", *TOKENIZER)
"""The files of a model in transformers' layout."""


def pipeline_files(path: str, *, local: bool = False) -> tuple[str, ...] | None:
    """The files of the pipeline in a folder or repository: all parts that its ``model_index.json`` names.

    ``local``: do not use the network; None if the index is not on this machine.
    """
    try:
        folder = Path(path) if Path(path).is_dir() else snapshot(path, ["model_index.json"], local_files_only=local)
    except (OSError, ValueError):  # what loads the files says why
        return None if local else PIPELINE
    parts = [part for part, entry in _json(folder / "model_index.json").items() if isinstance(entry, list) and entry[:1] != [None]]
    return ("model_index.json", *(f"{part}/*" for part in parts)) if parts else PIPELINE


_IGNORED_FILES = ["*.bin", "*.fp16.*", "*.msgpack", "*.py"]
_LFS_POINTER = b"version "
_LONGEST_HEADER = 100_000_000
"""Bytes; the limit of the safetensors format."""


def snapshot(path: str, files: Sequence[str], **options: Any) -> Path:
    """``snapshot_download`` of the files of a Hub id; the library is imported here, because reading a recipe must not import it.

    Raises ValueError for a text that is no id and, with ``local_files_only``, FileNotFoundError if the cache has no copy.
    """
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(path, allow_patterns=[*files], **options))


def find_weights(path: str, files: Sequence[str] = PIPELINE, *, key: str = "policy.model.path") -> Path | None:
    """The folder ``path``, or the complete cached copy of the Hub id ``path``; None if the weights are not on this machine.

    ``files``: ``PIPELINE``, ``DENOISER``, ``MODEL`` or ``TOKENIZER``. Does not use the network. Raises ValueError, which names the
    recipe's ``key``, if ``path`` is neither a folder nor a Hub id.
    """
    if Path(path).is_dir():
        return Path(path)
    try:
        cached = snapshot(path, files, ignore_patterns=_IGNORED_FILES, local_files_only=True)
    except ValueError:
        raise ValueError(f'{key}: {path} is neither a folder nor a Hugging Face id ("owner/name")') from None
    except FileNotFoundError:
        return None
    # An interrupted download is continued.
    return None if files != TOKENIZER and find_problems(cached, files) else cached


def fetch_weights(path: str, files: Sequence[str] = PIPELINE, *, key: str = "policy.model.path") -> Path:
    """Like ``find_weights``, but downloads missing files, and requires that all files of a model are complete.

    Raises ValueError if the download fails or if files are missing or damaged.
    """
    folder = find_weights(path, files, key=key)
    if folder is not None and (files == TOKENIZER or not Path(path).is_dir()):
        return folder  # a cached copy that was found is complete
    if folder is None:
        try:
            folder = snapshot(path, files, ignore_patterns=_IGNORED_FILES)
        except OSError as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(
                f"{key}: the weights of {path} could not be downloaded: {reason}. Log in with `hf auth login` if they are gated, "
                "or download them elsewhere and set the local folder"
            ) from error
    if files != TOKENIZER:
        require_complete(folder, path=path, key=key, files=files)
    return folder


def find_encoder(path: str) -> Path | None:
    """Like ``find_weights``, for the image encoder of an IP-Adapter in transformers' layout; ``playground`` is the built-in one."""
    if path == "playground":
        return Path(wings.load("part.playground_weights")("sight"))
    return find_weights(path, MODEL, key="policy.train.encoder")


def fetch_encoder(path: str) -> Path:
    """Like ``fetch_weights``, for the encoder of ``find_encoder``."""
    return Path(str(find_encoder(path))) if path == "playground" else fetch_weights(path, MODEL, key="policy.train.encoder")


class IncompleteWeights(ValueError):
    """Files of a model's folder are missing or damaged. ``command`` downloads them again."""

    def __init__(self, text: str, command: str) -> None:
        super().__init__(text, command)  # both, so that another process can send it
        self.command = command

    def __str__(self) -> str:
        return f"{self.args[0]}. Download the model again: `{self.command}`"


def require_complete(folder: Path, *, path: str, key: str, files: Sequence[str] = PIPELINE) -> None:
    """Raise IncompleteWeights, which names every file, if files of a diffusers or transformers folder are missing or damaged.

    Only file sizes, the headers of safetensors files and JSON files are read. ``path``: the folder or the Hub id that the recipe's
    ``key`` names. Parts of a pipeline that a family can do without (the third text encoder of Stable Diffusion 3) may be missing.
    """
    if problems := find_problems(folder, files):
        command = f"hf download ID --local-dir {path}" if Path(path).is_dir() else f"hf download {path}"
        raise IncompleteWeights(f"{key}: {folder} is incomplete: {'; '.join(problems)}", command)


def find_problems(folder: Path, files: Sequence[str] = PIPELINE) -> list[str]:
    """Name each file that is missing or damaged, and say what is wrong with it. ``files``: as for ``find_weights``."""
    found: list[str] = []
    index: Mapping[str, object] = {"transformer": [""]} if files == DENOISER else _json(folder / "model_index.json")
    for part, entry in index.items():
        if part not in (*_WEIGHTS, *_SETTINGS) or not isinstance(entry, list) or entry[:1] == [None]:
            continue
        if not (folder / part).is_dir():
            found.append(f"{part} is missing")
        elif not any((folder / part).glob("*.json")):
            found.append(f"{part} has no configuration")
        elif part in _WEIGHTS and not any((folder / part).glob("*.safetensors*")):
            found.append(f"{part} has no safetensors file")
    for file in _files(folder, "*.safetensors.index.json"):
        shards = _json(file).get("weight_map")
        for name in sorted(set(shards.values()) if isinstance(shards, dict) else ()):
            if not (shard := file.parent / name).is_file():
                found.append(f"{shard.relative_to(folder).as_posix()} is missing")
    for file in _files(folder, "*.json"):
        try:
            read_json(file)
        except ValueError:
            found.append(f"{file.relative_to(folder).as_posix()} is not valid JSON")
    for file in _files(folder, "*.safetensors"):
        if (problem := _problem(file)) is not None:
            found.append(f"{file.relative_to(folder).as_posix()} {problem}")
    return found


def _json(file: Path) -> dict[str, object]:
    """The object in a JSON file; empty if there is none, or if it is damaged (which ``find_problems`` reports)."""
    try:
        found = read_json(file) if file.is_file() else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


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
    return [file for place in (folder, *(folder / part for part in _PARTS)) for file in sorted(place.glob(pattern))]
