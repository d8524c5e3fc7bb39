"""The rewards that ask a vision-language model: the questions of each, and how answers become columns.

Example::

    judge = Endpoint(model="Qwen/Qwen2.5-VL-72B-Instruct", base_url="http://localhost:4877/v1", key=None)
    reward = AspectsReward(judge=judge, n_evals=3, temperature=0.7)
    reward([Sample(task, image)])  # {"alignment": ..., "quality": ..., "identity": ...}
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeAlias

from pydantic import Field, model_validator

from retouch.config.section import Count
from retouch.rewards.base import PathText, RunFacts, TaskFacts, whole_group_problems
from retouch.types import Column, Sample, Scores, Task
from retouch_judge.base import NAN, JudgeReward, Prompt, Verdict, edit_parts, image_parts, judged_image, quoted, rubric
from retouch_judge.questions import ChoiceForm, Form, ScoresForm, WordForm
from retouch_judge.wording import Scale
from retouch_rewards.completions import completion_of

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

Aspect: TypeAlias = Literal["alignment", "quality", "identity"]
_IMAGES: Mapping[Aspect, int] = {"alignment": 2, "quality": 1, "identity": 2}


class AspectsReward(JudgeReward):
    """The judge of a TRL writer script (docs/coming-from.md): one question and one column, 0 to 1, for each aspect.

    ``alignment``: whether the image follows the instruction. ``quality``: the quality of the image, without the instruction.
    ``identity``: whether everything that should not change is unchanged. Tasks without a source image are text-to-image prompts,
    which have no identity.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.Aspects(judge=judge, aspects=("alignment", "quality")).columns)
        ['alignment', 'quality']
    """

    kind: Literal["aspects"] = "aspects"
    n_evals: Count = 3
    """Number of answers to each question, each with its own seed. A score is their mean; it is missing if one answer is missing."""
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] = 0.7
    """Sampling temperature of the answers. At 0 all answers are the same, so ``n_evals`` must be 1."""
    aspects: Annotated[tuple[Aspect, ...], Field(min_length=1)] = ("alignment", "quality", "identity")
    """The aspects to ask for; ``identity`` needs a source image."""

    rubrics: ClassVar[tuple[str, ...]] = ("alignment", "generated-alignment", "quality", "identity")

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if len(set(self.aspects)) != len(self.aspects):
            raise ValueError(f"aspects {list(self.aspects)}: give each aspect at most once")
        return self

    @property
    def columns(self) -> Mapping[str, Column]:  # type: ignore[override]
        """One column for each aspect."""
        return {aspect: Column(0.0, 1.0) for aspect in self.aspects}

    @property
    def questions(self) -> tuple[tuple[str, int], ...]:  # type: ignore[override]
        """One question for each aspect."""
        return tuple((aspect, _IMAGES[aspect]) for aspect in self.aspects)

    @property
    def settings(self) -> str:
        """The names of the aspects."""
        return ", ".join(self.aspects)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. Raises ValueError for ``identity`` if a task has no source image."""
        prompts = []
        for aspect in self.aspects:
            form = ScoresForm({aspect: Scale(0, 1)})
            for sample in samples:
                asked = sample.task.instruction
                if aspect == "quality":
                    prompts.append(Prompt(rubric("quality"), image_parts(sample), form))
                elif aspect == "alignment" and not sample.task.images:
                    prompts.append(Prompt(rubric("generated-alignment"), image_parts(sample, quoted("Prompt", asked)), form))
                else:
                    prompts.append(Prompt(rubric(aspect), edit_parts(sample, quoted("Instruction", asked)), form))
        verdicts, count = self.panel.judge(prompts), len(samples)
        return {aspect: means(verdicts[k * count : (k + 1) * count], aspect) for k, aspect in enumerate(self.aspects)}

    def task_problems(self, path: str, tasks: TaskFacts) -> Iterator[str]:
        """Yield a message if ``identity`` is asked for and the tasks have no source images."""
        yield from super().task_problems(path, tasks)
        if "identity" in self.aspects and not tasks.has_source:
            none = f"{tasks.path}.kind {tasks.kind!r} has none"
            yield f"{path}.aspects: identity compares with a source image, but {none}; remove identity"


def means(verdicts: Sequence[Verdict], name: str) -> Float[Tensor, " b"]:
    """The mean answer of each verdict under this name, float32; NaN if one is missing."""
    import torch

    return torch.tensor([float(verdict.mean(name)) for verdict in verdicts])


class GroundReward(JudgeReward):
    """Closeness of the image to the task's target image, as in EARL. Column ``ground``, 0 to 10. The source is not shown.

    Source: EARL (arXiv 2508.01119).

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.Ground(judge=judge).columns)
        ['ground']
    """

    kind: Literal["ground"] = "ground"

    columns: ClassVar[Mapping[str, Column]] = {"ground": Column(0.0, 10.0)}
    rubrics: ClassVar[tuple[str, ...]] = ("ground",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("ground", 2),)
    needs_target = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. Raises ValueError if a task has no target image."""
        prompts = []
        for sample in samples:
            target = sample.task.target
            if target is None:
                raise ValueError(
                    f"task {sample.task.id!r} has no target image, which the ground reward needs; use data with target images"
                )
            parts = ("The right picture:", target, "The picture to judge:", judged_image(sample))
            prompts.append(Prompt(rubric("ground"), parts, ScoresForm({"score": Scale(0, 10)})))
        return {"ground": means(self.panel.judge(prompts), "score")}


class OneTokenReward(JudgeReward):
    """Base class of rewards whose answers are one word: its probability, or the words of repeated answers."""

    min_mass: Annotated[float, Field(gt=0.0, le=1.0)] = 0.5
    """Minimum total probability of the words that may be the answer; with less the score is missing."""
    by: Literal["probability", "choice"] = "probability"
    """``probability``: use the first token's log-probabilities. ``choice``, for endpoints without log-probabilities: use the mean
    of ``n_evals`` answers."""

    one_token: ClassVar[bool] = True

    @property
    def settings(self) -> str:
        """``min_mass``, or ``votes`` if ``by`` is ``choice``."""
        return f"min_mass {self.min_mass:g}" if self.by == "probability" else "votes"

    def form(self, name: str, values: Mapping[str, float]) -> Form:
        """The form of an answer that is one of these words."""
        return WordForm(name, values, self.min_mass) if self.by == "probability" else ChoiceForm(name, values)


class YesReward(OneTokenReward):
    """The probability that the judge answers yes to the question whether the image fulfils the instruction. It needs
    log-probabilities, or repeated answers.

    Column ``yes``, 0 to 1: p(yes) / (p(yes) + p(no)). Tasks with and without a source image have different rubrics.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> retouch.rewards.Yes(judge=judge, by="choice", n_evals=5).n_evals
        5
    """

    kind: Literal["yes"] = "yes"

    columns: ClassVar[Mapping[str, Column]] = {"yes": Column(0.0, 1.0)}
    rubrics: ClassVar[tuple[str, ...]] = ("yes", "generated-yes")
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("yes", 2),)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32."""
        form, prompts = self.form("yes", {"no": 0.0, "yes": 1.0}), []
        for sample in samples:
            asked = sample.task.instruction
            if sample.task.images:
                prompts.append(Prompt(rubric("yes"), edit_parts(sample, quoted("Instruction", asked)), form))
            else:
                prompts.append(Prompt(rubric("generated-yes"), image_parts(sample, quoted("Prompt", asked)), form))
        return {"yes": means(self.panel.judge(prompts), "yes")}


class DigitReward(OneTokenReward):
    """The expected digit from 0 to 5, divided by 5 (Edit-R1, arXiv 2510.16888). It needs log-probabilities, or repeated answers.

    Column ``digit``, 0 to 1. ``task.meta["requirement"]`` is an optional description of a good edit, from the data set.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> retouch.rewards.Digit(judge=judge).by
        'probability'
    """

    kind: Literal["digit"] = "digit"

    columns: ClassVar[Mapping[str, Column]] = {"digit": Column(0.0, 1.0)}
    rubrics: ClassVar[tuple[str, ...]] = ("digit",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("digit", 2),)
    needs_source = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. Raises ValueError if a task has no source image."""
        form, prompts = self.form("digit", {str(digit): digit / 5 for digit in range(6)}), []
        for sample in samples:
            facts = [quoted("Instruction", sample.task.instruction)]
            if "requirement" in sample.task.meta:
                facts.append(quoted("Requirement", sample.task.meta["requirement"]))
            prompts.append(Prompt(rubric("digit"), edit_parts(sample, *facts), form))
        return {"digit": means(self.panel.judge(prompts), "digit")}


class WinRateReward(JudgeReward):
    """Win rate of an image among the images of its task (Pref-GRPO, arXiv 2508.20751).

    Column ``win_rate``, 0 to 1: the mean probability that an image is better than each other image of its group. The judge sees
    every pair in both orders, and the probability is the mean of both answers, which removes the judge's position bias. A group
    consists of the samples with the same ``task.id`` in one call, so each call must contain whole groups. The score is missing if
    the sample is alone in its group, or if one of its pairs has no answer.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.WinRate(judge=judge).columns)
        ['win_rate']
    """

    kind: Literal["win_rate"] = "win_rate"

    columns: ClassVar[Mapping[str, Column]] = {"win_rate": Column(0.0, 1.0)}
    rubrics: ClassVar[tuple[str, ...]] = ("pair",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("pair", 3),)
    one_token: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A group of k samples needs k (k - 1) questions, times the repeats."""
        import torch

        groups: dict[str, list[int]] = {}
        for row, sample in enumerate(samples):
            groups.setdefault(sample.task.id, []).append(row)
        pairs = [pair for rows in groups.values() for pair in combinations(rows, 2)]
        form, prompts = WordForm("second", {"first": 0.0, "second": 1.0}), []
        for one, other in (order for pair in pairs for order in (pair, pair[::-1])):
            task = samples[one].task
            source = ("Source picture:", task.images[0]) if task.images else ()
            shown = ("First picture:", judged_image(samples[one]), "Second picture:", judged_image(samples[other]))
            prompts.append(Prompt(rubric("pair"), (quoted("Instruction", task.instruction), *source, *shown), form))
        verdicts = self.panel.judge(prompts)
        wins: list[list[float]] = [[] for _ in samples]
        for (one, other), forth, back in zip(pairs, verdicts[::2], verdicts[1::2], strict=True):
            better = (1 - float(forth.mean("second")) + float(back.mean("second"))) / 2
            wins[one].append(better)
            wins[other].append(1 - better)
        return {"win_rate": torch.tensor([sum(won) / len(won) if won else NAN for won in wins])}

    def problems(self, path: str, prefix: str, run: RunFacts) -> Iterator[str]:
        """Yield a message if evaluation, which has one image per task, uses the column, and if a chunk splits groups."""
        yield from super().problems(path, prefix, run)
        yield from whole_group_problems(run, column=f"{prefix}win_rate", reward="win_rate")


_LOW, _HIGH = 1.0, 5.0
_WRITTEN = ("relevance", "concreteness", "language")


class CompletionQualityReward(JudgeReward):
    """A judge's score of the text that the policy wrote, as a description for an image model. The judge sees the task's instruction
    and the text, and no image.

    ``relevance``, ``concreteness``, ``language``, each 1 to 5: how well the text serves the instruction, how exactly it says what
    is to be seen, and how clear its language is. ``completion``, 0 to 1: (mean of the three - 1) / 4. A blank text gets the lowest
    values, and the judge is not asked.

    This is the only reward that sends the policy's text to a judge. The text is quoted as data, and the rubric says that praise and
    orders in it are faults. A policy may still learn to write what this judge likes: read the completions of the run, and combine
    this reward with one that scores the image.

    Source: the option ``use_completion_quality_reward`` of a TRL writer script (docs/coming-from.md) for text to image. It asks
    GPT-5 mini, and combines ``completion`` and the reward of the image with the weights 0.5 and 0.5.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-model", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.CompletionQuality(judge=judge).columns)
        ['relevance', 'concreteness', 'language', 'completion']
    """

    kind: Literal["completion_quality"] = "completion_quality"

    columns: ClassVar[Mapping[str, Column]] = {**dict.fromkeys(_WRITTEN, Column(_LOW, _HIGH)), "completion": Column(0.0, 1.0)}
    rubrics: ClassVar[tuple[str, ...]] = ("completion",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("completion", 0),)
    reads_completions = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. Raises ValueError for a sample without a completion."""
        import torch

        texts = [completion_of(sample) for sample in samples]
        asked = [row for row, text in enumerate(texts) if text.strip()]
        form, prompts = ScoresForm(dict.fromkeys(_WRITTEN, Scale(_LOW, _HIGH))), []
        for row in asked:
            parts = (quoted("Request", samples[row].task.instruction), quoted("Text", texts[row]))
            prompts.append(Prompt(rubric("completion"), parts, form))
        table = torch.full((len(samples), len(_WRITTEN)), _LOW)
        for row, verdict in zip(asked, self.panel.judge(prompts), strict=True):
            table[row] = torch.stack([verdict.mean(name).float() for name in _WRITTEN])
        mean = (table.mean(dim=1) - _LOW) / (_HIGH - _LOW)
        return {**dict(zip(_WRITTEN, table.unbind(dim=1), strict=True)), "completion": mean}


_SEMANTIC = ("success", "restraint")
_PERCEPTUAL = ("naturalness", "cleanness")
_VIE_COLUMNS: Mapping[str, Column] = {
    **{name: Column(0.0, 10.0) for name in ("sc", "pq", "overall")},
    **{name: Column(0.0, 10.0, diagnostic=True) for name in (*_SEMANTIC, *_PERCEPTUAL)},
}


class VieScore(JudgeReward):
    """VIEScore (arXiv 2312.14867). Columns, each 0 to 10:

    ``sc`` = min(success, restraint), semantic consistency; ``pq`` = min(naturalness, cleanness), perceptual quality; ``overall`` =
    sqrt(sc pq). Each is computed for every answer, and then averaged. A task without a source image is a text-to-image prompt; its
    ``sc`` is the success alone. The four sub-scores are diagnostics, 0 to 10; ``restraint`` is NaN for a text-to-image prompt.

    The scale and the formula are those of the paper. The prompts are Retouch's own words, so scores differ from those of the
    published prompts; the key ``prompts`` names prompts of yours.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.VieScore(judge=judge).columns)[:3]
        ['sc', 'pq', 'overall']
    """

    kind: Literal["viescore"] = "viescore"
    prompts: PathText | None = Field(default=None, exclude_if=operator.not_)
    """A folder with prompts of yours: ``vie-edit.txt``, ``vie-prompt.txt`` (a task without a source image) and ``vie-picture.txt``
    take the place of Retouch's prompts. The sentence that asks for the form of the answer is added to them."""

    columns: ClassVar[Mapping[str, Column]] = _VIE_COLUMNS
    rubrics: ClassVar[tuple[str, ...]] = ("vie-edit", "vie-prompt", "vie-picture")
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("vie-edit", 2), ("vie-picture", 1))

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32; NaN if an answer that the column needs is missing."""
        import torch

        prompts = []
        for sample in samples:
            asked = sample.task.instruction
            if sample.task.images:
                form = ScoresForm({part: Scale(0, 10) for part in _SEMANTIC})
                prompts.append(Prompt(self.rubric("vie-edit"), edit_parts(sample, quoted("Instruction", asked)), form))
            else:
                form = ScoresForm({"success": Scale(0, 10)})
                prompts.append(Prompt(self.rubric("vie-prompt"), image_parts(sample, quoted("Prompt", asked)), form))
        form = ScoresForm({part: Scale(0, 10) for part in _PERCEPTUAL})
        prompts += [Prompt(self.rubric("vie-picture"), image_parts(sample), form) for sample in samples]
        verdicts = self.panel.judge(prompts)
        least: list[Tensor] = []  # the smaller sub-score of each repeat, (b, n), float64, NaN if there is none
        parts: Scores = {}
        for half, names in ((verdicts[: len(samples)], _SEMANTIC), (verdicts[len(samples) :], _PERCEPTUAL)):
            rows = torch.full((len(half), self.panel.repeats), NAN, dtype=torch.float64)
            for row, verdict in enumerate(half):
                if given := [verdict.scores[name] for name in names if name in verdict.scores]:
                    rows[row] = torch.stack(given).amin(dim=0)
            least.append(rows)
            parts |= {name: means(half, name) for name in names}
        sc, pq = least
        overall = (sc * pq).sqrt().mean(dim=1).float()
        return {"sc": sc.mean(dim=1).float(), "pq": pq.mean(dim=1).float(), "overall": overall, **parts}

    def rubric(self, name: str) -> str:
        return rubric(name, self.prompts)

    def problems(self, path: str, prefix: str, run: RunFacts) -> Iterator[str]:
        """Yield those of every judge, and one for a folder without a prompt."""
        yield from super().problems(path, prefix, run)
        if self.prompts is not None and not any((Path(self.prompts) / f"{name}.txt").is_file() for name in self.rubrics):
            yield f"{path}.prompts: {self.prompts} has none of the files {', '.join(f'{name}.txt' for name in self.rubrics)}"


_WHOLE = Scale(0, 10, whole=True)


class ComplexEditReward(JudgeReward):
    """Complex-Edit's judge (arXiv 2504.13143, which averages 20 answers). Columns, each 0 to 10:

    ``instruction_following``: how well the image follows the instruction. If ``task.meta["operations"]`` lists the atomic
    operations of a compound instruction, each operation gets a score, and the column is their mean. ``identity_preservation``: how
    well everything else is preserved. ``perceptual_quality``: the quality of the image, without the instruction. ``overall``: the
    mean of the three. The judge answers with whole numbers.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> retouch.rewards.ComplexEdit(judge=judge, n_evals=20).columns["overall"].high
        10.0
    """

    kind: Literal["complex_edit"] = "complex_edit"

    columns: ClassVar[Mapping[str, Column]] = {
        name: Column(0.0, 10.0) for name in ("instruction_following", "identity_preservation", "perceptual_quality", "overall")
    }
    rubrics: ClassVar[tuple[str, ...]] = ("complex-following", "complex-preservation", "complex-quality")
    questions: ClassVar[tuple[tuple[str, int], ...]] = (
        ("complex-following", 2),
        ("complex-preservation", 2),
        ("complex-quality", 1),
    )
    needs_source = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. Raises ValueError if a task has no source image, or if its operations are not a list
        of texts."""
        import torch

        prompts = []
        for sample in samples:
            listed = sample.task.meta.get("operations", [])
            if not isinstance(listed, list) or not all(isinstance(one, str) for one in listed):
                raise ValueError(
                    f'task {sample.task.id!r}: meta["operations"] must be a list of texts, one for each atomic operation'
                )
            facts = [quoted("Instruction", sample.task.instruction)]
            names = ["following"]
            if listed:
                names = [f"following_{number}" for number in range(1, len(listed) + 1)]
                facts.append(quoted("Operations", {str(number): one for number, one in enumerate(listed, 1)}))
            form = ScoresForm(dict.fromkeys(names, _WHOLE))
            prompts.append(Prompt(rubric("complex-following"), edit_parts(sample, *facts), form))
        for sample in samples:
            parts = edit_parts(sample, quoted("Instruction", sample.task.instruction))
            prompts.append(Prompt(rubric("complex-preservation"), parts, ScoresForm({"preservation": _WHOLE})))
        for sample in samples:
            prompts.append(Prompt(rubric("complex-quality"), image_parts(sample), ScoresForm({"quality": _WHOLE})))
        # A verdict is the mean over all its names and repeats: NaN if any of them is missing.
        given = [
            float(torch.stack(list(verdict.scores.values())).mean()) if verdict.scores else NAN
            for verdict in self.panel.judge(prompts)
        ]
        table = torch.tensor(given, dtype=torch.float32).view(3, len(samples))
        return dict(zip(self.columns, [*table, table.mean(dim=0)], strict=True))


GRAPHS = ("Knowledge_Graph", "Visual Components")
"""The keys of the graph in a task's ``meta``: the first in MMMG's test set, the second in its training set."""
NOTES = ("Annotation", "Key Knowledge")
"""The keys of the notes on the graph in a task's ``meta``."""


class MmmgReward(JudgeReward):
    """The part of a task's knowledge graph that the image shows. Columns, each 0 to 1:

    ``fidelity``: 1 - GED / (nodes + edges of both graphs), where GED is the edit distance between the shown graph and the task's
    graph. ``elements``, ``dependencies``: the share of the elements and of the dependencies that the image shows; ``dependencies``
    is missing if the graph has none. An edge counts only if both of its elements are shown too. The judge answers 1 or 0 for each
    element and each dependency.

    Source: MMMG (arXiv 2506.10963). Its code uses networkx's first approximation of the distance, an upper bound; this reward
    computes the exact distance. MMMG's score multiplies the fidelity by a readability, computed from regions of SAM 2.1; this
    factor is not included.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.Mmmg(judge=judge).columns)
        ['fidelity', 'elements', 'dependencies']
    """

    kind: Literal["mmmg"] = "mmmg"

    columns: ClassVar[Mapping[str, Column]] = {
        "fidelity": Column(0.0, 1.0),
        "elements": Column(0.0, 1.0),
        "dependencies": Column(0.0, 1.0, diagnostic=True),
    }
    rubrics: ClassVar[tuple[str, ...]] = ("mmmg",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("mmmg", 1),)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. Raises ValueError if a task has no knowledge graph in its ``meta``."""
        import torch

        graphs, prompts = [KnowledgeGraph.of(sample.task) for sample in samples], []
        for sample, graph in zip(samples, graphs, strict=True):
            facts = [quoted("Elements and dependencies", dict(graph.names))]
            if graph.notes is not None:
                facts.append(quoted("Notes on them", graph.notes))
            form = ScoresForm(dict.fromkeys(graph.names, Scale(0, 1, whole=True)), max_tokens=2048)
            prompts.append(Prompt(rubric("mmmg"), image_parts(sample, *facts), form))
        table = torch.full((len(samples), 3), NAN, dtype=torch.float64)
        for row, (graph, verdict) in enumerate(zip(graphs, self.panel.judge(prompts), strict=True)):
            if any(name not in verdict.scores for name in graph.names):
                continue
            answers = torch.stack([verdict.scores[name] for name in graph.names])
            if not answers.isnan().any():  # means over the answers, all missing if an answer is
                fidelity = [graph.fidelity([bool(seen) for seen in answer]) for answer in answers.unbind(dim=1)]
                shares = [part.mean() for part in answers.tensor_split([len(graph.elements)])]
                table[row] = torch.stack([torch.tensor(fidelity, dtype=torch.float64).mean(), *shares])
        return dict(zip(self.columns, table.float().unbind(dim=1), strict=True))


@dataclass(frozen=True, slots=True)
class KnowledgeGraph:
    """A knowledge graph. ``elements``: their names. ``dependencies``: in MMMG's notation, ``Causes(rain, river)``. ``notes``:
    explanations of the elements and dependencies."""

    elements: tuple[str, ...]
    dependencies: tuple[str, ...]
    notes: Any = None

    @classmethod
    def of(cls, task: Task) -> KnowledgeGraph:
        """Read the graph in a task's ``meta``, which is JSON text or an object. Raises ValueError if there is none."""
        found = next((task.meta[key] for key in GRAPHS if task.meta.get(key)), None)
        if isinstance(found, str):
            try:
                found = json.loads(found)
            except json.JSONDecodeError:
                found = None
        elements, dependencies = (_names(found, key) for key in ("elements", "dependencies"))
        if not elements or dependencies is None:
            raise ValueError(f"task {task.id!r} has no knowledge graph; its meta needs {GRAPHS[0]} with elements and dependencies")
        return cls(elements, dependencies, next((task.meta[key] for key in NOTES if task.meta.get(key)), None))

    @property
    def names(self) -> dict[str, str]:
        """The elements and dependencies by their short names (``e1``, ``d1``), which the judge uses in its answer."""
        elements = {f"e{k}": element for k, element in enumerate(self.elements, start=1)}
        return elements | {f"d{k}": dependency for k, dependency in enumerate(self.dependencies, start=1)}

    def size(self, shown: Sequence[bool]) -> int:
        """Return the number of nodes and edges of the shown graph. ``shown``: for each element, then for each dependency."""
        nodes = {element.lower() for element, seen in zip(self.elements, shown, strict=False) if seen}
        known = {element.lower() for element in self.elements}
        edges = set()
        for dependency, seen in zip(self.dependencies, shown[len(self.elements) :], strict=True):
            if seen:
                edges |= {edge for edge in _edges(dependency, known) if nodes.issuperset(edge)}
        return len(nodes) + len(edges)

    def fidelity(self, shown: Sequence[bool]) -> float:
        """Return 1 - the normalised edit distance. The shown graph is a subgraph, so the distance is the difference in size."""
        whole, part = self.size([True] * len(self.names)), self.size(shown)
        return 1 - (whole - part) / (whole + part)


def _names(graph: Any, key: str) -> tuple[str, ...] | None:
    """Return the distinct names in the list under ``key``; None if the graph has no such list."""
    names = graph.get(key) if isinstance(graph, Mapping) else None
    return tuple(dict.fromkeys(names)) if isinstance(names, list) and all(isinstance(name, str) for name in names) else None


def _edges(dependency: str, elements: set[str]) -> set[tuple[str, str]]:
    """Return the edges of ``Relation(one, other)`` between known elements: from one to other; for ``Requires`` from other to one;
    for ``Defines`` in both directions."""
    relation, _, inside = dependency.partition("(")
    ends = [_element(end.strip().lower(), elements) for end in inside.removesuffix(")").split(",", 1)]
    if len(ends) != 2:
        return set()
    one, other = ends
    if one is None or other is None:
        return set()
    match relation.strip().lower():
        case "requires":
            return {(other, one)}
        case "defines":
            return {(one, other), (other, one)}
    return {(one, other)}


def _element(name: str, elements: set[str]) -> str | None:
    """Return the element with this name; otherwise the only element whose name contains it or, if the name has several words, is
    contained in it. None if there is no such element, or more than one."""
    if name.startswith("change("):
        name = name.removeprefix("change(").removesuffix(")").strip()
    if name in elements:
        return name
    near = [element for element in elements if name in element or (" " in name and element in name)]
    return near[0] if len(near) == 1 else None
