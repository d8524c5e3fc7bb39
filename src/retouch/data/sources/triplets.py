"""Triplets for painting words in the style of a reference image, in Calligrapher's layout: ``self_bench.txt`` has lines
``<number>-<text>``.

In the same folder are ``test<number>_source.png``, the image with the text; ``test<number>_mask.png`` of the same size, white where
the model should paint; and ``test<number>_ref.png``, a style crop of any size. The source is both the image to fill in and the
target.
"""

import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Literal

from retouch.core.random import generator
from retouch.data.base import ImageData
from retouch.data.images import load_mask
from retouch.data.rows import Identity, InvalidRow, Problem, Row
from retouch.data.sources.folder import Entry, image_under, read_metadata
from retouch.types import Json, TaskContents

LIST = "self_bench.txt"
PROMPT = "The text is '{}'."
_LINE = re.compile(r"(?P<number>\d+)-(?P<text>.*\S.*)")


class TripletData(ImageData):
    """Words to paint into a masked part of an image, in the style of a reference (``self_bench.txt`` and its images). The known
    data set with this layout is a benchmark, so training on it needs ``allow_test_sets``."""

    kind: Literal["triplets"] = "triplets"
    path: str
    """The folder."""
    reference: Literal["own", "other"] = "other"
    """Which style crop is the reference image of an item: "own" is the item's own crop, which shows the letters to be painted;
    "other" is the crop of another item."""

    def rows(self, *, seed: int) -> "TripletRows":
        return TripletRows(self.path, reference=self.reference, seed=seed)

    @classmethod
    def rows_at(cls, path: Path) -> "TripletRows | None":
        return TripletRows(path, reference="own") if (path / LIST).is_file() else None

    def contents(self) -> TaskContents:
        return TaskContents(images=True, mask=True, reference=True, target=True, text=True, pairs=False)


class TripletRows:
    """The items of a folder. A row is bad if one of its images is missing, or if its mask is all black or not black and white.

    ``reference``: "own" takes the item's own crop, which shows the letters to be painted; "other" takes the crop of another item:
    the seed gives each crop to one other item, so that no two items share an image and a split can separate them.
    """

    def __init__(self, folder: str | Path, *, reference: Literal["own", "other"], seed: int = 0) -> None:
        self._root = Path(folder)
        table = read_metadata(self._root.resolve() / LIST, text_field="line")
        self._file = table.file
        self._digest = table.digest
        self._entries = table.entries
        self.problems: tuple[Problem, ...] = table.notes
        self._reference = reference
        self._seed = seed
        self._first: dict[int, int] = {}
        for entry in table.entries:
            if (item := _item(entry)) is not None:
                self._first.setdefault(item[0], entry.line)
        self._styles = sorted(number for number in self._first if (self._root / _file(number, "ref")).is_file())
        if reference == "other" and len(self._styles) < 2:
            raise ValueError(
                f"{folder}: reference 'other' needs at least 2 items with a reference, and {len(self._styles)} have one; use 'own'"
            )
        self._others: dict[int, int] = {}  # the item whose crop each item takes
        if reference == "other":
            import torch

            order = torch.randperm(len(self._styles), generator=generator(seed, "reference")).tolist()
            styles = [self._styles[place] for place in order]
            self._others = {number: styles[number % len(styles)] for number in self._first}
            self._others |= {style: styles[place - 1] for place, style in enumerate(styles)}

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Row:
        entry = self._entries[index]
        item = _item(entry)
        if item is None:
            raise InvalidRow(
                [Problem(self._file, entry.line, entry.what or "an item is a line <number>-<text>, for example 11-Azir")]
            )
        number, text = item
        wrong = []
        if self._first[number] != entry.line:
            wrong.append(f"the number {number} is taken by line {self._first[number]}")
        images = {}
        for part, whose in (("source", number), ("mask", number), ("ref", self._others.get(number, number))):
            try:
                images[part] = image_under(self._root, _file(whose, part))
            except ValueError as error:
                wrong.append(str(error))
        if "mask" in images:
            with suppress(ValueError):  # reported when the images of the row are decoded
                values = {value for _, value in load_mask(images["mask"]).getcolors() or ()}
                if values == {0}:
                    wrong.append(f"{images['mask'].name}: the mask is all black, so nothing would be painted")
                elif not values <= {0, 255}:
                    levels = f"{len(values)} grey levels; save it as black and white, with white where to paint"
                    wrong.append(f"{images['mask'].name}: the mask has {levels}")
        if wrong:
            raise InvalidRow([Problem(self._file, entry.line, what) for what in wrong])
        meta: dict[str, Json] = {"number": number}
        return Row(
            file=self._file,
            line=entry.line,
            id=f"{self._root.resolve().name}/{number}",
            instruction=PROMPT.format(text),
            images=(images["source"],),
            mask=images["mask"],
            reference=images["ref"],
            target=images["source"],
            text=text,
            source=str(number),
            tags={},
            meta=meta,
        )

    def identity(self) -> Identity:
        """The identity of the list, including the choice of the reference images."""
        styles = self._styles if self._reference == "other" else []
        content = json.dumps([self._digest, self._reference, self._seed if styles else 0, styles, self._root.resolve().name])
        return Identity(hashlib.sha256(content.encode()).hexdigest(), self._file, self._root)


def _item(entry: Entry) -> tuple[int, str] | None:
    """The number and the text of a line, or None if the line has another form. The text may contain hyphens."""
    line = "" if entry.fields is None else str(entry.fields["line"])
    match = _LINE.fullmatch(line)
    return None if match is None else (int(match["number"]), match["text"].strip())


def _file(number: int, part: str) -> str:
    return f"test{number}_{part}.png"
