"""Triplets to paint words in the style of a reference (Calligrapher's layout): ``self_bench.txt``, a ``<number>-<text>`` a line.

Beside it lie ``test<number>_source.png``, what the masked part looked like; ``test<number>_mask.png``, as large, white where
to paint; and ``test<number>_ref.png``, a style crop of any size. The source is both the picture to fill in and the target.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import torch

from retouch.core.random import generator
from retouch.data.images import MAX_PIXELS, Picture, load_mask
from retouch.data.problems import BadRow, Problem
from retouch.data.rows import Row
from retouch.data.sources.folder import picture_under
from retouch.data.sources.tables import Entry, read_table
from retouch.types import Json

LIST = "self_bench.txt"
PROMPT = "The text is '{}'."
_LINE = re.compile(r"(?P<number>\d+)-(?P<text>.*\S.*)")


class TripletRows:
    """The items of a folder. A row that misses a picture, or whose mask marks nothing or is not black and white, is bad.

    ``reference``: a crop of the item itself shows the letters that are to be painted, so "other" takes another item's, drawn by the
    seed: of those that have one, each as likely.
    """

    def __init__(self, folder: str | Path, *, reference: Literal["own", "other"], seed: int = 0) -> None:
        self._root = Path(folder)
        table = read_table(self._root / LIST, text_field="line")
        self._file = table.file
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
                f"{folder}: a reference of another item is asked for, and {len(self._styles)} items have one; take 'own'"
            )

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Row:
        entry = self._entries[index]
        item = _item(entry)
        if item is None:
            raise BadRow([Problem(self._file, entry.line, entry.what or "an item is a line <number>-<text>, 11-Azir say")])
        number, text = item
        wrong = []
        if self._first[number] != entry.line:
            wrong.append(f"the number {number} is taken by line {self._first[number]}")
        pictures = self._pictures(number, wrong)
        if "mask" in pictures:
            wrong += _wrong_mask(pictures["mask"])
        if wrong:
            raise BadRow([Problem(self._file, entry.line, what) for what in wrong])
        meta: dict[str, Json] = {"number": number}
        return Row(
            file=self._file,
            line=entry.line,
            id=f"{self._root.resolve().name}/{number}",
            instruction=PROMPT.format(text),
            images=(pictures["source"],),
            mask=pictures["mask"],
            reference=pictures["ref"],
            target=pictures["source"],
            text=text,
            source=str(number),
            tags={},
            meta=meta,
        )

    def _pictures(self, number: int, wrong: list[str]) -> Mapping[str, Picture]:
        styles = [other for other in self._styles if other != number]
        style = number
        if self._reference == "other" and styles:
            style = styles[int(torch.randint(len(styles), (), generator=generator(self._seed, "reference", number)))]
        found = {}
        for part, whose in (("source", number), ("mask", number), ("ref", style)):
            try:
                found[part] = picture_under(self._root, _file(whose, part))
            except ValueError as error:
                wrong.append(str(error))
        return found


def _item(entry: Entry) -> tuple[int, str] | None:
    """Number and text, which may hold hyphens of its own."""
    line = "" if entry.fields is None else str(entry.fields["line"])
    match = _LINE.fullmatch(line)
    return None if match is None else (int(match["number"]), match["text"].strip())


def _file(number: int, part: str) -> str:
    return f"test{number}_{part}.png"


def _wrong_mask(picture: Picture) -> list[str]:
    try:
        colours = load_mask(picture, max_pixels=MAX_PIXELS).getcolors()
    except ValueError:
        return []  # said when the row's pictures are looked at
    values = {value for _, value in colours or ()}
    if values == {0}:
        return [f"{picture.name}: the mask is all black, so there is nothing to paint"]
    if not values <= {0, 255}:
        return [f"{picture.name}: the mask has {len(values)} grey levels; save it as black and white, white where to paint"]
    return []
