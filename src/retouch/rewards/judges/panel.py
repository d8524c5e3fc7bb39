"""The engine that all judges share: every prompt is asked ``repeats`` times, and a score that any repeat misses is missing."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.rewards.closing import close
from retouch.rewards.judges.answers.forms import Form
from retouch.rewards.judges.rubrics import fingerprint, rubric
from retouch.rewards.vlm.asking import Answer, Asker, Part, Question
from retouch.types import Sample, Scores

NAN = float("nan")
_MOST_CALLS = 256


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """What is asked of one sample: a rubric, what is shown after it (the judged picture last), and the form of an answer."""

    rubric: str
    parts: tuple[Part, ...]
    form: Form


@dataclass(frozen=True, slots=True, eq=False)
class Verdict:
    """What the judge said of one prompt. ``scores``: each name's values over the repeats, (n,), NaN where a repeat is missing."""

    scores: Mapping[str, Float[Tensor, " n"]]
    answers: tuple[Answer, ...]

    def mean(self, name: str) -> Float[Tensor, ""]:
        """The mean over the repeats; NaN where one is missing."""
        return self.scores[name].mean() if name in self.scores else torch.tensor(NAN)


class Panel:
    """``repeats`` answers to each prompt, at ``temperature``, with the seeds ``seed``, ``seed + 1`` and so on.

    The seeds do not depend on the sample or its place, so the order of samples changes no score. ValueError: settings out of range.
    """

    def __init__(self, asker: Asker, *, repeats: int = 1, temperature: float = 0.0, seed: int = 0) -> None:
        if repeats < 1 or not 0 <= temperature <= 2 or not 0 <= seed < 2**30:
            raise ValueError(
                f"repeats {repeats}, temperature {temperature}, seed {seed}: give at least one repeat, a temperature from 0 to 2, "
                "and a seed from 0 to 2^30"
            )
        self.asker = asker
        self.repeats = repeats
        self.temperature = temperature
        self.seed = seed

    @property
    def identity(self) -> str:
        """Who answers, how often, and at which temperature and seeds."""
        return f"{self.asker.identity}; {self.repeats} answers at temperature {self.temperature:g}, seeds from {self.seed}"

    def through(self, wrap: Callable[[Asker], Asker]) -> "Panel":
        """The same panel, asking through a wrapper of its asker."""
        return Panel(wrap(self.asker), repeats=self.repeats, temperature=self.temperature, seed=self.seed)

    def judge(self, prompts: Sequence[Prompt]) -> list[Verdict]:
        """A verdict each, in order; all questions are asked at once."""
        questions = [
            Question(prompt.rubric, prompt.parts, prompt.form, seed=self.seed + repeat, temperature=self.temperature)
            for prompt in prompts
            for repeat in range(self.repeats)
        ]
        answers = self.asker.ask(questions)
        assert len(answers) == len(questions)
        return [_verdict(answers[k : k + self.repeats]) for k in range(0, len(answers), self.repeats)]

    def close(self) -> None:
        """Let go of the asker's connections."""
        close(self.asker)


class OfPanel(ABC):
    """What all judges have: the panel that they ask, and a thread for each call that is under way. ``rubrics``: the files that they
    may show it; ``settings``: what else of their arguments decides a score.
    """

    rubrics: tuple[str, ...] = ()

    def __init__(self, panel: Panel, *, settings: str = "") -> None:
        self.panel = panel
        self.settings = settings
        self._calls = ThreadPoolExecutor(max_workers=_MOST_CALLS, thread_name_prefix="judge-call")

    @abstractmethod
    def __call__(self, samples: Sequence[Sample]) -> Scores: ...

    def submit(self, samples: Sequence[Sample]) -> "Future[Scores]":
        """Judge while the caller goes on; calls may overtake each other."""
        return self._calls.submit(self, samples)

    @property
    def fingerprint(self) -> str:
        """Who is asked, by which rubrics."""
        shown = f"rubrics {fingerprint(*(rubric(name) for name in self.rubrics))}" if self.rubrics else ""
        return "; ".join(part for part in (self.panel.identity, shown, self.settings) if part)

    def close(self) -> None:
        """End the threads, and let go of the panel's connections."""
        self._calls.shutdown(wait=True, cancel_futures=True)
        self.panel.close()


def _verdict(answers: Sequence[Answer]) -> Verdict:
    names = {name for answer in answers for name in answer.scores}
    scores = {name: torch.tensor([answer.scores.get(name, NAN) for answer in answers], dtype=torch.float64) for name in names}
    return Verdict(scores, tuple(answers))
