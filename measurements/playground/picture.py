"""Draws the image in the README: held-out edits of a finished run, before and after training.

`python measurements/playground/picture.py runs/quickstart docs/pictures/quickstart.png`
"""

import sys
import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from retouch.records.folder import RunFolder

SIDE, GAP, LINE, LEFT = 120, 10, 15, 10
ACROSS, LETTERS = 520, 78  # smallest width of a text line in px, and the number of letters in it
COLUMNS = ("source", "before", "after", "target")


def main(run: Path, out: Path) -> None:
    folder = RunFolder(run)
    first, last = folder.sample_steps()[0], folder.sample_steps()[-1]
    before = {line["task"]: line for line in folder.read_samples(first) if line["set"] == "heldout"}
    after = [line for line in folder.read_samples(last) if line["set"] == "heldout"]
    columns = COLUMNS if after[0]["source"] else COLUMNS[1:]
    across = max(ACROSS, len(columns) * (SIDE + GAP))
    width = LEFT + 2 * (across + 3 * GAP)
    rows = (len(after) + 1) // 2
    captions = [caption(before[line["task"]], line) for line in after]
    high = height_of(folder.samples(last) / after[0]["image"])
    below = LINE if high < SIDE else 0  # a score in the corner of a low image would hide what it shows
    text = 4 + below + LINE * max(len(lines) for lines in captions)
    sheet = Image.new("RGB", (width, 28 + rows * (high + text + GAP)), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(13)
    for half in range(2):
        for column, name in enumerate(columns):
            draw.text((LEFT + half * width // 2 + column * (SIDE + GAP), 6), name, fill="#555", font=font)
    for index, line in enumerate(after):
        x, y = LEFT + (index % 2) * width // 2, 28 + (index // 2) * (high + text + GAP)
        start = before[line["task"]]
        files = {
            "source": (last, line["source"], ""),
            "before": (first, start["image"], f"{start['reward']:.1f}"),
            "after": (last, line["image"], f"{line['reward']:.1f}"),
            "target": (last, line["target"], ""),
        }
        for column, (step, name, score) in enumerate(files[name] for name in columns):
            path = folder.samples(step) / name
            with Image.open(path) as image:
                sheet.paste(image.resize((SIDE, high), Image.Resampling.NEAREST), (x + column * (SIDE + GAP), y))
                ink = "black" if below or image.convert("L").getpixel((1, image.height - 2)) > 96 else "white"
            draw.text((x + column * (SIDE + GAP) + 4, y + high + (1 if below else -18)), score, fill=ink, font=font)
        for number, (words, colour) in enumerate(captions[index]):
            draw.text((x, y + high + 2 + below + LINE * number), words, fill=colour, font=font)
    out.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(out, optimize=True)


def height_of(picture: Path) -> int:
    """The height in px of an image that is shown ``SIDE`` px wide."""
    with Image.open(picture) as image:
        return SIDE * image.height // image.width


def caption(before: dict, after: dict) -> list[tuple[str, str]]:
    """The caption as lines with colours: the instruction and, for a writer, its text before and after training."""
    lines = [(words, "#222") for words in textwrap.wrap(after["instruction"], LETTERS)[:2]]
    for when, line in (("before", before), ("after", after)):
        if line.get("text") is not None:
            said = f"{when}: {line['text'] or '(nothing)'}"
            lines += [(words, "#06c") for words in textwrap.wrap(said, LETTERS)[:2]]
    return lines


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
