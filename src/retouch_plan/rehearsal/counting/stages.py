"""What a rehearsal counts: the work of a stage, its memory at each kind of allocation, and the rise of a call."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

Event: TypeAlias = tuple[str, int, bool]
"""A kind of allocation: the name of the operation, its bytes, and whether it is in a backward pass."""
Peaks: TypeAlias = dict[tuple[int, Event], tuple[int, Counter[str]]]
"""By device and kind of allocation, the most bytes held at such an allocation, and the bytes of each holder."""


@dataclass(slots=True)
class Work:
    """The work of a stage. ``flops``: FLOPs by kind and dtype. ``seconds``: modelled seconds by kind. ``waits``: the number of host
    waits by cause and code location. ``counts``: the number of "kernels", the "bytes" that they moved, and the bytes "copied"
    between host and device and "communicated"."""

    flops: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Work", times: float = 1.0) -> None:
        for mine, theirs in zip(self._parts, other._parts, strict=True):
            for name, value in theirs.items():
                mine[name] += value * times  # type: ignore[assignment]

    def copy(self) -> "Work":
        return Work(*(Counter(part) for part in self._parts))

    def since(self, before: "Work") -> "Work":
        made = self.copy()
        made.add(before, -1.0)
        return made

    @property
    def _parts(self) -> Sequence[Counter[str]]:
        return self.flops, self.seconds, self.waits, self.counts

    @property
    def kernels(self) -> float:
        return self.counts["kernels"]

    def add_seconds(self, kind: str, seconds: float) -> None:
        self.seconds[kind] += seconds  # type: ignore[assignment]  # the values of a Counter are typed as int

    @property
    def device_seconds(self) -> float:
        return sum(self.seconds.values())


@dataclass(slots=True)
class Stage:
    """The work of a stage, and its memory at each kind of allocation."""

    work: Work = field(default_factory=Work)
    most: Peaks = field(default_factory=dict)

    @property
    def peaks(self) -> dict[int, int]:
        """The most bytes held on each device."""
        return {where: size for where, (size, _) in self._largest().items()}

    @property
    def held(self) -> dict[int, Counter[str]]:
        """On each device, the bytes of each holder at the peak."""
        return {where: held for where, (_, held) in self._largest().items()}

    @property
    def peak(self) -> int:
        """The most bytes held on any device."""
        return max((size for size, _ in self.most.values()), default=0)

    def _largest(self) -> dict[int, tuple[int, Counter[str]]]:
        found: dict[int, tuple[int, Counter[str]]] = {}
        for (where, _), entry in self.most.items():
            if where not in found or entry[0] > found[where][0]:
                found[where] = entry
        return found


@dataclass(slots=True)
class Rise:
    """How much memory a call uses above the memory that is held when it starts.

    ``before``: the bytes held at the start on each device, by holder. ``most``: the difference at each kind of allocation.
    """

    before: dict[int, Counter[str]]
    most: Peaks = field(default_factory=dict)
