"""Hugging Face data sets, from the Hub or from disk, with a column map.

No code of a data set is run: the ``datasets`` library refuses data sets with code. Rows stay on disk and images stay encoded until
they are accessed. An image that is stored as a path is opened only in the folder of the data set or in the caches of the library
(unpacked archives), so that a table cannot name other files of this machine. ``datasets`` is imported when rows are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from retouch.config.consent import data_path, require_no_links_out
from retouch.config.section import NonEmpty
from retouch.data.base import ImageData
from retouch.data.examination import file_state
from retouch.data.images import EncodedImage
from retouch.data.rows import Identity, Layout, Problem, Row
from retouch.data.sources.columns import find_columns
from retouch.types import TaskContents

if TYPE_CHECKING:
    import datasets

_COLUMNS = {
    "id": ("id",),
    "instruction": ("instruction", "prompt"),
    "image": ("image", "images"),
    "mask": ("mask",),
    "reference": ("reference",),
    "target": ("target",),
    "chosen": ("chosen",),
    "rejected": ("rejected",),
    "text": ("text",),
    "source": ("source",),
    "thought": ("thought", "thinking", "CoT"),
}


class HubData(ImageData):
    """A Hugging Face data set by id or path."""

    on_hub = True

    kind: Literal["hub"] = "hub"
    path: NonEmpty
    """Id or folder of the data set."""
    config: str | None = None
    """Configuration of the data set; null if there is only one."""
    revision: str | None = None
    """Commit or tag; null uses the newest."""
    split: str = "train"
    """Split of the data set."""
    columns: dict[str, str]
    """Map from a field (``instruction``, ``image``, ``target``, ...) to the column of the data set."""

    def rows(self, *, seed: int) -> HubRows:
        if Path(self.path).exists():
            data_path(self.path)
        return read_hub(
            self.path,
            split=self.split,
            config=self.config,
            revision=self.revision,
            columns=self.columns,
            tag_keys=self.tags,
            thought_keys=self.thought_keys,
        )

    def contents(self) -> TaskContents:
        return TaskContents(reference=None if "reference" in self.columns else False)


class HubRows:
    """The rows of a data set of the ``datasets`` library. The ``line`` of a row is its number, from 1. ``folder``: the folder of
    the data set, if it is on this machine."""

    def __init__(
        self, dataset: datasets.Dataset, layout: Layout, *, problems: tuple[Problem, ...], folder: Path | None = None
    ) -> None:
        self.problems = problems
        self._folder = folder
        self._original = dataset
        self._dataset = dataset.with_format("arrow")  # raw cells, because the library would decode images without a size limit
        self._layout = layout

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Row:
        (fields,) = self._dataset[index].to_pylist()
        return self._layout.parse(fields, line=index + 1)

    def identity(self) -> Identity | None:
        """The identity of the table, from the library's fingerprint and the sizes and times of the files of the table."""
        if not self._layout.has_images:
            return None
        files = sorted({str(file["filename"]) for file in self._original.cache_files})
        states = [(str(Path(name).name), *file_state(name)[1:]) for name in files]
        digest = self._layout.digest(self._original._fingerprint, repr(states))
        return Identity(digest, self._layout.file, self._folder)


def read_hub(
    path: str | Path,
    *,
    split: str | None = None,
    config: str | None = None,
    revision: str | None = None,
    columns: Mapping[str, str] | None = None,
    tag_keys: tuple[str, ...] = (),
    thought_keys: tuple[str, ...] = (),
    name: str | None = None,
) -> HubRows:
    """The rows of one split of a data set.

    ``path``: on disk, a folder that ``save_to_disk`` wrote, a folder that ``load_dataset`` reads (parquet, imagefolder), or a
    parquet file; otherwise an id on the Hub. ``split`` may be None if there is only one split. ``revision``: a commit on the Hub,
    so that the data cannot change during a run. ``columns``: the column of a field, if their names differ. ``tag_keys`` and
    ``thought_keys``: as in ``read_folder``. ``name``: the prefix of the ids of rows without an id. Raises ValueError for an unknown
    data set, split or column, a file that is not parquet, links out of the data set, and files that the library cannot read.
    """
    import datasets
    from datasets.exceptions import DatasetsError
    from huggingface_hub.constants import HF_HUB_CACHE
    from pyarrow import ArrowException

    local = Path(path).exists()
    if local and revision is not None:
        raise ValueError(f"{path} is on this disk and has no revision {revision!r}; leave revision out")
    if Path(path).is_file() and Path(path).suffix != ".parquet":
        raise ValueError(
            f"{path}: not a parquet file; for CSV or JSONL use a folder with metadata.csv or metadata.jsonl, or a prompt list"
        )
    if Path(path).is_dir():
        require_no_links_out(Path(path))
    elif local:
        data_path(path)
    try:
        loaded = _load(path, split, config, revision)
    except (DatasetsError, ArrowException, RuntimeError, OSError, ValueError) as error:
        reason = f"{error}: {error.__cause__}" if isinstance(error, DatasetsError) and error.__cause__ is not None else str(error)
        raise ValueError(f"{path}: `datasets` cannot read it: {reason}") from error
    dataset, file = _one_split(loaded, str(path), split)
    if not len(dataset):
        raise ValueError(f"{file}: no rows")
    if local and {*dataset.column_names} <= {"image", "label"} and not columns and _is_image_folder(Path(path)):
        raise ValueError(
            f"{path}: a folder of images without metadata.jsonl; write one, with a line for each image: "
            '{"file_name": "NAME.png", "instruction": "TEXT"}'
        )
    found, notes = find_columns(dataset.column_names, columns=columns or {}, defaults=_COLUMNS, file=file)
    if not local and revision is None:
        notes.append(Problem(file, 0, "no revision is given, so the data may change during the run; pin a commit", "note"))
    caches = [Path(datasets.config.HF_DATASETS_CACHE), Path(HF_HUB_CACHE)]
    allowed = tuple(root.resolve() for root in ([Path(path), *caches] if local else caches))
    layout = Layout(file, name or Path(path).name, found, tag_keys, partial(embedded_image, allowed=allowed), thought_keys)
    folder = Path(path) if local else None
    return HubRows(dataset, layout, problems=tuple(notes), folder=folder if folder is None or folder.is_dir() else folder.parent)


def _load(path: str | Path, split: str | None, config: str | None, revision: str | None) -> datasets.Dataset | datasets.DatasetDict:
    import datasets

    where = Path(path)
    if (where / "state.json").is_file() or (where / "dataset_dict.json").is_file():
        return datasets.load_from_disk(str(where))
    if where.is_file():
        return datasets.load_dataset("parquet", data_files=str(where.resolve()), split=split)
    name = str(where.resolve()) if where.is_dir() else str(path)  # absolute: a folder "json" would be read as a format name
    return datasets.load_dataset(name, config, split=split, revision=revision)


def _is_image_folder(folder: Path) -> bool:
    """Whether ``datasets`` reads image files in this folder, and not a table that contains images."""
    tables = ("*.parquet", "*.arrow")
    return folder.is_dir() and not any(next(folder.rglob(pattern), None) for pattern in tables)


def _one_split(loaded: datasets.Dataset | datasets.DatasetDict, path: str, split: str | None) -> tuple[datasets.Dataset, str]:
    import datasets

    if isinstance(loaded, datasets.Dataset):
        if split is not None and loaded.split is not None and str(loaded.split) != split:
            raise ValueError(f"{path}: this is the split {str(loaded.split)!r}, not {split!r}")
        return loaded, f"{path}[{split or loaded.split or 'all'}]"
    chosen = split or (next(iter(loaded)) if len(loaded) == 1 else None)
    if chosen not in loaded:
        raise ValueError(f"{path}: set split to one of the splits: {', '.join(loaded)}")
    return loaded[chosen], f"{path}[{chosen}]"


def embedded_image(value: Any, allowed: tuple[Path, ...]) -> EncodedImage:
    """The image in a cell: bytes, or the library's struct of bytes and path. ``allowed``: folders in which a path may be opened.

    Raises ValueError for any other value, and for a path outside these folders.
    """
    cell = {"bytes": value, "path": None} if isinstance(value, bytes) else value
    if not isinstance(cell, dict) or not {"bytes", "path"} >= cell.keys():
        raise ValueError(f"should be an image, not {value!r:.40}; for file names use a folder with metadata.jsonl")
    if cell.get("bytes"):
        return EncodedImage(str(cell.get("path") or "an image in the table"), cell["bytes"])
    if not cell.get("path"):
        raise ValueError("an image without bytes")
    path = Path(cell["path"]).resolve()
    for root in allowed:
        if path.is_relative_to(root):
            return EncodedImage(path.relative_to(root).as_posix(), path)
    raise ValueError(f"{cell['path']!r} is outside the data set and is not opened")
