"""Requests for a scene in words that the playground's text-to-image model was not trained on.

Colours and shapes have other names, places are points of the compass or of a clock, and the background is a time of day. Every word
has only one meaning: "show me a ruby disc at half past ten and a navy box in the heart, at midnight" means "dark picture, red
circle top left, blue square centre".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from retouch_worlds.playground.world.choices import RandomChoices
from retouch_worlds.playground.world.descriptions import GROUNDS, Placed
from retouch_worlds.playground.world.scenes import COLOURS, PLACES, SHAPES

if TYPE_CHECKING:
    import torch

COLOUR_WORDS = dict(
    zip(
        COLOURS,
        (("scarlet", "ruby"), ("emerald", "jade"), ("navy", "sapphire"), ("amber", "gold"), ("rose", "magenta"), ("teal", "aqua")),
        strict=True,
    )
)
SHAPE_WORDS = dict(zip(SHAPES, (("disc", "ball"), ("box", "tile"), ("wedge", "pyramid")), strict=True))
PLACE_WORDS = (
    ("in the north west", "at half past ten"),
    ("in the north", "at twelve"),
    ("in the north east", "at half past one"),
    ("in the west", "at nine"),
    ("in the heart", "at the hub"),
    ("in the east", "at three"),
    ("in the south west", "at half past seven"),
    ("in the south", "at six"),
    ("in the south east", "at half past four"),
)
GROUND_WORDS = (("at midnight", "by night"), ("at dusk", "in the evening"), ("at dawn", "in the morning"), ("at noon", "by day"))
CLAUSES = ("{a} {colour} {shape} {place}", "{place} {a} {colour} {shape}", "a {shape} {place} in {colour}")
OPENERS = ("", "show me ", "i want ", "could you do ", "make it ")
JOINS = (" and ", "; ", " with ", " plus ")
assert len(PLACE_WORDS) == len(PLACES)
assert len(GROUND_WORDS) == len(GROUNDS)


def request(background: int, things: Sequence[Placed], generator: torch.Generator) -> str:
    """A request, in random words, for a scene with this background and these things in the given order."""
    choices = RandomChoices(generator)
    clauses = choices.choose(JOINS).join(_clause(one, choices) for one in things)
    text = choices.choose(OPENERS) + clauses
    ground = choices.choose(GROUND_WORDS[background])
    return f"{text}, {ground}" if choices.uniform() < 0.5 else f"{ground}: {text}"


def _clause(one: Placed, choices: RandomChoices) -> str:
    colour = choices.choose(COLOUR_WORDS[one.thing.colour])
    return choices.choose(CLAUSES).format(
        a="an" if colour[0] in "aeiou" else "a",
        colour=colour,
        shape=choices.choose(SHAPE_WORDS[one.thing.shape]),
        place=choices.choose(PLACE_WORDS[one.cell]),
    )


def vocabulary() -> list[str]:
    """Every word of a request that describes a colour, a shape, a place or the background, sorted."""
    spoken = [*COLOUR_WORDS.values(), *SHAPE_WORDS.values(), *PLACE_WORDS, *GROUND_WORDS]
    return sorted({word for texts in spoken for text in texts for word in text.split()})
