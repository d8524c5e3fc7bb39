"""Reads the ladders of a user: a folder with ``ladder.jsonl``, one item per line, and the images that it names.

``{"id": "barn", "instruction": "paint the barn red", "source": "barn.png", "rungs": [{"image": "red.png", "truth": 1}, ...]}``
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

from PIL import Image
from pydantic import Field, JsonValue

from retouch.config.section import Section
from retouch.data.images import load_image
from retouch.data.sources.tables import Entry, read_table
from retouch.types import Sample, Task
from retouch_bench.judges.ladders import Item, Probe, item_of

FILE = "ladder.jsonl"
_MOST_ERRORS = 20


class LadderRung(Section):
    """A rung: one image of an item."""

    image: Annotated[str, Field(min_length=1)]
    """The file, relative to the folder."""
    truth: Annotated[float, Field(strict=False)]
    """How good the image is in comparison with the other rungs of the item, on any scale; higher is better."""
    name: str = ""
    """The name of the rung; the default is "truth" and its value. Rungs with the same name share a row of the report."""


class LadderRow(Section):
    """An item: one line of the file."""

    instruction: Annotated[str, Field(min_length=1)]
    """The instruction of the edit, or the prompt of the image."""
    rungs: Annotated[list[LadderRung], Field(min_length=2)]
    """Two or more images, with at least two different values of ``truth``."""
    source: str | None = None
    """The file of the source image; null for images that were generated from a prompt."""
    target: str | None = None
    """The file of the correct result, for judges that compare with it."""
    id: str = ""
    """The item's name; the default is the number of its line."""
    text: str | None = None
    """The text that the image should contain, for judges that read it."""
    meta: dict[str, JsonValue] = Field(default={})
    """Other metadata of the task that the judge needs."""


def read_ladders(folder: Path) -> list[Item]:
    """Read the items in the folder. Raises ValueError if the file is missing or empty, or with a line for each mistake in it."""
    file = folder / FILE
    if not file.is_file() or not file.read_text(encoding="utf-8-sig", errors="replace").strip():
        state = " has no items" if file.is_file() else ": no such file"
        raise ValueError(f"{file}{state}; write one JSON object with instruction, source and rungs per line into {FILE}")
    items: list[Item] = []
    wrong: list[str] = []
    for entry in read_table(file).entries:
        try:
            item = _item(folder, entry)
            if any(item.id == known.id for known in items):
                raise ValueError(f"an earlier line has the same id {item.id!r}; give each item a different id")
            items.append(item)
        except ValueError as error:
            wrong += [f"{FILE} line {entry.line}: {part}" for part in str(error).splitlines()]
    if wrong:
        more = [f"... and {len(wrong) - _MOST_ERRORS} more"] if len(wrong) > _MOST_ERRORS else []
        raise ValueError("\n".join([*wrong[:_MOST_ERRORS], *more]))
    return items


def _item(folder: Path, entry: Entry) -> Item:
    if entry.fields is None:
        raise ValueError(entry.what)
    row = LadderRow(**entry.fields)
    source = () if row.source is None else (_image(folder, row.source),)
    target = None if row.target is None else _image(folder, row.target)
    task = Task(row.id or str(entry.line), row.instruction, source, target=target, text=row.text, meta=row.meta)
    return item_of([Probe(name, Sample(task, _image(folder, rung.image)), rung.truth) for name, rung in _named(row.rungs)])


def _named(rungs: Sequence[LadderRung]) -> Iterator[tuple[str, LadderRung]]:
    """Yield each rung with its name. The default is "truth 0.5"; if several rungs have the same truth, a number is added."""
    seen: dict[str, int] = {}
    for rung in rungs:
        name = rung.name or f"truth {rung.truth:g}"
        seen[name] = seen.get(name, 0) + 1
        if rung.name and seen[name] > 1:
            raise ValueError(f"rungs: two have the name {name!r}; give each rung a different name")
        yield (name if seen[name] == 1 else f"{name} ({seen[name]})"), rung


def _image(folder: Path, name: str) -> Image.Image:
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{name} is outside the folder; copy it into {folder}")
    if not path.is_file():
        raise ValueError(f"{name}: no such file in {folder}")
    return load_image(path)
