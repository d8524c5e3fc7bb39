"""Writes MMMG's training set (``MMMGBench/MMMG_Train``, arXiv 2506.10963) as a curriculum: prompt lists from easy to hard tasks.

``train.json`` maps a level ("0_preschool") to disciplines, and each discipline to a list of rows with ``question``, ``key``, the
knowledge graph (``Visual Components``) and its meaning (``Key Knowledge``).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeAlias

from retouch.data.guard import refuse_test_sets
from retouch.records.files import read_json, write_lines

TRAIN = "train.json"
DIFFICULTY = "mmmg_difficulty_summary.json"
"""A file with pairs of level and discipline as ``tuples``, the easiest first, in the format of system A's repository."""
_TAGS = ("level", "discipline")

Pair: TypeAlias = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Curriculum:
    """The written prompt lists. ``files``: one for each stage, with the rows of the previous stage and harder ones. ``rows``: the
    number of rows in the last one."""

    files: tuple[Path, ...]
    rows: int

    def __str__(self) -> str:
        tags = json.dumps(list(_TAGS))
        return (
            f"{self.rows} prompts in {len(self.files)} stages. Give each phase of the recipe the data of its stage: "
            f"data: {{ kind: 'prompts', path: '{self.files[0]}', held_out: 0.05, tags: {tags} }}"
        )


def write_curriculum(source: str | Path, *, out: str | Path, stages: int = 5) -> Curriculum:
    """Write ``stage-1.jsonl`` to ``stage-N.jsonl`` into ``out``, where these files must not exist yet.

    The pairs of level and discipline are in the order of ``mmmg_difficulty_summary.json`` if ``source`` has this file; pairs that
    the file does not contain come last, in the order of the levels. As in system A, each stage adds the same number of pairs; if
    they cannot be divided evenly, the first stages add one more. Raises ValueError for a folder without ``train.json`` in this
    form, and for more stages than pairs.
    """
    folder, target = Path(source), Path(out)
    refuse_test_sets([source], allow_test_sets=False)
    file = folder / TRAIN
    if not file.is_file():
        raise ValueError(f"{file}: no such file; download MMMGBench/MMMG_Train first, for example with `hf download`")
    pairs = _pairs(file)
    places = _places(folder / DIFFICULTY) if (folder / DIFFICULTY).is_file() else {}
    order = sorted(pairs, key=lambda pair: places.get(pair, len(places)))
    if not 1 <= stages <= len(order):
        raise ValueError(f"--stages {stages}: give a number from 1 to {len(order)}, the pairs of level and discipline in {file}")
    each, more = divmod(len(order), stages)
    ends = list(accumulate(each + (stage < more) for stage in range(stages)))
    files = tuple(target / f"stage-{stage}.jsonl" for stage in range(1, stages + 1))
    if taken := next((path for path in files if path.exists()), None):
        raise ValueError(f"{taken} exists; remove it, or give another folder")
    target.mkdir(parents=True, exist_ok=True)
    for path, end in zip(files, ends, strict=True):
        write_lines(path, [row for pair in order[:end] for row in pairs[pair]])
    return Curriculum(files, sum(len(rows) for rows in pairs.values()))


def _pairs(file: Path) -> dict[Pair, list[dict[str, Any]]]:
    """The rows of each pair of level and discipline, as lines of a prompt list, in the order of the levels. Rows without a
    question or a key are left out, as in system A."""
    found: dict[Pair, list[dict[str, Any]]] = {}
    for level, disciplines in sorted(_map(file).items()):
        if not isinstance(disciplines, Mapping) or not all(isinstance(rows, list) for rows in disciplines.values()):
            raise ValueError(f"{file}: {level} should map disciplines to lists of rows")
        for discipline, rows in disciplines.items():
            pair = _level(level), discipline
            lines = [_line(row, *pair) for row in rows if row.get("question") and row.get("key")]
            if lines:
                found[pair] = lines
    if not found:
        raise ValueError(f"{file}: no row with a question and a key")
    return found


def _line(row: Mapping[str, Any], level: str, discipline: str) -> dict[str, Any]:
    graph = {key: row[key] for key in ("Visual Components", "Key Knowledge") if key in row}
    return {"id": str(row["key"]), "prompt": row["question"], "level": level, "discipline": discipline, **graph}


def _places(file: Path) -> dict[Pair, int]:
    """The place of each pair in the order of difficulty."""
    entries = _map(file).get("tuples")
    if not isinstance(entries, list) or not all(isinstance(each, Mapping) and each.keys() >= {*_TAGS} for each in entries):
        raise ValueError(f"{file}: should have tuples with level and discipline")
    return {(_level(entry["level"]), entry["discipline"]): place for place, entry in enumerate(entries)}


def _level(name: str) -> str:
    """The name of a level without its number: "preschool" for "0_preschool"."""
    return name.rpartition("_")[2]


def _map(file: Path) -> Mapping[str, Any]:
    found = read_json(file)
    if not isinstance(found, Mapping):
        raise ValueError(f"{file}: should be a JSON object")
    return found
