"""What a run achieved, in one record: ``summary.json``."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from retouch.types import Json


def standing(split: str) -> str:
    """What the tasks are that a run is judged by, as ``eval.split`` has them: held-out ones, or those that train."""
    return "trained-on" if split == "train" else "held-out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The held-out reward before and after training, and what it stands beside.

    ``column`` and ``on`` say what was measured ("overall", "held-out tasks of complexity 2 and 3"), all of them in its unit.
    ``ceiling``: what the exact target scores. ``best_of_k``: mean over tasks of the best of ``k`` samples of the base.
    ``gain_ci95``: the 95 % interval of after - before, low and high. None: not measured. ``cost``: name to amount, for people.
    """

    column: str
    on: str
    before: float
    after: float
    steps: int
    ceiling: float | None = None
    best_of_k: float | None = None
    k: int | None = None
    gain_ci95: tuple[float, float] | None = None
    cost: Mapping[str, Json] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def gap_closed(self) -> float | None:
        """Share of the way from before to the ceiling that was gone; None without a ceiling above before."""
        if self.ceiling is None or self.ceiling <= self.before:
            return None
        return self.gain / (self.ceiling - self.before)

    def to_json(self) -> dict[str, object]:
        """The fields, with ``gain`` and ``gap_closed``."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {**fields, "gain": self.gain, "gap_closed": self.gap_closed}

    @classmethod
    def from_json(cls, kept: Mapping[str, object]) -> "Summary":
        """The inverse of ``to_json``. ValueError where fields are missing or unknown."""
        names = {item.name for item in dataclasses.fields(cls)}
        given = {name: value for name, value in kept.items() if name not in ("gain", "gap_closed")}
        missing = [name for name in ("column", "on", "before", "after", "steps") if given.get(name) is None]
        unknown = sorted(set(given) - names)
        if missing or unknown:
            raise ValueError(f"summary.json does not fit this version of retouch: missing {missing}, unknown {unknown}")
        interval = given.pop("gain_ci95", None)
        given["gain_ci95"] = None if interval is None else (interval[0], interval[1])  # type: ignore[index]
        return cls(**given)  # type: ignore[arg-type]
