"""What rewards and judges exchange: questions, the forms that an answer may have, and answers.

A client may call an endpoint, run a model in this process, or wrap another client to store its answers. It raises no error because
of a single question: without a usable answer, it returns an ``Answer`` without scores. A form is scores as JSON, one of a few
words, or the probabilities of a few words; it parses a reply, or returns None if the reply is not usable.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, runtime_checkable

from PIL.Image import Image

from retouch.types import Json
from retouch_judge.answers import LONGEST, parse, read_scores
from retouch_judge.wording import Scale

Part: TypeAlias = str | Image


_LONGEST_VOTE = 1000  # characters
_LEDGER_PREFIX = "retouch.rewards.judges.forms."


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """A judge's reply. ``finished``: the finish reason (``stop`` for a complete reply). ``first``: the candidates for the first
    token, with log-probabilities, if they were requested."""

    text: str
    finished: str
    refused: bool = False
    first: Mapping[str, float] = field(default_factory=dict)


class Form(Protocol):
    """The format of an answer, and its parser."""

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of an answer."""
        ...

    def read(self, reply: JudgeReply) -> dict[str, float] | None:
        """Return the scores, or None if the reply is not usable."""
        ...

    def schema(self) -> dict[str, Json] | None:
        """Return the JSON schema of an answer, empty for free text; None if the log-probabilities of its first token are read."""
        ...

    def choices(self) -> tuple[str, ...]:
        """Return all possible answers, for servers that constrain an answer to a list; empty if there is no short list."""
        ...


class _KeptForm:
    """A form whose answers ledgers keep under an older name of its class."""

    __slots__ = ()

    @property
    def ledger_name(self) -> str:
        """The form in the names under which ledgers keep answers. It never changes, or kept answers would be asked for again."""
        return f"{_LEDGER_PREFIX}{self!r}"


class _OpenForm:
    """A form without a short list of possible answers, and without a schema unless the class has one."""

    __slots__ = ()

    def schema(self) -> dict[str, Json]:
        """Return no schema: the answer is free text."""
        return {}

    def choices(self) -> tuple[str, ...]:
        """Return no choices."""
        return ()


@dataclass(frozen=True, slots=True)
class ScoresForm(_KeptForm, _OpenForm):
    """A number for each name, on its scale. ``reasoning``: the judge writes its reasoning before the numbers. A reply is not usable
    if it was truncated, refused or filtered, or if ``read_scores`` cannot read it."""

    scales: Mapping[str, Scale]
    reasoning: bool = True
    max_tokens: int = 1024

    def read(self, reply: JudgeReply) -> dict[str, float] | None:
        """Return a number for every name, or None if the reply is not usable."""
        if reply.refused or reply.finished != "stop":
            return None
        return read_scores(reply.text, self.scales)

    def schema(self) -> dict[str, Json]:
        """Return the schema of an object with exactly these keys; the reasoning is first, so that the numbers follow from it."""
        properties: dict[str, Json] = {"reasoning": {"type": "string"}} if self.reasoning else {}
        for name, scale in self.scales.items():
            kind = "integer" if scale.whole else "number"
            properties[name] = {"type": kind, "minimum": scale.low, "maximum": scale.high}
        return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ChoiceForm(_KeptForm):
    """The value of a one-word answer, for endpoints without log-probabilities. The values of repeated questions are averaged.

    ``values``: as in ``WordForm``. A reply is usable if it consists of one allowed word, or is JSON of the schema.
    Raises ValueError for fewer than two words, or if two words have the same spelling (case and spaces do not count).
    """

    name: str
    values: Mapping[str, float]
    max_tokens: int = 32

    def __post_init__(self) -> None:
        _check_words(self.values)

    def read(self, reply: JudgeReply) -> dict[str, float] | None:
        """Return the word's value, or None if the reply is not usable."""
        if reply.refused or reply.finished != "stop":
            return None
        values = {_spelling(word): value for word, value in self.values.items()}
        text = reply.text.strip()
        if len(text) > _LONGEST_VOTE:
            return None
        if text.startswith("{"):
            parsed = parse(text)
            given = parsed[0] if parsed is not None and parsed[1] == len(text) else None
            answer = given["answer"] if isinstance(given, dict) and list(given) == ["answer"] else ""
            text = answer if isinstance(answer, str) else ""
        word = _spelling(text.removesuffix("."))
        return {self.name: values[word]} if word in values else None

    def schema(self) -> dict[str, Json]:
        """Return the schema of an object with the word under the key ``answer``."""
        answer: dict[str, Json] = {"answer": {"type": "string", "enum": list(self.values)}}
        return {"type": "object", "properties": answer, "required": ["answer"], "additionalProperties": False}

    def choices(self) -> tuple[str, ...]:
        """Return the words."""
        return tuple(self.values)


@dataclass(frozen=True, slots=True)
class WordForm(_KeptForm):
    """The expected value of the answer's first token over a few words: sum of p(word) value / sum of p(word), as Edit-R1 (arXiv
    2510.16888) reads digits.

    ``values``: maps words to values, for example "5" to 5.0 or "yes" to 1.0; case and spaces around a token do not matter. The
    allowed words must have at least the probability ``min_mass`` together. With less, the judge was about to write another answer,
    and the reply is not usable. Raises ValueError for fewer than two words, if two words have the same spelling, or if ``min_mass``
    is not above 0 and at most 1.
    """

    name: str
    values: Mapping[str, float]
    min_mass: float = 0.5
    max_tokens: int = 1

    def __post_init__(self) -> None:
        _check_words(self.values)
        if not 0 < self.min_mass <= 1:
            raise ValueError(f"min_mass {self.min_mass}: give a probability above 0 and at most 1")

    def read(self, reply: JudgeReply) -> dict[str, float] | None:
        """Return the expected value, or None if the reply is not usable."""
        if reply.refused or not reply.first:
            return None
        values = {_spelling(word): value for word, value in self.values.items()}
        mass = total = everything = 0.0
        for token, log_prob in reply.first.items():
            if math.isnan(log_prob) or log_prob > 1e-3:
                return None
            probability = math.exp(log_prob)
            everything += probability
            if _spelling(token) in values:
                mass += probability
                total += probability * values[_spelling(token)]
        if everything > 1.01 or mass < self.min_mass:
            return None
        low, high = min(values.values()), max(values.values())
        return {self.name: min(max(total / mass, low), high)}

    def schema(self) -> None:
        """Return None, because the log-probabilities are read."""
        return None

    def choices(self) -> tuple[str, ...]:
        """Return no choices: the answer is not constrained, so that the probability of the allowed words can be read."""
        return ()


@dataclass(frozen=True, slots=True)
class ProbabilityForm(WordForm):
    """The probability that the first token is exactly the last word of ``values``, not divided by that of the other words."""

    def read(self, reply: JudgeReply) -> dict[str, float] | None:
        """Return the probability, 0 if the token is not among the candidates; None if the reply is not usable."""
        if WordForm.read(self, reply) is None:
            return None
        return {self.name: math.exp(reply.first.get(list(self.values)[-1], -math.inf))}


@dataclass(frozen=True, slots=True)
class ListForm(_OpenForm):
    """A JSON object with a number from 0 to ``top`` for each name in the list ``score``, as published editing rewards answer.

    ``regions``: a list ``edit_region`` comes first.
    """

    names: tuple[str, ...]
    top: float
    regions: bool = False
    max_tokens: int = 512

    def read(self, reply: JudgeReply) -> dict[str, float] | None:
        """Return a number for every name, or None if the reply is not usable."""
        return ScoresForm({name: Scale(0, self.top) for name in self.names}).read(reply)

    def schema(self) -> dict[str, Json]:
        """Return the schema of the object."""
        count = len(self.names)
        score: Json = {"type": "array", "items": {"type": "number"}, "minItems": count, "maxItems": count}
        regions: dict[str, Json] = {"edit_region": {"type": "array", "items": {"type": "object"}}} if self.regions else {}
        properties: dict[str, Json] = {**regions, "reasoning": {"type": "string"}, "score": score}
        return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class PatternForm(_OpenForm):
    """Numbers in free text. ``patterns``: for each name a regular expression without an unlimited repeat; its group is the number,
    or N/A for a name without a score. A reply is usable if each is found with one value, from ``low`` to ``high``."""

    patterns: tuple[tuple[str, str], ...]
    low: float
    high: float
    max_tokens: int = 1024

    def read(self, reply: JudgeReply) -> dict[str, float] | None:
        """Return the numbers, or None if the reply is not usable."""
        if reply.refused or reply.finished != "stop" or len(reply.text) > LONGEST:
            return None
        found = {name: set(re.findall(pattern, reply.text)) for name, pattern in self.patterns}
        if any(len(given) != 1 for given in found.values()):
            return None
        scores = {name: float(text) for name, (text,) in found.items() if text != "N/A"}
        return scores if all(self.low <= score <= self.high for score in scores.values()) else None


@dataclass(frozen=True, slots=True)
class TextForm(_OpenForm):
    """A text, of which only the length in characters is a number."""

    max_tokens: int = 256

    def read(self, reply: JudgeReply) -> dict[str, float] | None:
        """Return the length of the text, or None if it is blank, or the reply is not usable."""
        text = reply.text.strip()
        return None if reply.refused or reply.finished != "stop" or not text else {"length": float(len(text))}


def first_tokens(candidates: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Return the log-probability of each text of a first token. The probabilities of candidates with the same text are added, also
    if they are so small that ``math.exp`` rounds them to 0."""
    import numpy

    found: dict[str, float] = {}
    for text, log_prob in candidates:
        found[text] = float(numpy.logaddexp(found.get(text, -math.inf), log_prob))
    return found


def _check_words(values: Mapping[str, float]) -> None:
    if len({_spelling(word) for word in values}) != len(values) or len(values) < 2:
        raise ValueError(f"the words {list(values)}: give two or more words that differ in their letters")


def _spelling(token: str) -> str:
    return token.strip(" \n\t▁Ġ").lower()


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    """One request. ``rubric`` is the system message; ``parts`` follow in order, the image to judge last.

    So the questions about one task share all parts except the last; a server that caches prefixes computes the shared parts once.
    ``form``: the format of the answer. ``seed`` and ``temperature`` are sent and recorded. ``verbatim``: the parts are the input of
    a published model, in its order, without anything between them; without a rubric, there is no system message of ours.
    ``begins``: the answer begins with this text already, and the model continues it.
    """

    rubric: str
    parts: tuple[Part, ...]
    form: Form
    seed: int
    temperature: float
    verbatim: bool = False
    begins: str = ""


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


def quoted_fault(answers: Iterable[tuple[str, str]], *, longest: int = 200) -> str:
    """Quote one of the (fault, text) of answers, if possible one with a text, which is cut after ``longest`` characters; empty if
    none has a fault."""
    fault, text = max(answers, key=lambda answer: (bool(answer[0]), bool(answer[1])), default=("", ""))
    text = " ".join(text.split()) if fault else ""
    return fault + (f": {text[:longest]!r}{'...' * (len(text) > longest)}" if text else "")


@runtime_checkable
class JudgeClient(Protocol):
    """Answers questions, in their order. ``identity`` names the model and the settings that could change an answer, but not the
    address: the same model at another address is the same judge. Ledgers store answers under ``identity``."""

    identity: str

    def ask(self, questions: Sequence[Question]) -> list[Answer]: ...
