"""Data sets of image tokens in EARL's layout: ``feature/`` has one file per edit, and ``list/tokenized_datalist.json`` has the
names of these files.

A list is ``{"prefix": FOLDER, "path_list": [NAME, ...]}``. Its files are searched first in ``feature/`` next to the folder of the
list, then in the parent of that folder, and then under ``prefix``, so that a data set can be moved.
"""

from __future__ import annotations

import hashlib
import mmap
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, TypeAlias, runtime_checkable

from pydantic import Field

from retouch.config.consent import data_path
from retouch.config.section import Count, Positive
from retouch.core.random import permutation
from retouch.data.base import (
    DataContext,
    DataSets,
    DataSource,
    HeldOut,
    at_most,
    held_out_problems,
    require_training_rows,
)
from retouch.data.checks import OnBadRow, accept_rows
from retouch.data.rows import InvalidRow, Problem, Row, RowRequirements
from retouch.data.sources.folder import image_under, path_under
from retouch.data.tasks import MappedTasks, Subset, Tasks, UnindexedTasks, limit, split_by_source
from retouch.records.files import read_json
from retouch.types import Codes, Json, SplitName, Task, TaskContents

if TYPE_CHECKING:
    from jaxtyping import Int
    from PIL.Image import Image
    from torch import Tensor

    from retouch_models.features import Feature

FEATURES, LIST = "feature", "list/tokenized_datalist.json"
SPLITS = ("train", "validation", "test")
SHOWN = 5
Coefficients: TypeAlias = tuple[Positive, ...]


class TokenData(DataSource):
    """Edits as image tokens, in EARL's layout (``retouch data tokenize`` writes it): for policies that generate image tokens."""

    path_keys = ("lists", "validation_lists")

    kind: Literal["tokens"] = "tokens"
    lists: Annotated[tuple[str, ...], Field(min_length=1)]
    """Lists of feature files (``tokenized_datalist.json``), or the folders that contain them."""
    coefficients: Coefficients = ()
    """How often a pass contains the rows of each list, one number per list. 1.5 means all rows once, and half of the rows, drawn
    with the recipe's seed, once more. If it is empty, the rows of each list are repeated to the size of the largest list."""
    validation_lists: tuple[str, ...] = ()
    """Lists for evaluation; training rows with the same source images are left out. If it is empty, some training rows are held
    out."""
    validation_coefficients: Coefficients = ()
    """``coefficients`` for the validation lists."""
    trusted: bool = False
    """Also open ``.pth`` features, because you trust their author; only torch's restricted loader reads them."""
    thought_keys: tuple[str, ...] = Field(default=(), exclude_if=operator.not_)
    """If the chain of thought of a feature is a map: the keys to use, in this order, as lines "key: value". An empty list uses all
    values without their keys."""
    held_out: HeldOut = 0.1
    """Rows that are held out for evaluation if there are no ``validation_lists``: a share of the source images, or a whole number,
    the least number of rows. "all" holds out every row: for `retouch eval`, not for training."""
    on_bad_row: OnBadRow = "refuse"
    """What to do about an unusable file: stop before training, or leave it out with a warning."""
    limit: Count | None = None
    """Number of training rows to use of the mixture, drawn with the recipe's seed; null uses all."""

    @classmethod
    def rows_at(cls, path: Path) -> TokenRows | None:
        named = path.name == Path(LIST).name or any((path / inside).is_file() for inside in (LIST, f"{FEATURES}/{LIST}"))
        return TokenRows([path], trusted=False) if named else None

    def keys_for_all(self, path: str) -> dict[str, Json]:
        empty: dict[str, Json] = {"coefficients": [], "validation_lists": [], "validation_coefficients": []}
        return {"lists": [path], **empty, "held_out": "all", "limit": None}

    def contents(self) -> TaskContents:
        return TaskContents(mask=False, reference=False, tokens=True, pairs=False)

    def problems(self, at: str, *, eval_split: SplitName | None) -> Iterator[str]:
        for prefix in ("", "validation_"):
            names, numbers = getattr(self, f"{prefix}lists"), getattr(self, f"{prefix}coefficients")
            if numbers and len(numbers) != len(names):
                yield f"{at}.{prefix}coefficients: {len(numbers)} for {len(names)} lists; give one each, or none"
        if self.validation_lists or eval_split is None:
            return
        yield from held_out_problems(self.held_out, at, eval_split)

    def rows(self) -> TokenRows:
        """The rows of all lists, before they are checked and repeated."""
        return TokenRows([*self.lists, *self.validation_lists], trusted=self.trusted, thought_keys=self.thought_keys)

    def build(self, context: DataContext) -> TokenSets:
        """The tasks. Rows are split before they are repeated; training rows that share a source image with validation rows are left
        out before that too."""
        allowed = self.refuse_test_sets(trains=context.trains)
        if not self.validation_lists:
            require_training_rows(self.held_out, context)
        rows = self.rows()
        # Source and target images are decoded from the tokens.
        required = replace(context.required, images=RowRequirements().images, target=False)
        accepted = accept_rows(rows, on_bad_row=self.on_bad_row, required=required)
        source = dict(zip(accepted.indices, accepted.sources, strict=True))
        found = list(accepted.problems)
        parts = [[index for index in part if index in source] for part in rows.parts]
        training, validation = parts[: len(self.lists)], parts[len(self.lists) :]
        if validation:
            images = {source[index] for part in validation for index in part}
            kept = [[index for index in part if source[index] not in images] for part in training]
            if lost := sum(map(len, training)) - sum(map(len, kept)):
                found.append(Problem(self.lists[0], 0, f"{lost} rows share a source image with validation rows: left out", "note"))
            heldout = mixed(validation, self.validation_coefficients, seed=context.eval_seed)
        else:
            every = [index for part in training for index in part]
            split = split_by_source([source[index] for index in every], held_out=self.held_out, seed=context.seed)
            heldout = [every[k] for k in split.held_out]
            away = set(heldout)
            kept = [[index for index in part if index not in away] for part in training]
        train = mixed(kept, self.coefficients, seed=context.seed)
        if not train and context.trains:
            raise ValueError("data: nothing is left to train on; give more rows, or larger coefficients")
        if self.limit is not None:
            train = list(limit(train, n=self.limit, seed=context.seed))
        if context.eval_split == "train" and not validation:
            heldout = list(dict.fromkeys(train))
        tasks = Tasks(rows, resize=None)
        chosen = at_most(heldout, context, held_out=self.held_out)
        return TokenSets(Subset(tasks, train), Subset(tasks, chosen), allowed, tuple(found), rows)


@runtime_checkable
class ImageTokenModel(Protocol):
    """A model whose images are grids of codes. ``grid``: the (height, width) of an image in codes."""

    grid: tuple[int, int]
    codebook_size: int

    def decode_codes(self, codes: Int[Tensor, "r h w"]) -> list[Image]: ...


@dataclass(frozen=True)
class TokenSets(DataSets):
    """Tasks that have image tokens. ``rows``: the feature files."""

    rows: TokenRows | None = None

    def with_model(self, model: object) -> DataSets:
        """The same tasks, with the images that the model decodes from their tokens. Raises ValueError if the model does not
        generate image tokens, or if its grid or codebook does not fit the tokens."""
        assert self.rows is not None
        if not isinstance(model, ImageTokenModel):
            raise ValueError(
                f"data.kind: 'tokens' needs a model that generates image tokens, which {type(model).__name__} does not"
            )
        self.rows.require(
            [row for row in range(len(self.rows)) if self.rows.known(row)], grid=model.grid, codes=model.codebook_size
        )
        assert not isinstance(self.train, UnindexedTasks)
        decoded = partial(with_decoded_images, decode=model.decode_codes)
        return replace(self, train=MappedTasks(self.train, decoded), heldout=MappedTasks(self.heldout, decoded))


def with_decoded_images(task: Task, *, decode: Callable[[Int[Tensor, "r h w"]], list[Image]]) -> Task:
    """The task with images decoded from its codes. Images that were stored in addition to the codes are not replaced."""
    wanted = {}
    if not task.images:
        wanted["images"] = task.meta[Codes.SOURCE]
    if task.target is None and Codes.TARGET in task.meta:
        wanted["target"] = task.meta[Codes.TARGET]
    if not wanted:
        return task
    import torch

    drawn = dict(zip(wanted, decode(torch.tensor(list(wanted.values()))), strict=True))
    images = (drawn["images"],) if "images" in drawn else task.images
    return replace(task, images=images, target=drawn.get("target", task.target))


class TokenRows:
    """The edits of several lists, one list after another. ``parts``: the row numbers of each list.

    If the lists belong to several data sets, each row has the name of its data set as the tag ``data_set``.
    """

    def __init__(self, lists: Sequence[str | Path], *, trusted: bool, thought_keys: Sequence[str] = ()) -> None:
        """Raises ValueError for a missing list, and for a list without file names."""
        self.problems: tuple[Problem, ...] = ()
        self.parts: list[range] = []
        self._trusted, self._thought_keys = trusted, thought_keys
        self._entries: list[tuple[str, Path, str]] = []
        names: list[str] = []
        for each in lists:
            given = Path(each)
            inside = given / FEATURES / LIST  # the layout of EARL's own archives
            file = (inside if inside.is_file() else given / LIST) if given.is_dir() else given
            if not file.is_file():
                raise ValueError(f"{each}: no list of image tokens; name a {Path(LIST).name}, or the folder that has {LIST}")
            root, entries = _entries(file)
            parts = [part for part in file.resolve().parent.parts if part not in ("list", FEATURES)]
            name = "/".join(parts[-2:]) if parts[-1] in SPLITS else parts[-1]
            names.append(name)
            name = name if names.count(name) == 1 else f"{name}#{names.count(name)}"
            start = len(self._entries)
            self._entries += [(name, root, entry) for entry in entries]
            self.parts.append(range(start, len(self._entries)))
        self._tagged = len({_data_set(name) for name in names}) > 1
        # Height, width and largest code of each row that was read. Forked processes, which read the rows of a large data set, write
        # into the same memory.
        self._seen = memoryview(mmap.mmap(-1, 3 * 8 * len(self._entries))).cast("q")

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Row:
        from retouch_models.features import read_feature

        name, root, entry = self._entries[index]
        try:
            path = path_under(root, entry)
            feature = read_feature(path, trusted=self._trusted, thought_keys=self._thought_keys)
            row = _row(name, root, path, feature)
            if self._tagged:
                row = replace(row, tags={"data_set": _data_set(name), **row.tags})
        except ValueError as error:
            reason = str(error) if entry in str(error) else f"{entry}: {error}"
            raise InvalidRow([Problem(str(root), 0, reason)]) from None
        grids = [grid for grid in (feature.source, feature.target) if grid is not None]
        for place, number in enumerate((*grids[0].shape, max(int(grid.max()) for grid in grids))):
            self._seen[3 * index + place] = number
        return row

    def known(self, index: int) -> bool:
        """Whether the row was read without an error."""
        return bool(self._seen[3 * index])

    def require(self, indices: Sequence[int], *, grid: tuple[int, int], codes: int) -> None:
        """Check rows that were read. Raises ValueError with the files whose grid is not ``grid``, (height, width), or that have a
        code of ``codes`` or more."""
        wrong = []
        for index in indices:
            height, width, highest = self._seen[3 * index : 3 * index + 3]
            _, root, entry = self._entries[index]
            if (height, width) != grid:
                wrong.append(f"{root / entry}: {height}x{width} codes, and the model's images have {grid[0]}x{grid[1]}")
            elif highest >= codes:
                wrong.append(f"{root / entry}: the code {highest}, and the autoencoder has {codes}")
        if wrong:
            shown = "\n".join(f"  {line}" for line in wrong[:SHOWN])
            more = f"\n  and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise ValueError(
                f"{len(wrong)} of {len(indices)} feature files were made with another autoencoder or size:\n{shown}{more}\n"
                "Tokenize the data with this model's autoencoder and size (`retouch data tokenize`)."
            )


def mixed(parts: Sequence[Sequence[int]], coefficients: Sequence[float], *, seed: int) -> list[int]:
    """The rows of all parts. The rows of part i occur ``coefficients[i]`` times (EARL's rule): all rows as often as the integer
    part says, and for the fraction some rows, drawn with ``seed``, once more.

    Without coefficients, each part is repeated to the size of the largest part. Raises ValueError if the number of coefficients is
    not the number of parts.
    """
    if coefficients and len(coefficients) != len(parts):
        raise ValueError(f"{len(coefficients)} coefficients for {len(parts)} lists; give one each, or none")
    largest = max((len(part) for part in parts), default=0)
    rows: list[int] = []
    for number, part in enumerate(parts):
        # Exact in decimal: 1.55 copies of 100 rows are 155, which binary rounding could miss.
        count = int(Fraction(str(coefficients[number])) * len(part)) if coefficients else largest
        copies, more = divmod(count, len(part)) if part else (0, 0)
        order = permutation(len(part), seed, "coefficients", number)
        rows += [*part] * copies + [part[place] for place in sorted(order[:more])]
    return rows


def _entries(file: Path) -> tuple[Path, list[str]]:
    """The folder of the files of a list, and their names."""
    content = read_json(data_path(file))
    names = content.get("path_list") if isinstance(content, dict) else None
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f'{file}: contains no file names; a list is {{"prefix": FOLDER, "path_list": [NAME, ...]}}')
    above = file.resolve().parent.parent
    places = [above / FEATURES, above, *([Path(content["prefix"])] if isinstance(content.get("prefix"), str) else [])]
    there = (place for place in places if any((place / name).is_file() for name in names[:SHOWN]))
    return next(there, places[0]), names


def _data_set(name: str) -> str:
    """The name of the data set without its split: "omniedit" for "omniedit/train#2"."""
    return name.partition("/")[0].partition("#")[0]


def _row(name: str, root: Path, path: Path, feature: Feature) -> Row:
    task = feature.task
    stored = {part: image_under(root.parent, place) for part, place in task.get("pictures", {}).items()}
    original = stored.get("original")
    meta = {**task.get("meta", {}), Codes.SOURCE: feature.source.tolist()}
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
        target=stored.get("edited"),
        text=task.get("text"),
        source=hashlib.sha256(feature.source.int().numpy().tobytes()).hexdigest(),
        tags=task.get("tags", {}),
        meta=meta,
    )
