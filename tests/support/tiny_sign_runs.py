"""A run of the playground's inpainting model with an IP-Adapter, and images for its tasks."""

from copy import deepcopy
from pathlib import Path

from retouch.recipe.recipe import parse
from retouch.run.session import run
from retouch.types import Task
from retouch_worlds.data import WordData
from tiny_recipes import SMALL


def make_run(root: Path) -> None:
    """Train the run ``signs`` in ``root`` for two steps, so that images differ before and after."""
    document = deepcopy(SMALL) | {"name": "signs", "out": str(root), "device": "cpu", "trackers": (), "learning_rate": 0.05}
    document["checkpoints"] = {"every": 1}
    adapter = {"kind": "ip-adapter", "encoder": "playground", "tokens": 4, "projection": "mlp", "blocks": "all"}
    document["policy"] = {"kind": "denoising", "model": {"kind": "playground-words"}, "train": adapter}
    document["data"] = {"kind": "playground-words", "count": 8}
    document["reward"] = {"kind": "compressibility", "combine": {"compressibility": 1}}
    assert run(parse(document), fresh=False) == 0


def task() -> Task:
    """A task with a source image, a mask and a reference."""
    found = WordData(count=1).tasks()[0]
    assert found.mask is not None
    assert found.reference is not None
    return found
