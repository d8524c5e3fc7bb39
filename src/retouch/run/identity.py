"""What a run was started with: the content of its tasks and of its frozen weights, in the file ``identity.json`` of its folder.

A run goes on, and its results are opened, only with the same content. The identity of its reward is in the ledger.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from retouch.data.base import DataSets
from retouch.distributed.ranks import Ranks
from retouch.records import files
from retouch.records.folder import RunFolder
from retouch.rewards.identity import changed_keys
from retouch.run.evaluation import content_hash, task_content

SHOWN = 5
log = logging.getLogger("retouch")


def record(folder: RunFolder, weights: Mapping[str, str], sets: Sequence[DataSets]) -> None:
    """Store what the run is started with. ``weights``: the result of ``frozen_hashes``."""
    folder.require_owner()
    files.write_json(folder.identity, {"weights": weights, **_data(sets)})


def stored(folder: RunFolder) -> Mapping[str, Any]:
    """Read what ``record`` stored; empty for a run of an earlier release. Raises ValueError for a damaged file."""
    found = files.read_record(folder.identity) if folder.identity.exists() else {}
    if not isinstance(found, dict) or not all(isinstance(part, dict) for part in found.values()):
        raise ValueError(f"{folder.identity} was changed: restore it from a backup, or start over with --fresh")
    return found


def require_same_data(folder: RunFolder, sets: Sequence[DataSets], ranks: Ranks) -> None:
    """Raise ValueError, on every rank, if the content of the training rows or of the held-out tasks is not as at the start."""
    before = stored(folder)
    changed = []
    if not before:
        log.warning("the run began with an earlier release: whether its data and base weights are the same cannot be checked")
    elif ranks.is_main:
        now = _data(sets)
        known = {key: value for key, value in before["data"].items() if key in now["data"]}  # a check may decode fewer rows
        changed = [f"the training data: {line}" for line in changed_keys(known, {key: now["data"][key] for key in known})]
        changed += changed_tasks(before["tasks"], now["tasks"])
    if ranks.any(bool(changed)):
        more = [f"and {len(changed) - SHOWN} more"] if len(changed) > SHOWN else []
        raise ValueError(
            "the data are not those that the run began with:\n  "
            + "\n  ".join([*changed[:SHOWN], *more] or ["the message of rank 0 says how"])
            + "\nScores before and after could not be compared. Restore the data, give this run another name, or start over with "
            "--fresh (in Python: train(fresh=True)), which renames its folder"
        )


def require_same_weights(folder: RunFolder, weights: Mapping[str, str], ranks: Ranks | None = None) -> None:
    """Raise ValueError, on every rank, if a part has other frozen weights than at the start of the run. ``weights``: the result of
    ``frozen_hashes``; parts that are not loaded are not compared."""
    before = stored(folder).get("weights", {})
    changed = [name for name, digest in weights.items() if before.get(name, digest) != digest]
    if bool(changed) if ranks is None else ranks.any(bool(changed)):
        raise ValueError(
            f"the base weights are not those of the run in {folder.root}: {', '.join(changed) or 'on another rank'} differs. Give "
            "the model that the run was trained on (from Python, also to load_run: model=...), or restore its files; a new run "
            "starts with another name, or with --fresh"
        )


def changed_tasks(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> list[str]:
    """One line for each held-out task whose content differs; none if only the order or the ids differ."""
    if sorted(map(content_hash, before.values())) == sorted(map(content_hash, now.values())):
        return []
    lines = [f"the held-out task {line}" for line in changed_keys(dict.fromkeys(before), dict.fromkeys(now))]
    for name in before.keys() & now.keys():
        lines += [f"the held-out task {name}: {line}" for line in changed_keys(before[name], now[name])]
    return sorted(lines)


def _data(sets: Sequence[DataSets]) -> dict[str, Any]:
    phases = [f" of phase {place}" if place else "" for place in range(len(sets))]
    content = {f"{key}{phase}": value for phase, each in zip(phases, sets, strict=True) for key, value in each.content.items()}
    heldout = sets[0].heldout
    return {"data": content, "tasks": {task.id: task_content(task) for task in (heldout[i] for i in range(len(heldout)))}}
