"""A folder of pictures with ``metadata.jsonl`` or ``metadata.csv``, as Hugging Face's imagefolder lays it out.

A line has ``file_name`` (or ``file_names``, ``image``, ``images``) and ``instruction`` (or ``prompt``), and may have ``target``,
``mask``, ``reference`` (each also as ``target_file_name`` and so on), ``text``, ``id`` and ``source``. Names of files are
relative to the metadata file, and no file outside the folder is ever opened. Where no line names a source picture, the tasks
are to make pictures, not to edit them. Every row is held in memory; for millions use parquet and ``read_hub``.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from retouch.data.images import Picture
from retouch.data.rows import Layout, TableRows, find_columns
from retouch.data.sources.tables import read_table

METADATA = ("metadata.jsonl", "metadata.csv")
_COLUMNS = {
    "id": ("id",),
    "instruction": ("instruction", "prompt"),
    "image": ("file_name", "file_names", "image", "images"),
    "mask": ("mask", "mask_file_name"),
    "reference": ("reference", "reference_file_name"),
    "target": ("target", "target_file_name"),
    "text": ("text",),
    "source": ("source",),
}


def read_folder(
    folder: str | Path,
    *,
    metadata: str | None = None,
    columns: Mapping[str, str] | None = None,
    tag_keys: tuple[str, ...] = (),
    name: str | None = None,
) -> TableRows:
    """The rows of a folder. Nothing is decoded yet.

    ``metadata``: the file's name, where it is not one of ``METADATA``; ``columns``: field to key, where keys differ from the
    convention (``{"instruction": "edit_prompt"}``); ``tag_keys``: keys that become tags; ``name``: begins the ids of rows that have
    none (by default the folder's). ValueError: no such folder, no metadata file or two, no rows, unknown columns.
    """
    root = Path(folder)
    if not root.is_dir():
        raise ValueError(f"{folder}: no such folder")
    there = [metadata] if metadata else [file for file in METADATA if (root / file).is_file()]
    if len(there) != 1:
        raise ValueError(f"{folder}: {' and '.join(there) or 'no metadata'} found; one of {' and '.join(METADATA)} must be there")
    table = read_table(path_under(root, there[0]))
    keys = list(dict.fromkeys(key for entry in table.entries for key in entry.fields or ()))
    found, notes = find_columns(keys, columns=columns or {}, defaults=_COLUMNS, file=table.file)
    if "image" not in found and "target" not in found:
        raise ValueError(f"{table.file}: no row has a file_name or a target; a list of prompts alone is read by read_prompts")
    layout = Layout(table.file, name or root.resolve().name, found, tag_keys, lambda value: picture_under(root, value))
    return TableRows(table, layout, notes=notes)


def picture_under(root: Path, value: Any) -> Picture:
    """The picture that a metadata file names, called by its place under ``root``. ValueError as ``path_under``."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"the name of a file belongs here, not {value!r:.40}")
    path = path_under(root, value)
    return Picture(path.relative_to(root.resolve()).as_posix(), path)


def path_under(root: Path, name: str) -> Path:
    """The file of that name under ``root``, with every link resolved.

    ValueError: no such file; a name that is absolute, climbs with "..", or leads out of the folder by a link.
    """
    if "\\" in name or "\0" in name:
        raise ValueError(f"{name!r}: separate folders by /, and use no other special signs in names")
    if PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or ".." in PurePosixPath(name).parts:
        raise ValueError(f"{name!r} leaves the folder; name a file inside it, relative to the metadata file")
    try:
        path = (root / name).resolve(strict=True)
    except FileNotFoundError:
        raise ValueError(f"{name!r}: no such file") from None
    except (OSError, RuntimeError):  # a name too long, a file used as a folder, links in a circle
        raise ValueError(f"{name!r}: cannot be reached") from None
    if not path.is_relative_to(root.resolve()):
        raise ValueError(f"{name!r} leads out of the folder by a link; copy the file into it")
    if not path.is_file():
        raise ValueError(f"{name!r} is not a file")
    return path
