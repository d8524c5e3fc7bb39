"""Rewards of published generating models, with the prompts, scales and formulas of their authors' code.

The prompts are inputs that the models were trained with, so they are quoted to the letter, including their faults. They have no
system message except RationalRewards', and the images come where the published code puts them. Answers are read as those of all
judges: an unreadable answer is missing, where the published code puts a middle score, 0 or another number of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import PrivateAttr, field_serializer

from retouch.config import wings
from retouch.config.section import Kinds
from retouch.protocols import Reward
from retouch.rewards.base import JudgeClients, LoadedModel, RewardSection, RunFacts, TaskFacts, close, source_image, unchanged
from retouch.rewards.parts import SINGLE
from retouch.types import Column, Sample, Scores
from retouch_judge.base import NAN, JudgeReward, Prompt, Verdict, judged_image, plain, published, quoted, rubric
from retouch_judge.questions import ListForm, Part, PatternForm, ProbabilityForm, TextForm
from retouch_judge.rewards import OneTokenReward, means

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from torch import Tensor


def _asked(name: str, sample: Sample) -> str:
    return published(name).replace("{instruction}", plain(sample.task.instruction))


def _repeats(verdicts: Sequence[Verdict], name: str, count: int) -> Float[Tensor, "b n"]:
    """The answers under a name, one per repeat, float64; NaN if one is missing."""
    import torch

    rows = [verdict.scores.get(name, torch.full((count,), NAN, dtype=torch.float64)) for verdict in verdicts]
    return torch.stack(rows) if rows else torch.empty(0, count, dtype=torch.float64)


_EDIT, _PICTURE = ("success", "restraint"), ("naturalness", "cleanness")
_TOP = 25


def _pairs(
    reward: JudgeReward, samples: Sequence[Sample], names: Sequence[str], *, label: str = "", regions: bool = False
) -> Scores:
    """The four numbers of an edit, 0 to 25, each (b, n), float64: two of the question about the edit, with source and edited image,
    and two of the question about the edited image alone. ``names``: the prompts. ``label``: a text before each image."""
    images = [(source_image(sample.task), judged_image(sample)) for sample in samples]

    def parts(shown: Sequence[Any], text: str) -> tuple[Part, ...]:
        labelled = [part for k, image in enumerate(shown, 1) for part in ([label.format(k), image] if label else [image])]
        return (*labelled, text)

    edit, picture = ListForm(_EDIT, _TOP, regions), ListForm(_PICTURE, _TOP)
    asked = [Prompt("", parts(pair, _asked(names[0], sample)), edit, True) for sample, pair in zip(samples, images, strict=True)]
    asked += [Prompt("", parts([edited], published(names[1])), picture, True) for _, edited in images]
    verdicts, count, repeats = reward.panel.judge(asked), len(samples), reward.panel.repeats
    found = {name: _repeats(verdicts[:count], name, repeats) for name in _EDIT}
    return found | {name: _repeats(verdicts[count:], name, repeats) for name in _PICTURE}


_OF_PAIRS: Mapping[str, Column] = {
    **{name: Column(0.0, 10.0) for name in ("sc", "pq", "overall")},
    **{name: Column(0.0, 10.0, diagnostic=True) for name in (*_EDIT, *_PICTURE)},
}


class EditScore(JudgeReward):
    """EditScore (arXiv 2509.23909): VIEScore by judges that were fine-tuned for it. They score from 0 to 25, divided by 2.5
    here. Columns, each 0 to 10:

    ``sc`` = min(success, restraint), ``pq`` = min(naturalness, cleanness), ``overall`` = sqrt(sc pq). Each is computed for every
    answer, and then averaged. The four sub-scores are diagnostics. The published code samples with temperature 0.7 (and top-p 0.9,
    top-k 20, which are the server's here) and averages 1 to 8 answers.

    Prompt and formula: VectorSpaceLab/EditScore (Apache-2.0), with the labels of images that its vLLM client writes.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.EditScore(judge=judge).columns)[:3]
        ['sc', 'pq', 'overall']
    """

    kind: Literal["editscore"] = "editscore"
    average: Literal["last", "first"] = "last"
    """``last``: the mean of the answers' overall scores; ``first``: the overall score of the answers' mean ``sc`` and ``pq``."""

    version = 2
    columns: ClassVar[Mapping[str, Column]] = _OF_PAIRS
    rubrics: ClassVar[tuple[str, ...]] = ("editscore-edit", "editscore-picture")
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("editscore-edit", 2), ("editscore-picture", 1))
    needs_source = True

    @property
    def settings(self) -> str:
        """The value of ``average``."""
        return f"average {self.average}"

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. Raises ValueError if a task has no source image."""
        given = {name: part / 2.5 for name, part in _pairs(self, samples, self.rubrics, label="<img{}>: ").items()}
        sc, pq = (given[one].minimum(given[other]) for one, other in (_EDIT, _PICTURE))
        overall = (sc * pq).sqrt().mean(dim=1) if self.average == "last" else (sc.mean(dim=1) * pq.mean(dim=1)).sqrt()
        scores = {"sc": sc.mean(dim=1), "pq": pq.mean(dim=1), "overall": overall}
        return {name: part.float() for name, part in (scores | {name: part.mean(dim=1) for name, part in given.items()}).items()}


class SpatialReward(JudgeReward):
    """SpatialReward (arXiv 2602.07458): a Qwen3-VL-8B that first names the edited regions, and then scores as EditScore does,
    from 0 to 25, divided by 2.5. Columns, each 0 to 10:

    ``sc`` = 0.6 success + 0.4 restraint, ``pq`` = 0.5 naturalness + 0.5 cleanness, ``overall`` = sc^0.8 pq^0.2, the mean over the
    answers. The published reward is ``overall`` / 10. The four sub-scores are diagnostics.

    Prompt, weights and formula: lorangan-ddup/SpatialReward (its model is Apache-2.0), whose question about the image has doubled
    braces. The other SpatialReward of public code (LivingFutureLab/SpatialReward) scores text-to-image with detectors.

    Example::

        >>> judge = {"kind": "endpoint", "model": "SpatialReward-8B", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.SpatialReward(judge=judge).columns)[:3]
        ['sc', 'pq', 'overall']
    """

    kind: Literal["spatialreward"] = "spatialreward"

    columns: ClassVar[Mapping[str, Column]] = _OF_PAIRS
    rubrics: ClassVar[tuple[str, ...]] = ("spatial-edit", "spatial-picture")
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("spatial-edit", 2), ("spatial-picture", 1))
    needs_source = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. Raises ValueError if a task has no source image."""
        given = {name: part / 2.5 for name, part in _pairs(self, samples, self.rubrics, regions=True).items()}
        sc = 0.6 * given["success"] + 0.4 * given["restraint"]
        pq = 0.5 * given["naturalness"] + 0.5 * given["cleanness"]
        scores = {"sc": sc, "pq": pq, "overall": sc**0.8 * pq**0.2, **given}
        return {name: part.mean(dim=1).float() for name, part in scores.items()}


_AXES = ("alignment", "coherence", "style")
_NUMBER = r"([0-9]{1,3}(?:\.[0-9]{1,20})?)"


class UnifiedReward(JudgeReward):
    """UnifiedReward (arXiv 2503.05236) and UnifiedReward-Edit, fine-tuned Qwen-VLs that score images and edits. Columns, 0 to 1:

    For ``protocol`` ``axes`` (UnifiedReward-2.0): ``alignment``, ``coherence`` and ``style``, from answers of 1 to 5, divided by 5.
    For ``point`` (UnifiedReward 1.0, UnifiedReward-qwen-7b): ``final``, from 1 to 5, divided by 5, as Flow-GRPO does. For ``edit``
    (UnifiedReward-Edit): ``success``, ``restraint``, ``naturalness`` and ``cleanness``, from 0 to 25, divided by 25. The authors
    publish no formula that combines the columns of one protocol: choose one with ``combine``.

    Prompts: CodeGoat24/UnifiedReward (its models are MIT). Flow-GRPO's prompt for 1.0 leaves the list of elements out, and begins
    with the text ``<image>``.

    Example::

        >>> judge = {"kind": "endpoint", "model": "UnifiedReward", "base_url": "http://127.0.0.1:8080/v1"}
        >>> list(retouch.rewards.UnifiedReward(judge=judge, protocol="edit").columns)
        ['success', 'restraint', 'naturalness', 'cleanness']
    """

    kind: Literal["unifiedreward"] = "unifiedreward"
    protocol: Literal["axes", "point", "edit"] = "axes"
    """The questions of the model: ``axes`` and ``point`` for text to image, ``edit`` for edits."""

    rubrics: ClassVar[tuple[str, ...]] = ("unified-axes", "unified-point", "unified-edit", "unified-picture")

    @property
    def columns(self) -> Mapping[str, Column]:  # type: ignore[override]
        """The columns of the protocol."""
        return dict.fromkeys({"axes": _AXES, "point": ("final",), "edit": (*_EDIT, *_PICTURE)}[self.protocol], Column(0.0, 1.0))

    @property
    def questions(self) -> tuple[tuple[str, int], ...]:  # type: ignore[override]
        """The questions of the protocol."""
        edit = (("unified-edit", 2), ("unified-picture", 1))
        return edit if self.protocol == "edit" else ((f"unified-{self.protocol}", 1),)

    @property
    def settings(self) -> str:
        """The protocol."""
        return self.protocol

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. Raises ValueError for ``edit`` if a task has no source image."""
        if self.protocol == "edit":
            given = _pairs(self, samples, ("unified-edit", "unified-picture"))
            return {name: (part.mean(dim=1) / _TOP).float() for name, part in given.items()}
        patterns = tuple((name, rf"{name.title()} Score \(1-5\):\W{{0,9}}{_NUMBER}") for name in _AXES)
        form = PatternForm(patterns if self.protocol == "axes" else (("final", rf"Final Score:\W{{0,9}}{_NUMBER}"),), 1, 5)
        name = f"unified-{self.protocol}"
        verdicts = self.panel.judge([Prompt("", (judged_image(one), _asked(name, one)), form, True) for one in samples])
        return {column: means(verdicts, column) / 5 for column in self.columns}

    def task_problems(self, path: str, tasks: TaskFacts) -> Iterator[str]:
        """Yield a message if the tasks of ``edit`` have no source images."""
        yield from super().task_problems(path, tasks)
        if self.protocol == "edit" and not tasks.has_source:
            yield f"{path}.protocol: edit compares with a source image, but {tasks.path}.kind {tasks.kind!r} has none; use axes"


_ASPECTS = ("text_faithfulness", "image_faithfulness", "visual_quality", "text_rendering")
_TITLES = ("Text Faithfulness", "Image Faithfulness", "Physical and Visual Quality", "Text Rendering")


class RationalRewards(JudgeReward):
    """RationalRewards (TIGER-Lab), a Qwen3-VL-8B that criticises an edit before it scores it from 1 to 4. Columns:

    ``text_faithfulness``, ``image_faithfulness``, ``visual_quality``, each 1 to 4. ``text_rendering``, 1 to 4, a diagnostic: NaN if
    the edit asks for no text. ``rationalrewards``, 0 to 1: (mean - 1) / 3 of text faithfulness, visual quality and, if there is
    one, text rendering. That is the reward of the published training code, without the image's faithfulness; its evaluation code
    adds all four, with 2.5 for a missing one.

    Prompt and formula: TIGER-AI-Lab/RationalRewards (its models are Apache-2.0), for RationalRewards-8B-Edit. It samples with
    temperature 0.1. No question about a single image is published for RationalRewards-8B-T2I, so tasks need a source image.

    Example::

        >>> judge = {"kind": "endpoint", "model": "RationalRewards-8B-Edit", "base_url": "http://127.0.0.1:6868/v1"}
        >>> list(retouch.rewards.RationalRewards(judge=judge).columns)[-1]
        'rationalrewards'
    """

    kind: Literal["rationalrewards"] = "rationalrewards"

    columns: ClassVar[Mapping[str, Column]] = {
        **{name: Column(1.0, 4.0) for name in _ASPECTS[:3]},
        "text_rendering": Column(1.0, 4.0, diagnostic=True),
        "rationalrewards": Column(0.0, 1.0),
    }
    rubrics: ClassVar[tuple[str, ...]] = ("rational-system", "rational-edit")
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("rational-edit", 2),)
    needs_source = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column, (b,), float32. Raises ValueError if a task has no source image."""
        import torch

        section = (
            r"(?ms)^\W{{0,9}}{}\.\W{{0,9}}{}(?:(?!^\W{{0,9}}[1-4]\.\W{{0,9}}(?:{})).){{0,9000}}?^\W{{0,9}}Score:[ \[*]{{0,9}}{}"
        )
        number = rf"({_NUMBER[1:-1]}|N/A)"
        patterns = tuple(
            (name, section.format(k, title, "|".join(_TITLES), number if name == "text_rendering" else _NUMBER))
            for k, (name, title) in enumerate(zip(_ASPECTS, _TITLES, strict=True), start=1)
        )
        form, asked = PatternForm(patterns, 1, 4, max_tokens=2048), []
        for sample in samples:
            first, second, third = published("rational-edit").split("<image>")
            first = first.replace("{instruction}", plain(sample.task.instruction))
            parts = (first, source_image(sample.task), second, judged_image(sample), third)
            asked.append(Prompt(published("rational-system"), parts, form, True))
        verdicts = self.panel.judge(asked)
        given = {name: _repeats(verdicts, name, self.panel.repeats) for name in _ASPECTS}
        rated = torch.stack([given["text_faithfulness"], given["visual_quality"], given["text_rendering"]])
        overall = (rated.nanmean(dim=0) - 1) / 3
        overall[given["text_faithfulness"].isnan()] = NAN  # no answer
        scores = {name: part.mean(dim=1) for name, part in given.items()} | {"rationalrewards": overall.mean(dim=1)}
        return {name: part.float() for name, part in scores.items()}


class VQAScore(OneTokenReward):
    """VQAScore (arXiv 2404.01291): the probability that a visual question answering model says Yes when it is asked whether the
    image shows the prompt. It needs log-probabilities, or repeated answers.

    Column ``vqascore``, 0 to 1: p(Yes) of the first token, not divided by p(Yes) + p(No).

    Question and formula: linzhiqiu/t2v_metrics (Apache-2.0), whose own model is CLIP-FlanT5, published as a pickle of a class that
    transformers does not have; it asks Qwen-VLs, GPT-4o and others the same question.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.VQAScore(judge=judge).columns)
        ['vqascore']
    """

    kind: Literal["vqascore"] = "vqascore"

    columns: ClassVar[Mapping[str, Column]] = {"vqascore": Column(0.0, 1.0)}
    rubrics: ClassVar[tuple[str, ...]] = ("vqascore",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("vqascore", 1),)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32."""
        words = {"No": 0.0, "Yes": 1.0}
        chosen = self.form("vqascore", words)
        form = ProbabilityForm("vqascore", words, self.min_mass) if self.by == "probability" else chosen
        prompts = [Prompt("", (judged_image(sample), _asked("vqascore", sample)), form, True) for sample in samples]
        return {"vqascore": means(self.panel.judge(prompts), "vqascore")}


class DeQAReward(OneTokenReward):
    """DeQA's score of an image's technical quality (arXiv 2501.11561): the judge continues "The quality of the image is", and the
    probabilities of excellent, good, fair, poor and bad give the expected level. The instruction is not shown. It needs
    log-probabilities, and a server that continues an answer (vLLM, SGLang) or a judge in this process.

    Column ``deqa``, 1 to 5: the expected level, bad is 1 and excellent is 5.

    Question and formula: zhiyuanyou/DeQA-Score (MIT). Its model, a fine-tuned mPLUG-Owl2, is published as pickles of a class that
    needs remote code, so it cannot be loaded, and no judge here gives its scores: this is its question to another model.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> retouch.rewards.DeQA(judge=judge).columns["deqa"].high
        5.0
    """

    kind: Literal["deqa"] = "deqa"
    by: Literal["probability"] = "probability"
    """The first token's log-probabilities are the only way."""

    columns: ClassVar[Mapping[str, Column]] = {"deqa": Column(1.0, 5.0)}
    rubrics: ClassVar[tuple[str, ...]] = ("deqa",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("deqa", 1),)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32."""
        form = self.form("deqa", {"bad": 1.0, "poor": 2.0, "fair": 3.0, "good": 4.0, "excellent": 5.0})
        begins = "The quality of the image is"
        parts = [(f"{published('deqa')}\n", judged_image(sample)) for sample in samples]
        return {"deqa": means(self.panel.judge([Prompt("", part, form, True, begins) for part in parts]), "deqa")}


# None that ask a judge: `edit_caption` is one, and would contain itself.
_IN_PROCESS = {kind: path for kind, path in wings.of_set("reward").items() if path.startswith("retouch_rewards.")}
_INNER = Kinds("reward", {**SINGLE, **_IN_PROCESS})


class EditCaptionReward(JudgeReward):
    """A text-to-image reward for edits: a vision-language model sees the source image and the instruction, and describes the image
    that the edit should give; ``of`` scores the edited image for this description. So an edit is scored without a reward model for
    edits.

    The columns are those of ``of``. The model is asked once for each task of a call, never about an edited image; the estimate of a
    run's calls counts one for each image, which is the most. With ``n_evals`` above 1, a score is the mean over as many
    descriptions. A description names little of what must stay unchanged: combine this reward with one that compares with the
    source, such as ``dino`` or ``lpips``. The prompt is Retouch's own.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.EditCaption(judge=judge, of={"kind": "hpsv3"}).columns)
        ['hpsv3']
    """

    kind: Literal["edit_caption"] = "edit_caption"
    of: Annotated[RewardSection, _INNER]
    """The reward that scores the image for the description, a text-to-image reward in this process, such as ``hpsv3``,
    ``pickscore`` or ``clip``; without the keys ``combine`` and ``max_missing``."""

    rubrics: ClassVar[tuple[str, ...]] = ("edit-caption",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("edit-caption", 1),)
    needs_source = True

    _inner: Any = PrivateAttr(default=None)

    @field_serializer("of")
    def _part(self, of: RewardSection) -> dict[str, Any]:
        """The wrapped reward as JSON, without the keys ``combine`` and ``max_missing``, which belong to this reward."""
        return {key: value for key, value in _INNER.document(of).items() if key not in ("combine", "max_missing")}

    @property
    def columns(self) -> Mapping[str, Column]:  # type: ignore[override]
        """The columns of ``of``."""
        return self.of.known_columns() or {}

    @property
    def inner(self) -> Reward:
        """The reward that scores, built at the first use if ``build`` has not built it."""
        if self._inner is None:
            self._inner = self.of.build()
        inner: Reward = self._inner
        return inner

    @property
    def settings(self) -> str:
        """The kind and the fingerprint of ``of``."""
        return f"{self.of.name} {getattr(self.inner, 'fingerprint', '')}"

    def build(
        self,
        *,
        device: torch.device | str = "cpu",
        clients: JudgeClients | None = None,
        keep: Callable[[Reward], Reward] = unchanged,
    ) -> Reward:
        """Return the reward with an open client and the loaded reward ``of``."""

        def ready(reward: Reward) -> Reward:
            assert isinstance(reward, EditCaptionReward)
            reward._inner = self.of.build(device=device)
            return keep(reward)

        return super().build(device=device, clients=clients, keep=ready)

    def close(self) -> None:
        """Close the client's connections and those of ``of``."""
        super().close()
        close(self._inner)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return each column of ``of``, (b,), float32; NaN without a description. Raises ValueError if a task has no source."""
        import torch

        tasks = {sample.task.id: sample.task for sample in samples}
        asked = [
            Prompt(rubric("edit-caption"), (quoted("Instruction", task.instruction), "Picture:", source_image(task)), TextForm())
            for task in tasks.values()
        ]
        answers = dict(zip(tasks, (verdict.answers for verdict in self.panel.judge(asked)), strict=True))
        scores = {name: torch.full((self.panel.repeats, len(samples)), NAN) for name in self.columns}
        for repeat in range(self.panel.repeats):
            texts = [answers[sample.task.id][repeat] for sample in samples]
            rows = [row for row, answer in enumerate(texts) if answer.scores]
            described = [
                replace(samples[row], task=replace(samples[row].task, instruction=texts[row].text.strip())) for row in rows
            ]
            for name, column in (self.inner(described) if rows else {}).items():
                scores[name][repeat, rows] = column
        return {name: column.mean(dim=0) for name, column in scores.items()}

    def problems(self, path: str, prefix: str, run: RunFacts) -> Iterator[str]:
        """Yield those of every judge and of ``of``, and a message if ``of`` compares with a source image or has keys of this
        reward."""
        yield from super().problems(path, prefix, run)
        yield from self.of.problems(f"{path}.of", prefix, run)
        if self.of.needs_source:
            yield f"{path}.of.kind: {self.of.name} scores edits; use it alone, or give a text-to-image reward, such as hpsv3"
        if self.of.model_fields_set & {"combine", "max_missing"}:
            yield f"{path}.of: combine and max_missing belong to edit_caption; move them up, next to `of`"

    def loaded_models(self) -> Iterator[LoadedModel]:
        """Yield the models of the judge and of ``of`` in this process."""
        yield from super().loaded_models()
        yield from self.of.loaded_models()

    def changeable_paths(self, path: str) -> Iterator[str]:
        """Yield the changeable paths of the reward, of its judge's section and of ``of``."""
        yield from super().changeable_paths(path)
        yield from self.of.changeable_paths(f"{path}.of")
