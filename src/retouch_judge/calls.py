"""The number and the cost of the questions that a run asks its judges.

The numbers are upper bounds, except for retries after errors: a question whose answer is in the ledger is not asked again. Tokens
are estimates: 4/3 for an English word, one for every 28 x 28 pixels of an image (as Qwen2.5-VL counts), 150 for an answer with
reasoning.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from retouch.policies.rollout import DenoisingRollout
from retouch.recipe.recipe import Recipe
from retouch_judge.base import JudgeReward, rubric

_TOKENS_PER_WORD = 4 / 3
_PIXELS_PER_TOKEN = 28 * 28
_USUAL_SIDE = 1024
_INSTRUCTION = 40
_REASONED = 150


@dataclass(frozen=True, slots=True)
class Calls:
    """The questions to one judge. ``who``: the judge's model. ``training`` and ``evaluation``: numbers of questions, both 0 if they
    are not known. Tokens and ``dollars``: totals of all questions; ``dollars`` is None without prices, or without the number.
    ``unknown``: the class of a judge that does not declare its questions."""

    path: str
    who: str
    training: int
    evaluation: int
    input_tokens: int
    output_tokens: int
    dollars: float | None
    unknown: str = ""

    def __str__(self) -> str:
        if self.unknown:
            return (
                f"{self.path} asks {self.who}; how many questions is not known: declare them in the class, for example "
                f"{self.unknown}.questions = ((RUBRIC, 1),): the rubric and the number of images of each question about a sample"
            )
        asked = f"{self.path} asks {self.who} {self.training:,} questions in training and {self.evaluation:,} in evaluations"
        tokens = f"about {_short(self.input_tokens)} input tokens and {_short(self.output_tokens)} output tokens"
        return f"{asked}; {tokens}" + ("" if self.dollars is None else f", about ${self.dollars:,.2f}")


def judge_calls(recipe: Recipe, *, steps: Sequence[int], heldout: int) -> list[Calls]:
    """The questions to each judge, from the recipe alone, before the run starts.

    ``steps``: number of steps of each phase. ``heldout``: number of tasks of an evaluation.

    These count as evaluation: the evaluations before, during and after the run, the evaluation of the tasks' own targets, the best
    of k, the guided sampling, and the measurements of ``watch``.
    """
    every = recipe.eval.every
    evaluated = heldout * (3 + ((sum(steps) - 1) // every if every else 0) + recipe.eval.best_of_k)
    if recipe.eval.guided_k and isinstance(recipe.rollout, DenoisingRollout):
        chain = recipe.eval.num_steps or recipe.rollout.num_steps
        # The last step has no candidates. Its image is the best one of the step before, whose answer is known.
        evaluated += heldout * max(1, recipe.eval.guided_k * (chain - 1))
    seen = canaries = 0  # images and canaries in all measurements of ``watch``
    if (watch := recipe.watch) is not None:
        looks = 1 + sum(steps) // watch.every
        seen, canaries = looks * min(watch.tasks, heldout), looks * (0 if watch.canaries is None else watch.canaries.count)
    calls = []
    for path, _, part in recipe.reward.parts():
        if not isinstance(part, JudgeReward):
            continue
        trained = 0  # samples in training; if those of a group are compared, each counts once per other sample
        for phase, count in zip(recipe.resolved_phases(), steps, strict=True):
            if not phase.imitates:
                refill = phase.rollout.refill
                rounds = phase.most_turns + (phase.most_turns > 1) if refill is None else 1 + refill.rounds
                trained += count * rounds * phase.rows * (phase.group_size - 1 if part.compares_groups else 1)
        calls.append(_calls(recipe, path, part, trained=trained, evaluated=evaluated + seen + canaries))
    if watch is not None and watch.judge is not None:
        parts = watch.judge.reward.parts("watch.judge.reward")
        judges = [(path, part) for path, _, part in parts if isinstance(part, JudgeReward)]
        calls += [_calls(recipe, path, part, trained=0, evaluated=seen) for path, part in judges]
    return calls


def _calls(recipe: Recipe, path: str, part: JudgeReward, *, trained: int, evaluated: int) -> Calls:
    if part.compares_groups:
        evaluated = 0  # a held-out task has one image, so there is nothing to compare
    questions = part.questions
    asked = len(questions) * part.n_evals
    count = (trained + evaluated) * asked
    height, width = recipe.image_size or (_USUAL_SIDE, _USUAL_SIDE)
    of_image = max(1.0, height * width / _PIXELS_PER_TOKEN)
    rubrics = {about: about if " " in about else rubric(about) for about, _ in questions}  # no file's name has a space
    texts = {about: len(text.split()) * _TOKENS_PER_WORD + _INSTRUCTION for about, text in rubrics.items()}
    read = count * sum(texts[name] + images * of_image for name, images in questions) / max(len(questions), 1)
    written = count * (1 if part.one_token else _REASONED)
    return Calls(
        path=path,
        who=part.judge.description,
        training=trained * asked,
        evaluation=evaluated * asked,
        input_tokens=round(read),
        output_tokens=written,
        dollars=part.judge.cost(input_tokens=read, output_tokens=written) if questions else None,
        unknown="" if questions else type(part).__name__,
    )


def _short(count: int) -> str:
    """12345678 as 12.3 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
