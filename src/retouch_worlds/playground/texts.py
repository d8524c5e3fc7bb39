"""The playground's texts, from a small closed vocabulary of lower-case words, commas and semicolons.

Instructions for edits have several phrasings of each edit, connectors between edits, and filler that requests no edit: phrases
without meaning, and clauses that name things to be left unchanged. Because of these clauses, a model must recognise to which clause
a word belongs. Every text describes its edits completely and is unambiguous.

Descriptions of scenes are the prompts of the text-to-image model, in the words that it was trained on: "dark picture, red circle
top left, blue square centre" describes the background and then, in one clause each, all things of the scene. Requests use other
words: colours and shapes have other names, places are points of the compass or of a clock, and the background is a time of day.
Every word has only one meaning: "show me a ruby disc at half past ten and a navy box in the heart, at midnight" means the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from retouch.core.random import generator
from retouch.types import Task
from retouch_worlds.playground.scenes import (
    COLOURS,
    KINDS,
    MOST_EDITS,
    PLACES,
    SHAPES,
    Edit,
    Kind,
    RandomChoices,
    Scene,
    Thing,
    apply,
    edits_of_kinds,
    random_kinds,
    random_scene,
    things_needed,
)

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
KEEPS = ("leave the {thing} alone", "keep the {thing} as it is", "do not touch the {thing}", "the {thing} stays where it is")
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


def edits_of(task: Task) -> Sequence[Edit]:
    """The edits of a task of ``PlaygroundTasks``."""
    edits = task.meta["edits"]
    assert isinstance(edits, list)
    return [Edit.from_json(edit) for edit in edits]


def with_unfinished_target(task: Task, *, share: float) -> Task:
    """The task. If it has several edits, its target lacks one of them with probability ``share``, drawn with a generator keyed by
    the task's id.

    Such faults are typical of images that models edit by complex instructions. The instruction and ``meta`` do not change. The
    target stays complete if the other edits would leave the scene empty.
    """
    from retouch_worlds.playground.rendering import render

    edits = edits_of(task)
    choices = RandomChoices(generator(0, "unfinished", task.id))
    if len(edits) < 2 or choices.uniform() >= share:
        return task
    scene, missing = Scene.from_json(task.meta["scene"]), choices.integer(len(edits))
    done = [edit for number, edit in enumerate(edits) if number != missing]
    if all(edit.kind == "remove" for edit in done) and len(done) == len(scene.objects):
        return task
    return replace(task, target=render(apply(scene, done)))


def with_thought(task: Task) -> Task:
    """The task with its edits in plain words in ``meta``: as one text, ``thought``, for models that generate a chain of thought,
    and one by one, ``instructions``, for a teacher that makes single edits."""
    edits = edits_of(task)
    return replace(task, meta={**task.meta, "thought": completion(edits), "instructions": [completion([edit]) for edit in edits]})


GROUNDS = ("dark", "dim", "pale", "bright")
DESCRIPTION_OPENERS = (
    "one small poster:",
    "please draw",
    "i would like",
    "for the cover of my book:",
    "my friend asked for",
    "now paint",
)
DESCRIPTION_CLOSERS = (
    "please",
    "for me",
    "thanks",
    "if you can",
    "for the school play",
    "because i think that it will look better",
)


class Placed(NamedTuple):
    """A thing and its cell."""

    cell: int
    thing: Thing


def placed(scene: Scene) -> list[Placed]:
    """The scene's things in the order of their cells."""
    return [Placed(cell, thing) for cell, thing in scene.objects.items()]


def clause(one: Placed) -> str:
    """A thing and its place in words. The words of a thing are adjacent, and the place comes last."""
    return f"{one.thing.colour} {one.thing.shape} {PLACES[one.cell]}"


def description(background: int, things: Sequence[Placed]) -> str:
    """The background and then the things, in the given order: the plain form, in which the completions of a writer are."""
    return ", ".join([f"{GROUNDS[background]} picture", *map(clause, things)])


def free_description(scene: Scene, generator: torch.Generator) -> str:
    """A description of the scene with clauses in random order, sometimes with articles, without the background, or with filler."""
    choices = RandomChoices(generator)
    clauses = [clause(one) for one in placed(scene)]
    if choices.uniform() < 0.5:
        clauses = [f"a {one}" for one in clauses]
    clauses = choices.sample(clauses, len(clauses))
    if choices.uniform() < 0.9:
        where = choices.choose((0, 0, len(clauses)))
        clauses.insert(where, choices.choose(("", "a ")) + f"{GROUNDS[scene.background]} picture")
    text = choices.choose((", ", ", ", "; ", " and ")).join(clauses)
    if choices.uniform() < 0.3:
        text = f"{choices.choose(DESCRIPTION_OPENERS)} {text}"
    if choices.uniform() < 0.3:
        text = f"{text}, {choices.choose(DESCRIPTION_CLOSERS)}"
    return text


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
REQUEST_OPENERS = ("", "show me ", "i want ", "could you do ", "make it ")
REQUEST_JOINS = (" and ", "; ", " with ", " plus ")
assert len(PLACE_WORDS) == len(PLACES)
assert len(GROUND_WORDS) == len(GROUNDS)


def request(background: int, things: Sequence[Placed], generator: torch.Generator) -> str:
    """A request, in random words, for a scene with this background and these things in the given order."""
    choices = RandomChoices(generator)
    # The order of the draws decides the texts of all tasks.
    join, clauses = choices.choose(REQUEST_JOINS), []
    for one in things:
        colour = choices.choose(COLOUR_WORDS[one.thing.colour])
        pattern = choices.choose(CLAUSES)
        shape, place = choices.choose(SHAPE_WORDS[one.thing.shape]), choices.choose(PLACE_WORDS[one.cell])
        clauses.append(pattern.format(a="an" if colour[0] in "aeiou" else "a", colour=colour, shape=shape, place=place))
    text = choices.choose(REQUEST_OPENERS) + join.join(clauses)
    ground = choices.choose(GROUND_WORDS[background])
    return f"{text}, {ground}" if choices.uniform() < 0.5 else f"{ground}: {text}"
