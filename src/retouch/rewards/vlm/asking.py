"""What goes to a judge and what comes back: the seam between rewards, which phrase questions, and askers, which get them answered.

An asker may be a client of an endpoint, a model in this process, or a wrapper that keeps answers or shares a budget. It never
raises for one question's sake: an answer that cannot be had is an ``Answer`` without scores.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from PIL.Image import Image

from retouch.rewards.judges.answers.forms import Form

Part: TypeAlias = str | Image


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One request. ``rubric`` is the system's message; ``parts`` follow in order, the picture that is judged last.

    So the questions about one task share everything but their last part, and a server that caches prefixes computes it once.
    ``form`` says what an answer may be. ``seed`` and ``temperature`` are sent and recorded.
    """

    rubric: str
    parts: tuple[Part, ...]
    form: Form
    seed: int
    temperature: float


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What became of a question. ``scores``: by the form's names, empty where no answer is usable; ``fault`` then says why.

    ``text``: the answer as it was given, for the record. ``seed``: of the attempt that was kept. ``seconds``: from the question to
    its end, with pauses. ``faults``: why the attempts before the last one failed. The tokens are those of all attempts together;
    ``cost``: what these cost, None where no price is known.
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
class Asker(Protocol):
    """Gets questions answered, in their order. ``identity`` names the model and the settings that could change an answer, and not
    where it is asked: the same model at another address is the same judge."""

    identity: str

    def ask(self, questions: Sequence[Question]) -> list[Answer]: ...
