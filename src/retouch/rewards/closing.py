"""Letting go of what a reward holds open: connections, threads."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class _Closable(Protocol):
    def close(self) -> None: ...


def close(part: object) -> None:
    """Close it, where it can be closed."""
    if isinstance(part, _Closable):
        part.close()
