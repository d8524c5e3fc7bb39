"""Reinforcement-learning post-training for image editing and generation."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retouch.inference.writers import Writer

__version__ = "0.1.0"


def open_writer(target: str, overrides: Sequence[str] = (), *, allow_imports: Iterable[str] = ()) -> "Writer":
    """The writer of a recipe or run, to use from Python: ``write("a cat").prompt``, or ``write.many([...])`` for several.

    ``allow_imports``: modules outside Retouch that the recipe may import; runs of your own need none.
    Raises ValueError for a policy that does not write.
    """
    from retouch.inference.opening import open_writer as opened  # loads torch

    return opened(target, overrides, allow_imports=allow_imports)
