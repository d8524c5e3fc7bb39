"""Words on signs, in some style: an image shows two signs on a wall.

An image of 64 x 32 px (width x height) has two lines of eight cells of 8 x 16 px. A word fills consecutive cells, one letter each,
from the left edge of its sign. The splits have different words, but all letters occur in each split. Letters are drawn in Pillow's
default font.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from PIL.Image import Image
from PIL.Image import new as new_image
from PIL.ImageDraw import Draw
from PIL.ImageFont import FreeTypeFont, load_default

from retouch.types import SplitName
from retouch_worlds.playground.scenes import RandomChoices

HEIGHT, WIDTH = 32, 64
CELL, LINE = 8, 16
SHORTEST, LONGEST = 3, 6
CONSONANTS, VOWELS = "BDFHKLMNPRST", "AEOU"
LETTERS = CONSONANTS + VOWELS

Colour: TypeAlias = tuple[int, int, int]
PAPERS: tuple[Colour, ...] = ((245, 240, 225), (250, 215, 120), (170, 215, 240), (190, 230, 170), (245, 190, 195), (215, 215, 215))
INKS: tuple[Colour, ...] = ((25, 25, 30), (25, 40, 110), (130, 20, 30), (15, 80, 45), (90, 30, 110), (95, 55, 20))
WALLS: tuple[Colour, ...] = ((150, 130, 110), (120, 140, 150), (140, 150, 120), (160, 120, 130))
SIZES = (10, 11, 12)


@dataclass(frozen=True, slots=True)
class Style:
    """The style of a word. ``ink``, ``paper``: RGB colours. ``size``: the font size of the letters, in px."""

    ink: Colour
    paper: Colour
    size: int


def random_word(choices: RandomChoices, split: SplitName) -> str:
    """A random word of the split, with 3 to 6 letters; consonants and vowels alternate."""
    while True:
        kinds = (CONSONANTS, VOWELS) if choices.integer(2) else (VOWELS, CONSONANTS)
        word = "".join(choices.choose(kinds[place % 2]) for place in range(SHORTEST + choices.integer(LONGEST - SHORTEST + 1)))
        if split_of_word(word) == split:
            return word


def split_of_word(word: str) -> SplitName:
    """The split of a word: train with probability 0.8, validation and test with 0.1 each."""
    place = hashlib.sha256(word.encode()).digest()[0] % 10
    return "train" if place < 8 else "validation" if place == 8 else "test"


def random_style(choices: RandomChoices, *, unlike: Style | None = None) -> Style:
    """A random style; ink, paper and size are drawn uniformly, without the ink and the paper of ``unlike``."""
    used = () if unlike is None else (unlike.ink, unlike.paper)
    inks, papers = ([colour for colour in all_of if colour not in used] for all_of in (INKS, PAPERS))
    return Style(choices.choose(inks), choices.choose(papers), choices.choose(SIZES))


def write(image: Image, box: tuple[int, int, int, int], word: str, style: Style) -> None:
    """Draw a sign with a word into ``image``, one letter per cell from the left edge. ``box``: left, top, right, bottom in px."""
    left, top, right, bottom = box
    sign = new_image("RGB", (right - left, bottom - top), style.paper)
    for place, letter in enumerate(word):
        at = (CELL * place + CELL / 2, (bottom - top) / 2)
        Draw(sign).text(at, letter, fill=style.ink, font=_font(style.size), anchor="mm")
    image.paste(sign, (left, top))


def another_letter(letter: str, choices: RandomChoices) -> str:
    """A random letter other than ``letter``."""
    return choices.choose([another for another in LETTERS if another != letter])


def sign_box(line: int, column: int, cells: int) -> tuple[int, int, int, int]:
    """Left, top, right and bottom, in px, of a sign that starts at a line and a column and has ``cells`` cells."""
    return CELL * column, LINE * line, CELL * (column + cells), LINE * (line + 1)


def random_wall(choices: RandomChoices) -> Image:
    """The image of a wall with a lighter stripe at a random place."""
    colour = choices.choose(WALLS)
    wall = new_image("RGB", (WIDTH, HEIGHT), colour)
    left, width = choices.integer(WIDTH), 4 + choices.integer(12)
    Draw(wall).rectangle((left, 0, left + width, HEIGHT), fill=(colour[0] + 30, colour[1] + 30, colour[2] + 30))
    return wall


@cache
def _font(size: int) -> FreeTypeFont:
    font = load_default(size)
    if not isinstance(font, FreeTypeFont):
        raise ValueError("words need Pillow's scalable font, but this Pillow was built without FreeType; install one with FreeType")
    return font
