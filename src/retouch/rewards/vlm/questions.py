"""Questions to a judge and their answers: what rewards, which phrase questions, and clients, which get them answered, share.

A client may talk to an endpoint, run a model in this process, or wrap another client to keep its answers. It raises no error
because of one question: where there is no usable answer, it returns an ``Answer`` without scores.
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

    So the questions about one task share everything but their last part, which a server that caches prefixes computes once.
    ``form``: what an answer may be. ``seed`` and ``temperature`` are sent and recorded.
    """

    rubric: str
    parts: tuple[Part, ...]
    form: Form
    seed: int
    temperature: float


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """The end of a question. ``scores``: by the form's names, empty where no answer is usable; ``fault`` then says why.

    ``text``: the raw answer, for the record. ``seed``: of the attempt that was kept. ``seconds``: in all, with pauses. ``faults``:
    why the attempts before the last one failed. The tokens are those of all attempts together; ``cost``: their price in dollars,
    None if it is not known.
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
    """Gets questions answered, in their order. ``identity`` names the model and the settings that could change an answer, but not
    its address: the same model at another address is the same judge. Ledgers keep answers under it."""

    identity: str

    def ask(self, questions: Sequence[Question]) -> list[Answer]: ...
