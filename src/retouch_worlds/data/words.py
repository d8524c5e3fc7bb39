"""The playground's text-rendering tasks: an image shows two signs on a wall, and one of them has letters in some style. The model
should paint a word on the empty sign in the same style, or, with ``style_from_reference``, in a style that only the reference image
shows.

``playground.world.words`` draws words, signs and walls.
"""

from collections.abc import Mapping
from typing import ClassVar, Literal

from PIL.Image import new as new_image
from PIL.ImageDraw import Draw
from pydantic import Field

from retouch.config.section import Pixels, Share
from retouch.core.random import generator
from retouch.types import Task, TaskContents
from retouch_worlds.data.generated import GeneratedData, GeneratedTasks
from retouch_worlds.playground.world.choices import RandomChoices
from retouch_worlds.playground.world.words import (
    CELL,
    HEIGHT,
    LETTERS,
    LONGEST,
    SHORTEST,
    WIDTH,
    another_letter,
    another_style,
    random_style,
    random_wall,
    random_word,
    sign_box,
    write,
)

PROMPT = "The text is '{}'."


class WordData(GeneratedData):
    """Words to paint on an empty sign, in the style of the other sign or of a reference image. The reward ``ocr`` reads the words,
    and ``playground-signs`` scores the style."""

    demonstration_faults = ("wrong_letters",)
    renamed_keys: ClassVar[Mapping[str, str]] = {"slips": "wrong_letters", "apart": "style_from_reference"}

    kind: Literal["playground-words"] = "playground-words"
    wrong_letters: Share = 0.0
    """Share of wrong letters in the targets. Always 0 for held-out tasks."""
    style_from_reference: bool = Field(default=False, exclude_if=lambda separate: not separate)
    """Give the signs of the source image another ink and paper than the target, so that only the reference image shows the style of
    the target."""

    def contents(self) -> TaskContents:
        return TaskContents(images=True, mask=True, reference=True, target=True, text=True, pairs=False)

    @property
    def generated_size(self) -> Pixels | None:
        return HEIGHT, WIDTH

    def tasks(self, *, in_turn: bool = False) -> "WordTasks":
        return WordTasks(self)


class WordTasks(GeneratedTasks):
    """The tasks of ``WordData``; task i depends only on (seed, split, i), ``wrong_letters`` and ``style_from_reference``.

    The source image of a task has an empty sign; ``mask`` covers this sign, and ``reference`` is a crop of the other sign, whose
    letters do not occur in the word. A task also has the ``target`` and the ``text``; its tag ``letters`` is the length of the
    word. A wrong letter in the target is a random other letter. ``style_from_reference`` changes only the signs of the source
    image, not words, walls or reference images.

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
        box = sign_box(line, 1, LONGEST)
        length = SHORTEST + choices.integer(2)
        other = "".join(choices.sample([letter for letter in LETTERS if letter not in word], length))
        crop = sign_box(1 - line, choices.integer(WIDTH // CELL - length + 1), length)
        wall = random_wall(choices)
        shown = "".join(another_letter(letter, choices) if choices.uniform() < self._wrong_letters else letter for letter in word)
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
