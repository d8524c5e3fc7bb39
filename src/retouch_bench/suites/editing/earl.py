"""EARL's evaluation (arXiv 2508.01119): six public test sets, all scored by VIEScore."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from retouch.data.rows import Row, Rows
from retouch.data.sources.hub import read_hub
from retouch.types import Column
from retouch_bench.suite import SuiteItem
from retouch_bench.suites.row_suite import JoinedRows, RowSuite, file_rows, keyed_rows
from retouch_judge.rewards import VieScore

SetName: TypeAlias = Literal["omniedit", "emuedit", "aurora", "magicbrush", "vismin", "i2ebench"]


class EarlSuite(RowSuite):
    """EARL's evaluation: OmniEdit, Emu Edit, AURORA, MagicBrush, VisMin and I2EBench."""

    sets: Annotated[tuple[SetName, ...], Field(min_length=1, strict=False)] = (
        "omniedit",
        "emuedit",
        "aurora",
        "magicbrush",
        "vismin",
        "i2ebench",
    )
    """The test sets, which are also the names of their folders or files. The published average is over all six."""

    name: ClassVar[str] = "earl"
    title: ClassVar[str] = "EARL's evaluation"
    source: ClassVar[str] = "https://github.com/saba96/EARL"
    licence: ClassVar[str] = "different for each set"
    size: ClassVar[int] = 0
    protocol: ClassVar[str] = (
        "One edit of each source image. VIEScore gives SC = min(success, restraint), PQ = min(naturalness, cleanness) and overall "
        "= sqrt(SC x PQ), 0 to 10. Each column is averaged in each of the six sets; the headline is the mean of the sets."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "The judge's prompts are our wording of VIEScore's criteria and scales; the published judge is gpt-4o-mini.",
        "The judge sees images at the model's output size; the published script reduces both to an area of 256 x 256 pixels.",
        "An unreadable answer is a missing score; the published script counts it as 0.",
        "All given rows of Emu Edit are used; the published script draws 1000 with the shuffle of the datasets library, seed 42.",
    )
    task = "editing"
    columns: ClassVar[Mapping[str, Column]] = {name: VieScore.columns[name] for name in ("sc", "pq", "overall")}
    headline_column: ClassVar[str] = "overall"
    average = "categories"
    judged_by = VieScore
    layout: ClassVar[str] = (
        "give a folder with the sets omniedit (split dev of TIGER-Lab/OmniEdit-Filtered-1.2M), emuedit "
        "(facebook/emu_edit_test_set), aurora (McGill-NLP/AURORA-Bench) and vismin (mair-lab/escher-vismin-dev), each as "
        "NAME.parquet or as a folder NAME of parquet files; magicbrush, the folder with edit_turns.json and images; and i2ebench, "
        "the folder EditData"
    )

    def rows(self, data: Path) -> Rows:
        """Read the rows of the chosen sets, one set after the other."""
        return JoinedRows(_SetRows(name, _READERS[name](data)) for name in self.sets)

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item, with its set as the category."""
        return SuiteItem(
            id=row.id,
            prompt=row.instruction.removeprefix("edit_instruction: "),  # the prefix of VisMin's instructions
            category=row.id.partition("-")[0],
            cluster=row.source,
        )


class _SetRows:
    """The rows of one set. ``id`` is the name of the set and the line; ``source`` is the same for rows with the same source image.
    The columns ``id`` and ``source`` of the sets are ignored, because they have other meanings."""

    def __init__(self, name: SetName, rows: Rows) -> None:
        self.problems = rows.problems
        self._name = name
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        data = row.images[0].data
        image = row.images[0].name if isinstance(data, Path) else hashlib.sha256(data).hexdigest()
        return replace(row, id=f"{self._name}-{row.line}", source=f"{self._name}/{image}")


def _parquet(name: str, *, image: str, instruction: str) -> Callable[[Path], Rows]:
    def read(data: Path) -> Rows:
        file = data / f"{name}.parquet"
        return read_hub(
            file if file.is_file() else _found(data, name), columns={"image": image, "instruction": instruction}, name=name
        )

    return read


def _found(data: Path, name: str) -> Path:
    path = data / name
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder; choose other sets (--option sets=[...]), or {EarlSuite.layout}")
    return path


def _magicbrush(data: Path) -> Rows:
    """Read the test split of MagicBrush. ``edit_turns.json`` names images, which are in one folder per source image."""
    folder = _found(data, "magicbrush")
    table = [{**row, "file": _magicbrush_file(row.get("input"))} for row in keyed_rows(folder / "edit_turns.json")]
    columns = {"image": "file", "instruction": "instruction"}
    return file_rows(table, name=str(data / "magicbrush"), columns=columns, images=folder / "images")


def _magicbrush_file(name: object) -> str | None:
    return f"{name.partition('-')[0]}/{name}" if isinstance(name, str) else None


def _i2ebench(data: Path) -> Rows:
    """Read I2EBench: a folder for each task, with a JSON file of rows and the folder ``input``. A JSON file with a digit in its
    name is another list, which the published script also skips."""
    root = _found(data, "i2ebench")
    table = []
    for folder in sorted(path for path in root.iterdir() if path.is_dir()):
        lists = sorted(path for path in folder.glob("*.json") if not any(sign.isdigit() for sign in path.name))
        for row in keyed_rows(lists[0]) if lists else ():
            image = row.get("image")
            named = f"{folder.name}/input/{image}" if isinstance(image, str) else None
            table.append({"file": named, "ori_exp": row.get("ori_exp")})
    columns = {"image": "file", "instruction": "ori_exp"}
    return file_rows(table, name=str(data / "i2ebench"), columns=columns, images=root)


_READERS: Mapping[SetName, Callable[[Path], Rows]] = {
    "omniedit": _parquet("omniedit", image="src_img", instruction="edited_prompt_list"),
    "emuedit": _parquet("emuedit", image="image", instruction="instruction"),
    "aurora": _parquet("aurora", image="input", instruction="instruction"),
    "magicbrush": _magicbrush,
    "vismin": _parquet("vismin", image="source_image", instruction="edit_instruction"),
    "i2ebench": _i2ebench,
}
