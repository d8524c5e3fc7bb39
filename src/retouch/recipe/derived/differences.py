"""Decides whether a run can resume with a changed recipe: only keys that do not change past results may differ."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from retouch.recipe.derived.out_of_memory import MEMORY_KEYS
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
