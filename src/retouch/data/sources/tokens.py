"""Data sets of image tokens in EARL's layout: ``feature/`` with a file an edit, ``list/tokenized_datalist.json`` that names them.

A list is ``{"prefix": FOLDER, "path_list": [NAME, ...]}``. Its files are looked for beside it first (``feature/`` beside the
list's folder, then that folder's parent), and under ``prefix`` where they are not there, so that a data set can be moved.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import overload

import torch
from jaxtyping import Int
from PIL.Image import Image
from torch import Tensor

from retouch.core.random import generator
from retouch.data.images import Picture
from retouch.data.problems import BadRow, Problem
from retouch.data.rows import Row
from retouch.data.sources.features import Feature, read_feature
from retouch.data.sources.folder import path_under, picture_under
from retouch.types import Codes, Task

FEATURES, LIST = "feature", "list/tokenized_datalist.json"
SHOWN = 5


class TokenRows:
    """The edits of several lists, one list after another. ``parts``: the rows of each list."""

    def __init__(self, lists: Sequence[str | Path], *, trusted: bool) -> None:
        """ValueError: no such list, or one that names nothing."""
        self.problems: tuple[Problem, ...] = ()
        self.parts: list[range] = []
        self._trusted = trusted
        self._entries: list[tuple[str, Path, str]] = []
        self._seen: dict[int, tuple[tuple[int, int], int]] = {}
        names: list[str] = []
        for each in lists:
            file = list_file(each)
            root, entries = _entries(file)
            name = _name(file)
            names.append(name)
            name = name if names.count(name) == 1 else f"{name}#{names.count(name)}"
            start = len(self._entries)
            self._entries += [(name, root, entry) for entry in entries]
            self.parts.append(range(start, len(self._entries)))

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Row:
        name, root, entry = self._entries[index]
        try:
            path = path_under(root, entry)
            feature = read_feature(path, trusted=self._trusted)
            row = _row(name, root, path, feature)
        except ValueError as error:
            said = str(error) if entry in str(error) else f"{entry}: {error}"
            raise BadRow([Problem(str(root), 0, said)]) from None
        grids = [grid for grid in (feature.source, feature.target) if grid is not None]
        self._seen[index] = ((grids[0].shape[0], grids[0].shape[1]), max(int(grid.max()) for grid in grids))
        return row

    def known(self, index: int) -> bool:
        """Whether the row was read, and could be."""
        return index in self._seen

    def require(self, indices: Sequence[int], *, grid: tuple[int, int], codes: int) -> None:
        """ValueError, by file, where a picture of known rows has another grid than (height, width), or a code that there is not."""
        wrong = []
        for index in indices:
            found, highest = self._seen[index]
            _, root, entry = self._entries[index]
            if found != grid:
                wrong.append(f"{root / entry}: {found[0]}x{found[1]} codes, and the model's pictures have {grid[0]}x{grid[1]}")
            elif highest >= codes:
                wrong.append(f"{root / entry}: the code {highest}, and the autoencoder has {codes}")
        if wrong:
            shown = "\n".join(f"  {line}" for line in wrong[:SHOWN])
            more = f"\n  and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise ValueError(
                f"{len(wrong)} of {len(indices)} feature files are of another autoencoder or size:\n{shown}{more}\n"
                "Tokenize the data with this model's autoencoder and size (`retouch data tokenize`)."
            )


def mixed(parts: Sequence[Sequence[int]], coefficients: Sequence[float], *, seed: int) -> list[int]:
    """The rows of all parts, each ``coefficient`` times: whole copies, and of the rest of it rows drawn by ``seed`` (EARL's rule).

    No coefficients: each part as often as makes it as large as the largest. ValueError: one that is missing, or not above 0.
    """
    if coefficients and len(coefficients) != len(parts):
        raise ValueError(f"{len(coefficients)} coefficients for {len(parts)} lists; give one each, or none")
    largest = max((len(part) for part in parts), default=0)
    rows: list[int] = []
    for number, part in enumerate(parts):
        # By its digits: 1.55 copies of 100 rows are 155, and not what the nearest binary number makes of it.
        count = int(Fraction(str(coefficients[number])) * len(part)) if coefficients else largest
        copies, more = divmod(count, len(part)) if part else (0, 0)
        order = torch.randperm(len(part), generator=generator(seed, "coefficients", number)).tolist()
        rows += [*part] * copies + [part[place] for place in sorted(order[:more])]
    return rows


class DecodedTasks(Sequence[Task]):
    """Tasks that carry codes, with the pictures that ``decode`` makes of them when a task is asked for.

    Pictures that the task has are left as they are: a data set may store them beside the codes.
    """

    def __init__(self, tasks: Sequence[Task], decode: Callable[[Int[Tensor, "r h w"]], list[Image]]) -> None:
        self._tasks = tasks
        self._decode = decode

    def __len__(self) -> int:
        return len(self._tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> "DecodedTasks": ...

    def __getitem__(self, index: int | slice) -> "Task | DecodedTasks":
        if isinstance(index, slice):
            return DecodedTasks(self._tasks[index], self._decode)
        task = self._tasks[index]
        wanted = {}
        if not task.images:
            wanted["images"] = task.meta[Codes.SOURCE]
        if task.target is None and Codes.TARGET in task.meta:
            wanted["target"] = task.meta[Codes.TARGET]
        if not wanted:
            return task
        drawn = dict(zip(wanted, self._decode(torch.tensor(list(wanted.values()))), strict=True))
        images = (drawn["images"],) if "images" in drawn else task.images
        return replace(task, images=images, target=drawn.get("target", task.target))


def list_file(place: str | Path) -> Path:
    """The list of that name, or in the data set's folder. ValueError where there is none."""
    file = Path(place)
    inside = file / FEATURES / LIST  # as the source's own archives have it
    found = (inside if inside.is_file() else file / LIST) if file.is_dir() else file
    if not found.is_file():
        raise ValueError(f"{place}: no list of image tokens; name a {Path(LIST).name}, or the folder that has {LIST}")
    return found


def _entries(file: Path) -> tuple[Path, list[str]]:
    """The folder under which a list's files lie, and their names."""
    try:
        told = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file}: not JSON ({error})") from None
    names = told.get("path_list") if isinstance(told, dict) else None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f'{file}: names no files; a list is {{"prefix": FOLDER, "path_list": [NAME, ...]}}')
    above = file.resolve().parent.parent
    places = [above / FEATURES, above, *([Path(told["prefix"])] if isinstance(told.get("prefix"), str) else [])]
    there = (place for place in places if any((place / name).is_file() for name in names[:SHOWN]))
    return next(there, places[0]), names


def _name(file: Path) -> str:
    """What a data set is called: the folder that holds it, not those that all of them have."""
    parts = [part for part in file.resolve().parent.parts if part not in ("list", FEATURES)]
    return parts[-1]


def _row(name: str, root: Path, path: Path, feature: Feature) -> Row:
    told = feature.task
    kept = {part: picture_under(root.parent, place) for part, place in told.get("pictures", {}).items()}
    original: Picture | None = kept.get("original")
    meta = {**told.get("meta", {}), Codes.SOURCE: feature.source.tolist()}
    if feature.target is not None:
        meta[Codes.TARGET] = feature.target.tolist()
    if feature.thought is not None:
        meta[Codes.THOUGHT] = feature.thought
    return Row(
        file=str(path),
        line=0,
        id=f"{name}/{feature.id}",
        instruction=feature.instruction,
        images=() if original is None else (original,),
        mask=None,
        reference=None,
        target=kept.get("edited"),
        text=told.get("text"),
        source=hashlib.sha256(feature.source.to(torch.int32).numpy().tobytes()).hexdigest(),
        tags=told.get("tags", {}),
        meta=meta,
    )
