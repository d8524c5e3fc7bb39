"""Lists of prompts: ``.txt`` with one a line, ``.jsonl`` with ``prompt`` (or ``instruction``) and what else a judge needs.

The layout of Flow-GRPO's lists: what stands between the first pair of double quotes is the text that the picture should show.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from retouch.data.images import Picture
from retouch.data.problems import Problem
from retouch.data.rows import Layout, Row, TableRows, find_columns
from retouch.data.sources.tables import read_table

_COLUMNS = {"id": ("id",), "instruction": ("prompt", "instruction"), "text": ("text",), "source": ("source",)}


class PromptRows:
    """The rows of a prompt list; the text to draw is taken from the prompt where the row does not give it."""

    def __init__(self, rows: TableRows) -> None:
        self.problems: tuple[Problem, ...] = rows.problems
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        return row if row.text is not None else replace(row, text=quoted(row.instruction))


def read_prompts(
    path: str | Path, *, columns: Mapping[str, str] | None = None, tag_keys: tuple[str, ...] = (), name: str | None = None
) -> PromptRows:
    """The rows of a prompt list, which has no pictures. Arguments as in ``read_folder``; ``name`` is by default the file's stem."""
    file = Path(path)
    table = read_table(file, text_field="prompt")
    keys = list(dict.fromkeys(key for entry in table.entries for key in entry.fields or ()))
    found, notes = find_columns(keys, columns=columns or {}, defaults=_COLUMNS, file=table.file)
    return PromptRows(TableRows(table, Layout(table.file, name or file.stem, found, tag_keys, _no_picture), notes=notes))


def quoted(prompt: str) -> str | None:
    """What stands between the first pair of double quotes; None without a pair, or with nothing in it."""
    parts = prompt.split('"', 2)
    return parts[1].strip() or None if len(parts) == 3 else None


def _no_picture(value: Any) -> Picture:
    raise ValueError(f"a prompt list has no pictures, yet names {value!r:.40}; put the rows into a folder's metadata.jsonl")
