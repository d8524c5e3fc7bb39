"""An image of a run's held-out images before and after training, to look at in a notebook."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw

from retouch.data.images import load_image
from retouch.records.files import inside
from retouch.records.folder import RunFolder

_GAP = 4
_TITLE = 14


def before_and_after(folder: Path, *, rows: int = 8, side: int = 128, until: int | None = None) -> Image.Image:
    """Draw the first ``rows`` held-out tasks: source image (if there is one), before and after training; each at most ``side`` px.

    Tiny images are enlarged by a whole factor. ``until``: the latest step to show; None means the latest step with images.

    Raises ValueError if the run has no images yet.
    """
    run = RunFolder(folder)
    steps = [step for step in run.sample_steps() if until is None or step <= until]
    if not steps:
        raise ValueError(f"{folder} has no images yet; train first, with samples.every above 0")
    first, last = (
        {line["task"]: line for line in run.read_samples(step) if line["set"] == "heldout"} for step in (steps[0], steps[-1])
    )
    lines = [(first[task], last[task]) for task in last if task in first][:rows]
    table = [
        [_image(run, steps[0], a, "source"), _image(run, steps[0], a, "image"), _image(run, steps[-1], b, "image")]
        for a, b in lines
    ]
    titles = ["source", f"step {steps[0]}", f"step {steps[-1]}"]
    if all(row[0] is None for row in table):
        table, titles = [row[1:] for row in table], titles[1:]
    return _grid(table, titles, side)


def _image(run: RunFolder, step: int, line: dict[str, Any], key: str) -> Image.Image | None:
    name = line[key]
    return None if name is None else load_image(inside(run.samples(step), name))


def _grid(table: list[list[Image.Image | None]], titles: list[str], side: int) -> Image.Image:
    pitch = side + _GAP
    sheet = Image.new("RGB", (pitch * len(titles), _TITLE + pitch * len(table)), "white")
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(titles):
        draw.text((column * pitch, 0), title, fill="black")
    for row, images in enumerate(table):
        for column, image in enumerate(images):
            if image is not None:
                sheet.paste(_fitted(image, side), (column * pitch, _TITLE + row * pitch))
    return sheet


def _fitted(image: Image.Image, side: int) -> Image.Image:
    factor = side // max(image.size)
    if factor > 1:
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((side, side))
    return image
