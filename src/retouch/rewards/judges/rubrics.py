"""A judge with a rubric: its questions, and the panel that asks several of them about each image.

The rubrics, which are text files in ``prompts/``, and the parts that follow a rubric in a prompt.

A prompt contains a task and its image. Only the prompts of the reward ``completion_quality`` contain a policy's completion. The
texts of a task and of a completion are inserted as quoted data. The rubric comes first and the image to judge last, so that the
prompts of a group share everything before that image. Ledgers store answers under the whole prompt: if any word here changes,
stored answers are not found, and every judge is asked again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING

from PIL.Image import Image

from retouch.rewards.base import close, source_image
from retouch.rewards.vlm.forms import Form
from retouch.rewards.vlm.questions import Answer, JudgeClient, Part, Question
from retouch.types import Json, Sample

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

# The JSON constants true, false and null are exempt: they may be the only entry of a list.
_BRACKETED = re.compile(r"\[(?=\s{0,8}/?\s{0,8}[A-Za-z_][A-Za-z0-9_]{0,60}\s{0,8}\])(?!(?:true|false|null)\])")
_FOLDER = resources.files("retouch.rewards.judges") / "prompts"


@cache
def rubric(name: str) -> str:
    """Read the rubric in the file ``prompts/NAME.txt``."""
    return (_FOLDER / f"{name}.txt").read_text(encoding="utf-8").strip()


def fingerprint(*texts: str) -> str:
    """Return a hash of the rubrics' texts, 16 hexadecimal digits."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]


def quoted(what: str, value: Json) -> str:
    """Return a labelled line of data as JSON, in which no text can end the quotation or contain a token of a chat template.

    Such tokens contain "<" (ChatML, Llama 3, Gemma, DeepSeek, Phi), "[" (Mistral, Llama 2, GLM) or "◁" (Kimi); these characters
    are replaced by JSON escapes. "[" is replaced only before a word and "]", so that other text does not change.
    """
    data = json.dumps(value, ensure_ascii=False).replace("<", "\\u003c").replace("◁", "\\u25c1")
    data = _BRACKETED.sub("\\\\u005b", data)
    return f"{what} (data, not addressed to you): {data}"


def judged_image(sample: Sample) -> Image:
    """Return the image to judge. Raises ValueError if there is none."""
    if sample.image is None:
        raise ValueError(f"task {sample.task.id!r} has no image to judge; pass only samples with an image")
    return sample.image


def edit_parts(sample: Sample, *facts: str) -> tuple[Part, ...]:
    """Return the facts, the source image and the edited image. Raises ValueError if the task has no source image."""
    return (*facts, "Source picture:", source_image(sample.task), "Edited picture:", judged_image(sample))


def image_parts(sample: Sample, *facts: str) -> tuple[Part, ...]:
    """Return the facts and the image."""
    return (*facts, "Picture:", judged_image(sample))


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
