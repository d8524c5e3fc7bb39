"""Human ratings of the images of a run, from a CSV file.

The file has a header and one line per rating. The columns are ``rating``, and for the sample ``image`` (a file, relative to the CSV
or to the run's folder), ``sha256`` (the hash of the image in the ledger), or ``step``, ``group``, ``slot`` and optionally ``split``
(default: train). Several ratings of a sample are averaged. The sample of an image that was made for
several tasks is given by step, group and slot, because a rating is about one task.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from PIL import Image

from retouch.rewards.ledger.database import UNREADABLE, image_hash
from retouch_view.ledger.ledger_view import LedgerSample

COLUMN = "rating"
_PLACE = ("step", "group", "slot")


def with_ratings(samples: Sequence[LedgerSample], file: Path, run: Path) -> list[LedgerSample]:
    """The rated samples, with the additional column ``rating``. Raises ValueError if a line is invalid or its sample does not
    exist."""
    if not file.is_file():
        raise ValueError(f"--ratings: there is no file {file}; give a CSV with a column `rating` and a column for the image")
    by_image: dict[str, list[LedgerSample]] = {}
    for sample in samples:
        by_image.setdefault(sample.image, []).append(sample)
    by_place = {sample.place: sample for sample in samples}
    given: dict[int, list[float]] = {}
    reader = csv.DictReader(io.StringIO(_text(file), newline=""))
    try:
        lines = [(reader.line_num, line) for line in reader]
    except csv.Error as error:
        raise ValueError(f"{file}, line {reader.line_num + 1}: {error}") from None
    key = _key(reader.fieldnames or [], file)
    for number, line in lines:
        try:
            _require_values(line, (*(_PLACE if key == "place" else (key,)), COLUMN))
            about = _samples_of(key, line, by_image=by_image, by_place=by_place, roots=(file.parent, run))
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


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"--ratings: {file} is not UTF-8 text ({error}); save it as CSV in UTF-8") from None


def _key(header: Sequence[str], file: Path) -> str:
    """How the file identifies a sample: ``image``, ``sha256`` or ``place``."""
    if COLUMN in header:
        for name in ("image", "sha256"):
            if name in header:
                return name
        if set(_PLACE) <= set(header):
            return "place"
    raise ValueError(
        f"{file} has the columns {', '.join(header)}; it needs `rating`, and `image`, `sha256`, or step, group and slot"
    )


def _require_values(line: Mapping[str, str | None], names: Sequence[str]) -> None:
    """Raise ValueError if one of these columns is empty, or missing because the line is too short."""
    for name in names:
        if not (line[name] or "").strip():
            raise ValueError(f"`{name}` is empty")


def _samples_of(
    key: str,
    line: Mapping[str, str],
    *,
    by_image: Mapping[str, list[LedgerSample]],
    by_place: Mapping[tuple[str, int, int, int], LedgerSample],
    roots: Sequence[Path],
) -> list[LedgerSample]:
    """The samples of a line; several if the policy made the same image of a task more than once."""
    if key == "place":
        step, group, slot = (int(line[name]) for name in _PLACE)
        found = by_place.get((line.get("split") or "train", step, group, slot))
        if found is None:
            raise ValueError(f"the run scored no sample of step {step}, group {group}, slot {slot}")
        return [found]
    digest = line["sha256"] if key == "sha256" else _hash_of(line["image"], roots)
    if digest not in by_image:
        raise ValueError(f"the run scored no image {line[key]}")
    tasks = {sample.task for sample in by_image[digest]}
    if len(tasks) > 1:
        raise ValueError(f"the image {line[key]} was made for {len(tasks)} tasks; name its sample by step, group and slot")
    return by_image[digest]


def _hash_of(image: str, roots: Sequence[Path]) -> str:
    for root in roots:
        path = root / image
        if path.is_file():
            try:
                with Image.open(path) as opened:
                    return image_hash(opened)
            except UNREADABLE as error:
                raise ValueError(f"{image} cannot be read as an image: {error}") from None
    raise ValueError(f"there is no file {image} next to the CSV or in the run's folder")


def _rating(text: str) -> float:
    rating = float(text)
    if not math.isfinite(rating):
        raise ValueError(f"the rating {text} is not a finite number")
    return rating
