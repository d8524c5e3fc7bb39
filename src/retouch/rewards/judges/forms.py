"""The forms an answer may have: scores as JSON, or one of a few words by its log-probability. Each reads a reply or abstains."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from retouch.rewards.judges.reading import read_scores
from retouch.rewards.judges.scales import Scale
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
        """The JSON schema of an answer; None where the answer is a word."""
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
        if len({_spelling(word) for word in self.values}) != len(self.values) or len(self.values) < 2:
            raise ValueError(f"the words {list(self.values)}: give two or more that differ in their letters")
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


def _spelling(token: str) -> str:
    return token.strip(" \n\t▁Ġ").lower()
