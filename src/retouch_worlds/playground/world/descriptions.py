"""Prompts of the playground's text-to-image model: descriptions of scenes in the words that the model was trained on.

"dark picture, red circle top left, blue square centre" describes the background and then, in one clause each, all things of the
scene.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from retouch_worlds.playground.world.choices import RandomChoices
from retouch_worlds.playground.world.scenes import COLOURS, PLACES, SHAPES, Scene, Thing

if TYPE_CHECKING:
    import torch

GROUNDS = ("dark", "dim", "pale", "bright")
OPENERS = ("one small poster:", "please draw", "i would like", "for the cover of my book:", "my friend asked for", "now paint")
CLOSERS = ("please", "for me", "thanks", "if you can", "for the school play", "because i think that it will look better")


class Placed(NamedTuple):
    """A thing and its cell."""

    cell: int
    thing: Thing


def placed(scene: Scene) -> list[Placed]:
    """The scene's things in the order of their cells."""
    return [Placed(cell, thing) for cell, thing in scene.objects.items()]


def ground(background: int) -> str:
    """The background in words."""
    return f"{GROUNDS[background]} picture"


def clause(one: Placed) -> str:
    """A thing and its place in words. The words of a thing are adjacent, and the place comes last."""
    return f"{one.thing.colour} {one.thing.shape} {PLACES[one.cell]}"


def description(background: int, things: Sequence[Placed]) -> str:
    """The background and then the things, in the given order: the plain form, in which the completions of a writer are."""
    return ", ".join([ground(background), *map(clause, things)])


def free_description(scene: Scene, generator: torch.Generator) -> str:
    """A description of the scene with clauses in random order, sometimes with articles, without the background, or with filler."""
    choices = RandomChoices(generator)
    clauses = [clause(one) for one in placed(scene)]
    if choices.uniform() < 0.5:
        clauses = [f"a {one}" for one in clauses]
    clauses = choices.sample(clauses, len(clauses))
    if choices.uniform() < 0.9:
        where = choices.choose((0, 0, len(clauses)))
        clauses.insert(where, choices.choose(("", "a ")) + ground(scene.background))
    text = choices.choose((", ", ", ", "; ", " and ")).join(clauses)
    if choices.uniform() < 0.3:
        text = f"{choices.choose(OPENERS)} {text}"
    if choices.uniform() < 0.3:
        text = f"{text}, {choices.choose(CLOSERS)}"
    return text


def vocabulary() -> list[str]:
    """Every word that a plain description may contain, sorted."""
    return sorted({word for text in [*GROUNDS, "picture", *PLACES, *COLOURS, *SHAPES] for word in text.split()})
