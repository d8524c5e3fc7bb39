"""A picture of the held-out tasks before and after training, with their prompts and the rewards of their images."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from retouch.data.images import load_image
from retouch.records.files import inside
from retouch.records.folder import RunFolder

_GAP, _LINE, _TEXT = 6, 15, 12
_MOST_LINES = 3


def before_and_after(folder: Path, *, rows: int = 8, side: int = 128, until: int | None = None) -> Image.Image:
    """Draw the first ``rows`` held-out tasks: the prompt, and below it the source image (if there is one), and the images before
    and after training with their rewards; each at most ``side`` px.

    Tiny images are enlarged by a whole factor. ``until``: the latest step to show; None means the latest step with images.

    Raises ValueError if the run has no images yet.
    """
    run = RunFolder(folder)
    steps = [step for step in run.sample_steps() if until is None or step <= until]
    ends = [next(filter(None, (_heldout(run, step) for step in order)), {}) for order in (steps, reversed(steps))]
    tasks = [[each[task] for each in ends] for task in ends[1] if task in ends[0]][:rows]
    if not tasks:
        raise ValueError(f"{folder} has no images yet; train first, with samples.every above 0")
    table = []
    for first, last in tasks:
        files = [(first, "image"), (last, "image")] if first["step"] < last["step"] else [(first, "image")]
        if any(line["source"] for line, _ in tasks):
            files.insert(0, (first, "source"))
        table.append((str(first["instruction"]), [(_image(run, line, name), _caption(line, name)) for line, name in files]))
    return _sheet(table, side)


def _heldout(run: RunFolder, step: int) -> dict[str, dict[str, Any]]:
    return {line["task"]: line for line in run.read_samples(step) if line["set"] == "heldout"}


def _image(run: RunFolder, line: Mapping[str, Any], name: str) -> Image.Image | None:
    return None if line[name] is None else load_image(inside(run.samples(line["step"]), line[name]))


def _caption(line: Mapping[str, Any], name: str) -> str:
    if name == "source":
        return name
    when = f"step {line['step']}" if line["step"] else "before"
    return when if line["reward"] is None else f"{when}: {line['reward']:.3g}"


def _sheet(table: list[tuple[str, list[tuple[Image.Image | None, str]]]], side: int) -> Image.Image:
    """Draw rows of (prompt, [(image, caption)])."""
    width = max(len(cells) for _, cells in table) * (side + _GAP)
    font = ImageFont.load_default(_TEXT)
    prompts = [textwrap.wrap(text, max(20, width // 6), max_lines=_MOST_LINES, placeholder=" ...") for text, _ in table]
    heights = [_LINE * (len(prompt) + 1) + side + 2 * _GAP for prompt in prompts]
    sheet = Image.new("RGB", (width, sum(heights)), "white")
    draw, top = ImageDraw.Draw(sheet), 0
    for prompt, height, (_, cells) in zip(prompts, heights, table, strict=True):
        for place, words in enumerate(prompt):
            draw.text((0, top + place * _LINE), words, fill="black", font=font)
        for column, (image, caption) in enumerate(cells):
            at = (column * (side + _GAP), top + len(prompt) * _LINE + 2)
            draw.text((at[0], at[1] + side), caption, fill="#555555", font=font)
            if image is None:
                continue
            if (factor := side // max(image.size)) > 1:
                image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
            else:
                image.thumbnail((side, side))
            sheet.paste(image, at)
        top += height
    return sheet
