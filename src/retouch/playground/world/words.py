"""The playground's text-rendering tasks: an image shows two signs on a wall, one with a word in some style. A word is to be painted
on the empty sign in the same style, or, with ``style_from_reference``, in a style that only the reference image has.

An image of 32 x 64 px has two lines of eight cells of 8 x 16 px. A word fills consecutive cells, one letter each, from the left
edge of its sign. Splits differ in their words; all letters occur in each split. Letters are drawn in Pillow's own font.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, TypeAlias

from PIL.Image import Image
from PIL.Image import new as new_image
from PIL.ImageDraw import Draw
from PIL.ImageFont import FreeTypeFont, load_default
from pydantic import Field

from retouch.config.section import Share
from retouch.core.random import generator
from retouch.data.base import SplitName
from retouch.playground.world.choices import RandomChoices
from retouch.playground.world.generated import GeneratedData, GeneratedTasks
from retouch.types import Task, TaskContents

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
    """The style of a word. ``size``: of the letters, in px."""

    ink: Colour
    paper: Colour
    size: int


class WordData(GeneratedData):
    """Words to paint on an empty sign, in the style of the other sign or of a reference image. The reward ``ocr`` reads them, and
    ``playground-signs`` scores the style."""

    demonstration_faults = ("wrong_letters",)
    renamed_keys: ClassVar[Mapping[str, str]] = {"slips": "wrong_letters", "apart": "style_from_reference"}

    kind: Literal["playground-words"] = "playground-words"
    wrong_letters: Share = 0.0
    """Share of wrong letters in the targets; held-out tasks have none."""
    style_from_reference: bool = Field(default=False, exclude_if=lambda separate: not separate)
    """The signs of the source image have another ink and paper than the target, which only the reference image shows."""

    def contents(self) -> TaskContents:
        return TaskContents(images=True, mask=True, reference=True, target=True, text=True, pairs=False)

    def tasks(self, *, in_turn: bool = False) -> "WordTasks":
        return WordTasks(self)


class WordTasks(GeneratedTasks):
    """The tasks of ``WordData``; task i depends only on (seed, split, i), ``wrong_letters`` and ``style_from_reference``.

    A task has the image with an empty sign as its source, the sign as ``mask``, the other sign as ``reference`` (with letters that
    the word does not have), the ``target`` and the ``text``; its tag ``letters`` is the length of the word. A wrong letter of the
    target is another letter. ``style_from_reference`` changes only the signs of the source, not words, walls or references.

    Example: ``WordData(seed=0, count=1000).tasks()[0].text``
    """

    def __init__(self, data: WordData) -> None:
        super().__init__(data)
        self._wrong_letters, self._style_from_reference = data.wrong_letters, data.style_from_reference

    def _task(self, index: int) -> Task:
        choices = RandomChoices(generator(self.seed, "word", self.split, index))
        word = random_word(choices, self.split)
        style = random_style(choices)
        line = choices.integer(2)
        box = _sign(line, 1, LONGEST)
        length = SHORTEST + choices.integer(2)
        other = "".join(choices.sample([letter for letter in LETTERS if letter not in word], length))
        crop = _sign(1 - line, choices.integer(WIDTH // CELL - length + 1), length)
        wall = _wall(choices)
        shown = "".join(_other(letter, choices) if choices.uniform() < self._wrong_letters else letter for letter in word)
        source_style = another_style(style, choices) if self._style_from_reference else style
        source, sheet = wall.copy(), wall.copy()
        write(source, crop, other, source_style)
        write(source, box, "", source_style)
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


def random_word(choices: RandomChoices, split: SplitName) -> str:
    """A word of the split, of 3 to 6 letters, consonants and vowels in turn."""
    while True:
        kinds = (CONSONANTS, VOWELS) if choices.integer(2) else (VOWELS, CONSONANTS)
        word = "".join(choices.choose(kinds[place % 2]) for place in range(SHORTEST + choices.integer(LONGEST - SHORTEST + 1)))
        if split_of_word(word) == split:
            return word


def split_of_word(word: str) -> SplitName:
    """The split of a word: train with probability 0.8, validation and test with 0.1 each."""
    place = hashlib.sha256(word.encode()).digest()[0] % 10
    return "train" if place < 8 else "validation" if place == 8 else "test"


def random_style(choices: RandomChoices) -> Style:
    """A style; ink, paper and size are drawn uniformly."""
    return Style(choices.choose(INKS), choices.choose(PAPERS), choices.choose(SIZES))


def another_style(style: Style, choices: RandomChoices) -> Style:
    """A style with another ink and another paper."""
    inks, papers = ([colour for colour in all_of if colour not in (style.ink, style.paper)] for all_of in (INKS, PAPERS))
    return Style(choices.choose(inks), choices.choose(papers), choices.choose(SIZES))


def write(image: Image, box: tuple[int, int, int, int], word: str, style: Style) -> None:
    """Draw a sign with a word into ``image``, one letter a cell from the left edge. ``box``: left, top, right, bottom in px."""
    left, top, right, bottom = box
    sign = new_image("RGB", (right - left, bottom - top), style.paper)
    for place, letter in enumerate(word):
        at = (CELL * place + CELL / 2, (bottom - top) / 2)
        Draw(sign).text(at, letter, fill=style.ink, font=_font(style.size), anchor="mm")
    image.paste(sign, (left, top))


def _other(letter: str, choices: RandomChoices) -> str:
    return choices.choose([another for another in LETTERS if another != letter])


def _sign(line: int, column: int, cells: int) -> tuple[int, int, int, int]:
    return CELL * column, LINE * line, CELL * (column + cells), LINE * (line + 1)


def _wall(choices: RandomChoices) -> Image:
    """A wall with a lighter stripe at a random place."""
    colour = choices.choose(WALLS)
    wall = new_image("RGB", (WIDTH, HEIGHT), colour)
    left, width = choices.integer(WIDTH), 4 + choices.integer(12)
    Draw(wall).rectangle((left, 0, left + width, HEIGHT), fill=(colour[0] + 30, colour[1] + 30, colour[2] + 30))
    return wall


@cache
def _font(size: int) -> FreeTypeFont:
    font = load_default(size)
    if not isinstance(font, FreeTypeFont):
        raise ValueError("words need Pillow's scalable font, but this Pillow was built without FreeType; install a build with it")
    return font
