"""The points that docs/scaling.md compares. Each axis has a few points: one algorithm of the league with one change."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import runs
from contestants import Contestant
from worlds import EDITOR, EDITOR_LARGE, World, noisy

ALGORITHM = EDITOR.contestant("Flow-CPS")


@dataclass(frozen=True)
class Point:
    """A value of an axis: the algorithm and the world of the league, with the changes that the value makes to them."""

    label: str
    world: World
    contestant: Contestant

    @property
    def settings(self) -> dict[str, float]:
        """The settings of the league's first trial."""
        return {knob.name: knob.default for knob in self.contestant.knobs}

    def records(self, kept: Path) -> list[dict[str, Any]]:
        """The kept final runs, ordered by seed."""
        found = runs.read(kept, self.world, self.contestant.name).values()
        final = [run for run in found if run["stage"] == "final" and run["settings"] == self.settings]
        return sorted(final, key=lambda run: run["seed"])


@dataclass(frozen=True)
class Axis:
    """The points of one section of the page, which differ in one setting.

    ``unit`` is the header of the column of labels, and ``text`` introduces the table. The point with the label ``base`` belongs to
    all axes, and the other points are compared to it.
    """

    title: str
    unit: str
    text: str
    points: Sequence[Point]
    base: str


def point(
    label: str, name: str, *, budget: int = EDITOR.budget, changes: Mapping[str, Any] | None = None, noise: float | None = None
) -> Point:
    """The point whose runs are kept under ``name``.

    ``changes``: values of recipe keys. ``noise``: the noise of a judge that errs and abstains (`noisy_judges`); None for the exact
    judge.
    """
    contestant = replace(ALGORITHM, name=name, changes={**ALGORITHM.changes, **(changes or {})})
    world = EDITOR if noise is None else noisy(EDITOR, "NoisyEdits", noise=noise)
    return Point(label, replace(world, name="scaling", budget=budget, contestants=(contestant,)), contestant)


def _groups(tasks: int, size: int) -> Point:
    return point(f"{size}", f"group of {size}", changes={"tasks_per_step": tasks, "group_size": size})


def _trained(size: int) -> Point:
    return point(
        f"{size}", f"{size} steps trained", changes={"rollout.window": {"mode": "window", "size": size, "low": 0, "high": 4}}
    )


def _noise(noise: float) -> Point:
    return point(f"{noise:g}", f"noise {noise:g}", noise=noise)


BASE = Point(f"{EDITOR.budget:,}", EDITOR, ALGORITHM)
"""The point that all axes share: the final runs of the league."""
SAMPLES = Axis(
    "Samples",
    "network evaluations",
    "Each run has its own cosine schedule of the learning rate, so a short run is not the beginning of a long one.",
    (
        point("2,500", "2500 evaluations", budget=2500),
        point("5,000", "5000 evaluations", budget=5000),
        BASE,
        point("20,000", "20000 evaluations", budget=20_000),
        point("40,000", "40000 evaluations", budget=40_000),
    ),
    BASE.label,
)
GROUPS = Axis(
    "Group size",
    "group size",
    "A step has 48 images in all rows, so larger groups have fewer tasks per step: 24, 12, 6 and 3.",
    (_groups(24, 2), _groups(12, 4), replace(BASE, label="8"), _groups(3, 16)),
    "8",
)
TRAINED = Axis(
    "Denoising steps trained per chain",
    "trained steps",
    "A chain has 6 denoising steps. The trained ones are a window that is drawn in each training step among the first four. Each\n"
    "trained step costs 3 evaluations more, so a run of equally many evaluations has fewer training steps.",
    (_trained(1), replace(BASE, label="2"), _trained(4)),
    "2",
)
NOISE = Axis(
    "Noise of the judge",
    "noise",
    "The noise is the standard deviation of the judge's error, as a share of the scale, before its score is rounded to one of 6\n"
    "values; 5 % of the samples get no score (`measurements/league/noisy_judges.py`). Held-out tasks are scored exactly.",
    (replace(BASE, label="exact"), _noise(0.25), _noise(0.5)),
    "exact",
)
_LARGER = replace(ALGORITHM, name="16 blocks")
NETWORK = Axis(
    "Network size",
    "blocks",
    "The editor of 16 blocks has 9.6 million parameters (`retouch tools playground --large`), that of 4 blocks 2.5 million. It\n"
    "starts from the packaged editor and was trained for 300 steps more, so it is another base model with a gap of its own. Its\n"
    "network evaluations cost more, and count the same.",
    (replace(BASE, label="4"), Point("16", replace(EDITOR_LARGE, name="scaling", contestants=(_LARGER,)), _LARGER)),
    "4",
)
AXES = (SAMPLES, GROUPS, TRAINED, NOISE, NETWORK)


def every_point() -> list[Point]:
    """All points of all axes, each only once."""
    return list({point.contestant.name: point for axis in AXES for point in axis.points}.values())
