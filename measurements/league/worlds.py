"""The worlds of the league: a recipe of the playground, a judge, a budget, and which held-out tasks are scored.

`recipe_of` makes the recipe of one run: the recipe of a world with the changes and settings of a contestant, and with as many steps
as the budget allows.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from budget import steps_within
from contestants import DENOISING, GDPO, TOKENS, Contestant

from retouch.recipe.document import apply, evaluate
from retouch.recipe.recipe import Recipe, parse

ROOT = Path(__file__).resolve().parents[2]
Stage = Literal["tuning", "final"]
SPLIT: Mapping[Stage, str] = {"tuning": "validation", "final": "test"}
"""The split of each stage. Tuning never sees a task of the split on which final runs are scored."""
FIRST_SEED: Mapping[Stage, int] = {"tuning": 0, "final": 101}
CURVE = 4
"""Number of held-out evaluations during a final run of the league, at equal intervals of steps."""


@dataclass(frozen=True)
class World:
    """A problem that contestants solve, from the same base model and with the same judge.

    ``recipe``: a recipe file in the repository. ``changes``: new values of its keys. ``budget``: network evaluations of a run.
    ``column``: the score of held-out tasks. ``strata``: a tag and the values of it whose tasks count. ``preservation``: the column
    that measures how much of the source image is kept, or None.
    """

    name: str
    title: str
    recipe: str
    budget: int
    contestants: Sequence[Contestant]
    column: str
    strata: tuple[str, tuple[str, ...]]
    changes: Mapping[str, Any] = field(default_factory=dict)
    preservation: str | None = None
    allow_imports: tuple[str, ...] = ()

    def definition(self, contestant: Contestant) -> str:
        """A digest of everything that determines the runs of a contestant in this world. If it changes, its queue starts over."""
        own = {key: value for key, value in asdict(contestant).items() if key not in ("name", "source")}
        known = [_file(self.recipe), self.budget, self.column, self.strata, dict(self.changes), own]
        return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]

    def contestant(self, name: str) -> Contestant:
        """The contestant with this name. Raises ValueError if this world has none."""
        found = {each.name: each for each in self.contestants}
        if name not in found:
            raise ValueError(f"{self.name} has no contestant {name!r}; it has {', '.join(found)}")
        return found[name]


def recipe_of(
    world: World,
    contestant: Contestant,
    settings: Mapping[str, float],
    *,
    stage: Stage,
    seed: int,
    curve: int = CURVE,
    device: str = "cpu",
) -> Recipe:
    """The recipe of one run. ``settings``: a value for each of the contestant's knobs, by name of the knob.

    The number of steps is the largest within the budget. A final run is evaluated ``curve`` times, the last time at its end.
    """
    fixed = {"device": device, **QUIET}
    document = apply(_file(world.recipe), [*_lines(fixed), *_lines(world.changes), *_lines(contestant.changes)])
    if contestant.tasks_for_groups:
        document |= {"tasks_per_step": document["tasks_per_step"] * document["group_size"], "group_size": 1}
    for knob in contestant.knobs:
        document = apply(document, _lines(dict.fromkeys(knob.keys, settings[knob.name])))
    tag, values = world.strata
    held_out = {"eval.column": world.column, "eval.split": SPLIT[stage], "eval.headline": {tag: list(values)}}
    document = apply(document, _lines({**held_out, "seed": seed, "steps": 1, "passes": None}))
    recipe = parse(document, allow_imports=world.allow_imports)
    steps = steps_within(recipe, world.budget)
    every = -(-steps // curve) if stage == "final" else 0
    return parse({**document, "steps": steps, "eval": {**document["eval"], "every": every}}, allow_imports=world.allow_imports)


def untrained(world: World, recipe: Recipe) -> Recipe | None:
    """The recipe of a run whose first evaluation scores the base model as all other runs of the world do.

    None if ``recipe`` itself does so, with the denoising steps of the world's evaluations.
    """
    document = recipe.document()
    standard = apply(_file(world.recipe), _lines(world.changes))["eval"].get("num_steps")
    if document["eval"]["num_steps"] == standard:
        return None
    held_out = {**document["eval"], "num_steps": standard, "every": 0}
    return parse({**document, "steps": 1, "eval": held_out}, allow_imports=world.allow_imports)


def digest(recipe: Recipe) -> str:
    """A digest of the recipe without its name and output folder."""
    settings = {key: value for key, value in recipe.document().items() if key not in ("name", "out")}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


@lru_cache
def _file(recipe: str) -> dict[str, Any]:
    """The evaluated recipe file. The result is cached, so callers must not change it."""
    return evaluate(ROOT / recipe)


def _lines(values: Mapping[str, Any]) -> list[str]:
    """The values as overrides of a recipe: ``a.b=value``."""
    return [f"{path}={json.dumps(value)}" for path, value in values.items()]


QUIET = {
    "trackers": [],
    "samples": {"every": 0, "tasks": 1, "groups": 1},
    "checkpoints": {"every": 0, "keep": 1},
    "eval.best_of_k": 0,
}
"""Settings that minimise what a run does besides training."""


def noisy(world: World, judge: str, *, max_missing: float | None = None, **arguments: Any) -> World:
    """The same world with a judge that errs and abstains; held-out tasks are scored exactly.

    ``judge``: the name of a class in `noisy_judges`. ``max_missing``: the share of a step's samples that may have no score; None
    is the default of recipes. ``arguments``: values of the fields of the judge.
    """
    reward = {"kind": "import", "class": f"noisy_judges:{judge}", "args": arguments, "combine": {"judged": 1}}
    if max_missing is not None:
        reward["max_missing"] = max_missing
    return replace(
        world,
        name=world.name.replace("exact", "noisy"),
        title=world.title + ", with a judge that errs and abstains",
        contestants=[each for each in world.contestants if each is not GDPO],
        changes={**world.changes, "reward": reward},
        allow_imports=("noisy_judges",),
    )


EDITOR = World(
    name="editor-exact",
    title="The editor",
    recipe="measurements/league/editor.jsonnet",
    budget=10_000,
    contestants=(*DENOISING, GDPO),
    column="overall",
    strata=("complexity", ("2", "3")),
    preservation="IP",
)
LARGE_WEIGHTS = "runs/playground/editor-large"
"""The output of `retouch tools playground --large`, run in the root of the repository."""
EDITOR_LARGE = replace(
    EDITOR,
    name="editor-large-exact",
    title="The editor with four times as many blocks",
    changes={"policy.model": {"kind": "playground", "path": LARGE_WEIGHTS}},
)
WORDS = World(
    name="words-exact",
    title="Words on signs",
    recipe="recipes/playground/words-grpo.jsonnet",
    budget=10_000,
    contestants=DENOISING,
    column="correctness",
    strata=("letters", ("3", "4", "5", "6")),
    changes={"eval.tasks": 100, "eval.batch": 100, "eval.every": 0},
)
WRITER = World(
    name="writer-exact",
    title="A vision-language model that writes the editor's prompt",
    recipe="recipes/qwen-image-edit/writer-grpo-frozen-playground.jsonnet",
    budget=32_000,
    contestants=TOKENS,
    column="overall",
    strata=("complexity", ("2", "3")),
    changes={"eval.tasks": 100, "eval.complexity": [2, 3], "eval.batch": 100},
    preservation="IP",
)
IMAGE_TOKENS = replace(
    WRITER,
    name="tokens-exact",
    title="An editor that writes image tokens",
    recipe="recipes/playground/image-tokens-unfinished.jsonnet",
)
SAME_COMPLETIONS = 0.5
"""Share of samples without a score that stops a run of a token policy. It often writes the same completion for all samples of a
task. Their images are equal, so the judge abstains from all of them or from none: with the default of 0.2, two tasks of eight end a
run."""
WORLDS = (
    EDITOR,
    noisy(EDITOR, "NoisyEdits"),
    WORDS,
    noisy(WORDS, "NoisySigns", where="box", line_width=160),
    WRITER,
    noisy(WRITER, "NoisyEdits", max_missing=SAME_COMPLETIONS),
    IMAGE_TOKENS,
    noisy(IMAGE_TOKENS, "NoisyEdits", max_missing=SAME_COMPLETIONS),
    EDITOR_LARGE,
)
