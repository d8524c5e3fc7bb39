"""Exclude scores in the ledgers of a run from use, so that they are asked for again; for answers that are wrong or forged.

The call to the judge stays recorded with its cost, but its answer is not reused. The scores of a sample are deleted.
"""

import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retouch.rewards.ledger.database import Database, all_finite, decode_scores
from retouch_view.ledger.ledger_view import LedgerView

_IMAGE = re.compile(r"[0-9a-f]{8,64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The scores to expel: scores that match all fields that are not None. If all fields are None: scores that are infinite.

    ``image``: the first 8 or more hexadecimal digits of the image's hash. ``judge``: the judge of an answer, or the fingerprint of
    the reward of a sample. ``split`` and ``steps`` (both ends included, counted as in the run's metrics) select samples, and the
    answers about their images. Raises ValueError if ``image`` is not a hash.
    """

    image: str | None = None
    judge: str | None = None
    split: str | None = None
    steps: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.image is not None and not _IMAGE.fullmatch(self.image):
            raise ValueError(f"--image {self.image}: give the first 8 to 64 hexadecimal digits of the image's hash")

    @property
    def by_value(self) -> bool:
        """Whether scores are selected by their value: all fields are None."""
        return (self.image, self.judge, self.split, self.steps) == (None, None, None, None)

    def takes(self, row: Mapping[str, Any]) -> bool:
        """Whether a row of ``samples`` or ``answers`` is selected, without regard to its split and step."""
        if self.by_value:
            return not all_finite(decode_scores(row["scores"]))
        return row["picture"].startswith(self.image or "") and self.judge in (None, row["judge"])

    def takes_place(self, split: str, step: int) -> bool:
        """Whether the samples of this split and step are selected. ``step``: number of completed steps."""
        low, high = self.steps or (0, 2**63)
        return self.split in (None, split) and low <= (step + 1 if split == "train" else step) <= high


def expel(run: Path, selection: Selection, *, dry_run: bool) -> dict[str, Any]:
    """Expel the selected scores from the ledgers of all ranks and of rescorings. Raises ValueError if the run has no ledger.

    ``dry_run``: change nothing. Returns the selected samples and answers as JSON.
    """
    ledger = LedgerView.open(run)
    samples: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for file in [*ledger.files, *ledger.rescored.values()]:
        with closing(Database(file)) as database, database.writing() as connection:
            found = _rows(connection.execute("SELECT split, step, group_id, slot, task, picture, judge, scores FROM samples"))
            here = [row for row in found if selection.takes_place(row["split"], row["step"])]
            scored = [row for row in here if selection.takes(row)]
            found = _rows(
                connection.execute(
                    "SELECT number, picture, judge, scores, text FROM answers WHERE scores IS NOT NULL AND NOT fresh"
                )
            )
            placed = selection.split is not None or selection.steps is not None
            images = {row["picture"] for row in here}  # of any judge: a reward that asks a judge has a fingerprint of its own
            asked = [row for row in found if selection.takes(row) and (not placed or row["picture"] in images)]
            if not dry_run:
                places = [(row["split"], row["step"], row["group_id"], row["slot"]) for row in scored]
                connection.executemany("DELETE FROM samples WHERE split = ? AND step = ? AND group_id = ? AND slot = ?", places)
                connection.executemany(
                    "UPDATE answers SET fresh = 1, fault = 'expelled' WHERE number = ?", [(row["number"],) for row in asked]
                )
        samples += scored
        answers += asked
    return {"run": run.name, "dry_run": dry_run, "samples": samples, "answers": answers}


def _rows(cursor: Any) -> list[dict[str, Any]]:
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]
