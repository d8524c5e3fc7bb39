"""What follows from a recipe: whether a run may resume with another one, its judge requests, and the keys that save memory.

The number and the cost of the questions that a run asks its judges, from the recipe alone, before the run starts.

The numbers are upper bounds, except for retries after errors: a question whose answer is in the ledger is not asked again. Tokens
are estimates: 4/3 for an English word, one for every 28 x 28 pixels of an image (as Qwen2.5-VL counts), 150 for an answer with
reasoning.

Advice when a device is out of memory: which keys of the recipe reduce the memory of a stage.

These keys change only memory, time and rounding, so a run may resume with other values than it started with.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from retouch.recipe.document import value_at
from retouch.recipe.recipe import Recipe
from retouch.rewards.judges.base import JudgeReward
from retouch.rewards.judges.rubrics import rubric

_FREE = re.compile(
    r"steps|passes|eval\.every|ledger.*|(samples|checkpoints)\..*|push.*|trackers(\.\d+)?|devices?(\..*)?|sharding"
    r"|deterministic|ranks|out|policy\.(prompt_embeddings|attention|compile)|optimizer\.fused|(policy|renderer)\.model\.vae_slicing"
    # The connection to an engine.
    r"|(phases\.\d+\.)?rollout\.engine\.(url|adapters|images|timeout|patience|sleep)"
    # How much a stream reads in advance.
    r"|(phases\.\d+\.)?data\.ahead"
    r"|eval\.audit|eval\.suites\.\d+\.(every|data|sigmas|on_alarm)"
    r"|watch\.every|watch\.\w+\.(on_alarm|limit|sigmas|window)|watch\.(diversity|preservation|brightness|saturation|detail)"
)
_HASHED = {
    r"reward\.(rewards\.[^.]+\.)?source": "the source code of the reward function has",
    r"(phases\.\d+\.)?data\.rows_": "the rows of train_dataset have",
    r"(phases\.\d+\.)?data\.evaluation": "the rows of eval_dataset have",
}
"""Keys whose values are hashes, which tell a user nothing, with what the hashes stand for."""


def differences(old: Recipe, new: Recipe, *, new_judge: bool = False) -> list[str]:
    """A line for each key that differs but must not differ, with both values; empty if the run can resume.

    These keys may differ: the length (of the last phase), intervals, pushes, trackers, devices, ranks, batch sizes and others that
    change only memory, time and rounding, folders of data and runs, connections to judges and engines, and the limits of ``watch``.
    With ``new_judge`` all keys of the reward may differ.
    """
    before, after = dict(leaves(old.document())), dict(leaves(new.document()))
    changeable = {*_changeable_rewards(old), *_changeable_rewards(new)}
    lines = []
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key, "(nothing)"), after.get(key, "(nothing)")
        free = _free(key) or _is_data_path(key, new) or _is_inside(key, changeable) or key in _last_phase_length(new)
        free = free or (new_judge and key.startswith("reward."))
        if was != now and not free:
            hashed = next((what for form, what in _HASHED.items() if re.fullmatch(form, key)), None)
            lines.append(f"{key}: {was} in the run, {now} in the recipe" if hashed is None else f"{key}: {hashed} changed")
    return lines


def _free(key: str) -> bool:
    return bool(_FREE.fullmatch(key)) or re.sub(r"^phases\.\d+\.", "", key) in MEMORY_KEYS


def _is_data_path(key: str, recipe: Recipe) -> bool:
    """Whether the key is the path of a data source (``DataSource.path_keys``)."""
    match = re.fullmatch(r"(?:phases\.(\d+)\.)?data\.(?:args\.)?(\w+)(?:\.\d+)?", key)
    if match is None:
        return False
    phases = recipe.phases or ()
    if match[1] is None:
        return match[2] in recipe.data.path_keys
    data = phases[int(match[1])].data if int(match[1]) < len(phases) else None
    return data is not None and match[2] in data.path_keys


def _changeable_rewards(recipe: Recipe) -> Iterator[str]:
    """Yield the keys that rewards declare as changeable: the connection to a judge."""
    yield from recipe.reward.changeable_paths("reward")
    if recipe.watch is not None and recipe.watch.judge is not None:
        yield from recipe.watch.judge.reward.changeable_paths("watch.judge.reward")
    for index, suite in enumerate(recipe.eval.suites):
        yield from _changeable_judges(suite.judge, f"eval.suites.{index}.judge")


def _changeable_judges(section: Any, path: str) -> Iterator[str]:
    """Yield the keys of the connections to a suite's judges. ``section`` is JSON: a model, or a reward that asks a model."""
    if not isinstance(section, dict):
        return
    if section.get("kind") == "endpoint":
        from retouch.rewards.vlm.endpoint_settings import EndpointSettings

        yield from (f"{path}.{key}" for key in EndpointSettings.changeable)
    for key, inner in section.items():
        yield from _changeable_judges(inner, f"{path}.{key}")


def _is_inside(key: str, paths: Iterable[str]) -> bool:
    return any(key == path or key.startswith(f"{path}.") for path in paths)


def _last_phase_length(recipe: Recipe) -> tuple[str, ...]:
    if recipe.phases is None:
        return ()
    last = len(recipe.phases) - 1
    return f"phases.{last}.steps", f"phases.{last}.passes"


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a document with their values: ``a.b`` and ``a.0.b``. Empty dictionaries and lists are values."""
    if isinstance(value, dict | list) and value:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in entries:
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


_TOKENS_PER_WORD = 4 / 3
_PIXELS_PER_TOKEN = 28 * 28
_USUAL_SIDE = 1024
_INSTRUCTION = 40
_REASONED = 150


@dataclass(frozen=True, slots=True)
class Calls:
    """The questions to one judge. ``who``: the judge's model. ``training`` and ``evaluation``: numbers of questions. Tokens and
    ``dollars``: totals of all questions; ``dollars`` is None without prices."""

    path: str
    who: str
    training: int
    evaluation: int
    input_tokens: int
    output_tokens: int
    dollars: float | None

    def __str__(self) -> str:
        asked = f"{self.path} asks {self.who} {self.training:,} questions in training and {self.evaluation:,} in evaluations"
        tokens = f"about {_short(self.input_tokens)} input tokens and {_short(self.output_tokens)} output tokens"
        return f"{asked}; {tokens}" + ("" if self.dollars is None else f", about ${self.dollars:,.2f}")


def judge_calls(recipe: Recipe, *, steps: Sequence[int], heldout: int) -> list[Calls]:
    """The questions to each judge. ``steps``: number of steps of each phase. ``heldout``: number of tasks of an evaluation.

    These count as evaluation: the evaluations before, during and after the run, the evaluation of the tasks' own targets, the best
    of k, and the measurements of ``watch``.
    """
    every = recipe.eval.every
    evaluated = heldout * (3 + ((sum(steps) - 1) // every if every else 0) + recipe.eval.best_of_k)
    seen, canaries = _looked_at(recipe, sum(steps), heldout)
    calls = [
        _calls(recipe, path, part, trained=_trained(recipe, part, steps), evaluated=evaluated + seen + canaries)
        for path, _, part in recipe.reward.parts()
        if isinstance(part, JudgeReward)
    ]
    if recipe.watch is not None and recipe.watch.judge is not None:
        parts = recipe.watch.judge.reward.parts("watch.judge.reward")
        judges = [(path, part) for path, _, part in parts if isinstance(part, JudgeReward)]
        calls += [_calls(recipe, path, part, trained=0, evaluated=seen) for path, part in judges]
    return calls


def _looked_at(recipe: Recipe, steps: int, heldout: int) -> tuple[int, int]:
    """Number of images and number of canaries in all measurements of ``watch``."""
    watch = recipe.watch
    if watch is None:
        return 0, 0
    looks = 1 + steps // watch.every
    return looks * min(watch.tasks, heldout), looks * (0 if watch.canaries is None else watch.canaries.count)


def _trained(recipe: Recipe, part: JudgeReward, steps: Sequence[int]) -> int:
    """Number of samples scored in training. If the samples of a group are compared, each counts once per other sample."""
    samples = 0
    for phase, count in zip(recipe.resolved_phases(), steps, strict=True):
        if not phase.imitates:
            rounds = 1 if phase.rollout.refill is None else 1 + phase.rollout.refill.rounds
            samples += count * rounds * phase.rows * (phase.group_size - 1 if part.compares_groups else 1)
    return samples


def _calls(recipe: Recipe, path: str, part: JudgeReward, *, trained: int, evaluated: int) -> Calls:
    if part.compares_groups:
        evaluated = 0  # a held-out task has one image, so there is nothing to compare
    questions = part.questions
    asked = len(questions) * part.n_evals
    count = (trained + evaluated) * asked
    read = count * sum(_read(recipe, name, images) for name, images in questions) / max(len(questions), 1)
    written = count * (1 if part.one_token else _REASONED)
    return Calls(
        path=path,
        who=part.judge.description,
        training=trained * asked,
        evaluation=evaluated * asked,
        input_tokens=round(read),
        output_tokens=written,
        dollars=part.judge.cost(input_tokens=read, output_tokens=written),
    )


def _read(recipe: Recipe, name: str, images: int) -> float:
    """Number of input tokens of one question."""
    height, width = recipe.image_size or (_USUAL_SIDE, _USUAL_SIDE)
    text = len(rubric(name).split()) * _TOKENS_PER_WORD + _INSTRUCTION
    return text + images * max(1.0, height * width / _PIXELS_PER_TOKEN)


def _short(count: int) -> str:
    """12345678 as 12.3 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)


_ROLLOUT = ("rollout.chunk",)
_RENDER = ("renderer.batch", "renderer.encoder_batch")
_UPDATE = ("microbatch", "policy.logits_at_once", "policy.gradient_checkpointing")
KEYS: dict[str, tuple[str, ...]] = {
    "loading": (),
    "trial step": (*_ROLLOUT, *_UPDATE),
    "evaluation": ("eval.batch", *_RENDER),
    "rollout": _ROLLOUT,
    "render": (*_RENDER, *_ROLLOUT),
    "encode": _UPDATE,
    "update": _UPDATE,
    "judge": (),
}
MEMORY_KEYS = frozenset(key for keys in KEYS.values() for key in keys)
_FEWEST = {"policy.logits_at_once": 32}


class OutOfMemory(ValueError):
    """A device is full; the message names the keys to change."""


def explained(recipe: Recipe, stage: str, error: str) -> OutOfMemory:
    """The error for the user, with advice. ``stage``: what the run was doing. ``error``: torch's message."""
    first, *_ = [*error.splitlines(), ""]
    return OutOfMemory(f"the {stage} does not fit: {first}\n{_advice(recipe, stage)}")


def suggestions(recipe: Recipe, stage: str) -> list[str]:
    """Overrides for ``--set`` that need less memory: each key of the stage with half its value, or switched on. Keys that are at
    their limit are left out."""
    found, document = [], recipe.document()
    for key in KEYS.get(stage, ()):
        value = value_at(document, key)
        if value is False:
            found.append(f"{key}=true")
        elif isinstance(value, int) and value > _FEWEST.get(key, 1):
            found.append(f"{key}={max(value // 2, 1)}")
    return found


def _advice(recipe: Recipe, stage: str) -> str:
    lower = suggestions(recipe, stage)
    if lower:
        said = " ".join(f"--set {each}" for each in lower)
        return f"Continue from the last checkpoint with settings that change only memory and time: {said}"
    if stage == "loading":
        return "`retouch doctor RECIPE` reports the memory of the weights and the settings that would fit"
    if stage == "judge":
        return "The judge needs this memory: give the judge its own device, or serve it from another process (`retouch serve`)"
    return "No setting is left that needs less memory without changing the results: use smaller images, fewer tokens or more memory"
