"""Triplets for painting words in the style of a reference image, in Calligrapher's layout: ``self_bench.txt`` has lines
``<number>-<text>``.

In the same folder are ``test<number>_source.png`` (or ``<number>_source.png``), the image to fill in; ``..._mask.png`` of the same
size, white where the model should paint; and ``..._ref.png``. In the published benchmark the source shows the text, and the ref is
the source's part inside the mask, so the source is the target. In other folders of this layout the ref is a whole image, which
shows the text, and is the target.
"""

import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from PIL.Image import Image
from pydantic import Field

from retouch.core.random import permutation
from retouch.data.base import ImageData
from retouch.data.images import EncodedImage, load_image, load_mask
from retouch.data.rows import Identity, InvalidRow, Problem, Row, quoted
from retouch.data.sources.folder import Entry, image_under, read_metadata
from retouch.records.files import png
from retouch.types import Json, TaskContents

LIST = "self_bench.txt"
PROMPT = "The text is '{}'."
Target: TypeAlias = Literal["source", "ref"]
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
    target: Target = "source"
    """Which image a supervised warm-up learns, and an edit is compared with. With "ref", the ref is resized to the size of the
    source, and the style crop is the part of the ref inside the box around the mask."""
    template: Annotated[str, Field(pattern=r"^[^{}]*\{\}[^{}]*$")] = PROMPT
    """The prompt of an item, with {} for the text of its line. "{}" takes the line itself as the prompt, and the words that it
    quotes as the text. A line that has the form of the template already is taken as the prompt too."""

    def rows(self, *, seed: int) -> "TripletRows":
        return TripletRows(self.path, reference=self.reference, target=self.target, template=self.template, seed=seed)

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

    def __init__(
        self,
        folder: str | Path,
        *,
        reference: Literal["own", "other"],
        target: Target = "source",
        template: str = PROMPT,
        seed: int = 0,
    ) -> None:
        self._target, self._template = target, template
        self._root = Path(folder)
        table = self._table = read_metadata(self._root.resolve() / LIST, text_field="line")
        self._file = table.file
        self._reference = reference
        self._seed = seed
        self._first: dict[int, int] = {}
        for entry in table.entries:
            if (item := _item(entry)) is not None:
                self._first.setdefault(item[0], entry.line)
        # Texts that the template is put around although they look like prompts themselves: they quote words.
        items = [(entry.line, item[1]) for entry in table.entries if (item := _item(entry)) is not None]
        prompts = [line for line, text in items if self._prompt(text)[0] != text and quoted(text) is not None]
        lines = ", ".join(map(str, prompts[:8]))
        found = f"{len(prompts)} texts look like prompts (lines {lines}); data.template '{{}}' takes a line as the prompt"
        self.problems: tuple[Problem, ...] = (
            *table.notes,
            *([Problem(self._file, prompts[0], found, "note")] if prompts else []),
        )
        self._styles = sorted(number for number in self._first if (self._root / self._name(number, "ref")).is_file())
        if reference == "other" and len(self._styles) < 2:
            raise ValueError(
                f"{folder}: reference 'other' needs at least 2 items with a reference, and {len(self._styles)} have one; use 'own'"
            )
        self._others: dict[int, int] = {}  # the item whose crop each item takes
        if reference == "other":
            styles = [self._styles[place] for place in permutation(len(self._styles), seed, "reference")]
            self._others = {number: styles[number % len(styles)] for number in self._first}
            self._others |= {style: styles[place - 1] for place, style in enumerate(styles)}

    def __len__(self) -> int:
        return len(self._table.entries)

    def __getitem__(self, index: int) -> Row:
        entry = self._table.entries[index]
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
        style = self._others.get(number, number)
        parts = {"source": ("source", number), "mask": ("mask", number), "style": ("ref", style)}
        parts |= {"ref": ("ref", number), "style mask": ("mask", style)} if self._target == "ref" else {}
        for part, (kind, whose) in parts.items():
            try:
                images[part] = image_under(self._root, self._name(whose, kind))
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
        prompt, text = self._prompt(text)
        target, reference = images["source"], images["style"]
        if self._target == "ref":
            try:
                size = load_image(images["source"]).size
                target = EncodedImage(images["ref"].name, png(_resized(images["ref"], size)))
                mask = load_mask(images["style mask"])
                reference = EncodedImage(reference.name, png(_resized(reference, mask.size).crop(mask.getbbox())))
            except ValueError as error:
                raise InvalidRow([Problem(self._file, entry.line, str(error))]) from None
        return Row(
            file=self._file,
            line=entry.line,
            id=f"{self._root.resolve().name}/{number}",
            instruction=prompt,
            images=(images["source"],),
            mask=images["mask"],
            reference=reference,
            target=target,
            text=text,
            source=str(number),
            tags={},
            meta=meta,
        )

    def _prompt(self, text: str) -> tuple[str, str]:
        """The prompt of a line, and the text to paint."""
        before, after = self._template.split("{}")
        after = after if text.endswith(after) else after.removesuffix(".")  # the last full stop may be left out
        if text.startswith(before) and text.endswith(after) and len(text) > len(before + after):
            inner = text.removeprefix(before).removesuffix(after)
            return text, (quoted(text) or text) if self._template == "{}" else inner
        return self._template.replace("{}", text), text

    def _name(self, number: int, part: str) -> str:
        """The name of an item's file. A folder may leave out the word "test"."""
        short = f"{number}_{part}.png"
        return short if (self._root / short).is_file() else f"test{short}"

    def identity(self) -> Identity:
        """The identity of the list, including the choice of the reference and target images and of the prompts."""
        styles = self._styles if self._reference == "other" else []
        chosen = [self._reference, self._target, self._template, self._seed if styles else 0, styles]
        content = json.dumps([self._table.digest, *chosen, self._root.resolve().name])
        return Identity(hashlib.sha256(content.encode()).hexdigest(), self._file, self._root)


def _item(entry: Entry) -> tuple[int, str] | None:
    """The number and the text of a line, or None if the line has another form. The text may contain hyphens."""
    line = "" if entry.fields is None else str(entry.fields["line"])
    match = _LINE.fullmatch(line)
    return None if match is None else (int(match["number"]), match["text"].strip())


def _resized(image: EncodedImage, size: tuple[int, int]) -> Image:
    found = load_image(image)
    return found if found.size == size else found.resize(size)
