"""People's ratings of a run's pictures, from a CSV.

A header, and a line for each rating: ``rating``, and which sample it is about, as ``image`` (a file, relative to the CSV or to the
run), ``picture`` (its SHA-256 in the ledger), or ``step``, ``group``, ``slot`` and perhaps ``split`` (else train). A sample that is
rated more than once has the mean.
"""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image

from retouch.audit.opening import Scored
from retouch.rewards.ledger.hashing import image_hash

COLUMN = "rating"
_PLACE = ("step", "group", "slot")


def rated(samples: Sequence[Scored], file: Path, run: Path) -> list[Scored]:
    """The samples that were rated, with the column ``rating``. ValueError names the line that is wrong or about no sample."""
    if not file.is_file():
        raise ValueError(f"{file} is no file; give a CSV with a column `rating` and one that names the picture")
    by_picture: dict[str, list[Scored]] = {}
    for sample in samples:
        by_picture.setdefault(sample.picture, []).append(sample)
    by_place = {sample.place: sample for sample in samples}
    given: dict[int, list[float]] = {}
    with file.open(newline="", encoding="utf-8-sig") as opened:
        reader = csv.DictReader(opened)
        how = _how(reader.fieldnames or [], file)
        for number, line in enumerate(reader, start=2):
            try:
                about = _about(how, line, by_picture=by_picture, by_place=by_place, roots=(file.parent, run))
                rating = _rating(line[COLUMN])
            except ValueError as error:
                raise ValueError(f"{file}, line {number}: {error}") from None
            for sample in about:
                given.setdefault(id(sample), []).append(rating)
    return [
        replace(sample, scores={**sample.scores, COLUMN: math.fsum(given[id(sample)]) / len(given[id(sample)])})
        for sample in samples
        if id(sample) in given
    ]


def _how(header: Sequence[str], file: Path) -> str:
    """By which columns the file names a sample."""
    if COLUMN in header:
        for name in ("image", "picture"):
            if name in header:
                return name
        if set(_PLACE) <= set(header):
            return "place"
    raise ValueError(
        f"{file} has the columns {', '.join(header)}; it needs `rating`, and `image`, `picture`, or step, group and slot"
    )


def _about(
    how: str,
    line: Mapping[str, str],
    *,
    by_picture: Mapping[str, list[Scored]],
    by_place: Mapping[tuple[str, int, int, int], Scored],
    roots: Sequence[Path],
) -> list[Scored]:
    """The samples that a line is about; several where the policy made one picture twice."""
    if how == "place":
        step, group, slot = (int(line[name]) for name in _PLACE)
        found = by_place.get((line.get("split") or "train", step, group, slot))
        if found is None:
            raise ValueError(f"no sample of step {step}, group {group}, slot {slot} was judged")
        return [found]
    name = line["picture"] if how == "picture" else _name_of(line["image"], roots)
    if name not in by_picture:
        raise ValueError(f"{line[how]} is no picture that was judged in this run")
    return by_picture[name]


def _name_of(image: str, roots: Sequence[Path]) -> str:
    for root in roots:
        path = root / image
        if path.is_file():
            with Image.open(path) as opened:
                return image_hash(opened)
    raise ValueError(f"there is no file {image} beside the CSV or in the run's folder")


def _rating(text: str) -> float:
    rating = float(text)
    if not math.isfinite(rating):
        raise ValueError(f"the rating {text} is no finite number")
    return rating
