"""The tasks of the playground: data sources that generate scenes, edits and words from a seed instead of reading files. A task is
generated on access from the seed, the split and the number of the task.

The splits have different scenes, and instructions with different contents (whatever their words). A scene and the content of an
instruction are each hashed to one of ten buckets: the first bucket is the split test, the second validation, and the others train.
A scene or an instruction that belongs to another split is drawn again.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, TypeAlias, get_args, overload

from PIL.Image import new as new_image
from PIL.ImageDraw import Draw
from pydantic import Field

from retouch.config.section import Count, NonNegative, Pixels, Share
from retouch.core.random import generator
from retouch.data.base import DataContext, DataSets, DataSource, Mixture
from retouch.data.checks import OnBadRow
from retouch.data.guard import refuse_test_sets
from retouch.data.tasks import MappedTasks
from retouch.types import SplitName, Task, TaskContents
from retouch_worlds.playground.scenes import (
    CELLS,
    MOST_EDITS,
    SIZE,
    Edit,
    Numbers,
    RandomChoices,
    Scene,
    Thing,
    apply,
    edits_of_kinds,
    impossible_edit,
    random_kinds,
    random_scene,
    things_needed,
)
from retouch_worlds.playground.texts import (
    JOINS,
    PHRASES,
    completion,
    content,
    description,
    edits_of,
    instruction,
    phrase,
    placed,
    request,
    untouched,
    with_thought,
    with_unfinished_target,
)
from retouch_worlds.playground.words import (
    CELL,
    HEIGHT,
    LETTERS,
    LONGEST,
    SHORTEST,
    WIDTH,
    another_letter,
    random_style,
    random_wall,
    random_word,
    sign_box,
    write,
)

if TYPE_CHECKING:
    import torch


class GeneratedData(DataSource):
    """Tasks of the playground, generated from a seed."""

    demonstration_faults: ClassVar[tuple[str, ...]] = ()
    """Keys that add faults to the demonstrations and instructions; they are set to 0 for evaluation."""

    count: Count
    """Number of tasks in the set."""
    seed: int = 0
    """Seed of the tasks."""
    split: SplitName = "train"
    """The split from which scenes, instructions or words are drawn; the three splits are disjoint."""

    @abstractmethod
    def tasks(self, *, in_turn: bool = False) -> Sequence[Task]:
        """The tasks, each generated on access. ``in_turn``: if all numbers of edits or things have equal weights, successive tasks
        go through these numbers in turn instead of drawing them, so that the set has equally many tasks of each number."""

    def build(self, context: DataContext) -> DataSets:
        heldout = context.eval_source
        if not isinstance(heldout, GeneratedData):
            heldout = self.for_evaluation(
                tasks=context.eval_tasks, seed=context.eval_seed, split=context.eval_split, complexity=None
            )
        return DataSets(self.tasks(), heldout.tasks(in_turn=True), self.refuse_test_sets(trains=context.trains))

    def for_evaluation(self, *, tasks: int, seed: int, split: SplitName, complexity: Mapping[int, float] | None) -> Self:
        changes: dict[str, object] = {"count": tasks, "seed": seed, "split": split, **dict.fromkeys(self.demonstration_faults, 0)}
        if complexity is not None and "complexity" in type(self).model_fields:
            changes["complexity"] = complexity
        return self.model_copy(update=changes)

    def refuse_test_sets(self, *, trains: bool = True) -> tuple[str, ...]:
        if not trains or self.split != "test":
            return ()
        found = refuse_test_sets(["playground"], split=self.split, allow_test_sets=self.allow_test_sets)
        return tuple(map(str, found))

    def all_tasks(self, *, size: tuple[int, int], on_bad_row: OnBadRow) -> Sequence[Task]:
        return self.tasks()


class GeneratedTasks(Sequence[Task]):
    """The tasks of a ``GeneratedData`` section, each made by ``_task`` from its number."""

    def __init__(self, data: GeneratedData) -> None:
        self.seed, self.split, self._size = data.seed, data.split, data.count

    @abstractmethod
    def _task(self, index: int) -> Task:
        """The task with the number ``index``, from 0 to ``len(self) - 1``: the same on every call."""

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> list[Task]: ...

    def __getitem__(self, index: int | slice) -> Task | list[Task]:
        if isinstance(index, slice):
            return [self._task(i) for i in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(f"task {index} of {self._size}")
        return self._task(index % self._size)


def taking_turns(mixture: Mapping[int, float]) -> Numbers:
    """The numbers with a positive weight in ascending order, to be taken in turn, if their weights are equal; else the mixture of
    these numbers."""
    kept = {number: weight for number, weight in mixture.items() if weight > 0}
    return sorted(kept) if len({round(weight / math.fsum(kept.values()), 9) for weight in kept.values()}) == 1 else kept


# Chosen so that every split has several contents of every kind of single edit, also of removals, which have only 18 contents.
_SALT = "retouch playground 818"


def split_of(text: str) -> SplitName:
    """The split of a scene (its canonical JSON) or of an instruction (its content). Test and validation have a tenth each."""
    bucket = int.from_bytes(hashlib.sha256(f"{_SALT} {text}".encode()).digest()[:8], "big") % 10
    return "test" if bucket == 0 else "validation" if bucket == 1 else "train"


def canonical(scene: Scene) -> str:
    """The JSON of the scene with sorted keys and no spaces: the text that decides its split."""
    return json.dumps(scene.to_json(), sort_keys=True, separators=(",", ":"))


class PlaygroundData(GeneratedData):
    """Scenes and edits drawn from a seed."""

    demonstration_faults: ClassVar[tuple[str, ...]] = ("impossible", "unfinished")
    generated_size: ClassVar[Pixels] = (SIZE, SIZE)

    kind: Literal["playground"] = "playground"
    complexity: Mixture
    """Numbers of edits in one instruction, 1 to 4: a list, or a map from number to weight."""
    filler: Share = 0.0
    """Share of the instructions with filler: words that request no edit."""
    impossible: Share = 0.0
    """Share of the instructions that also request impossible edits, of things that are not in the image. Always 0 for held-out
    tasks."""
    unfinished: Share = Field(default=0.0, exclude_if=lambda share: share == 0)
    """Share of the tasks with several edits whose target lacks one of the edits, which is typical of demonstrations that were made
    by models. Always 0 for held-out tasks."""
    thought: bool = Field(default=False, exclude_if=lambda thought: not thought)
    """Describe the edits of each task in plain words: ``meta`` gets ``thought``, a chain of thought for models that generate one,
    and ``instructions``, the single edits for a teacher (objective ``opd``)."""
    turns: bool = Field(default=False, exclude_if=lambda turns: not turns)
    """Give each task its edits one by one, as the turns of an episode (``rollout.turns``)."""

    def contents(self) -> TaskContents:
        counts = [number for number, weight in self.complexity.items() if weight] if self.turns else [0]
        turns = min(counts), max(counts)
        return TaskContents(images=True, mask=False, reference=False, target=True, pairs=False, turns=turns)

    def tasks(self, *, in_turn: bool = False) -> Sequence[Task]:
        tasks: Sequence[Task] = PlaygroundTasks(self, in_turn=in_turn)
        if self.unfinished:
            tasks = MappedTasks(tasks, partial(with_unfinished_target, share=self.unfinished))
        return MappedTasks(tasks, with_thought) if self.thought else tasks


class PlaygroundTasks(GeneratedTasks):
    """The tasks of ``PlaygroundData``; task i depends only on (seed, split, i), ``complexity``, ``filler`` and ``impossible``.

    A task has the source image in ``images``, the exact ``target``, the tags ``complexity`` ("2") and ``kinds`` ("add+move"), and
    in ``meta`` the ``scene`` and the ``edits`` as JSON. With ``turns`` it has its edits one by one as turns, in a random phrasing
    without filler, each with the scene before it and its own target. Removals come last, so that no scene in between is empty.
    ``in_turn``: see ``GeneratedData.tasks``.

    Example: ``PlaygroundData(seed=0, count=1000, complexity=[1], filler=0.25).tasks()[0].instruction``
    """

    def __init__(self, data: PlaygroundData, *, in_turn: bool = False) -> None:
        super().__init__(data)
        self._filler, self._impossible_share, self._turns = data.filler, data.impossible, data.turns
        self._complexity = taking_turns(data.complexity) if in_turn else data.complexity

    def _draw(self, index: int) -> tuple[Scene, tuple[Edit, ...], str]:
        random = generator(self.seed, "playground", self.split, index)
        choices = RandomChoices(random)
        filler = choices.uniform() < self._filler
        kinds = random_kinds(choices.number(self._complexity, index), random)
        while True:
            scene = random_scene(random, least=things_needed(kinds))
            if split_of(canonical(scene)) != self.split:
                continue
            for _ in range(8):
                edits = edits_of_kinds(scene, kinds, random)
                if edits is not None and split_of(content(edits)) == self.split:
                    impossible = self._impossible(scene, edits, random)
                    text = instruction(edits, untouched(scene, edits), random, filler=filler, impossible=impossible)
                    return scene, edits, text

    def _impossible(self, scene: Scene, edits: Sequence[Edit], random: torch.Generator) -> list[Edit]:
        """Draw the impossible edits of an instruction: for a share of the instructions one or two, but with at most ``MOST_EDITS``
        edits in the instruction."""
        if self._impossible_share == 0.0:
            return []
        choices = RandomChoices(random)
        if choices.uniform() >= self._impossible_share:
            return []
        made: list[Edit] = []
        wanted = min(1 + choices.integer(2), MOST_EDITS - len(edits))
        while len(made) < wanted:
            edit = impossible_edit(scene, edits, random)
            if split_of(content([edit])) == self.split and edit.thing not in [other.thing for other in made]:
                made.append(edit)
        return made

    def _task(self, index: int) -> Task:
        from retouch_worlds.playground.rendering import render

        scene, edits, text = self._draw(index)
        digest = hashlib.sha256(f"{canonical(scene)} {text}".encode()).hexdigest()[:8]
        name, after, turns = f"playground/{self.split}/seed{self.seed}/{index:06d}-{digest}", scene, []
        for number, edit in enumerate(sorted(edits, key=lambda edit: edit.kind == "remove") if self._turns else (), 1):
            before, after = after, apply(after, [edit])
            turns.append(
                Task(
                    id=f"{name}/turn-{number}",
                    instruction=instruction([edit], [], generator(0, "turn", name, number), filler=False),
                    target=render(after),
                    tags={"complexity": "1", "kinds": edit.kind},
                    meta={"scene": before.to_json(), "edits": [edit.to_json()]},
                )
            )
        return Task(
            id=name,
            instruction=text,
            images=(render(scene),),
            target=render(apply(scene, edits)),
            tags={"complexity": str(len(edits)), "kinds": "+".join(sorted(edit.kind for edit in edits))},
            meta={"scene": scene.to_json(), "edits": [edit.to_json() for edit in edits]},
            turns=tuple(turns),
        )


class IndirectPlaygroundData(PlaygroundData):
    """The playground's scenes and edits with short names of things, which are unambiguous only together with the image: for a
    writer that sees the image and writes the complete names. The ``completion`` of a task has the complete names."""

    demonstration_faults = ("impossible", "unfinished", "incomplete")

    kind: Literal["playground-indirect"] = "playground-indirect"  # type: ignore[assignment]
    filler: Literal[0] = 0
    """Always 0: these instructions have no filler."""
    impossible: Literal[0] = 0
    """Always 0: these instructions request no impossible edits."""
    unfinished: Literal[0] = Field(default=0, exclude=True)
    """Always 0: a writer learns from completions, not from targets."""
    turns: Literal[False] = Field(default=False, exclude=True)
    """Always false: a writer writes one instruction for all edits."""
    incomplete: Share = 0.0
    """Share of the tasks with several edits that have an empty completion; held-out tasks have none."""

    def tasks(self, *, in_turn: bool = False) -> MappedTasks:
        return MappedTasks(PlaygroundTasks(self, in_turn=in_turn), partial(indirect, incomplete=self.incomplete))


def names(thing: Thing, scene: Scene) -> tuple[str, ...]:
    """The shortest unambiguous names of a thing in the scene: its colour or its shape if one of them is enough, else both."""
    others = [other for other in scene.objects.values() if other != thing]
    short = []
    if all(other.colour != thing.colour for other in others):
        short.append(f"{thing.colour} one")
    if all(other.shape != thing.shape for other in others):
        short.append(thing.shape)
    return tuple(short) or (" ".join(thing),)


def indirect(task: Task, *, incomplete: float = 0.0) -> Task:
    """The task of ``PlaygroundTasks`` with an indirect instruction and a completion, drawn with a generator keyed by the task's id.
    ``incomplete``: the probability of an empty completion for a task with several edits."""
    edits, scene = edits_of(task), Scene.from_json(task.meta["scene"])
    choices = RandomChoices(generator(0, "indirect", task.id))
    completed = [] if choices.uniform() < incomplete and len(edits) > 1 else edits
    clauses = []
    for edit in edits:
        pattern = choices.choose(PHRASES[edit.kind])
        # A thing to be added is not in the scene, so its complete name is used.
        name = " ".join(edit.thing) if edit.kind == "add" else choices.choose(names(edit.thing, scene))
        clauses.append(phrase(edit, pattern.replace("{thing}", name)))
    return replace(
        task,
        id=f"{task.id}/indirect",
        instruction=choices.choose(JOINS[len(clauses)]).format(*clauses),
        meta={**task.meta, "completion": completion(completed)},
    )


Things: TypeAlias = Annotated[int, Field(strict=False, ge=1, le=CELLS)]
ThingCounts: TypeAlias = Annotated[dict[Things, NonNegative], *get_args(Mixture)[1:]]
# The share of the incomplete completions for three or more things that name only one thing; the others name two.
_ONE = 0.7


class TextToImageData(GeneratedData):
    """Scenes of the playground, requested in words that its text-to-image model does not know: for a writer of prompts. The
    ``completion`` of a task is a prompt in known words. With ``known_words``, this prompt is also the instruction: for the
    text-to-image model itself, which was trained on scenes with 1 to 4 things."""

    demonstration_faults = ("incomplete",)

    kind: Literal["playground-scenes"] = "playground-scenes"
    complexity: ThingCounts
    """Numbers of things in a scene, 1 to 9: a list, or a map from number to weight."""
    known_words: bool = False
    """Write the instructions in words that the text-to-image model was trained on."""
    incomplete: Share = 0.0
    """Share of the tasks with several things whose completion stops after the first or second thing; held-out tasks have none."""

    def contents(self) -> TaskContents:
        return TaskContents(images=False, mask=False, reference=False, target=True, pairs=False, turns=(0, 0))

    def tasks(self, *, in_turn: bool = False) -> TextToImageTasks:
        return TextToImageTasks(self, in_turn=in_turn)


class TextToImageTasks(GeneratedTasks):
    """The tasks of ``TextToImageData``; task i depends only on (seed, split, i), ``complexity`` and ``incomplete``.

    A task has no source image. It has the exact ``target``, the tag ``complexity`` ("2"), and in ``meta`` the ``scene`` and the
    ``completion``: the prompt in known words, with the things in the order of the request. ``in_turn``: see
    ``GeneratedData.tasks``.

    Example: ``TextToImageData(seed=0, count=1000, complexity=[1, 2]).tasks()[0].instruction``
    """

    def __init__(self, data: TextToImageData, *, in_turn: bool = False) -> None:
        super().__init__(data)
        self._incomplete = data.incomplete
        self._known_words = data.known_words
        self._complexity = taking_turns(data.complexity) if in_turn else data.complexity

    def _task(self, index: int) -> Task:
        from retouch_worlds.playground.rendering import render

        random = generator(self.seed, "painting", self.split, index)
        count = RandomChoices(random).number(self._complexity, index)
        while True:
            scene = random_scene(random, least=count, most=count)
            if split_of(canonical(scene)) == self.split:
                break
        choices = RandomChoices(random)
        things = choices.sample(placed(scene), len(scene.objects))
        incomplete, one = choices.uniform() < self._incomplete, choices.uniform() < _ONE
        named = things[: 1 if one or len(things) == 2 else 2] if incomplete and len(things) > 1 else things
        completion = description(scene.background, named)
        text = completion if self._known_words else request(scene.background, things, random)
        digest = hashlib.sha256(f"{canonical(scene)} {text}".encode()).hexdigest()[:8]
        return Task(
            id=f"painting/{self.split}/seed{self.seed}/{index:06d}-{digest}",
            instruction=text,
            target=render(scene),
            tags={"complexity": str(len(things))},
            meta={"scene": scene.to_json(), "completion": completion},
        )


PROMPT = "The text is '{}'."


class WordData(GeneratedData):
    """Words to paint on an empty sign, in the style of the other sign or of a reference image. The reward ``ocr`` reads the words,
    and ``playground-signs`` scores the style."""

    demonstration_faults = ("wrong_letters",)
    generated_size: ClassVar[Pixels] = (HEIGHT, WIDTH)

    kind: Literal["playground-words"] = "playground-words"
    wrong_letters: Share = 0.0
    """Share of wrong letters in the targets. Always 0 for held-out tasks."""
    style_from_reference: bool = Field(default=False, exclude_if=lambda separate: not separate)
    """Give the signs of the source image another ink and paper than the target, so that only the reference image shows the style of
    the target."""

    def contents(self) -> TaskContents:
        return TaskContents(images=True, mask=True, reference=True, target=True, text=True, pairs=False, turns=(0, 0))

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
        source_style = random_style(choices, unlike=style) if self._style_from_reference else style
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
