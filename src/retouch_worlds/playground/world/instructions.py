"""Instructions for edits: several phrasings of each edit, connectors between edits, and filler that requests no edit.

Filler consists of phrases without meaning, and of clauses that name things to be left unchanged. Because of these clauses, a model
must recognise to which clause a word belongs.

Texts consist of lower-case words, commas and semicolons from a small closed vocabulary. Every text describes its edits completely
and is unambiguous.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from retouch_worlds.playground.world.choices import RandomChoices
from retouch_worlds.playground.world.edits import KINDS, MOST_EDITS, Edit, Kind, edits_of_kinds, random_kinds, things_needed
from retouch_worlds.playground.world.scenes import COLOURS, PLACES, SHAPES, Scene, Thing, random_scene

if TYPE_CHECKING:
    import torch

PHRASES: dict[Kind, tuple[str, ...]] = {
    "recolour": (
        "make the {thing} {colour}",
        "paint the {thing} {colour}",
        "change the colour of the {thing} to {colour}",
        "recolour the {thing} in {colour}",
    ),
    "reshape": (
        "turn the {thing} into a {shape}",
        "change the {thing} into a {shape}",
        "make the {thing} a {shape}",
        "reshape the {thing} to a {shape}",
    ),
    "remove": ("remove the {thing}", "delete the {thing}", "take away the {thing}", "erase the {thing}"),
    "add": (
        "add a {thing} at the {place}",
        "put a {thing} at the {place}",
        "draw a {thing} at the {place}",
        "place a {thing} at the {place}",
    ),
    "move": (
        "move the {thing} to the {place}",
        "shift the {thing} to the {place}",
        "bring the {thing} to the {place}",
        "drag the {thing} over to the {place}",
    ),
}
_MOST_KEPT = 2
JOINS: dict[int, tuple[str, ...]] = {
    1: ("{}",),
    2: ("{}, then {}", "{} and {}", "{}; {}", "first {}, then {}", "{} and also {}"),
    3: ("{}, {} and {}", "first {}, then {} and {}", "{}, then {}, then {}", "{}; {}; {}", "{} and {}, then {}"),
    4: ("{}, {}, {} and {}", "first {}, then {}, then {} and {}", "{}; {}; {}; {}", "{} and {}, then {} and {}"),
}
KEEPS = (
    "leave the {thing} alone",
    "keep the {thing} as it is",
    "do not touch the {thing}",
    "the {thing} stays where it is",
)
OPENERS = (
    "please",
    "now",
    "hello,",
    "could you please",
    "in this picture,",
    "in the picture that you see here,",
    "i would like you to",
    "for the poster that i am making for the school play,",
    "my friend asked for one small change, so please",
    "this is nearly what i want for the cover of my book, but please",
)
CLOSERS = (
    "please",
    "thanks",
    "for me",
    "in this picture",
    "if you can",
    "and keep the rest as it is",
    "and do not touch anything else",
    "because i think that it will look much better that way",
    "so that i can show it to my friend at the end of the day",
)


def phrase(edit: Edit, pattern: str) -> str:
    """The edit in words. ``pattern``: one of the ``PHRASES`` of its kind."""
    result = edit.result or edit.thing
    return pattern.format(thing=" ".join(edit.thing), colour=result.colour, shape=result.shape, place=PLACES[edit.to_cell])


def completion(edits: Sequence[Edit]) -> str:
    """The edits in the given order, each in its first phrasing and with the complete names of things."""
    return "; ".join(phrase(edit, PHRASES[edit.kind][0]) for edit in edits)


def content(edits: Sequence[Edit]) -> str:
    """A canonical text of the edits: equal for two instructions if and only if they mean the same."""
    return " + ".join(sorted(phrase(edit, PHRASES[edit.kind][0]) for edit in edits))


def instruction(
    edits: Sequence[Edit], others: Sequence[Thing], generator: torch.Generator, *, filler: bool, impossible: Sequence[Edit] = ()
) -> str:
    """The edits as one text, in the given order, in a random phrasing. ``impossible`` edits are inserted at random places.

    ``filler``: add phrases without meaning before the edits, after them, or both, and clauses that name up to two of ``others``
    (things that no edit touches) as things to be left alone. The text has at most ``MOST_EDITS`` clauses.
    """
    choices = RandomChoices(generator)
    parts = [phrase(edit, choices.choose(PHRASES[edit.kind])) for edit in edits]
    for edit in impossible:
        parts.insert(choices.integer(len(parts) + 1), phrase(edit, choices.choose(PHRASES[edit.kind])))
    if filler:
        most = min(_MOST_KEPT, len(others), MOST_EDITS - len(parts))
        for kept in choices.sample(list(others), choices.integer(most + 1)):
            parts.insert(choices.integer(len(parts) + 1), choices.choose(KEEPS).format(thing=" ".join(kept)))
    text = choices.choose(JOINS[len(parts)]).format(*parts)
    if filler:
        where = choices.integer(3)
        opener = [choices.choose(OPENERS)] if where != 1 else []
        closer = [choices.choose(CLOSERS)] if where != 0 else []
        text = " ".join([*opener, text, *closer])
    return text


def untouched(scene: Scene, edits: Sequence[Edit]) -> list[Thing]:
    """The things of the scene that no edit touches, in the order of their cells."""
    return [thing for cell, thing in scene.objects.items() if all(cell not in edit.touches for edit in edits)]


def corpus(generator: torch.Generator, count: int) -> Iterator[str]:
    """``count`` instructions of every complexity, half of them with filler, to train a tokenizer on."""
    for i in range(count):
        kinds = random_kinds(1 + i // 2 % MOST_EDITS, generator)
        edits = None
        while edits is None:
            scene = random_scene(generator, least=things_needed(kinds))
            edits = edits_of_kinds(scene, kinds, generator)
        yield instruction(edits, untouched(scene, edits), generator, filler=i % 2 == 1)


def vocabulary() -> list[str]:
    """Every word that an instruction may contain, sorted; comma and semicolon count as words."""
    sentences = [pattern for kind in KINDS for pattern in PHRASES[kind]]
    sentences += [pattern for patterns in JOINS.values() for pattern in patterns]
    sentences += [*KEEPS, *OPENERS, *CLOSERS, *COLOURS, *SHAPES, *PLACES]
    words = {word for sentence in sentences for word in sentence.replace(",", " , ").replace(";", " ; ").split()}
    return sorted(word for word in words if "{" not in word)
