"""Suites of prompts for images. A judge or measure that only one suite uses stands before it."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from retouch.config.section import Share
from retouch.data.rows import InvalidRow, Layout, Problem, Row, Rows
from retouch.data.sources.folder import read_metadata, read_prompts
from retouch.data.sources.hub import encoded_image
from retouch.rewards.base import PathText, RewardSection
from retouch.rewards.identity import Fingerprinted
from retouch.types import Column, Json, Sample, Scores, Task
from retouch_bench.suite import SuiteItem
from retouch_bench.suites.rows import OwnSuite, RowSuite, number_of, pooled_mean, published, texts_of
from retouch_judge.base import NAN, JudgeReward, Prompt, image_parts, quoted, rubric
from retouch_judge.models import JudgeModel
from retouch_judge.questions import ChoiceForm, ScoresForm, WordForm
from retouch_judge.wording import Scale
from retouch_rewards.geneval import GenEvalReward, requirements
from retouch_rewards.ocr import RapidReader, TextReader, edit_distance, similarity

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from numpy import ndarray

_GENEVAL_TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")


class GenEvalSuite(RowSuite):
    """GenEval: 553 prompts in six tasks."""

    detector: PathText = "google/owlv2-base-patch16-ensemble"
    """Folder of an OWL-ViT, OWLv2 or Grounding DINO model, or its id in the Hugging Face cache."""
    clip: PathText = "openai/clip-vit-large-patch14"
    """The CLIP model that classifies colours."""
    threshold: Share = 0.3
    """Confidence above which an object counts as detected."""
    counting_threshold: Share = 0.4
    """Confidence above which an object counts as detected in the task ``counting``."""

    name, title = "geneval", "GenEval"
    source, licence, size = "https://github.com/djghosh13/geneval", "MIT", 553
    protocol: ClassVar[str] = (
        "Four images of each prompt. An image is correct if every required object is detected, in the required number, colour and "
        "position, and no excluded count is reached. The share of correct images is taken in each of the six tasks; the headline "
        "is the mean of the tasks."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "Objects are detected by an open-vocabulary detector of transformers; the published one is Mask2Former of mmdetection on "
        "the 80 classes of COCO. Their agreement was not measured, so the numbers are not comparable with published ones.",
        "Colours are classified on crops of the boxes; the published script replaces the pixels outside the object by grey.",
        "The threshold for counting is 0.4, because open-vocabulary detectors are less confident; the published one is 0.9.",
    )
    task = "text-to-image"
    images_per_item: ClassVar[int] = 4
    columns: ClassVar[Mapping[str, Column]] = GenEvalReward.columns
    headline_column: ClassVar[str] = "correct"
    average = "categories"
    layout: ClassVar[str] = "give prompts/evaluation_metadata.jsonl of the repository djghosh13/geneval"

    def rows(self, data: Path) -> Rows:
        return read_prompts(data / "evaluation_metadata.jsonl" if data.is_dir() else data, name="geneval")

    def item(self, row: Row) -> SuiteItem | None:
        tag = row.meta.get("tag")
        if tag not in _GENEVAL_TAGS:
            raise ValueError(f"'tag': {tag!r} is not one of {', '.join(_GENEVAL_TAGS)}")
        fields = {key: row.meta[key] for key in ("tag", "include", "exclude") if key in row.meta}
        requirements(Task(row.id, row.instruction, meta=fields))
        return SuiteItem(id=row.id.replace("/", "-"), prompt=row.instruction, category=str(tag), fields=fields)

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        return GenEvalReward(
            detector=self.detector, clip=self.clip, threshold=self.threshold, counting_threshold=self.counting_threshold
        )


class NegationSuite(GenEvalSuite):
    """Negated statements, after NegT2IBench: prompts of the user, with colours and positions that must and must not hold."""

    name, title = "negation", "Negation"
    source, licence, size = "the idea of NegT2IBench, https://arxiv.org/abs/2610.03084; prompts of your own", "your licence", 0
    protocol: ClassVar[str] = (
        "Four images of each prompt. A statement is a colour or a position, negated or not, or an object that must be absent. An "
        "image is correct if all statements hold. The share of correct images is taken for each number of positive and negated "
        "statements; the headline is the mean of these shares."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "The 4,800 published prompts, their file format and their thresholds were not at hand, so this is no reproduction of the "
        "published numbers. The prompts are yours.",
        *GenEvalSuite.deviations[1:],
    )
    layout: ClassVar[str] = (
        'give a .jsonl file in GenEval\'s format: lines with "prompt", "include" and "exclude"; "negated": true in an entry of '
        '"include" means that its color or position must not hold, as for "a cup that is not red"'
    )

    def rows(self, data: Path) -> Rows:
        return read_prompts(data, name=data.stem)

    def item(self, row: Row) -> SuiteItem | None:
        fields = {key: row.meta[key] for key in ("include", "exclude") if key in row.meta}
        wanted = requirements(Task(row.id, row.instruction, meta=fields))
        positive = sum(not one.negated and (one.color or one.position) is not None for one in wanted.include)
        negated = sum(one.negated for one in wanted.include) + len(wanted.exclude)
        category = f"{positive} positive, {negated} negated"
        return SuiteItem(id=row.id.replace("/", "-"), prompt=row.instruction, category=category, fields=fields)


_YES = WordForm("yes", {"no": 0.0, "yes": 1.0})


class SoftTifaJudge(JudgeReward):
    """Soft-TIFA (arXiv 2512.16853) on ``task.meta["vqa_list"]``, pairs of a question and its correct answer. The judge must return
    log-probabilities.

    Columns, 0 to 1: ``gm``, the geometric mean of the probabilities of the correct answers, which measures whole prompts; ``am``,
    the arithmetic mean, which measures single atoms. Both are NaN if an answer is missing.
    """

    columns: ClassVar[Mapping[str, Column]] = {"gm": Column(0.0, 1.0), "am": Column(0.0, 1.0)}
    rubrics: ClassVar[tuple[str, ...]] = ("expected-answer",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("expected-answer", 1),)
    one_token: ClassVar[bool] = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        import torch

        asked = [_pairs(sample.task.meta.get("vqa_list")) for sample in samples]
        prompts = [
            Prompt(rubric("expected-answer"), image_parts(sample, quoted("Question", pair[0]), quoted("Answer", pair[1])), _YES)
            for sample, pairs in zip(samples, asked, strict=True)
            for pair in pairs
        ]
        verdicts = iter(self.panel.judge(prompts))
        means = [soft_tifa([float(next(verdicts).mean("yes")) for _ in pairs]) for pairs in asked]
        return {name: torch.tensor([mean[number] for mean in means]) for number, name in enumerate(self.columns)}


def soft_tifa(probabilities: Sequence[float]) -> tuple[float, float]:
    """Return the geometric and the arithmetic mean; both are NaN if a probability is NaN."""
    arithmetic = sum(probabilities) / len(probabilities)
    if math.isnan(arithmetic) or 0 in probabilities:
        return (arithmetic if math.isnan(arithmetic) else 0.0), arithmetic
    return math.exp(sum(map(math.log, probabilities)) / len(probabilities)), arithmetic


def _pairs(value: Json) -> list[list[str]]:
    if not isinstance(value, list) or not value:
        raise ValueError("'vqa_list': should be a list of pairs of a question and its answer")
    pairs = [texts_of(pair, "vqa_list") for pair in value]
    if any(len(pair) != 2 for pair in pairs):
        raise ValueError("'vqa_list': should be a list of pairs of a question and its answer")
    return pairs


class GenEval2Suite(RowSuite):
    """GenEval 2: 800 prompts. The licence forbids commercial use, and this package contains no row of the data."""

    name, title = "geneval2", "GenEval 2"
    source, licence, size = "https://github.com/facebookresearch/GenEval2", "CC BY-NC 4.0", 800
    protocol: ClassVar[str] = (
        "One image of each prompt. For each atom of the prompt, the judge's probability that the published answer to the published "
        "question is right. gm is the geometric mean of an image's probabilities, am the arithmetic one; both are averaged over "
        "prompts."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "The judge is asked whether the answer is right, and the probability of yes is used; the published script uses the "
        "probability of the words of the answer.",
    )
    task = "text-to-image"
    columns: ClassVar[Mapping[str, Column]] = SoftTifaJudge.columns
    headline_column: ClassVar[str] = "gm"
    judged_by = SoftTifaJudge
    layout: ClassVar[str] = "give geneval2_data.jsonl of the repository facebookresearch/GenEval2"

    def rows(self, data: Path) -> Rows:
        return read_prompts(data / "geneval2_data.jsonl" if data.is_dir() else data, name="geneval2")

    def item(self, row: Row) -> SuiteItem | None:
        pairs: list[Any] = _pairs(row.meta.get("vqa_list"))
        return SuiteItem(
            id=row.id.replace("/", "-"),
            prompt=row.instruction,
            category=f"{number_of(row, 'atom_count')} atoms",
            fields={"vqa_list": pairs},
        )


CATEGORIES = ("global", "entity", "attribute", "relation", "other")
_CHOICE_FORM = ChoiceForm("yes", {"no": 0.0, "yes": 1.0})


class DpgJudge(JudgeReward):
    """The judge of DPG-Bench: asks ``task.meta["questions"]``, objects with ``id``, ``text``, ``parents`` and ``category``.

    Columns, 0 to 1: ``score``, the share of questions that are answered with yes, where a question counts as no if one of its
    parents counts as no; for each category of ``CATEGORIES`` the share without regard to parents, NaN if it has no question. A
    column is NaN if an answer that it needs is missing.
    """

    columns: ClassVar[Mapping[str, Column]] = {
        "score": Column(0.0, 1.0),
        **{name: Column(0.0, 1.0, diagnostic=True) for name in CATEGORIES},
    }
    rubrics: ClassVar[tuple[str, ...]] = ("question",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("question", 1),)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        import torch

        asked = [_listed(sample.task.id, sample.task.meta, "questions", "questions") for sample in samples]
        prompts = [
            Prompt(rubric("question"), image_parts(sample, quoted("Question", one["text"])), _CHOICE_FORM)
            for sample, each in zip(samples, asked, strict=True)
            for one in each
        ]
        verdicts = iter(self.panel.judge(prompts))
        rows = [_dpg_columns(each, [float(next(verdicts).mean("yes")) for _ in each]) for each in asked]
        return {name: torch.tensor([row[name] for row in rows]) for name in self.columns}


def _listed(name: str, meta: Mapping[str, Any], key: str, nouns: str) -> list[dict[str, Any]]:
    """Return the questions or test points of a task. Raises ValueError if there are none."""
    listed = meta.get(key)
    if not isinstance(listed, list) or not listed:
        raise ValueError(f'task {name!r} has no {nouns}: give meta["{key}"]')
    return [dict(one) for one in listed if isinstance(one, Mapping)]


def _dpg_columns(questions: Sequence[Mapping[str, Any]], answers: Sequence[float]) -> dict[str, float]:
    counted: dict[int, float] = {one["id"]: answer for one, answer in zip(questions, answers, strict=True)}
    for one in questions:  # in the published order, so that a question also counts as no if its parent has just become no
        if any(counted.get(parent) == 0 for parent in one["parents"]):
            counted[one["id"]] = 0.0
    columns = {"score": sum(counted.values()) / len(counted)}
    for name in CATEGORIES:
        own = [answer for one, answer in zip(questions, answers, strict=True) if one["category"] == name]
        columns[name] = sum(own) / len(own) if own else NAN
    return columns


class DpgSuite(RowSuite):
    """DPG-Bench: 1065 dense prompts."""

    name, title = "dpg", "DPG-Bench"
    source, licence, size = "https://github.com/TencentQQGYLab/ELLA", "Apache-2.0", 1065
    protocol: ClassVar[str] = (
        "Four images of each prompt. A model answers every question of the prompt with yes or no; a question counts as no if a "
        "question that it depends on counts as no. The score of an image is its share of yes, and the headline is the mean over "
        "images. Categories are shares of all questions of a category, without regard to dependence."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "A vision-language model answers, with our wording around the published question; the published one is mPLUG-large.",
        "Shares are reported from 0 to 1; the published ones are percentages.",
        "The published script skips the first question of the file; here it counts.",
        "Categories count all images of a prompt; the published script counts only the last one.",
        "A missing answer makes the image's score missing; the published script counts every answer other than yes as no.",
    )
    task = "text-to-image"
    images_per_item: ClassVar[int] = 4
    columns: ClassVar[Mapping[str, Column]] = DpgJudge.columns
    headline_column: ClassVar[str] = "score"
    judged_by = DpgJudge
    layout: ClassVar[str] = "give dpg_bench/dpg_bench.csv of the repository TencentQQGYLab/ELLA"

    def rows(self, data: Path) -> Rows:
        return _PromptRows(data / "dpg_bench.csv" if data.is_dir() else data)

    def item(self, row: Row) -> SuiteItem | None:
        return SuiteItem(id=row.id, prompt=row.instruction, fields={"questions": row.meta["questions"]})

    def headline(
        self, items: Sequence[SuiteItem], values: Mapping[str, Float[ndarray, " n"]], weights: Float[ndarray, "b n"]
    ) -> dict[str, Float[ndarray, " b"]]:
        import numpy as np

        found = super().headline(items, values, weights)
        for name in set(CATEGORIES) & set(values):
            asked = [_listed(item.id, item.fields, "questions", "questions") for item in items]
            counts = np.array([float(sum(one["category"] == name for one in each)) for each in asked])
            found[name] = pooled_mean(values[name], counts, weights)
        return found


class _PromptRows:
    """The lines of the file, grouped by prompt. If one line of a prompt cannot be used, the whole prompt is broken."""

    def __init__(self, path: Path) -> None:
        table = read_metadata(path)
        self.problems = table.notes
        lines: dict[str, list[tuple[int, Mapping[str, Json] | None, str]]] = defaultdict(list)
        for entry in table.entries:
            fields = entry.fields or {}
            lines[str(fields.get("item_id") or f"line {entry.line}")].append((entry.line, entry.fields, entry.what))
        self._lines = list(lines.values())
        self._layout = Layout(table.file, "dpg", {"id": "item_id", "instruction": "text"}, (), encoded_image)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> Row:
        lines = self._lines[index]
        questions, wrong = [], []
        for line, fields, what in lines:
            try:
                if fields is None:
                    raise ValueError(what)
                questions.append(_dpg_question(fields))
            except ValueError as error:
                wrong.append(Problem(self._layout.file, line, str(error)))
        known = {one["id"] for one in questions}
        strange = sorted({parent for one in questions for parent in one["parents"]} - known)
        if strange and not wrong:
            wrong.append(Problem(self._layout.file, lines[0][0], f"'dependency': this prompt has no question {strange[0]}"))
        if wrong:
            raise InvalidRow(wrong)
        first, fields, _ = lines[0]
        return self._layout.parse({**(fields or {}), "questions": questions}, line=first)


def _dpg_question(fields: Mapping[str, Json]) -> dict[str, Any]:
    """Parse the question of a line. Raises ValueError with the column that is missing or wrong."""
    texts = {name: str(fields.get(name) or "").strip() for name in ("proposition_id", "dependency", "question_natural_language")}
    texts["tuple"] = str(fields.get("tuple") or "").strip()
    for name, text in texts.items():
        if not text:
            raise ValueError(f"{name!r}: empty")
    try:
        number, parents = int(texts["proposition_id"]), [int(part) for part in texts["dependency"].split(",")]
    except ValueError:
        raise ValueError("'proposition_id', 'dependency': should be whole numbers") from None
    category = texts["tuple"].partition("(")[0].partition("-")[0].strip().lower()
    return {
        "id": number,
        "text": texts["question_natural_language"],
        "parents": [parent for parent in parents if parent],
        "category": category if category in CATEGORIES else "other",
    }


DIMENSIONS = {
    "Style": "style",
    "World Knowledge": "world_knowledge",
    "Attribute": "attribute",
    "Action": "action",
    "Relationship": "relationship",
    "Compound": "compound",
    "Grammar": "grammar",
    "Entity Layout": "layout",
    "Logical Reasoning": "reasoning",
    "Text Generation": "text",
}
_YES_OR_NO = Scale(0, 1, whole=True)


def dimension(point: str) -> str:
    """Return the column of a test point such as "Attribute - Quantity". Raises ValueError for an unknown dimension."""
    kind = point.partition("-")[0].strip()
    if kind not in DIMENSIONS:
        raise ValueError(f"'Testpoints': {point!r} has an unknown dimension; the dimensions are {', '.join(DIMENSIONS)}")
    return DIMENSIONS[kind]


class UniGenJudge(JudgeReward):
    """The judge of UniGenBench: one question for all test points of ``task.meta["points"]``.

    Columns, 0 to 1: ``overall``, the share of points that the image satisfies, and the same for the points of each dimension, NaN
    if the dimension has no point.
    """

    columns: ClassVar[Mapping[str, Column]] = {
        "overall": Column(0.0, 1.0),
        **{name: Column(0.0, 1.0, diagnostic=True) for name in DIMENSIONS.values()},
    }
    rubrics: ClassVar[tuple[str, ...]] = ("test-points",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("test-points", 1),)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        import torch

        points = [_listed(sample.task.id, sample.task.meta, "points", "test points") for sample in samples]
        prompts = []
        for sample, each in zip(samples, points, strict=True):
            listed: dict[str, Json] = {str(number): f"{point['kind']}: {point['words']}" for number, point in enumerate(each, 1)}
            parts = image_parts(sample, quoted("Prompt", sample.task.instruction), quoted("Points", listed))
            prompts.append(Prompt(rubric("test-points"), parts, ScoresForm({f"point_{name}": _YES_OR_NO for name in listed})))
        verdicts = self.panel.judge(prompts)
        table = {name: torch.full((len(samples),), NAN) for name in self.columns}
        for row, (verdict, each) in enumerate(zip(verdicts, points, strict=True)):
            answers = [float(verdict.mean(f"point_{number}")) for number in range(1, len(each) + 1)]
            table["overall"][row] = sum(answers) / len(answers)
            for name in {dimension(point["kind"]) for point in each}:
                own = [answer for answer, point in zip(answers, each, strict=True) if dimension(point["kind"]) == name]
                table[name][row] = sum(own) / len(own)
        return table


class UniGenSuite(RowSuite):
    """UniGenBench: 600 English prompts, short or long."""

    name, title = "unigenbench", "UniGenBench"
    source, licence, size = "https://github.com/CodeGoat24/UniGenBench", "MIT", 600
    protocol: ClassVar[str] = (
        "Four images of each prompt. The judge decides for each test point whether the image satisfies it. The score of each of "
        "the ten dimensions is the share of its satisfied points over all images; the headline is the mean of the dimensions."
    )
    deviations: ClassVar[tuple[str, ...]] = (
        "The judge's prompt is our wording; the published judges are gemini-2.5-pro and UniGenBench-EvalModel-qwen-72b-v1, which "
        "was tuned on the published wording.",
        "The published script prints the dimensions and no overall number.",
        "The Chinese files, whose test points have Chinese names, are not read.",
    )
    task = "text-to-image"
    images_per_item: ClassVar[int] = 4
    columns: ClassVar[Mapping[str, Column]] = UniGenJudge.columns
    headline_column: ClassVar[str] = "overall"
    judged_by = UniGenJudge
    layout: ClassVar[str] = "give data/test_prompts_en.csv or test_prompts_en_long.csv of the repository CodeGoat24/UniGenBench"

    def rows(self, data: Path) -> Rows:
        return read_prompts(data, columns={"instruction": "prompt_en"}, name="unigenbench")

    def item(self, row: Row) -> SuiteItem | None:
        try:
            listed = json.loads(published(row, "sub_dims_en"))
        except json.JSONDecodeError as error:
            raise ValueError(f"'sub_dims_en': not JSON: {error}") from None
        if not isinstance(listed, dict):
            raise ValueError(f"'sub_dims_en': not an object: {listed!r:.60}")
        kinds, words = (texts_of(listed.get(key), key) for key in ("Testpoints", "Testpoint Description"))
        if len(kinds) != len(words):
            raise ValueError(f"{len(kinds)} test points with {len(words)} descriptions")
        for kind in kinds:
            dimension(kind)
        points: list[Json] = [{"kind": kind, "words": text} for kind, text in zip(kinds, words, strict=True)]
        return SuiteItem(id=str(number_of(row, "index")), prompt=row.instruction, fields={"points": points})

    def headline(
        self, items: Sequence[SuiteItem], values: Mapping[str, Float[ndarray, " n"]], weights: Float[ndarray, "b n"]
    ) -> dict[str, Float[ndarray, " b"]]:
        import numpy as np

        if not values.keys() >= set(DIMENSIONS.values()):
            return super().headline(items, values, weights)
        kinds = [
            [dimension(str(point["kind"])) for point in _listed(item.id, item.fields, "points", "test points")] for item in items
        ]
        found: dict[str, Float[ndarray, " b"]] = {}
        for name in DIMENSIONS.values():
            counts = np.array([float(each.count(name)) for each in kinds])
            found[name] = pooled_mean(values[name], counts, weights)
        shares = np.stack(list(found.values()))
        known = ~np.isnan(shares)
        overall = np.where(known.any(0), np.nansum(shares, 0) / np.maximum(known.sum(0), 1), np.nan)
        return {"overall": overall, **found}


_READER = "Text is read by RapidOCR; the published reader is {}. Their agreement is unknown until it is measured."


class ReadTextReward(RewardSection):
    """Measures how much of the requested text an image shows. Columns, 0 to 1:

    ``accuracy``: 1 - edit distance / length of ``task.text``, at least 0, and 1 if the recognized text contains it (Flow-GRPO).
    ``exact``: 1 - edit distance / length of the longer text, so that superfluous text also counts. ``words``: the share of the
    words that were recognized, or of the characters if the ``language`` of the task is Chinese (LongText-Bench).
    """

    columns: ClassVar[Mapping[str, Column]] = {name: Column(0.0, 1.0) for name in ("accuracy", "exact", "words")}
    reads_text = True

    def load(self, device: torch.device | str) -> TextReader:
        return RapidReader()

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the text reader."""
        return self.model.fingerprint if isinstance(self.model, Fingerprinted) else type(self.model).__name__

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        import torch

        table = torch.zeros(len(samples), 3)
        for row, sample in enumerate(samples):
            if not (sample.task.text or "").strip():
                raise ValueError(f"task {sample.task.id!r} has no text that the image should show")
            if sample.image is not None:
                wanted, lines = sample.task.text or "", [line.text for line in self.model(sample.image)]
                chinese = sample.task.meta.get("language") == "zh"
                scores = accuracy(wanted, lines), similarity(wanted, " ".join(lines)), word_share(wanted, lines, chinese=chinese)
                table[row] = torch.tensor(scores)
        return dict(zip(self.columns, table.unbind(1), strict=True))


def accuracy(wanted: str, lines: Sequence[str]) -> float:
    """Return 1 - edit distance / length, ignoring case and spaces, 0 to 1; 1 if the recognized text contains the wanted text.
    Source: the reward of Flow-GRPO (arXiv 2505.05470)."""
    wanted, found = wanted.replace(" ", "").lower(), "".join(lines).replace(" ", "").lower()
    if wanted in found:
        return 1.0
    return 1.0 - min(edit_distance(found, wanted), len(wanted)) / len(wanted)


def units(text: str, *, chinese: bool) -> list[str]:
    """Split a text into words, or a Chinese one into characters, as LongText-Bench (arXiv 2507.22058) counts them: without
    punctuation, and words in lower case."""
    kept = "\u4e00-\u9fa5a-zA-Z0-9àâäéèêëîïôöùûüçÀÂÄÉÈÊËÎÏÔÖÙÛÜÇ"
    if chinese:
        return re.findall(f"[{kept}]", text)
    return re.sub(rf"[^{kept}\s]", "", text).lower().split()


def word_share(wanted: str, lines: Sequence[str], *, chinese: bool) -> float:
    """Return the share of the wanted words that were recognized, counting repetitions; 0 if there are no wanted words. Source:
    LongText-Bench (X-Omni, arXiv 2507.22058)."""
    right, found = Counter(units(wanted, chinese=chinese)), Counter(units(" ".join(lines), chinese=chinese))
    return (right & found).total() / right.total() if right else 0.0


class OcrSuite(RowSuite):
    """Flow-GRPO's OCR test list: prompts with a short text in double quotes."""

    name, title = "ocr", "OCR accuracy (Flow-GRPO)"
    source, licence, size = "https://github.com/yifan123/flow_grpo", "MIT", 1018
    protocol: ClassVar[str] = (
        "One image of each prompt. accuracy = 1 - edit distance / length of the text in the prompt's first double quotes, ignoring "
        "case and spaces, at least 0, and 1 if the recognized text contains it; the mean over images. exact also counts "
        "superfluous text."
    )
    deviations: ClassVar[tuple[str, ...]] = (_READER.format("PaddleOCR"),)
    task = "text-to-image"
    columns: ClassVar[Mapping[str, Column]] = {name: ReadTextReward.columns[name] for name in ("accuracy", "exact", "words")}
    headline_column: ClassVar[str] = "accuracy"
    layout: ClassVar[str] = "give dataset/ocr/test.txt of the repository yifan123/flow_grpo, one prompt per line"

    def rows(self, data: Path) -> Rows:
        return read_prompts(data, name="ocr")

    def item(self, row: Row) -> SuiteItem | None:
        if not (row.text or "").replace(" ", ""):
            raise ValueError("no text between double quotes")
        return SuiteItem(id=row.id.replace("/", "-"), prompt=row.instruction, text=row.text)

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        return ReadTextReward()


class LongTextSuite(RowSuite):
    """LongText-Bench: images with long English or Chinese texts."""

    language: Literal["en", "zh"] = "en"
    """Language of the file."""

    name, title = "longtext", "LongText-Bench"
    source, licence, size = "https://huggingface.co/datasets/X-Omni/LongText-Bench", "Apache-2.0", 160
    protocol: ClassVar[str] = (
        "Four images of each prompt. words is the share of the words of the requested texts that were recognized, ignoring "
        "punctuation and case; characters for Chinese. Words are pooled over all images, so long texts count more."
    )
    deviations: ClassVar[tuple[str, ...]] = (_READER.format("Qwen2.5-VL-7B-Instruct"),)
    task = "text-to-image"
    images_per_item: ClassVar[int] = 4
    columns: ClassVar[Mapping[str, Column]] = {name: ReadTextReward.columns[name] for name in ("words", "exact")}
    headline_column: ClassVar[str] = "words"
    layout: ClassVar[str] = "give text_prompts.jsonl or text_prompts_zh.jsonl of the data set X-Omni/LongText-Bench"

    def rows(self, data: Path) -> Rows:
        # The column text is a list, so item() reads it from the meta of the row; the field text gets a column that is a string.
        return read_prompts(data, columns={"id": "prompt_id", "instruction": "prompt", "text": "prompt"}, name="longtext")

    def item(self, row: Row) -> SuiteItem | None:
        texts = row.meta.get("text")
        text = " ".join(texts_of(texts if isinstance(texts, list) else [texts], "text"))
        words = len(units(text, chinese=self.language == "zh"))
        if not words:
            raise ValueError("'text': no words")
        category = row.meta.get("category")
        fields: dict[str, Json] = {"language": self.language, "units": words}
        return SuiteItem(id=row.id, prompt=row.instruction, text=text, category=str(category or ""), fields=fields)

    def reward(self, judge: JudgeModel | None) -> RewardSection:
        return ReadTextReward()

    def headline(
        self, items: Sequence[SuiteItem], values: Mapping[str, Float[ndarray, " n"]], weights: Float[ndarray, "b n"]
    ) -> dict[str, Float[ndarray, " b"]]:
        import numpy as np

        found = super().headline(items, values, weights)
        if "words" in values:  # not of another reward that scores the images
            counts = np.array([float(str(item.fields["units"])) for item in items])
            found["words"] = pooled_mean(values["words"], counts, weights)
        return found


class OwnPromptsSuite(OwnSuite):
    """Prompts of the user, scored by a reward of the user: PickScore, HPSv2, a judge, any other."""

    name, title = "prompts", "My prompts"
    deviations: ClassVar[tuple[str, ...]] = ("The user provides the prompts, so results are comparable only for the same file.",)
    task = "text-to-image"
    layout: ClassVar[str] = (
        "give a list of prompts: .txt with one per line, .jsonl with prompt and optionally category, or .csv with Prompts and "
        "Category, as in DrawBench"
    )

    def rows(self, data: Path) -> Rows:
        columns = {"instruction": "Prompts"} if data.suffix == ".csv" else {}
        return read_prompts(data, columns=columns, name=data.stem)
