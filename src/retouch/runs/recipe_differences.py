"""May a run go on under this recipe? Only what changes no number of what was already done may differ."""

import re
from collections.abc import Iterator
from typing import Any

from retouch.runs.recipe import Recipe

_FREE = re.compile(
    r"steps|passes|eval\.every|(samples|checkpoints)\..*|trackers(\.\d+)?|(renderer\.)?device|ranks|out|(phases\.\d+\.)?data\.path"
    # How a judge is reached, and how long it is waited for.
    r"|reward\.(rewards\.\w+\.)?((judge\.)?(device|base_url|key|concurrency|timeout|deadline|attempts|pause|longest_pause|prices.*|quota.*)"
    r"|endpoints.*|encoding|batch|retry_share|hedge(_share)?|(samples|requests)_per_minute|calls|rate_file|wait|threads)"
)


def differences(old: Recipe, new: Recipe) -> list[str]:
    """A line for each key that differs and may not, old value first; empty where the old run can go on as the new recipe says.

    Length (of the last phase, where there are phases), cadences, trackers, devices, ranks, the folders of data and runs, and how
    judges are reached may differ.
    """
    before, after = dict(_leaves(old.document(), "")), dict(_leaves(new.document(), ""))
    lines = []
    for key in sorted(before.keys() | after.keys()):
        was, now = before.get(key, "(nothing)"), after.get(key, "(nothing)")
        if was != now and not _FREE.fullmatch(key) and key not in _last_phase_length(new):
            lines.append(f"{key}: {was} in the run, {now} in the recipe")
    return lines


def _last_phase_length(recipe: Recipe) -> tuple[str, ...]:
    if recipe.phases is None:
        return ()
    last = len(recipe.phases) - 1
    return f"phases.{last}.steps", f"phases.{last}.passes"


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in entries:
            yield from _leaves(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
