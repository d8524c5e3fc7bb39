"""How often a run asks its judges, and what that costs: known before it begins, from the recipe alone.

An upper bound but for repeats after faults: answers that a ledger already holds are not asked for again. Tokens are estimates: a
word of English is a token and a third, a picture a token for every 28 x 28 pixels (as Qwen2.5-VL counts), a reasoned answer 150.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from retouch.recipe.judges import AspectsReward, Endpoint, Judge, JudgeReward, WinRateReward
from retouch.recipe.recipe import Recipe
from retouch.recipe.reward_classes import parts_of
from retouch.rewards.judges.rubrics import rubric

_TOKENS_PER_WORD = 4 / 3
_PIXELS_PER_TOKEN = 28 * 28
_USUAL_SIDE = 1024
_INSTRUCTION = 40
_REASONED = 150

# Of each question: its rubric, and how many pictures stand below it.
_QUESTIONS: dict[str, tuple[tuple[str, int], ...]] = {
    "viescore": (("vie-edit", 2), ("vie-picture", 1)),
    "editscore": (("editscore-edit", 2), ("editscore-picture", 1)),
    "complex_edit": (("complex-following", 2), ("complex-preservation", 2), ("complex-quality", 1)),
    "ground": (("ground", 2),),
    "yes": (("yes", 2),),
    "digit": (("digit", 2),),
    "win_rate": (("pair", 3),),
}
_ASPECTS = {"alignment": ("alignment", 2), "quality": ("quality", 1), "identity": ("identity", 2)}
_WORDS = ("yes", "digit", "win_rate")  # answered by one token


@dataclass(frozen=True, slots=True)
class Calls:
    """What one judge is asked. ``training`` and ``evaluation``: questions; tokens in all; ``dollars``: None without prices."""

    path: str
    who: str
    training: int
    evaluation: int
    input_tokens: int
    output_tokens: int
    dollars: float | None

    def __str__(self) -> str:
        asked = f"{self.path} asks {self.who} {self.training:,} questions in training and {self.evaluation:,} in evaluations"
        tokens = f"some {_short(self.input_tokens)} tokens read and {_short(self.output_tokens)} written"
        return f"{asked}; {tokens}" + ("" if self.dollars is None else f", about ${self.dollars:,.2f}")


def judge_calls(recipe: Recipe, *, steps: Sequence[int], heldout: int) -> list[Calls]:
    """What each judge of the recipe is asked in a run whose phases take so many steps; ``heldout``: tasks of an evaluation.

    Evaluations are those before, after and in between, that of the tasks' own targets, the best of k, and the looks of ``watch``.
    """
    every = recipe.eval.every
    evaluated = heldout * (3 + ((sum(steps) - 1) // every if every else 0) + recipe.eval.best_of_k)
    seen, canaries = _looked_at(recipe, sum(steps), heldout)
    calls = [
        _calls(recipe, path, part, trained=_trained(recipe, part, steps), evaluated=evaluated + seen + canaries)
        for path, _, part in parts_of(recipe.reward)
        if isinstance(part, JudgeReward)
    ]
    if recipe.watch is not None and recipe.watch.judge is not None:
        parts = parts_of(recipe.watch.judge.reward, "watch.judge.reward")
        judges = [(path, part) for path, _, part in parts if isinstance(part, JudgeReward)]
        calls += [_calls(recipe, path, part, trained=0, evaluated=seen) for path, part in judges]
    return calls


def _looked_at(recipe: Recipe, steps: int, heldout: int) -> tuple[int, int]:
    """Pictures and canaries of all looks."""
    watch = recipe.watch
    if watch is None:
        return 0, 0
    looks = 1 + steps // watch.every
    return looks * min(watch.tasks, heldout), looks * (0 if watch.canaries is None else watch.canaries.count)


def _trained(recipe: Recipe, part: Judge, steps: Sequence[int]) -> int:
    """Samples judged in training, each counted as often as it meets another where pairs are judged."""
    samples = 0
    for phase, count in zip(recipe.resolved_phases(), steps, strict=True):
        if not phase.imitates:
            samples += count * phase.rows * (phase.group_size - 1 if isinstance(part, WinRateReward) else 1)
    return samples


def _calls(recipe: Recipe, path: str, part: Judge, *, trained: int, evaluated: int) -> Calls:
    if isinstance(part, WinRateReward):
        evaluated = 0  # a held-out task has one picture
    questions = [_ASPECTS[name] for name in part.aspects] if isinstance(part, AspectsReward) else _QUESTIONS[part.kind]
    asked = len(questions) * part.n_evals
    count = (trained + evaluated) * asked
    read = count * sum(_read(recipe, name, pictures) for name, pictures in questions) / len(questions)
    written = count * (1 if part.kind in _WORDS else _REASONED)
    prices = part.judge.prices if isinstance(part.judge, Endpoint) else None
    return Calls(
        path=path,
        who=f"{part.judge.model} at {part.judge.base_url}" if isinstance(part.judge, Endpoint) else part.judge.path,
        training=trained * asked,
        evaluation=evaluated * asked,
        input_tokens=round(read),
        output_tokens=written,
        dollars=None if prices is None else (prices.input * read + prices.output * written) / 1e6,
    )


def _read(recipe: Recipe, name: str, pictures: int) -> float:
    """Tokens of one question."""
    height, width = recipe.image_size or (_USUAL_SIDE, _USUAL_SIDE)
    text = len(rubric(name).split()) * _TOKENS_PER_WORD + _INSTRUCTION
    return text + pictures * max(1.0, height * width / _PIXELS_PER_TOKEN)


def _short(count: int) -> str:
    """12345678 as 12.3 M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return str(count)
