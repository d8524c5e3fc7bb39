"""Complex-Edit (``UCSC-VLAA/Complex-Edit``, arXiv 2504.13143): each image has a chain of atomic edits. The edit of complexity c
merges the first c atomic edits into one instruction.

The data set has two splits of 531 images, ``test_real`` and ``test_syn``. It is a benchmark, licensed CC-BY-NC-4.0. For training
there is ``UCSC-VLAA/GPT-Image-Edit-1.5M``, which has similar complex instructions.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator

from retouch.data.base import ImageData
from retouch.data.rows import Identity, InvalidRow, Problem, Row, Rows, nested_value
from retouch.data.sources.hub import read_hub
from retouch.types import TaskContents

ID = "UCSC-VLAA/Complex-Edit"
MOST = 8
_COLUMNS = {"image": "image", "instruction": "edit.compound.0.compound_instruction"}


def levels(text: str) -> tuple[int, ...]:
    """The levels of complexity that a text names, ascending: "8", "1-8", "1,3,5", "1-2,8".

    Raises ValueError for other texts, and for levels outside 1 to 8.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise ValueError(f'complexity {text!r}: give levels from 1 to {MOST}, as "8", "1-8" or "1,3,5"')
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= MOST:
            raise ValueError(f"complexity {text!r}: levels go from 1 to {MOST}, and a range from the lower level to the higher")
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


def _checked(text: str) -> str:
    levels(text)
    return text


Levels: TypeAlias = Annotated[str, AfterValidator(_checked)]


class ComplexEditData(ImageData):
    """Complex-Edit: instructions of 1 to 8 edits each. It is a benchmark, so training on it needs ``allow_test_sets``."""

    on_hub = True

    kind: Literal["complex-edit"] = "complex-edit"
    path: str = ID
    """Id or folder of the data set."""
    revision: str | None = None
    """Commit or tag; null uses the newest."""
    split: Literal["test_real", "test_syn"] = "test_real"
    """Split of the data set: photographs, or generated images."""
    complexity: Levels
    """Number of edits in one instruction, 1 to 8: "8", "1-8" or "1,3,5". All levels of an image are on the same side of the split
    into training and held-out rows."""

    def rows(self, *, seed: int) -> "ComplexEditRows":
        return read_complex_edit(self.path, complexity=self.complexity, split=self.split, revision=self.revision)

    def contents(self) -> TaskContents:
        return TaskContents(images=True, mask=False, reference=False, pairs=False)


class ComplexEditRows:
    """Rows of n levels: row ``i * n + k`` is image i at the k-th level. The rows of an image have the same source, so that a split
    keeps them together.

    A row has the tag ``complexity``, and its atomic edits as ``operations`` in ``meta``.
    """

    def __init__(self, images: Rows, levels: Sequence[int]) -> None:
        self.problems = images.problems
        self._images = images
        self._levels = tuple(levels)

    def __len__(self) -> int:
        return len(self._images) * len(self._levels)

    def identity(self) -> Identity | None:
        """The identity of the images, with the levels added to its digest."""
        found = self._images.identity() if hasattr(self._images, "identity") else None
        levels = "-".join(map(str, self._levels))
        return None if found is None else replace(found, digest=f"{levels}-{found.digest}")

    def __getitem__(self, index: int) -> Row:
        image, place = divmod(range(len(self))[index], len(self._levels))
        row, level = self._images[image], self._levels[place]
        edit = row.meta.get("edit")
        instruction = nested_value(edit, f"compound.{level - 1}.compound_instruction") if isinstance(edit, Mapping) else None
        sequence = edit.get("sequence") if isinstance(edit, Mapping) else None
        steps: list[Any] = sequence if isinstance(sequence, list) else []
        operations = [nested_value(step, "instruction") for step in steps[:level]]
        wrong = []
        if not isinstance(instruction, str) or not instruction.strip():
            wrong.append(f"'edit.compound.{level - 1}.compound_instruction': no instruction of complexity {level}")
        if len(operations) < level or not all(isinstance(one, str) and one.strip() for one in operations):
            wrong.append(f"'edit.sequence': not the {level} atomic edits of complexity {level}")
        if wrong:
            raise InvalidRow([Problem(row.file, row.line, what) for what in wrong])
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
) -> ComplexEditRows:
    """The edits of one split, image after image, at the levels that ``complexity`` lists. ``path`` and ``revision`` are as in
    ``read_hub``. Raises ValueError for an unknown data set, split or level."""
    wanted = levels(complexity)
    images = read_hub(path, split=split, revision=revision, columns=_COLUMNS, name=f"complex-edit-{split}")
    return ComplexEditRows(images, wanted)
