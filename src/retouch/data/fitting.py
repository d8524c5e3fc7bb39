"""Rows that must bring what the model is given, and what the judge reads."""

from retouch.data.problems import BadRow, Problem
from retouch.data.rows import Row, Rows


class FittingRows:
    """``rows``, of which one is bad whose source ``pictures`` are not (least, most) in number, or that lacks a mask or a
    reference it must have.

    ``model`` is what the message calls the model, ``takes`` what it says of that. ``text``: a row without one is bad too.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        pictures: tuple[int, int],
        mask: bool,
        reference: bool = False,
        text: bool = False,
        model: str,
        takes: str,
    ) -> None:
        self.problems = rows.problems
        self._rows = rows
        self._pictures = pictures
        self._mask = mask
        self._reference = reference
        self._text = text
        self._wanted = f"{model} takes {takes}"

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        least, most = self._pictures
        wrong = []
        if not least <= len(row.images) <= most:
            wrong.append(f"{self._wanted}, and this row has {len(row.images)} picture{'s' * (len(row.images) != 1)}")
        if self._mask and row.mask is None:
            wrong.append(f"{self._wanted}, and this row has no mask")
        if self._reference and row.reference is None:
            wrong.append("an IP-Adapter reads a reference picture, and this row has none")
        if self._text and not (row.text or "").strip():
            wrong.append("no text for the reward to look for; put it between double quotes in the prompt, or in a column `text`")
        if wrong:
            raise BadRow([Problem(row.file, row.line, what) for what in wrong])
        return row
