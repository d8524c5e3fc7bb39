"""A deliberate bug."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """``old`` occurs once in ``file`` (of the core, or of the wing in its path) and is replaced by ``new``; then ``test`` fails."""

    name: str
    file: str
    old: str
    new: str
    test: str

    @property
    def path(self) -> str:
        """The file's path under src."""
        return self.file if self.file.startswith("retouch_") else f"retouch/{self.file}"
