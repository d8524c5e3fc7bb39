"""Repairs the line files of an interrupted run before it continues: each step once, no step after the checkpoint.

Damage by another program or a crash is reported, and repaired if possible. Before a damaged file is changed, it is copied under
another name.
"""

import json
import shutil
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from retouch.records import files


def keep_until(path: Path, step: int, *, key: Sequence[str] = ("step",), every_step: bool = False) -> list[str]:
    """Keep the lines up to ``step``, with each ``key`` once and in the order of steps. Returns a note about each problem.

    If lines with the same key differ, the last one is kept. ``every_step``: whether every step from 1 to ``step`` should have a
    line. Later lines and an incomplete last line are normal after a crash, and are removed without a note.
    """
    if not path.exists():
        return [f"{path.name} is missing: its lines about steps 1 to {step} are lost"] if every_step and step else []
    before = files.read_bytes(path)
    kept: dict[tuple[Any, ...], bytes] = {}
    unreadable = doubled = contradicting = 0
    order: list[int] = []
    for line in before.split(b"\n")[:-1]:
        found = _key(line, key)
        if found is None:
            unreadable += 1
            continue
        if found[0] > step:
            continue
        doubled += found in kept
        contradicting += found in kept and kept[found] != line
        kept[found] = line
        order.append(found[0])
    notes = [
        f"{path.name}: {count} {what}"
        for count, what in (
            (unreadable, "unreadable lines were removed"),
            (doubled - contradicting, "duplicate lines were removed"),
            (contradicting, "lines contradicted a line of the same step; the last one was kept"),
            (int(order != sorted(order)), "break in the order of steps; the lines were sorted"),
        )
        if count
    ]
    if notes:
        notes.append(f"a copy of the damaged file: {_copy(path).name}")
    if every_step and (missing := sorted(set(range(1, step + 1)) - {found[0] for found in kept})):
        notes.append(f"{path.name}: the lines of {_ranges(missing)} are missing and cannot be restored")
    after = b"".join(kept[found] + b"\n" for found in sorted(kept, key=lambda found: found[0]))
    if after != before:
        files.write_atomic(path, after)
    return notes


def readable_steps(path: Path) -> list[int]:
    """Return the step of each readable line; other lines of a damaged file are skipped."""
    lines = files.read_bytes(path).split(b"\n")[:-1] if path.exists() else []
    return [found[0] for line in lines if (found := _key(line, ("step",))) is not None]


def remove(path: Path) -> None:
    """Delete a file, or a folder with its contents."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove_leftovers(root: Path) -> None:
    """Remove the temporary files and folders below ``root`` that a killed process left. Only the writing process may call it."""
    for path in [*root.rglob(f"{files.TEMPORARY}*")]:
        remove(path)


def _key(line: bytes, names: Sequence[str]) -> tuple[Any, ...] | None:
    """Return the values that identify a line, the step first; None if the line cannot belong to this file."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or type(value.get("step")) is not int:
        return None
    if not all(isinstance(value.get(name), str) for name in names[1:]):
        return None
    return tuple(value[name] for name in names)


def _copy(path: Path) -> Path:
    target = path.with_name(f"{path.name}.damaged-{datetime.now():%Y%m%d-%H%M%S-%f}")
    files.write_atomic(target, files.read_bytes(path))
    return target


def _ranges(steps: Sequence[int]) -> str:
    """Format step numbers, with ranges for consecutive ones: "step 4" or "steps 4 to 6, 9"."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and step == parts[-1][-1] + 1:
            parts[-1][1:] = [step]
        else:
            parts.append([step])
    words = ", ".join(" to ".join(map(str, part)) for part in parts)
    return f"step{'s' * (len(steps) > 1)} {words}"
