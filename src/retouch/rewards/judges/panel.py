"""The panel that sends the prompts of a judge: every prompt is sent ``repeats`` times. A score is missing if any repeat misses
it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from retouch.rewards.base import close
from retouch.rewards.vlm.forms import Form
from retouch.rewards.vlm.questions import Answer, JudgeClient, Part, Question

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

NAN = float("nan")
_MOST_CALLS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A question about one sample: a rubric, the parts after it (the image to judge last), and the form of the answer."""

    rubric: str
    parts: tuple[Part, ...]
    form: Form


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """The answers to one prompt. ``scores``: the values of each name in the repeats, (n,), float64, NaN if a repeat is missing."""

    scores: Mapping[str, Float[Tensor, " n"]]
    answers: tuple[Answer, ...]

    def mean(self, name: str) -> Float[Tensor, ""]:
        """Return the mean over the repeats; NaN if one is missing."""
        import torch

        return self.scores[name].mean() if name in self.scores else torch.tensor(NAN)


class Panel:
    """Requests ``repeats`` answers to each prompt, at ``temperature``, with the seeds ``seed``, ``seed + 1`` and so on.

    The seeds do not depend on the sample or its position, so the order of samples does not change any score. ``threads``: executor
    of concurrent calls. Raises ValueError if a setting is out of range.
    """

    def __init__(self, client: JudgeClient, *, repeats: int = 1, temperature: float = 0.0, seed: int = 0) -> None:
        if repeats < 1 or not 0 <= temperature <= 2 or not 0 <= seed < 2**30:
            raise ValueError(
                f"repeats {repeats}, temperature {temperature}, seed {seed}: give at least one repeat, a temperature from 0 to 2, "
                "and a seed from 0 to 2^30 - 1"
            )
        self.client = client
        self.repeats = repeats
        self.temperature = temperature
        self.seed = seed
        self.threads = ThreadPoolExecutor(max_workers=_MOST_CALLS, thread_name_prefix="judge-call")

    @property
    def identity(self) -> str:
        """The client's identity, the number of repeats, the temperature and the seeds; part of the fingerprint of a judge."""
        return f"{self.client.identity}; {self.repeats} answers at temperature {self.temperature:g}, seeds from {self.seed}"

    def judge(self, prompts: Sequence[Prompt]) -> list[Verdict]:
        """Return a verdict for each prompt, in order; all questions are sent to the client in one call."""
        questions = [
            Question(prompt.rubric, prompt.parts, prompt.form, seed=self.seed + repeat, temperature=self.temperature)
            for prompt in prompts
            for repeat in range(self.repeats)
        ]
        answers = self.client.ask(questions)
        assert len(answers) == len(questions)
        return [_verdict(answers[k : k + self.repeats]) for k in range(0, len(answers), self.repeats)]

    def close(self) -> None:
        """Stop the threads, and close the client's connections."""
        self.threads.shutdown(wait=True, cancel_futures=True)
        close(self.client)


def _verdict(answers: Sequence[Answer]) -> Verdict:
    import torch

    names = {name for answer in answers for name in answer.scores}
    scores = {name: torch.tensor([answer.scores.get(name, NAN) for answer in answers], dtype=torch.float64) for name in names}
    return Verdict(scores, tuple(answers))
