"""What a judge's tokens cost."""

from dataclasses import dataclass

_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Prices:
    """Of a million tokens that are read, and that are written, in any currency. ValueError: below 0."""

    input: float
    output: float

    def __post_init__(self) -> None:
        if not (self.input >= 0 and self.output >= 0):
            raise ValueError(f"{self}: a price is 0 or more")

    def of(self, *, input_tokens: int, output_tokens: int) -> float:
        """What so many tokens cost."""
        return (self.input * input_tokens + self.output * output_tokens) / _MILLION
