"""How many calls beyond the first may be made: a share of the first calls, and a few a second in any case.

A budget keeps a fleet that is in trouble from being asked several times as much just then (Google's SRE book, "Handling Overload").
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Budget:
    """``share``: extra calls for each first call; ``floor``: extra calls a second beside them; at most ``most`` are saved up."""

    share: float
    floor: float
    most: float
    saved: float = field(init=False)
    counted: float | None = field(default=None)

    def __post_init__(self) -> None:
        self.saved = self.most

    def first(self) -> None:
        """A first call was made."""
        self.saved = min(self.most, self.saved + self.share)

    def take(self, now: float) -> bool:
        """Whether one more call may be made now; if so, it is paid for."""
        if self.counted is not None:
            self.saved = min(self.most, self.saved + (now - self.counted) * self.floor)
        self.counted = now
        if self.saved < 1:
            return False
        self.saved -= 1
        return True
