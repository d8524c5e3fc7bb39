"""How the playground's painter is told what to paint: its own words for a scene.

"dark picture, red circle top left, blue square centre": the ground, then a clause for each thing. What is not named is not there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from retouch.playground.world.draws import Draws
from retouch.playground.world.scenes import COLOURS, PLACES, SHAPES, Scene, Thing

GROUNDS = ("dark", "dim", "pale", "bright")
OPENERS = ("one small poster:", "please draw", "i would like", "for the cover of my book:", "my friend asked for", "now paint")
CLOSERS = ("please", "for me", "thanks", "if you can", "for the school play", "because i think that it will look better")


class Placed(NamedTuple):
    """A thing and the cell that it stands in."""

    cell: int
    thing: Thing


def placed(scene: Scene) -> list[Placed]:
    """The scene's things in the order of their cells."""
    return [Placed(cell, thing) for cell, thing in scene.objects.items()]


def ground(background: int) -> str:
    """The background in the painter's words."""
    return f"{GROUNDS[background]} picture"


def clause(one: Placed) -> str:
    """A thing and its place in the painter's words; the last word's neighbours to the left say all of it."""
    return f"{one.thing.colour} {one.thing.shape} {PLACES[one.cell]}"


def description(background: int, things: Sequence[Placed]) -> str:
    """The ground and then the things, in their order: the plain form, which a writer is shown."""
    return ", ".join([ground(background), *map(clause, things)])


def free_description(scene: Scene, generator: torch.Generator) -> str:
    """The scene in any order, with articles or without, with the ground left out at times, and with words that ask for nothing."""
    draws = Draws(generator)
    told = [clause(one) for one in placed(scene)]
    if draws.uniform() < 0.5:
        told = [f"a {one}" for one in told]
    told = draws.sample(told, len(told))
    if draws.uniform() < 0.9:
        where = draws.choose((0, 0, len(told)))
        told.insert(where, draws.choose(("", "a ")) + ground(scene.background))
    text = draws.choose((", ", ", ", "; ", " and ")).join(told)
    if draws.uniform() < 0.3:
        text = f"{draws.choose(OPENERS)} {text}"
    if draws.uniform() < 0.3:
        text = f"{text}, {draws.choose(CLOSERS)}"
    return text


def vocabulary() -> list[str]:
    """Every word that a plain description may hold, sorted."""
    return sorted({word for text in [*GROUNDS, "picture", *PLACES, *COLOURS, *SHAPES] for word in text.split()})
