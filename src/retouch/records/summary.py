"""The summary of a finished run, and the paired change of two evaluations."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from retouch.records.shapes import SUMMARY, checked
from retouch.types import Json


def split_label(split: str) -> str:
    """Return the name of the tasks on which a run is evaluated, given its ``eval.split``: "trained-on" or "held-out"."""
    return "trained-on" if split == "train" else "held-out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The mean score before and after training, and the numbers to compare it with.

    ``column``: the name of the score ("overall"). ``on``: a description of the tasks ("held-out tasks of complexity 2 and 3"). All
    scores are in the column's unit. ``before``, ``after``: means over the tasks with a score both before and after training.
    ``ceiling``: the score of the tasks' targets. ``best_of_k``: the mean over tasks of the best of ``k`` samples of the base
    policy. ``gain_ci95``: the 95 % confidence interval of after - before, as (low, high). ``independent_tasks``: the number of
    these tasks, where tasks with the same source image count once; ``needed_tasks``: how many it would take for an interval that
    excludes 0, if the gain and its spread between tasks stayed the same. None means not measured.
    ``lower_is_better``: whether a lower score is better, so that a negative gain is an improvement. ``cost``: amounts by name, for
    people to read.
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
    independent_tasks: int | None = None
    needed_tasks: int | None = None
    lower_is_better: bool = False
    cost: Mapping[str, Json] = field(default_factory=dict)

    @property
    def gain(self) -> float:
        return self.after - self.before

    @property
    def gap_closed(self) -> float | None:
        """(after - before) / (ceiling - before); None without a ceiling that is better than ``before``."""
        if self.ceiling is None or not self.is_better(self.ceiling, self.before):
            return None
        return self.gain / (self.ceiling - self.before)

    def is_better(self, score: float, other: float) -> bool:
        """Whether ``score`` is better than ``other`` in this column."""
        return score < other if self.lower_is_better else score > other

    def to_json(self) -> dict[str, object]:
        """Return the fields, together with ``gain`` and ``gap_closed``."""
        fields = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        return {**fields, "gain": self.gain, "gap_closed": self.gap_closed}

    @classmethod
    def from_json(cls, record: Mapping[str, object]) -> "Summary":
        """Read the result of ``to_json``. Raises ValueError if fields are missing, unknown or of other types."""
        if not isinstance(record, Mapping):
            raise ValueError(f"summary.json contains {type(record).__name__} and no object")
        names = {item.name for item in dataclasses.fields(cls)}
        given = {name: value for name, value in record.items() if name not in ("gain", "gap_closed")}
        missing = [name for name in ("column", "on", "before", "after", "steps") if given.get(name) is None]
        unknown = sorted(set(given) - names)
        if missing or unknown:
            raise ValueError(f"summary.json does not match this version of retouch: missing {missing}, unknown {unknown}")
        interval = checked(SUMMARY, given, "summary.json").pop("gain_ci95", None)
        given["gain_ci95"] = None if interval is None else (interval[0], interval[1])
        return cls(**given)  # type: ignore[arg-type]
