"""The forms an answer may have: scores as JSON, one of a few words, or their probabilities. Each reads a reply or abstains."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from retouch.rewards.judges.answers.reading import read_scores
from retouch.rewards.judges.answers.scales import Scale
from retouch.types import Json


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as the wire brought it. ``first``: tokens that could have come first, with log-probabilities, where asked for."""

    text: str
    finished: str
    refused: bool = False
    first: Mapping[str, float] = field(default_factory=dict)


class Form(Protocol):
    """What may be answered."""

    @property
    def max_tokens(self) -> int:
        """After how many tokens the judge is cut off."""
        ...

    def read(self, reply: Reply) -> dict[str, float] | None:
        """The scores, or None where the reply is not usable."""
        ...

    def schema(self) -> dict[str, Json] | None:
        """The JSON schema of an answer; None where its first token's log-probabilities are wanted."""
        ...

    def choices(self) -> tuple[str, ...]:
        """Every answer that there can be, for servers that choose among given ones; none where these are not few."""
        ...


@dataclass(frozen=True, slots=True)
class ScoresForm:
    """A number for each name, on its scale, after a ``reasoning`` where that is wanted.

    A reply that was cut off, refused or filtered, or that ``read_scores`` cannot read, is not usable.
    """

    scales: Mapping[str, Scale]
    reasoning: bool = True
    max_tokens: int = 1024

    def read(self, reply: Reply) -> dict[str, float] | None:
        """A number for every name, or None."""
        if reply.refused or reply.finished != "stop":
            return None
        return read_scores(reply.text, self.scales)

    def schema(self) -> dict[str, Json]:
        """An object of exactly these keys, the reasoning first, so that the numbers come after it."""
        properties: dict[str, Json] = {"reasoning": {"type": "string"}} if self.reasoning else {}
        for name, scale in self.scales.items():
            kind = "integer" if scale.whole else "number"
            properties[name] = {"type": kind, "minimum": scale.low, "maximum": scale.high}
        return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}

    def choices(self) -> tuple[str, ...]:
        """None: the numbers stand in JSON, often after a reasoning."""
        return ()


@dataclass(frozen=True, slots=True)
class ChoiceForm:
    """The value of the one word that was answered: a vote, of which repeats make a mean, where there are no log-probabilities.

    ``values`` as for ``WordForm``. A reply is usable where it is nothing but a legal word, or JSON of the schema with one.
    ValueError: fewer than two words, or two that are spelled alike.
    """

    name: str
    values: Mapping[str, float]
    max_tokens: int = 32

    def __post_init__(self) -> None:
        _check_words(self.values)

    def read(self, reply: Reply) -> dict[str, float] | None:
        """The word's value, or None."""
        if reply.refused or reply.finished != "stop":
            return None
        values = {_spelling(word): value for word, value in self.values.items()}
        text = reply.text.strip()
        if text.startswith("{"):
            try:
                given = json.loads(text)
            except ValueError:
                return None
            text = given["answer"] if isinstance(given, dict) and list(given) == ["answer"] else ""
        word = _spelling(text.removesuffix(".")) if isinstance(text, str) else ""
        return {self.name: values[word]} if word in values else None

    def schema(self) -> dict[str, Json]:
        """An object with the word as its ``answer``."""
        answer: dict[str, Json] = {"answer": {"type": "string", "enum": list(self.values)}}
        return {"type": "object", "properties": answer, "required": ["answer"], "additionalProperties": False}

    def choices(self) -> tuple[str, ...]:
        """The words."""
        return tuple(self.values)


@dataclass(frozen=True, slots=True)
class WordForm:
    """The expected value of the answer's first token over a few words: sum of p(word) value / sum of p(word) (Edit-R1's digits).

    ``values``: word to value, "5" to 5.0 or "yes" to 1.0; case and spaces around a token do not matter. The legal words must hold
    at least ``min_mass`` of the probability, or the judge was about to say something else and the reply is not usable.
    ValueError: fewer than two words, two that are spelled alike, or a mass that is none.
    """

    name: str
    values: Mapping[str, float]
    min_mass: float = 0.5
    max_tokens: int = 1

    def __post_init__(self) -> None:
        _check_words(self.values)
        if not 0 < self.min_mass <= 1:
            raise ValueError(f"min_mass {self.min_mass}: give a probability above 0 and up to 1")

    def read(self, reply: Reply) -> dict[str, float] | None:
        """The expected value, or None."""
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
        """A word has none."""
        return None

    def choices(self) -> tuple[str, ...]:
        """None: what the judge would have said freely is what counts, and how much of it is legal."""
        return ()


def _check_words(values: Mapping[str, float]) -> None:
    if len({_spelling(word) for word in values}) != len(values) or len(values) < 2:
        raise ValueError(f"the words {list(values)}: give two or more that differ in their letters")


def _spelling(token: str) -> str:
    return token.strip(" \n\t▁Ġ").lower()
