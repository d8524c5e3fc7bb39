"""A reward for TRL whose images are as bright as the completion's first id, for tests of the bridge on one and two ranks.

python tests/support/tiny_bridge.py FOLDER    (as a rank: judges its half of one group and writes the result)
"""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from PIL import Image

from retouch.distributed.ranks import destroy_distributed, init_distributed
from retouch.integrations.trl import RetouchReward
from retouch.run.step import TooManyMissing
from retouch.types import Column, Task

ENDS = (2, 3)


class Spy:
    """Renders an image as bright as the completion's first id (9 if it is empty, no image if it is 0); records its arguments."""

    def __init__(self):
        self.seen = []

    def __call__(self, tasks, trajectory):
        self.seen.append((list(tasks), trajectory.outputs))
        firsts = [output.ids[0] if output.ids else 9 for output in trajectory.outputs]
        return [Image.new("RGB", (1, 1), (first, first, first)) if first else None for first in firsts]


class Brightness:
    """Scores the brightness. ``missing_at``: the brightness for which the column ``light`` is missing."""

    def __init__(self, missing_at=None):
        self.columns = {"light": Column(-1.0, 255.0), "dark": Column(0.0, 255.0)}
        self.missing_at = missing_at

    def __call__(self, samples):
        light = torch.tensor([float(sample.image.getpixel((0, 0))[0]) for sample in samples])
        dark = 255 - light
        light[light == self.missing_at] = math.nan
        return {"light": light, "dark": dark}


def bridge(*, missing_at=None, **options):
    """Return the reward, whose task ids are in the column ``name``, and its renderer."""
    spy = Spy()
    writer = SimpleNamespace(stop=ENDS, decode=lambda ids: " ".join(map(str, ids)))
    options = {"combine": {"light": 1.0}, "task": lambda row: Task(row["name"], "x"), **options}
    return RetouchReward(writer, spy, Brightness(missing_at), **options), spy


def trl_call(function, ids, *, names=None, step=0, **more):
    """Call the reward as TRL calls it."""
    names = ["a"] * len(ids) if names is None else names
    state = SimpleNamespace(global_step=step)
    return function(
        prompts=[""] * len(ids), completions=["?"] * len(ids), completion_ids=ids, name=names, trainer_state=state, **more
    )


def main(folder: Path) -> None:
    ranks = init_distributed("cpu")
    function, spy = bridge(missing_at=5)
    said = ""
    try:
        trl_call(function, [[7], [5 if ranks.is_main else 6]])
    except TooManyMissing as error:
        said = str(error)
    keys = [output.key for output in spy.seen[0][1]]
    lines = [{key[2] for key in keys}, [key[3] for key in keys], said]
    (folder / f"{ranks.rank}.txt").write_text("\n".join(map(str, lines)))
    destroy_distributed()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
