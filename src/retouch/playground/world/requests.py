"""How a person asks for a scene: in words that the playground's painter never met.

Colours and shapes go by other names, places by the compass or the clock, and the ground by the time of day. One meaning each:
"show me a ruby disc at half past ten and a navy box in the heart, at midnight" is "dark picture, red circle top left, blue square
centre".
"""

from collections.abc import Sequence

import torch

from retouch.playground.world.descriptions import GROUNDS, Placed
from retouch.playground.world.draws import Draws
from retouch.playground.world.scenes import COLOURS, PLACES, SHAPES

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
    """The ground and the things, in their order, as somebody may ask for them."""
    draws = Draws(generator)
    told = draws.choose(JOINS).join(_clause(one, draws) for one in things)
    text = draws.choose(OPENERS) + told
    ground = draws.choose(GROUND_WORDS[background])
    return f"{text}, {ground}" if draws.uniform() < 0.5 else f"{ground}: {text}"


def _clause(one: Placed, draws: Draws) -> str:
    colour = draws.choose(COLOUR_WORDS[one.thing.colour])
    return draws.choose(CLAUSES).format(
        a="an" if colour[0] in "aeiou" else "a",
        colour=colour,
        shape=draws.choose(SHAPE_WORDS[one.thing.shape]),
        place=draws.choose(PLACE_WORDS[one.cell]),
    )


def vocabulary() -> list[str]:
    """Every word that names something in a request, sorted."""
    spoken = [*COLOUR_WORDS.values(), *SHAPE_WORDS.values(), *PLACE_WORDS, *GROUND_WORDS]
    return sorted({word for texts in spoken for text in texts for word in text.split()})
