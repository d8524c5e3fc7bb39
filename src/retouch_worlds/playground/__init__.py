"""The playground: a built-in world of small images, for the twins of the full-size recipes, and the packaged weights of its models.

The tasks of the playground are in ``data.playground``, its exact judges in ``rewards.playground`` and its models in
``models.playground``; the models are trained in ``pretraining``. This package may import ``types``, ``config`` and ``core``.
"""

from importlib.resources import files
from pathlib import Path


def playground_weights(name: str = "editor") -> Path:
    """Return the packaged folder of weights with this name."""
    return Path(str(files(__name__))) / "weights" / name
