"""Complex-Edit (``UCSC-VLAA/Complex-Edit``, arXiv 2504.13143): each picture has a chain of atomic edits, the first c of which, as
one instruction, are its edit of complexity c.

It holds two splits, ``test_real`` and ``test_syn``, of 531 pictures each, is a benchmark, and is licensed CC-BY-NC-4.0. For
training there is ``UCSC-VLAA/GPT-Image-Edit-1.5M``, which has complex instructions of the same kind.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from retouch.data.problems import BadRow, Problem
from retouch.data.rows import Row, Rows, dig

ID = "UCSC-VLAA/Complex-Edit"
MOST = 8
_COLUMNS = {"image": "image", "instruction": "edit.compound.0.compound_instruction"}


def levels(text: str) -> tuple[int, ...]:
    """The levels of complexity that a text names, ascending: "8", "1-8", "1,3,5", "1-2,8".

    ValueError for other texts, and for levels outside 1 to 8.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise ValueError(f'complexity {text!r}: give levels from 1 to {MOST}, as "8", "1-8" or "1,3,5"')
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= MOST:
            raise ValueError(f"complexity {text!r}: levels go from 1 to {MOST}, and a range from the lower one to the higher")
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


class ComplexEditRows:
    """Row ``i * n + k`` is picture i at the k-th of n levels. Rows of one picture have one source, so a split keeps them together.

    A row has the tag ``complexity``, and in its meta ``operations``, the atomic edits that it is made of.
    """

    def __init__(self, pictures: Rows, levels: Sequence[int]) -> None:
        self.problems = pictures.problems
        self._pictures = pictures
        self._levels = tuple(levels)

    def __len__(self) -> int:
        return len(self._pictures) * len(self._levels)

    def __getitem__(self, index: int) -> Row:
        picture, place = divmod(range(len(self))[index], len(self._levels))
        row, level = self._pictures[picture], self._levels[place]
        edit = row.meta.get("edit")
        instruction = dig(edit, f"compound.{level - 1}.compound_instruction") if isinstance(edit, Mapping) else None
        operations = [dig(step, "instruction") for step in _listed(edit, "sequence")[:level]]
        wrong = []
        if not isinstance(instruction, str) or not instruction.strip():
            wrong.append(f"'edit.compound.{level - 1}.compound_instruction': no instruction of complexity {level}")
        if len(operations) < level or not all(isinstance(one, str) and one.strip() for one in operations):
            wrong.append(f"'edit.sequence': not the {level} atomic edits that complexity {level} is made of")
        if wrong:
            raise BadRow([Problem(row.file, row.line, what) for what in wrong])
        return replace(
            row,
            id=f"{row.id}/{level}",
            instruction=str(instruction),
            tags={**row.tags, "complexity": str(level)},
            meta={"operations": operations},
        )


def read_complex_edit(
    path: str | Path = ID,
    *,
    complexity: str,
    split: str = "test_real",
    revision: str | None = None,
    cache_dir: str | Path | None = None,
) -> ComplexEditRows:
    """The edits of one split at the levels that ``complexity`` names, picture after picture. ``path``, ``revision`` and
    ``cache_dir`` as in ``read_hub``. ValueError: no such data set, split or level."""
    from retouch.data.sources.hub import read_hub  # slow to import

    wanted = levels(complexity)
    pictures = read_hub(path, split=split, revision=revision, columns=_COLUMNS, name=f"complex-edit-{split}", cache_dir=cache_dir)
    return ComplexEditRows(pictures, wanted)


def _listed(edit: Any, key: str) -> list[Any]:
    found = edit.get(key) if isinstance(edit, Mapping) else None
    return found if isinstance(found, list) else []
