"""Reinforcement-learning post-training for image editing and generation."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from retouch.inference.writers import Writer

__version__ = "0.1.0"


def open_writer(target: str, overrides: Sequence[str] = ()) -> "Writer":
    """The writer of a recipe or run, to use from Python: ``write("a cat").prompt``, or ``write.many([...])`` for several.

    ValueError for a policy that does not write.
    """
    from retouch.inference.opening import open_writer as opened  # loads torch

    return opened(target, overrides)
