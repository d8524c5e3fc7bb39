"""Instructions for a policy that is used, not trained: ``.txt`` with one a line, ``.jsonl`` with pictures beside them.

A JSON line has ``instruction`` (or ``prompt``) and may have ``image`` (or ``file_name``; one or a list),
``mask`` and ``reference``: names of files relative to the list, and none outside its folder is opened. Where one line has pictures
all must have.
"""

from pathlib import Path

from retouch.data.check import accept
from retouch.data.rows import Layout, TableRows, find_columns
from retouch.data.sources.folder import picture_under
from retouch.data.sources.tables import read_table
from retouch.data.tasks import Subset, Tasks

_COLUMNS = {
    "id": ("id",),
    "instruction": ("instruction", "prompt"),
    "image": ("image", "images", "file_name", "file_names"),
    "mask": ("mask",),
    "reference": ("reference",),
}


def read_instructions(path: str | Path) -> Subset:
    """The tasks of a list, in its order. ValueError with file and line for everything that cannot be used."""
    file = Path(path)
    table = read_table(file, text_field="instruction")
    keys = list(dict.fromkeys(key for entry in table.entries for key in entry.fields or ()))
    columns, notes = find_columns(keys, columns={}, defaults=_COLUMNS, file=table.file)
    layout = Layout(table.file, file.stem, columns, (), lambda value: picture_under(file.parent, value))
    rows = TableRows(table, layout, notes=notes)
    good, _ = accept(rows, on_bad_row="refuse")
    return Subset(Tasks(rows, resize=None), good)
