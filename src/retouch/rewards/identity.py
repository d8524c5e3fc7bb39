"""What a reward judges by, as a short text: it changes when the judge does, so that a resumed run can tell."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Fingerprinted(Protocol):
    """A reward that knows more about its identity than its class and arguments say: a rubric in a file, a model's revision."""

    @property
    def fingerprint(self) -> str: ...
