"""Questions to a judge and their answers: the types that rewards, which write questions, and clients, which answer them, share.

A client may call an endpoint, run a model in this process, or wrap another client to store its answers. It raises no error because
of a single question: without a usable answer, it returns an ``Answer`` without scores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from PIL.Image import Image

from retouch.rewards.vlm.forms import Form

Part: TypeAlias = str | Image


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One request. ``rubric`` is the system message; ``parts`` follow in order, the image to judge last.

    So the questions about one task share all parts except the last; a server that caches prefixes computes the shared parts once.
    ``form``: the format of the answer. ``seed`` and ``temperature`` are sent and recorded.
    """

    rubric: str
    parts: tuple[Part, ...]
    form: Form
    seed: int
    temperature: float


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The result of a question. ``scores``: by the form's names; empty if no answer is usable, and ``fault`` then gives the reason.

    ``text``: the raw answer, for the record. ``seed``: the seed of the last attempt. ``seconds``: the total time, including pauses.
    ``faults``: the faults of the attempts before the last one. ``input_tokens`` and ``output_tokens``: totals over all attempts.
    ``cost``: the price of these tokens in dollars, None if it is not known.
    """

    scores: Mapping[str, float] = field(default_factory=dict)
    fault: str = ""
    text: str = ""
    attempts: int = 0
    seed: int = 0
    temperature: float = 0.0
    seconds: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    faults: tuple[str, ...] = ()
    cost: float | None = None


@runtime_checkable
class JudgeClient(Protocol):
    """Answers questions, in their order. ``identity`` names the model and the settings that could change an answer, but not the
    address: the same model at another address is the same judge. Ledgers store answers under ``identity``."""

    identity: str

    def ask(self, questions: Sequence[Question]) -> list[Answer]: ...
