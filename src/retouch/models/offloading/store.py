"""Prompt embeddings on disk: one safetensors file per entry, whose name is the digest of everything that it was computed from.

Several processes may use one folder. A complete file gets its name by a rename; two processes that write the same entry write the
same content. A damaged file is reported and counts as missing, so files are not flushed to disk with fsync.
"""

import json
import logging
import os
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from retouch.config.consent import user_folder
from retouch.records import files

FOLDER_VARIABLE = "RETOUCH_PROMPT_CACHE"
LIMIT_VARIABLE = "RETOUCH_PROMPT_CACHE_GB"
DEFAULT_LIMIT_GB = 100.0
_SUFFIX = ".safetensors"
_CHECKSUM, _WIDENED = "crc32", "widened"
_KEPT_SHARE = 0.9
"""When the limit is exceeded, entries are deleted until this share of the limit is left."""
_ABANDONED_SECONDS = 24 * 3600
_log = logging.getLogger("retouch")


class EmbeddingStore:
    """Named groups of tensors in ``folder``, at most ``limit`` bytes; the least recently used are deleted first."""

    def __init__(self, folder: Path, *, limit: int) -> None:
        self.folder = folder
        self.limit = limit
        self._bytes: int | None = None
        self._failed = False

    @classmethod
    def of_user(cls) -> "EmbeddingStore":
        """The user's store: in the folder ``RETOUCH_PROMPT_CACHE`` (default: the user's cache folder), with a limit of
        ``RETOUCH_PROMPT_CACHE_GB`` GB (default: 100).

        Raises ValueError if the limit is not a positive number, or if there is no folder.
        """
        given = os.environ.get(FOLDER_VARIABLE)
        user = user_folder("XDG_CACHE_HOME", ".cache")
        if not given and user is None:
            raise ValueError(f"there is no home folder for prompt embeddings; set {FOLDER_VARIABLE} to a folder")
        folder = Path(given) if given else Path(user or "") / "prompt-embeddings"
        text = os.environ.get(LIMIT_VARIABLE) or str(DEFAULT_LIMIT_GB)
        try:
            limit = float(text)
        except ValueError:
            limit = 0.0
        if not 0 < limit < float("inf"):
            raise ValueError(f"{LIMIT_VARIABLE} is {text!r}; set it to the GB that prompt embeddings may take, for example 100")
        return cls(folder, limit=int(limit * 1e9))

    def read(self, key: str) -> dict[str, Tensor] | None:
        """Return the tensors of an entry, on the CPU; None if there is no such entry, or if it is damaged."""
        path = self._path(key)
        try:
            with safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            return None
        except (SafetensorError, OSError) as error:
            self._damaged(path, str(error))
            return None
        if about.get(_CHECKSUM) != _checksum(tensors):
            self._damaged(path, "its checksum differs")
            return None
        with suppress(OSError):
            os.utime(path)  # it is the most recently used now
        widened = json.loads(about[_WIDENED])
        return {name: tensor.float() if name in widened else tensor for name, tensor in tensors.items()}

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Store the tensors. If the disk cannot be written, this is reported once, and the entry is computed again when needed."""
        narrowed = {name: _narrowed(tensor.detach().cpu().contiguous()) for name, tensor in tensors.items()}
        widened = sorted(name for name, tensor in narrowed.items() if tensor.dtype != tensors[name].dtype)
        about = {_CHECKSUM: _checksum(narrowed), _WIDENED: json.dumps(widened)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with files.replacing(self._path(key), durable=False) as file:
                save_file(narrowed, file.name, metadata=about)
                size = os.path.getsize(file.name)
            self._bytes = size + (self.usage()[1] if self._bytes is None else self._bytes)
            if self._bytes > self.limit:
                self._delete_oldest()
        except (SafetensorError, OSError) as error:
            if not self._failed:
                _log.warning("prompt embeddings cannot be kept in %s: %s", self.folder, error)
            self._failed = True

    def usage(self) -> tuple[int, int]:
        """Return the number of entries and their total bytes."""
        sizes = [size for _, size, _ in self._entries()]
        return len(sizes), sum(sizes)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _damaged(self, path: Path, why: str) -> None:
        _log.warning("the prompt embeddings in %s are damaged (%s); they are computed again", path, why)

    def _entries(self) -> list[tuple[float, int, Path]]:
        """(time of the last use, bytes, path) of each entry. Removes temporary files that a killed process left."""
        found: list[tuple[float, int, Path]] = []
        with suppress(FileNotFoundError), os.scandir(self.folder) as entries:
            for file in entries:
                with suppress(FileNotFoundError):  # another process may have deleted it
                    state = file.stat()
                    if file.name.endswith(_SUFFIX):
                        found.append((state.st_mtime, state.st_size, Path(file.path)))
                    elif file.name.startswith(files.TEMPORARY) and time.time() - state.st_mtime > _ABANDONED_SECONDS:
                        Path(file.path).unlink(missing_ok=True)
        return found

    def _delete_oldest(self) -> None:
        entries = sorted(self._entries())
        self._bytes = sum(size for _, size, _ in entries)
        if self._bytes <= self.limit:  # another process has deleted some
            return
        _log.warning(
            "prompt embeddings take %.1f GB in %s; the limit is %.1f GB (%s): the least recently used are deleted",
            self._bytes / 1e9,
            self.folder,
            self.limit / 1e9,
            LIMIT_VARIABLE,
        )
        for _, size, path in entries:
            if self._bytes <= _KEPT_SHARE * self.limit:
                return
            path.unlink(missing_ok=True)
            self._bytes -= size


def _narrowed(tensor: Tensor) -> Tensor:
    """Return an fp32 tensor in bfloat16 if this is exact: 16-bit encoders return their states in fp32."""
    if tensor.dtype != torch.float32:
        return tensor
    half = tensor.bfloat16()
    return half if torch.equal(half.float(), tensor) else tensor


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().data, zlib.crc32(name.encode(), value))
    return str(value)
