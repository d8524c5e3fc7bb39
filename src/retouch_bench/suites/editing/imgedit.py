"""ImgEdit-Bench (arXiv 2505.20275): the basic suite, the hard one (understanding, grounding, editing), and multi-turn editing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

from retouch.data.rows import Row, Rows
from retouch.types import Column, Sample
from retouch_bench.suite import Scored, SuiteItem
from retouch_bench.suites.row_suite import JoinedRows, RowSuite, file_rows, keyed_rows, published
from retouch_bench.suites.rubric_reward import RubricReward
from retouch_judge.base import Prompt, edit_parts, quoted, rubric
from retouch_judge.questions import ScoresForm
from retouch_judge.rewards import VieScore
from retouch_judge.wording import Scale

_FIVE = Scale(1, 5, whole=True)
_ASPECTS = ("compliance", "naturalness", "integrity")
_TYPES = ("add", "adjust", "extract", "replace", "remove", "background", "style", "compose", "action")
_RENAMED = {"alter": "adjust"}  # name in the file: name on the page of the benchmark and in its rubrics
_SOURCE = "https://github.com/PKU-YuanGroup/ImgEdit"
_LICENCE = "not stated for the benchmark"
_OURS = "The judge's prompt is our wording of the published criteria and scale; the published one is for gpt-4o."


class ImgEditJudge(RubricReward):
    """The judge of the basic suite. Columns, whole numbers from 1 to 5: ``compliance``, ``naturalness``, ``integrity``."""

    columns: ClassVar[Mapping[str, Column]] = {name: Column(1.0, 5.0) for name in _ASPECTS}
    rubrics: ClassVar[tuple[str, ...]] = ("imgedit-basic",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("imgedit-basic", 2),)
    needs_source = True

    def prompts(self, sample: Sample) -> Iterable[Prompt]:
        """Yield one question for all three scores."""
        facts = (quoted("Kind", sample.task.meta.get("edit_type")), quoted("Instruction", sample.task.instruction))
        yield Prompt(rubric("imgedit-basic"), edit_parts(sample, *facts), ScoresForm(dict.fromkeys(_ASPECTS, _FIVE)))


class ImgEditHardJudge(RubricReward):
    """The judge of the hard suite. Column ``score``, 1 to 5."""

    columns: ClassVar[Mapping[str, Column]] = {"score": Column(1.0, 5.0)}
    rubrics: ClassVar[tuple[str, ...]] = ("imgedit-hard",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("imgedit-hard", 2),)
    needs_source = True

    def prompts(self, sample: Sample) -> Iterable[Prompt]:
        """Yield one question for the score."""
        parts = edit_parts(sample, quoted("Instruction", sample.task.instruction))
        yield Prompt(rubric("imgedit-hard"), parts, ScoresForm({"score": _FIVE}))


class ImgEditSuite(RowSuite):
    """ImgEdit-Bench, basic: single edits of nine types."""

    name: ClassVar[str] = "imgedit"
    title: ClassVar[str] = "ImgEdit-Bench (basic)"
    source: ClassVar[str] = _SOURCE
    licence: ClassVar[str] = _LICENCE
    size: ClassVar[int] = 737
    protocol: ClassVar[str] = (
        "One edit of each source image. The judge gives three whole numbers from 1 to 5: whether the instruction was followed, "
        "how natural the edit looks, and how intact the image is; the score of an image is their mean. It is averaged in each of "
        "the nine types, and the headline is the mean of the types."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        _OURS,
        "One rubric is used for all types and names the type; the published suite has a rubric for each type.",
        "Scores of images are not rounded; the published script rounds them to two digits.",
        "An answer without three valid scores is missing; the published script averages the scores that it finds.",
        "The published scripts report only the means of the types, without an overall mean.",
    )
    task = "editing"
    columns: ClassVar[Mapping[str, Column]] = {"score": Column(1.0, 5.0), **ImgEditJudge.columns}
    headline_column: ClassVar[str] = "score"
    average = "categories"
    judged_by = ImgEditJudge
    layout: ClassVar[str] = (
        "from the repository PKU-YuanGroup/ImgEdit, give the folder Benchmark/Basic with basic_edit.json and the folder "
        "original_images"
    )

    def rows(self, data: Path) -> Rows:
        """Read the rows of ``basic_edit.json``."""
        return _rows(data, "basic_edit.json")

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item, with its edit type as the category. Raises ValueError for an unknown type."""
        given = published(row, "edit_type")
        kind = _RENAMED.get(given, given)
        if kind not in _TYPES:
            raise ValueError(f"'edit_type': {kind!r} is not one of {', '.join(_TYPES)}")
        return SuiteItem(
            id=published(row, "key"), prompt=row.instruction, category=kind, cluster=row.source, fields={"edit_type": kind}
        )

    def score(self, item: SuiteItem, given: Mapping[str, float]) -> Scored:
        """Return the three scores, and their mean as ``score``."""
        return {"score": sum(given[name] for name in _ASPECTS) / len(_ASPECTS), **{name: given[name] for name in _ASPECTS}}


class ImgEditHardSuite(RowSuite):
    """ImgEdit-Bench, UGE: edits that need understanding and grounding, in scenes with many objects."""

    name: ClassVar[str] = "imgedit-uge"
    title: ClassVar[str] = "ImgEdit-Bench (understanding, grounding, editing)"
    source: ClassVar[str] = _SOURCE
    licence: ClassVar[str] = _LICENCE
    size: ClassVar[int] = 47
    protocol: ClassVar[str] = (
        "One edit of each source image. The judge gives one whole number from 1 to 5, at most 3 if anything changed that the "
        "instruction does not name; the headline is the mean over images."
    )
    deviations: ClassVar[tuple[str, ...]] = (_OURS, "An unreadable answer is a missing score; the published script leaves it out.")
    task = "editing"
    columns: ClassVar[Mapping[str, Column]] = ImgEditHardJudge.columns
    headline_column: ClassVar[str] = "score"
    judged_by = ImgEditHardJudge
    layout: ClassVar[str] = (
        "from the repository PKU-YuanGroup/ImgEdit, give the folder Benchmark/UGE with UGE_edit.json and the folder original_images"
    )

    def rows(self, data: Path) -> Rows:
        """Read the rows of ``UGE_edit.json``."""
        return _rows(data, "UGE_edit.json")

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item."""
        return SuiteItem(id=published(row, "key"), prompt=row.instruction, cluster=row.source)


class ImgEditMultiTurnSuite(RowSuite):
    """ImgEdit-Bench, multi-turn: two or three instructions, each for the result of the previous turn."""

    name: ClassVar[str] = "imgedit-multi-turn"
    title: ClassVar[str] = "ImgEdit-Bench (multi-turn)"
    source: ClassVar[str] = _SOURCE
    licence: ClassVar[str] = _LICENCE
    size: ClassVar[int] = 30
    protocol: ClassVar[str] = (
        "Each turn edits the image of the previous turn. VIEScore compares each turn with its own source image: sc = min(success, "
        "restraint), pq = min(naturalness, cleanness), overall = sqrt(sc x pq), 0 to 10; restraint is the preservation of a turn. "
        "Results are reported for each turn."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "In the publication, people judge the results; here VIEScore does, with our wording, so the numbers are not comparable.",
        "VIEScore sees one turn at a time. It cannot detect that a later turn undid what an earlier instruction requested.",
    )
    task = "editing"
    turns: ClassVar[int] = 3
    columns: ClassVar[Mapping[str, Column]] = {
        **{name: VieScore.columns[name] for name in ("sc", "pq", "overall")},
        "restraint": VieScore.columns["restraint"],
    }
    headline_column: ClassVar[str] = "overall"
    judged_by = VieScore
    layout: ClassVar[str] = (
        "from the data set sysuyy/ImgEdit, give the folder of the multi-turn benchmark: a JSON file for each of its three "
        "categories, and the folder original_images"
    )

    def rows(self, data: Path) -> Rows:
        """Read the rows of all JSON files of the folder; the name of the file is the category."""
        lists = sorted(data.glob("*.json"))
        if not lists:
            raise ValueError(f"{data}: no JSON file there; {self.layout}")
        return JoinedRows(_rows(data, path.name, columns={"instruction": "turn1"}, category=path.stem) for path in lists)

    def item(self, row: Row) -> SuiteItem | None:
        """Make the item, with the instructions of its later turns."""
        later = [published(row, turn) for turn in ("turn2", "turn3") if row.meta.get(turn) is not None]
        if not later:
            raise ValueError("'turn2': no text; a multi-turn item has at least two turns")
        category = published(row, "category")
        return SuiteItem(
            id=f"{category}-{published(row, 'key')}",
            prompt=row.instruction,
            later=tuple(later),
            category=category,
            cluster=row.source,
        )


def _rows(data: Path, name: str, *, columns: Mapping[str, str] | None = None, **added: str) -> Rows:
    """Read the rows of one list, in which the column ``id`` names the image."""
    images = next((data / folder for folder in ("original_images", "images") if (data / folder).is_dir()), data)
    table = [{**row, **added} for row in keyed_rows(data / name)]
    known = {"instruction": "prompt", "image": "id", "source": "id", **(columns or {})}
    return file_rows(table, name=str(data / name), columns=known, images=images)
