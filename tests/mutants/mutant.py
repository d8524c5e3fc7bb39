"""A deliberate bug."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """``old`` occurs once in ``file`` (under src/retouch) and is replaced by ``new``; then ``test`` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str
