"""Lists of prompts: ``.txt`` files with one prompt per line, and ``.jsonl`` files with ``prompt`` (or ``instruction``) and the
columns that a reward needs.

As in Flow-GRPO's lists, the quoted text of a prompt is the text that the image should show (``quotes.py``).
``read_instructions`` reads lists for inference, which may also name images.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from retouch.config.packaged import shipped
from retouch.config.section import NonEmpty
from retouch.data.base import StoredData
from retouch.data.images import EncodedImage
from retouch.data.rows import Layout, PromptRows
from retouch.data.sampler import Subset
from retouch.data.sources.columns import find_columns
from retouch.data.sources.folder import METADATA, image_under, names_images
from retouch.data.sources.tables import TableRows, read_table
from retouch.data.tasks import Tasks
from retouch.data.validation import accept
from retouch.types import TaskContents

_PROMPT_COLUMNS = {"id": ("id",), "instruction": ("prompt", "instruction"), "text": ("text",), "source": ("source",)}
_INSTRUCTION_COLUMNS = {
    "id": ("id",),
    "instruction": ("instruction", "prompt"),
    "image": ("image", "images", "file_name", "file_names"),
    "mask": ("mask",),
    "reference": ("reference",),
}


class PromptData(StoredData):
    """A list of prompts without images: a text file with one prompt per line, a JSON lines file or a CSV file."""

    kind: Literal["prompts"] = "prompts"
    path: NonEmpty
    """The file. Lists that come with the package's recipes are found as ``recipes/...`` from any working directory."""

    def rows(self, *, seed: int) -> PromptRows:
        return read_prompts(shipped(self.path), tag_keys=self.tags)

    @classmethod
    def rows_at(cls, path: Path) -> PromptRows | None:
        return read_prompts(path) if path.suffix in (".txt", ".jsonl", ".csv") else None

    def contents(self) -> TaskContents:
        return TaskContents(images=False, mask=False, reference=False, target=False, pairs=False)


def read_prompts(
    path: str | Path, *, columns: Mapping[str, str] | None = None, tag_keys: tuple[str, ...] = (), name: str | None = None
) -> PromptRows:
    """The rows of a prompt list. ``columns`` and ``tag_keys`` are as in ``read_folder``. ``name``: the prefix of the ids of rows
    without an id; by default the stem of the file name.

    Raises ValueError for a missing file, no rows, unknown columns, and the metadata file of a folder of images.
    """
    file = Path(path)
    table = read_table(file, text_field="prompt")
    if file.name in METADATA and names_images(table.keys()):
        raise ValueError(
            f"{file} names the images of a folder; give the folder, not its metadata file: {file.parent} (data.kind: 'folder')"
        )
    found, notes = find_columns(table.keys(), columns=columns or {}, defaults=_PROMPT_COLUMNS, file=table.file)
    return PromptRows(TableRows(table, Layout(table.file, name or file.stem, found, tag_keys, _no_image), notes=notes))


def read_instructions(path: str | Path) -> Subset:
    """The tasks of a list for inference, in the order of the list.

    A JSON line has ``instruction`` (or ``prompt``) and may have ``image`` (or ``file_name``; one or a list), ``mask`` and
    ``reference``: file names relative to the list; no file outside the folder of the list is opened. If one line has images, all
    lines must have images. Raises ValueError with the file and line of the rows that cannot be used.
    """
    file = Path(path)
    table = read_table(file, text_field="instruction")
    columns, notes = find_columns(table.keys(), columns={}, defaults=_INSTRUCTION_COLUMNS, file=table.file)
    layout = Layout(table.file, file.stem, columns, (), partial(image_under, file.parent))
    rows = TableRows(table, layout, notes=notes)
    good, _ = accept(rows, on_bad_row="refuse")
    return Subset(Tasks(rows, resize=None), good)


def _no_image(value: Any) -> EncodedImage:
    raise ValueError(f"a prompt list has no images, but this row names {value!r:.40}; put the rows into a folder's metadata.jsonl")
