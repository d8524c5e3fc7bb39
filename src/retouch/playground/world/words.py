"""Words on signs: two signs hang on a wall; one shows a word in some style, and the other is to show another in the same style.
Or, with ``apart``, in a style that the picture does not have, and a reference beside it does.

A picture of 32 x 64 px holds two lines of eight cells of 8 x 16 px. A word stands in consecutive cells, a letter each, from its
sign's left edge. Splits differ in their words; all letters occur in each. Letters are Pillow's own font, which ships with it.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

from PIL.Image import Image
from PIL.Image import new as new_image
from PIL.ImageDraw import Draw
from PIL.ImageFont import FreeTypeFont, load_default

from retouch.core.random import generator
from retouch.playground.world.drawn import DrawnTasks, Split
from retouch.playground.world.draws import Draws
from retouch.types import Task

HEIGHT, WIDTH = 32, 64
CELL, LINE = 8, 16
SHORTEST, LONGEST = 3, 6
CONSONANTS, VOWELS = "BDFHKLMNPRST", "AEOU"
LETTERS = CONSONANTS + VOWELS
PROMPT = "The text is '{}'."

Colour: TypeAlias = tuple[int, int, int]
PAPERS: tuple[Colour, ...] = ((245, 240, 225), (250, 215, 120), (170, 215, 240), (190, 230, 170), (245, 190, 195), (215, 215, 215))
INKS: tuple[Colour, ...] = ((25, 25, 30), (25, 40, 110), (130, 20, 30), (15, 80, 45), (90, 30, 110), (95, 55, 20))
WALLS: tuple[Colour, ...] = ((150, 130, 110), (120, 140, 150), (140, 150, 120), (160, 120, 130))
SIZES = (10, 11, 12)


@dataclass(frozen=True, slots=True)
class Style:
    """``size``: of the letters, in px."""

    ink: Colour
    paper: Colour
    size: int


class WordTasks(DrawnTasks):
    """``count`` tasks; task i depends on (seed, split, i), ``slips`` and ``apart`` alone.

    ``slips``: the share of letters that the target shows wrongly, each as another letter: what a painter that is to be improved is
    trained on. A task has the picture with an empty sign as its source, the sign as ``mask``, the other sign as ``reference``
    (letters that the word does not have), the ``target`` and the ``text``; its tag ``letters`` is the length of the word.

    ``apart``: both signs of the source are in another ink and on another paper than what is asked for, so that only the reference
    tells these. Words, letters, walls and references are the same ones.

    Example: ``WordTasks(seed=0, count=1000, split="train")[0].text``
    """

    def __init__(self, *, seed: int, count: int, split: Split, slips: float = 0.0, apart: bool = False) -> None:
        super().__init__(seed=seed, count=count, split=split)
        if not 0.0 <= slips <= 1.0:
            raise ValueError(f"slips lies in 0 to 1, not {slips}")
        self.slips, self.apart = slips, apart

    def _task(self, index: int) -> Task:
        draws = Draws(generator(self.seed, "word", self.split, index))
        word = random_word(draws, self.split)
        style = random_style(draws)
        line = draws.below(2)
        box = _sign(line, 1, LONGEST)
        length = SHORTEST + draws.below(2)
        other = "".join(draws.sample([letter for letter in LETTERS if letter not in word], length))
        crop = _sign(1 - line, draws.below(WIDTH // CELL - length + 1), length)
        wall = _wall(draws)
        shown = "".join(_other(letter, draws) if draws.uniform() < self.slips else letter for letter in word)
        hung = another_style(style, draws) if self.apart else style
        source, sheet = wall.copy(), wall.copy()
        write(source, crop, other, hung)
        write(source, box, "", hung)
        write(sheet, crop, other, style)
        target = source.copy()
        write(target, box, shown, style)
        mask = new_image("L", source.size)
        Draw(mask).rectangle((box[0], box[1], box[2] - 1, box[3] - 1), fill=255)
        return Task(
            id=f"words/{self.split}/seed{self.seed}/{index:06d}-{word}",
            instruction=PROMPT.format(word),
            images=(source,),
            mask=mask,
            reference=sheet.crop(crop),
            target=target,
            text=word,
            tags={"letters": str(len(word))},
        )


def random_word(draws: Draws, split: Split) -> str:
    """A word of the split, of consonants and vowels in turn."""
    while True:
        kinds = (CONSONANTS, VOWELS) if draws.below(2) else (VOWELS, CONSONANTS)
        word = "".join(draws.choose(kinds[place % 2]) for place in range(SHORTEST + draws.below(LONGEST - SHORTEST + 1)))
        if split_of_word(word) == split:
            return word


def split_of_word(word: str) -> Split:
    """Of ten words eight are for training, one for validation and one for the test."""
    place = hashlib.sha256(word.encode()).digest()[0] % 10
    return "train" if place < 8 else "validation" if place == 8 else "test"


def random_style(draws: Draws) -> Style:
    return Style(draws.choose(INKS), draws.choose(PAPERS), draws.choose(SIZES))


def another_style(style: Style, draws: Draws) -> Style:
    """One of another ink, and on another paper."""
    inks, papers = ([colour for colour in all_of if colour not in (style.ink, style.paper)] for all_of in (INKS, PAPERS))
    return Style(draws.choose(inks), draws.choose(papers), draws.choose(SIZES))


def write(picture: Image, box: tuple[int, int, int, int], word: str, style: Style) -> None:
    """Paint the sign and, a letter a cell from its left edge, the word. ``box``: left, top, right, bottom in px."""
    left, top, right, bottom = box
    sign = new_image("RGB", (right - left, bottom - top), style.paper)
    for place, letter in enumerate(word):
        at = (CELL * place + CELL / 2, (bottom - top) / 2)
        Draw(sign).text(at, letter, fill=style.ink, font=_font(style.size), anchor="mm")
    picture.paste(sign, (left, top))


def _other(letter: str, draws: Draws) -> str:
    return draws.choose([another for another in LETTERS if another != letter])


def _sign(line: int, column: int, cells: int) -> tuple[int, int, int, int]:
    return CELL * column, LINE * line, CELL * (column + cells), LINE * (line + 1)


def _wall(draws: Draws) -> Image:
    """A wall with a lighter stripe somewhere."""
    colour = draws.choose(WALLS)
    wall = new_image("RGB", (WIDTH, HEIGHT), colour)
    left, width = draws.below(WIDTH), 4 + draws.below(12)
    Draw(wall).rectangle((left, 0, left + width, HEIGHT), fill=(colour[0] + 30, colour[1] + 30, colour[2] + 30))
    return wall


@cache
def _font(size: int) -> FreeTypeFont:
    font = load_default(size)
    if not isinstance(font, FreeTypeFont):
        raise ValueError("words are drawn with Pillow's scalable font, which this Pillow lacks (it was built without FreeType)")
    return font
