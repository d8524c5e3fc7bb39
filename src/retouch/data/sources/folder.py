"""A folder of images with ``metadata.jsonl`` or ``metadata.csv``, in the layout of Hugging Face's imagefolder.

A line has ``file_name`` (or ``file_names``, ``image``, ``images``) and ``instruction`` (or ``prompt``), and may have ``target``,
``mask``, ``reference``, ``chosen`` and ``rejected`` (each also as ``target_file_name`` and so on), ``text``, ``id``, ``source`` and
``thought``. File names are relative to the metadata file, and no file outside the folder is ever opened. If no line names a source
image, the tasks are text-to-image tasks. All rows are kept in memory; for millions of rows use parquet and ``HubData``.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, Literal

from pydantic import Field

from retouch.config.section import Count, NonEmpty
from retouch.data.base import ImageData
from retouch.data.images import EncodedImage
from retouch.data.rows import Layout
from retouch.data.sources.columns import find_columns
from retouch.data.sources.tables import TableRows, read_table
from retouch.data.tasks import Tasks
from retouch.types import Task

METADATA = ("metadata.jsonl", "metadata.csv")
_COLUMNS = {
    "id": ("id",),
    "instruction": ("instruction", "prompt"),
    "image": ("file_name", "file_names", "image", "images"),
    "mask": ("mask", "mask_file_name"),
    "reference": ("reference", "reference_file_name"),
    "target": ("target", "target_file_name"),
    "chosen": ("chosen", "chosen_file_name"),
    "rejected": ("rejected", "rejected_file_name"),
    "text": ("text",),
    "source": ("source",),
    "thought": ("thought", "thinking", "CoT"),
}


class FolderData(ImageData):
    """A folder of images with a ``metadata.jsonl``, in the layout of Hugging Face's imagefolder."""

    kind: Literal["folder"] = "folder"
    path: NonEmpty
    """The folder."""
    columns: dict[str, str] = Field(default={})
    """Map from a field (``instruction``, ``target``, ...) to its key in the metadata file, if their names differ."""
    crops: Count = Field(default=1, exclude_if=lambda crops: crops == 1)
    """Number of versions of each training row: its images as they are, and random crops of them with their aspect ratio and at
    least 0.4 of their width and height. With few photographs, a model then learns less about these photographs and more that
    carries over to others. Held-out images are not cropped. Not for instructions that name a position, such as "on the left"."""

    def rows(self, *, seed: int) -> TableRows:
        return read_folder(self.path, columns=self.columns, tag_keys=self.tags, thought_keys=self.thought_keys)

    def training_tasks(self, tasks: Tasks, train: Sequence[int], *, seed: int) -> Sequence[Task]:
        if self.crops == 1:
            return super().training_tasks(tasks, train, seed=seed)
        from retouch.data.crops import CroppedTasks

        return CroppedTasks(tasks, train, count=self.crops, seed=seed)

    @classmethod
    def rows_at(cls, path: Path) -> TableRows | None:
        return read_folder(path) if any((path / name).is_file() for name in METADATA) else None


def read_folder(
    folder: str | Path,
    *,
    columns: Mapping[str, str] | None = None,
    tag_keys: tuple[str, ...] = (),
    thought_keys: tuple[str, ...] = (),
) -> TableRows:
    """The rows of a folder; no image is decoded yet.

    ``columns``: the key of a field, if it differs from the convention (``{"instruction": "edit_prompt"}``). ``tag_keys``: keys that
    become tags. ``thought_keys``: the keys to use of a chain of thought that is a map. Rows without an id get one that begins with
    the name of the folder.

    Raises ValueError for a missing folder, a missing or second metadata file, no rows, and unknown columns.
    """
    root = Path(folder)
    if root.name in METADATA and root.is_file():
        raise ValueError(f"{folder}: give the folder, not its metadata file: {root.parent}")
    if not root.is_dir():
        raise ValueError(f"{folder}: no such folder; give the folder of your data set (in a recipe: data.path)")
    there = [file for file in METADATA if (root / file).is_file()]
    if len(there) != 1:
        raise ValueError(f"{folder}: {' and '.join(there) or 'no metadata'} found; one of {' and '.join(METADATA)} must be there")
    table = read_table(path_under(root, there[0]))
    found, notes = find_columns(table.keys(), columns=columns or {}, defaults=_COLUMNS, file=table.file)
    if not {"image", "target", "chosen"} & found.keys():
        raise ValueError(
            f"{table.file}: no row has a file_name, a target or a chosen image; for prompts without images use data.kind: 'prompts'"
        )
    layout = Layout(table.file, root.resolve().name, found, tag_keys, partial(image_under, root), thought_keys)
    return TableRows(table, layout, notes=notes)


def names_images(keys: Iterable[str]) -> bool:
    """Whether these keys of a metadata file include one that names an image, by the convention."""
    return any(key in _COLUMNS[name] for key in keys for name in ("image", "target", "chosen"))


def image_under(root: Path, value: Any) -> EncodedImage:
    """The image that a metadata file names; its name in messages is its path under ``root``. Raises ValueError under the same
    conditions as ``path_under``."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"should be the name of a file, not {value!r:.40}")
    path = path_under(root, value)
    return EncodedImage(path.relative_to(root.resolve()).as_posix(), path)


def path_under(root: Path, name: str) -> Path:
    """The path of the file ``name`` under ``root``, with all links resolved.

    Raises ValueError for a missing file, and for a name that is absolute, contains "..", or leads out of the folder by a link.
    """
    if "\\" in name or "\0" in name:
        raise ValueError(f"{name!r}: separate folders by /, and use no other special characters in names")
    if PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{name!r} leaves the folder; name a file inside it, relative to the metadata file")
    try:
        path = (root / name).resolve(strict=True)
    except FileNotFoundError:
        raise ValueError(f"{name!r}: no such file") from None
    except (OSError, RuntimeError):  # a name that is too long, a file used as a folder, circular links
        raise ValueError(f"{name!r}: cannot be reached") from None
    if not path.is_relative_to(root.resolve()):
        raise ValueError(f"{name!r} leads out of the folder by a link; copy the file into it")
    if not path.is_file():
        raise ValueError(f"{name!r} is not a file")
    return path
