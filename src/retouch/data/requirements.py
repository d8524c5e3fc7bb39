"""What a run requires of every row: the images that its model takes, and the text and the target image that its reward reads."""

import sys
from dataclasses import dataclass
from typing import Literal, TypeAlias

from retouch.data.rows import InvalidRow, Problem, Row, Rows

CheckedShare: TypeAlias = Literal["all", "first"] | int
"""Rows whose images are decoded before training: all, the first ones, or this number of rows, drawn with a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRequirements:
    """What every row must have. ``images``: the smallest and the largest number of source images. ``mask``, ``reference``,
    ``text``, ``target``: whether every row must have one. ``pairs``: whether every row must have a chosen and a rejected image.

    ``model`` and ``takes`` are used in the error message: "flux-fill takes one image and a mask".
    """

    images: tuple[int, int] = (0, sys.maxsize)
    mask: bool = False
    reference: bool = False
    text: bool = False
    target: bool = False
    pairs: bool = False
    model: str = "the model"
    takes: str = "any number of images"


class RequiredRows:
    """The given rows; indexing also raises InvalidRow for a row that does not meet the requirements."""

    def __init__(self, rows: Rows, required: RowRequirements) -> None:
        self.problems = rows.problems
        self._rows = rows
        self._required = required

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row, required = self._rows[index], self._required
        least, most = required.images
        wanted = f"{required.model} takes {required.takes}, and this row has"
        wrong = []
        if not least <= len(row.images) <= most:
            wrong.append(f"{wanted} {len(row.images)} image{'s' * (len(row.images) != 1)}")
        if required.mask and row.mask is None:
            wrong.append(f"{wanted} no mask")
        if required.reference and row.reference is None:
            wrong.append("an IP-Adapter reads a reference image, and this row has none")
        if required.text and not (row.text or "").strip():
            wrong.append("no text for the reward to look for; put it in quotation marks in the prompt, or in a column `text`")
        if required.target and row.target is None:
            wrong.append("no target image for the reward to compare with; add a column `target`, or use another reward")
        if required.pairs and (row.chosen is None or row.rejected is None):
            wrong.append("no chosen and rejected image; DPO on the pairs of the data needs both in every row")
        if wrong:
            raise InvalidRow([Problem(row.file, row.line, what) for what in wrong])
        return row
