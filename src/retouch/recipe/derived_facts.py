"""What follows from a recipe: whether a run may resume with another one, and the keys that save memory.

The advice when a device is out of memory names keys that change only memory, time and rounding, so a run may resume with other
values of them than it started with.
"""

import re
from collections.abc import Iterator
from typing import Any

from retouch.config import wings
from retouch.recipe.document import value_at
from retouch.recipe.recipe import Recipe

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
_TOKENS_PER_WORD, _PIXELS_PER_TOKEN, _USUAL_SIDE, _INSTRUCTION, _REASONED = 4 / 3, 28 * 28, 1024, 40, 150


def differences(old: Recipe, new: Recipe, *, new_judge: bool = False) -> list[str]:
    """A line for each key that differs but must not differ, with both values; empty if the run can resume.

    These keys may differ: the length (of the last phase), intervals, pushes, trackers, devices, ranks, batch sizes and others that
    change only memory, time and rounding, folders of data and runs, connections to judges and engines, and the limits of ``watch``.
    With ``new_judge`` all keys of the reward may differ.
    """
    before, after = dict(leaves(old.document())), dict(leaves(new.document()))
    changeable = {*_changeable_rewards(old), *_changeable_rewards(new)}
    last = f"phases.{len(new.phases or ()) - 1}"
    lines = []
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key, "(nothing)"), after.get(key, "(nothing)")
        free = _FREE.fullmatch(key) or re.sub(r"^phases\.\d+\.", "", key) in MEMORY_KEYS or _is_data_path(key, new)
        free = free or key in (f"{last}.steps", f"{last}.passes") or (new_judge and key.startswith("reward."))
        free = free or any(key == path or key.startswith(f"{path}.") for path in changeable)
        if was != now and not free:
            hashed = next((what for form, what in _HASHED.items() if re.fullmatch(form, key)), None)
            lines.append(f"{key}: {was} in the run, {now} in the recipe" if hashed is None else f"{key}: {hashed} changed")
    return lines


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
        yield from (f"{path}.{key}" for key in wings.load("judge.endpoint").changeable)
    for key, inner in section.items():
        yield from _changeable_judges(inner, f"{path}.{key}")


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the keys of a document with their values: ``a.b`` and ``a.0.b``. Empty dictionaries and lists are values."""
    if isinstance(value, dict | list) and value:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in entries:
            yield from leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


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
    if lower := suggestions(recipe, stage):
        said = " ".join(f"--set {each}" for each in lower)
        advice = f"Continue from the last checkpoint with settings that change only memory and time: {said}"
    elif stage == "loading":
        advice = "`retouch doctor RECIPE` reports the memory of the weights and the settings that would fit"
    elif stage == "judge":
        advice = "The judge needs this memory: give the judge its own device, or serve it from another process (`retouch serve`)"
    else:
        advice = "No setting is left that needs less memory without changing the results: "
        advice += "use smaller images, fewer tokens or more memory"
    return OutOfMemory(f"the {stage} does not fit: {first}\n{advice}")


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
