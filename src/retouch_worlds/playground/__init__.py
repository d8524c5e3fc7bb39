"""The playground: a built-in world of small images for the twins of the full-size recipes, generated from a seed, and the
packaged weights of its models.

``scenes`` has coloured shapes and their edits, ``texts`` instructions and descriptions, ``words`` signs with words. This package
may import ``types``, ``config`` and ``core``, and imports torch only when random numbers are drawn.
"""

from importlib.resources import files
from pathlib import Path


def playground_weights(name: str = "editor") -> Path:
    """Return the packaged folder of weights with this name."""
    return Path(str(files(__name__))) / "weights" / name
