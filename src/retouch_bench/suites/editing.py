"""Suites of editing instructions. A judge that only one suite uses stands before it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeAlias, get_args

from pydantic import Field

from retouch.config.section import Count
from retouch.data.rows import Row, Rows
from retouch.data.sources.folder import read_folder
from retouch.data.sources.hub import read_hub
from retouch.rewards.base import PathText, RewardSection, source_image
from retouch.rewards.pixels import AppearanceReward
from retouch.rewards.several import SeveralRewards
from retouch.types import Column, Sample
from retouch_bench.complex_edit import Levels, read_complex_edit
from retouch_bench.suite import Scored, SuiteItem, require_judge
from retouch_bench.suites.rows import JoinedRows, OwnSuite, RowSuite, RubricReward, file_rows, keyed_rows, published, texts_of
from retouch_judge.base import NAN, Prompt, edit_parts, image_parts, judged_image, quoted, rubric
from retouch_judge.models import JudgeModel
from retouch_judge.questions import Part, ScoresForm
from retouch_judge.rewards import ComplexEditReward, VieScore
from retouch_judge.wording import Scale
from retouch_rewards.dino import DinoReward, LpipsReward

_VIE: Mapping[str, Column] = {name: VieScore.columns[name] for name in ("sc", "pq", "overall")}
_VIE_TURNS: Mapping[str, Column] = {**_VIE, "restraint": VieScore.columns["restraint"]}
_FIVE = Scale(1, 5, whole=True)


class GEditSuite(RowSuite):
    """GEdit-Bench v1: real users' edits of real photographs, in 11 groups, with English and Chinese instructions."""

    language: Literal["en", "cn"] = "en"
    """Language of the instructions; each language gives a separate result."""
    subset: Literal["full", "intersection"] = "full"
    """``full``: all rows of the language; ``intersection``: only the rows marked ``Intersection_exist``, which all models
    compared in the paper edited."""

    name, title = "gedit", "GEdit-Bench v1"
    source, licence, size = "https://huggingface.co/datasets/stepfun-ai/GEdit-Bench", "MIT", 606
    protocol: ClassVar[str] = (
        "One edit of each source image. VIEScore gives SC = min(success, restraint) and PQ = min(naturalness, cleanness), 0 to 10; "
        "overall = sqrt(SC x PQ) of each image. Each column is averaged in each of the 11 groups (task_type), and then over groups."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "The judge's prompts are our wording of VIEScore's criteria and scales.",
        "The judge sees the original source image (input_image_raw); the published script shows its 512-pixel copy (input_image).",
        "An unreadable answer is missing; the published script repairs answers, and gives random scores if it cannot repair them.",
    )
    task = "editing"
    columns = _VIE
    headline_column: ClassVar[str] = "overall"
    average = "categories"
    on_hub: ClassVar[bool] = True
    judged_by = VieScore
    layout: ClassVar[str] = "give the data set stepfun-ai/GEdit-Bench: its id, or a folder of it"

    def rows(self, data: Path) -> Rows:
        return read_hub(data, split="train", columns={"instruction": "instruction", "image": "input_image_raw"}, name="gedit")

    def item(self, row: Row) -> SuiteItem | None:
        if published(row, "instruction_language") != self.language:
            return None
        marked = row.meta.get("Intersection_exist")
        if not isinstance(marked, bool):
            raise ValueError("'Intersection_exist': should be true or false")
        if self.subset == "intersection" and not marked:
            return None
        return SuiteItem(id=published(row, "key"), prompt=row.instruction, category=published(row, "task_type"), cluster=row.source)


_IMGEDIT_ASPECTS = ("compliance", "naturalness", "integrity")
_IMGEDIT_TYPES = ("add", "adjust", "extract", "replace", "remove", "background", "style", "compose", "action")
_IMGEDIT_RENAMED = {"alter": "adjust"}  # name in the file: name on the page of the benchmark and in its rubrics
_IMGEDIT = "https://github.com/PKU-YuanGroup/ImgEdit"
_IMGEDIT_LICENCE = "not stated for the benchmark"
_IMGEDIT_PROMPT = "The judge's prompt is our wording of the published criteria and scale; the published one is for gpt-4o."


class ImgEditJudge(RubricReward):
    """The judge of the basic suite. Columns, whole numbers from 1 to 5: ``compliance``, ``naturalness``, ``integrity``."""

    columns: ClassVar[Mapping[str, Column]] = {name: Column(1.0, 5.0) for name in _IMGEDIT_ASPECTS}
    rubrics: ClassVar[tuple[str, ...]] = ("imgedit-basic",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("imgedit-basic", 2),)
    needs_source = True

    def prompts(self, sample: Sample) -> Iterable[Prompt]:
        facts = (quoted("Kind", sample.task.meta.get("edit_type")), quoted("Instruction", sample.task.instruction))
        yield Prompt(rubric("imgedit-basic"), edit_parts(sample, *facts), ScoresForm(dict.fromkeys(_IMGEDIT_ASPECTS, _FIVE)))


class ImgEditHardJudge(RubricReward):
    """The judge of the hard suite. Column ``score``, 1 to 5."""

    columns: ClassVar[Mapping[str, Column]] = {"score": Column(1.0, 5.0)}
    rubrics: ClassVar[tuple[str, ...]] = ("imgedit-hard",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("imgedit-hard", 2),)
    needs_source = True

    def prompts(self, sample: Sample) -> Iterable[Prompt]:
        parts = edit_parts(sample, quoted("Instruction", sample.task.instruction))
        yield Prompt(rubric("imgedit-hard"), parts, ScoresForm({"score": _FIVE}))


class ImgEditSuite(RowSuite):
    """ImgEdit-Bench, basic: single edits of nine types."""

    name, title = "imgedit", "ImgEdit-Bench (basic)"
    source, licence, size = _IMGEDIT, _IMGEDIT_LICENCE, 737
    protocol: ClassVar[str] = (
        "One edit of each source image. The judge gives three whole numbers from 1 to 5: whether the instruction was followed, "
        "how natural the edit looks, and how intact the image is; the score of an image is their mean. It is averaged in each of "
        "the nine types, and the headline is the mean of the types."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        _IMGEDIT_PROMPT,
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
        return _imgedit_rows(data, "basic_edit.json")

    def item(self, row: Row) -> SuiteItem | None:
        given = published(row, "edit_type")
        kind = _IMGEDIT_RENAMED.get(given, given)
        if kind not in _IMGEDIT_TYPES:
            raise ValueError(f"'edit_type': {kind!r} is not one of {', '.join(_IMGEDIT_TYPES)}")
        return SuiteItem(
            id=published(row, "key"), prompt=row.instruction, category=kind, cluster=row.source, fields={"edit_type": kind}
        )

    def score(self, item: SuiteItem, given: Mapping[str, float]) -> Scored:
        return {
            "score": sum(given[name] for name in _IMGEDIT_ASPECTS) / len(_IMGEDIT_ASPECTS),
            **{name: given[name] for name in _IMGEDIT_ASPECTS},
        }


class ImgEditHardSuite(RowSuite):
    """ImgEdit-Bench, UGE: edits that need understanding and grounding, in scenes with many objects."""

    name, title = "imgedit-uge", "ImgEdit-Bench (understanding, grounding, editing)"
    source, licence, size = _IMGEDIT, _IMGEDIT_LICENCE, 47
    protocol: ClassVar[str] = (
        "One edit of each source image. The judge gives one whole number from 1 to 5, at most 3 if anything changed that the "
        "instruction does not name; the headline is the mean over images."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        _IMGEDIT_PROMPT,
        "An unreadable answer is a missing score; the published script leaves it out.",
    )
    task = "editing"
    columns: ClassVar[Mapping[str, Column]] = ImgEditHardJudge.columns
    headline_column: ClassVar[str] = "score"
    judged_by = ImgEditHardJudge
    layout: ClassVar[str] = (
        "from the repository PKU-YuanGroup/ImgEdit, give the folder Benchmark/UGE with UGE_edit.json and the folder original_images"
    )

    def rows(self, data: Path) -> Rows:
        return _imgedit_rows(data, "UGE_edit.json")

    def item(self, row: Row) -> SuiteItem | None:
        return SuiteItem(id=published(row, "key"), prompt=row.instruction, cluster=row.source)


class ImgEditMultiTurnSuite(RowSuite):
    """ImgEdit-Bench, multi-turn: two or three instructions, each for the result of the previous turn."""

    name, title = "imgedit-multi-turn", "ImgEdit-Bench (multi-turn)"
    source, licence, size = _IMGEDIT, _IMGEDIT_LICENCE, 30
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
    columns = _VIE_TURNS
    headline_column: ClassVar[str] = "overall"
    judged_by = VieScore
    layout: ClassVar[str] = (
        "from the data set sysuyy/ImgEdit, give the folder of the multi-turn benchmark: a JSON file for each of its three "
        "categories, and the folder original_images"
    )

    def rows(self, data: Path) -> Rows:
        lists = sorted(data.glob("*.json"))
        if not lists:
            raise ValueError(f"{data}: no JSON file there; {self.layout}")
        return JoinedRows(_imgedit_rows(data, path.name, columns={"instruction": "turn1"}, category=path.stem) for path in lists)

    def item(self, row: Row) -> SuiteItem | None:
        later = [published(row, turn) for turn in ("turn2", "turn3") if row.meta.get(turn) is not None]
        if not later:
            raise ValueError("'turn2': no text; a multi-turn item has at least two turns")
        category, key = (published(row, name) for name in ("category", "key"))
        name = f"{category}-{key}"
        return SuiteItem(id=name, prompt=row.instruction, later=tuple(later), category=category, cluster=row.source)


def _imgedit_rows(data: Path, name: str, *, columns: Mapping[str, str] | None = None, **added: str) -> Rows:
    """Read the rows of one list, in which the column ``id`` names the image."""
    images = next((data / folder for folder in ("original_images", "images") if (data / folder).is_dir()), data)
    table = [{**row, **added} for row in keyed_rows(data / name)]
    known = {"instruction": "prompt", "image": "id", "source": "id", **(columns or {})}
    return file_rows(table, name=str(data / name), columns=known, images=images)


class MultiTurnSuite(RowSuite):
    """Sequences of editing instructions, with the scores and the preservation of each turn."""

    name, title = "multi-turn", "Editing in turns"
    source, licence, size = "https://arxiv.org/abs/2505.20275", "that of the user's data", 0
    protocol: ClassVar[str] = (
        "Each turn edits the image of the previous turn. VIEScore compares each turn with its own source image: sc = min(success, "
        "restraint), pq = min(naturalness, cleanness), overall = sqrt(sc x pq), 0 to 10; restraint is the preservation as scored "
        "by the judge. l1 is the mean absolute difference to the turn's source outside the mask, for items with a mask. Results "
        "are reported for each turn."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "No suite is published under this name; imgedit-multi-turn uses published instructions.",
    )
    task = "editing"
    turns: ClassVar[int] = 16
    columns: ClassVar[Mapping[str, Column]] = {**_VIE_TURNS, "l1": Column(0.0, 1.0, diagnostic=True, higher_is_better=False)}
    headline_column: ClassVar[str] = "overall"
    layout: ClassVar[str] = (
        "give a folder with metadata.jsonl, whose lines have file_name, instruction, later (a list of further instructions) and "
        "optionally mask (white: where any turn may change the image)"
    )

    def rows(self, data: Path) -> Rows:
        return read_folder(data)

    def item(self, row: Row) -> SuiteItem | None:
        if not row.images:
            raise ValueError("no source image")
        later = texts_of(row.meta.get("later"), "later")
        if len(later) >= self.turns:
            raise ValueError(f"'later': {len(later)} instructions; give at most {self.turns - 1}")
        return SuiteItem(id=row.id.replace("/", "-"), prompt=row.instruction, later=tuple(later), cluster=row.source)

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        return SeveralRewards(rewards={"vie": VieScore(judge=require_judge(self, judge)), "pixels": AppearanceReward()})

    def score(self, item: SuiteItem, given: Mapping[str, float]) -> Scored:
        return {**{name: given[f"vie/{name}"] for name in _VIE_TURNS}, "l1": 1 - given["pixels/preservation"]}


class OwnEditsSuite(OwnSuite):
    """Edits of the user, scored by a reward of the user."""

    name, title = "edits", "My edits"
    deviations: ClassVar[tuple[str, ...]] = ("The user provides the rows, so results are comparable only for the same folder.",)
    task = "editing"
    layout: ClassVar[str] = "give a folder with metadata.jsonl, whose lines have file_name, instruction and optionally category"

    def rows(self, data: Path) -> Rows:
        return read_folder(data)


class ComplexEditSuite(RowSuite):
    """Complex-Edit: instructions that combine 1 to 8 atomic edits of the same image."""

    levels: Levels = "1-8"
    """Which levels of complexity: "8", "1-8" or "1,4,8". A level is the number of atomic edits in the instruction."""
    split: Literal["test_real", "test_syn"] = "test_real"
    """Real photographs, or generated images."""
    answers: Count = 20
    """Number of answers of the judge to each question; the score is their mean."""

    name, title = "complex-edit", "Complex-Edit"
    source, licence, size = "https://huggingface.co/datasets/UCSC-VLAA/Complex-Edit", "CC BY-NC 4.0", 4248
    protocol: ClassVar[str] = (
        "One edit of each of 531 images at each of eight levels. The judge gives whole numbers from 0 to 10 for instruction "
        "following (IF, the mean over the atomic edits), identity preservation (IP) and perceptual quality (PQ, without the "
        "instruction), each the mean of 20 answers. Overall = (IF + IP + PQ) / 3 of each image. Results are reported for each "
        "level; the headline is the mean over the levels."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "The judge's prompts are our wording of the published criteria and bands.",
        "IF and IP are two questions; the published judge answers both in one.",
        "Overall is computed for each image; the published script combines scores of different images, because its workers finish "
        "in any order.",
        "The sequential mode of the paper, which edits step by step, is not implemented.",
    )
    task = "editing"
    columns: ClassVar[Mapping[str, Column]] = ComplexEditReward.columns
    headline_column: ClassVar[str] = "overall"
    average = "categories"
    on_hub: ClassVar[bool] = True
    layout: ClassVar[str] = "give the data set UCSC-VLAA/Complex-Edit: its id, or a folder of it"

    def rows(self, data: Path) -> Rows:
        return read_complex_edit(data, complexity=self.levels, split=self.split)

    def item(self, row: Row) -> SuiteItem | None:
        image, _, level = row.id.rpartition("/")
        name, category = f"{image.rpartition('/')[2]}-level-{level}", f"level {level}"
        return SuiteItem(id=name, prompt=row.instruction, category=category, cluster=row.source, fields=row.meta)

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        temperature = 0.0 if self.answers == 1 else 1.0
        return ComplexEditReward(judge=require_judge(self, judge), n_evals=self.answers, temperature=temperature)


SetName: TypeAlias = Literal["omniedit", "emuedit", "aurora", "magicbrush", "vismin", "i2ebench"]


class EarlSuite(RowSuite):
    """EARL's evaluation: OmniEdit, Emu Edit, AURORA, MagicBrush, VisMin and I2EBench."""

    sets: Annotated[tuple[SetName, ...], Field(min_length=1, strict=False)] = get_args(SetName)
    """The test sets, which are also the names of their folders or files. The published average is over all six."""

    name, title = "earl", "EARL's evaluation"
    source, licence, size = "https://github.com/saba96/EARL", "different for each set", 0
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
    columns = _VIE
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
        return JoinedRows(_SetRows(name, _READERS[name](data)) for name in self.sets)

    def item(self, row: Row) -> SuiteItem | None:
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


def _parquet(data: Path, *, name: str, image: str, instruction: str) -> Rows:
    file = data / f"{name}.parquet"
    columns = {"image": image, "instruction": instruction}
    return read_hub(file if file.is_file() else _found(data, name), columns=columns, name=name)


def _found(data: Path, name: str) -> Path:
    path = data / name
    if not path.exists():
        raise ValueError(f"{path}: no such file or folder; choose other sets (--option sets=[...]), or {EarlSuite.layout}")
    return path


def _magicbrush(data: Path) -> Rows:
    """Read the test split of MagicBrush. ``edit_turns.json`` names images, which are in one folder per source image."""
    folder = _found(data, "magicbrush")
    table = [
        {**row, "file": f"{name.partition('-')[0]}/{name}" if isinstance(name := row.get("input"), str) else None}
        for row in keyed_rows(folder / "edit_turns.json")
    ]
    columns = {"image": "file", "instruction": "instruction"}
    return file_rows(table, name=str(data / "magicbrush"), columns=columns, images=folder / "images")


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
    "omniedit": partial(_parquet, name="omniedit", image="src_img", instruction="edited_prompt_list"),
    "emuedit": partial(_parquet, name="emuedit", image="image", instruction="instruction"),
    "aurora": partial(_parquet, name="aurora", image="input", instruction="instruction"),
    "magicbrush": _magicbrush,
    "vismin": partial(_parquet, name="vismin", image="source_image", instruction="edit_instruction"),
    "i2ebench": _i2ebench,
}


class PreservationSuite(RowSuite):
    """Measures how much of the source is preserved outside the mask."""

    lpips: PathText | None = None
    """Weights of LPIPS on AlexNet, one safetensors file (see the reward ``lpips``); null leaves the column out."""
    dino: PathText | None = None
    """Weights of DINOv2, a folder or an id in the Hugging Face cache; null leaves the column out."""

    name, title = "preservation", "Source preservation"
    source, licence, size = "https://arxiv.org/abs/2306.10012", "that of the user's data", 0
    protocol: ClassVar[str] = (
        "One edit of each source image. Outside the mask (white is where to change): l1, the mean absolute difference of the "
        "colours to the source, 0 to 1, resized to the edit's size; lpips, the distance on AlexNet, at most 1; dino, the mean "
        "cosine of DINOv2's patches, at least 0. Each is averaged over images. Low l1 and lpips, and high dino, are better."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "No suite is published under this name. L1 and DINO are measures of MagicBrush on whole images, here outside the mask.",
    )
    task = "editing"
    columns: ClassVar[Mapping[str, Column]] = {
        "l1": Column(0.0, 1.0, higher_is_better=False),
        "lpips": Column(0.0, 1.0, diagnostic=True, higher_is_better=False),
        "dino": Column(0.0, 1.0, diagnostic=True),
    }
    headline_column: ClassVar[str] = "l1"
    layout: ClassVar[str] = "give a folder with metadata.jsonl, whose lines have file_name, instruction and mask"

    def rows(self, data: Path) -> Rows:
        return read_folder(data)

    def item(self, row: Row) -> SuiteItem | None:
        if not row.images or row.mask is None:
            raise ValueError("no source image or no mask; preservation is measured outside a mask")
        given = row.meta.get("category")
        category = given if isinstance(given, str) else ""
        return SuiteItem(id=row.id.replace("/", "-"), prompt=row.instruction, category=category, cluster=row.source)

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        parts: dict[str, RewardSection] = {"pixels": AppearanceReward()}
        if self.lpips is not None:
            parts["lpips"] = LpipsReward(weights=self.lpips)
        if self.dino is not None:
            parts["dino"] = DinoReward(path=self.dino)
        return SeveralRewards(rewards=parts)

    def score(self, item: SuiteItem, given: Mapping[str, float]) -> Scored:
        kept = given["pixels/preservation"]
        if kept != kept:
            return "the mask leaves nothing that should be preserved"
        return {"l1": 1 - kept, "lpips": 1 - given.get("lpips/preservation", NAN), "dino": given.get("dino/preservation", NAN)}


_KNOWLEDGE = (
    *("abstract_reasoning", "biology", "chemistry", "geography", "humanities", "mathematics", "medicine", "physics"),
    *("practical_knowledge", "rule-based_reasoning"),
)
_KRIS_NAMES = ("consistency", "instruction", "quality")


class KrisJudge(RubricReward):
    """The judge of KRIS-Bench. Columns, integers from 1 to 5: ``consistency``, ``instruction``, ``quality``, and ``knowledge``,
    which only knowledge categories have."""

    columns: ClassVar[Mapping[str, Column]] = {
        **{name: Column(1.0, 5.0) for name in _KRIS_NAMES},
        "knowledge": Column(1.0, 5.0, diagnostic=True),
    }
    rubrics: ClassVar[tuple[str, ...]] = ("five-consistency", "five-instruction", "five-knowledge", "five-quality")
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("five-consistency", 2), ("five-knowledge", 2), ("five-quality", 1))
    needs_source = True

    def prompts(self, sample: Sample) -> Iterable[Prompt]:
        meta, instruction = sample.task.meta, quoted("Instruction", sample.task.instruction)
        explained = (instruction, quoted("Explanation", meta["explain"])) if meta.get("explain") else (instruction,)
        yield Prompt(rubric("five-consistency"), _kris_parts(sample, instruction), ScoresForm({"consistency": _FIVE}))
        if meta.get("category") in _KNOWLEDGE:
            form = ScoresForm({"instruction": _FIVE, "knowledge": _FIVE})
            yield Prompt(rubric("five-knowledge"), _kris_parts(sample, *explained), form)
        else:
            yield Prompt(
                rubric("five-instruction"), _kris_parts(sample, *explained, target=True), ScoresForm({"instruction": _FIVE})
            )
        yield Prompt(rubric("five-quality"), image_parts(sample), ScoresForm({"quality": _FIVE}))


def _kris_parts(sample: Sample, *facts: str, target: bool = False) -> tuple[Part, ...]:
    """Return the facts, all source images, the correct result (if ``target`` and the task has one), and the edited image."""
    parts: list[Part] = [*facts]
    for number, image in enumerate(sample.task.images, 1):
        parts += [f"Source picture {number}:", image]
    if target and sample.task.target is not None:
        parts += ["The right result:", sample.task.target]
    return (*parts, "Edited picture:", judged_image(sample))


class KrisSuite(RowSuite):
    """KRIS-Bench: 22 published tasks, from counting to chemistry."""

    name, title = "kris", "KRIS-Bench"
    source, licence, size = "https://github.com/mercurystraw/Kris_Bench", "not stated in the repository", 1267
    protocol: ClassVar[str] = (
        "One edit of each item. The judge gives whole numbers from 1 to 5: consistency with the source, following of the "
        "instruction, quality of the image, and, in ten categories, agreement with an explanation of the right result. The score "
        "of an image is the mean of the scores that its category has."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "The judge's prompts are our wording of the published criteria and scale; the published judge is gpt-4o.",
        "Scores stay on the scale from 1 to 5. The paper reports them from 0 to 100, with a conversion that is not in the "
        "repository.",
        "The frames of temporal prediction are shown as numbered source images; the edited image is not placed among them in order "
        "of time.",
        "As published, knowledge is judged without an explanation if the item has none.",
        "An item with several source images needs a model that takes several.",
    )
    task = "editing"
    columns: ClassVar[Mapping[str, Column]] = {"score": Column(1.0, 5.0), **KrisJudge.columns}
    headline_column: ClassVar[str] = "score"
    judged_by = KrisJudge
    layout: ClassVar[str] = (
        "give the folder KRIS_Bench of the repository, which has a folder with annotation.json for each category"
    )

    def rows(self, data: Path) -> Rows:
        lists = sorted(data.glob("*/annotation.json"))
        if not lists:
            raise ValueError(f"{data}: none of its folders contains annotation.json; {self.layout}")
        return JoinedRows(_kris_rows(path) for path in lists)

    def item(self, row: Row) -> SuiteItem | None:
        category = published(row, "category")
        name, cluster = f"{category}-{published(row, 'key')}", f"{category}/{row.source}"
        fields = {"category": category, "explain": row.meta.get("explain")}
        return SuiteItem(id=name, prompt=row.instruction, category=category, cluster=cluster, fields=fields)

    def score(self, item: SuiteItem, given: Mapping[str, float]) -> Scored:
        names = (*_KRIS_NAMES, "knowledge") if item.category in _KNOWLEDGE else _KRIS_NAMES
        scores = {name: given[name] if name in names else NAN for name in KrisJudge.columns}
        return {"score": sum(scores[name] for name in names) / len(names), **scores}


def _kris_rows(path: Path) -> Rows:
    """Read the rows of a category. The published code reads ``instruction`` and ``explain``; the files have ``ins_en`` and
    ``explain_en``."""
    table = [
        {
            "key": row.get("key"),
            "ori_img": row.get("ori_img"),
            "gt_img": row.get("gt_img") or None,
            "instruction": row.get("ins_en") or row.get("instruction"),
            "explain": row.get("explain_en") or row.get("explain") or None,
            "category": path.parent.name,
        }
        for row in keyed_rows(path)
    ]
    columns = {"instruction": "instruction", "image": "ori_img", "target": "gt_img"}
    return file_rows(table, name=str(path), columns=columns, images=path.parent)


_LOGICAL = "logical_reasoning"
_RISE_CATEGORIES = ("temporal_reasoning", "causal_reasoning", "spatial_reasoning", _LOGICAL)
_RISE_FIELDS = ("category", "subtask", "reference", "reference_txt", "consistency_free", "reasoning_img")


class RiseJudge(RubricReward):
    """The judge of RISEBench. Columns: ``reasoning_score`` and ``consistency``, 1 to 5 (logical puzzles: 0 or 1), and ``quality``,
    1 to 5. Puzzles have no ``quality``, and tasks marked ``consistency_free`` have no ``consistency``."""

    columns: ClassVar[Mapping[str, Column]] = {
        "reasoning_score": Column(0.0, 5.0),
        "consistency": Column(0.0, 5.0, diagnostic=True),
        "quality": Column(1.0, 5.0, diagnostic=True),
    }
    rubrics: ClassVar[tuple[str, ...]] = ("five-consistency", "five-reasoning", "five-quality", "logic-consistency", "logic-answer")
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("five-consistency", 2), ("five-reasoning", 1), ("five-quality", 1))
    needs_source = True

    def prompts(self, sample: Sample) -> Iterable[Prompt]:
        meta = sample.task.meta
        logical = meta.get("category") == _LOGICAL
        scale, known = (Scale(0, 1, whole=True), "logic") if logical else (_FIVE, "five")
        right = sample.task.reference
        instruction = quoted("Instruction", sample.task.instruction)
        description = meta.get("reference_txt") if logical else meta.get("reference")
        facts = (instruction, quoted("The right result", description)) if description else (instruction,)
        if not meta.get("consistency_free"):
            before: tuple[Part, ...] = ("Source picture:", source_image(sample.task) if right is None else right)
            shown = (*(facts if logical else facts[:1]), *before, "Edited picture:", judged_image(sample))
            yield Prompt(rubric(f"{known}-consistency"), shown, ScoresForm({"consistency": scale}))
        needed: tuple[Part, ...] = ()
        if right is not None:
            needed = ("The right result:", right)
        elif meta.get("reasoning_img"):
            needed = ("Source picture:", source_image(sample.task))
        shown = (*facts, *needed, "Edited picture:", judged_image(sample))
        answer = "logic-answer" if logical else "five-reasoning"
        yield Prompt(rubric(answer), shown, ScoresForm({"reasoning_score": scale}))
        if not logical:
            yield Prompt(rubric("five-quality"), image_parts(sample), ScoresForm({"quality": _FIVE}))


class RiseSuite(RowSuite):
    """RISEBench: 360 edits, most of which need reasoning about the correct result."""

    name, title = "rise", "RISEBench"
    source: ClassVar[str] = "https://github.com/PhoenixZ810/RISEBench"
    licence: ClassVar[str] = "not stated for the data; the published outputs are MIT"
    size: ClassVar[int] = 360
    protocol: ClassVar[str] = (
        "One edit of each item. The judge gives whole numbers from 1 to 5 for reasoning (R), consistency (C) and plausibility "
        "(V); puzzles get 0 or 1 for R and C, which count as 1 and 5, and no V. The score is 0.5 R + 0.3 C + 0.2 V, without "
        "consistency 0.8 R + 0.2 V, for puzzles 0.7 R + 0.3 C; if R is 1, the score is halved, but at least 1. It is reported as "
        "25 (score - 1). An item is solved if all its scores are 5; the headline is the share of solved items."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "The judge's prompts are our wording of the published criteria and scales; the published judge is gpt-4.1 at temperature "
        "0.",
        "As in the published script, an item without a consistency score cannot be solved.",
        "In the published script, a row without the key consistency_free can count as free of consistency if other rows have "
        "the key; here it does not.",
    )
    task = "editing"
    columns: ClassVar[Mapping[str, Column]] = {
        "solved": Column(0.0, 1.0),
        "score": Column(0.0, 100.0),
        "reasoning": Column(1.0, 5.0),
        "consistency": Column(1.0, 5.0, diagnostic=True),
        "quality": Column(1.0, 5.0, diagnostic=True),
    }
    headline_column: ClassVar[str] = "solved"
    judged_by = RiseJudge
    layout: ClassVar[str] = (
        "from the data set PhoenixZ/RISEBench, give a folder that contains datav2_total_w_subtask.json and the unpacked folder data"
    )

    def rows(self, data: Path) -> Rows:
        name = data / "datav2_total_w_subtask.json"
        images = data / "data" if (data / "data").is_dir() else data
        table = [{**row, "reference_img": row.get("reference_img") or None} for row in keyed_rows(name)]
        columns = {"id": "index", "instruction": "instruction", "image": "image", "source": "image", "reference": "reference_img"}
        return file_rows(table, name=str(name), columns=columns, images=images)

    def item(self, row: Row) -> SuiteItem | None:
        category = published(row, "category")
        if category not in _RISE_CATEGORIES:
            raise ValueError(f"'category': {category!r} is not one of {', '.join(_RISE_CATEGORIES)}")
        described = "reference_txt" if category == _LOGICAL else "reference"
        if row.reference is None and not row.meta.get(described):
            raise ValueError(f"{described!r}: no text, and no reference_img; one of them must describe the correct result")
        fields = {key: row.meta[key] for key in _RISE_FIELDS if row.meta.get(key) is not None}
        return SuiteItem(id=row.id, prompt=row.instruction, category=category, cluster=row.source, fields=fields)

    def score(self, item: SuiteItem, given: Mapping[str, float]) -> Scored:
        reasoning, consistency, quality = (given[name] for name in ("reasoning_score", "consistency", "quality"))
        best: tuple[float, ...]
        if item.category == _LOGICAL:
            reasoning, consistency, quality = 4 * reasoning + 1, 4 * consistency + 1, NAN
            score, best = 0.3 * consistency + 0.7 * reasoning, (reasoning, consistency)
        elif item.fields.get("consistency_free"):
            score, best = 0.2 * quality + 0.8 * reasoning, (reasoning, quality)
        else:
            score, best = 0.3 * consistency + 0.5 * reasoning + 0.2 * quality, (reasoning, consistency, quality)
        if reasoning == 1:
            score = max(0.5 * score, 1.0)
        solved = (
            NAN if any(each != each for each in best) else float(set(best) == {5.0} and not item.fields.get("consistency_free"))
        )
        return {"solved": solved, "score": 25 * (score - 1), "reasoning": reasoning, "consistency": consistency, "quality": quality}
