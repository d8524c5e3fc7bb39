"""A forecast of the time to a target: the number of images after which a published or measured run reached it, multiplied by the
time that this recipe takes per image.

A target belongs to one model, task and algorithm. Nothing is forecast for a recipe with another model, task or algorithm, because
a curve of a small model, or of another task, does not carry over.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from retouch.recipe.document import value_at
from retouch.recipe.recipe import Recipe
from retouch_plan.doctor.findings import Finding, duration, note

CAUTION = "a forecast, not a measurement: runs of other seeds, data and code may differ by more than its range"


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A score that a run has reached.

    ``where``: keys of a recipe's document, such as ``policy.model.path``, each with a pattern that is searched in the JSON of its
    value; a recipe has this target if all patterns are found. ``images``: the smallest and the largest number of images that
    training may have taken; ``rows``: images per training step. ``basis``: who reached the score, and what is not known.
    """

    target: str
    where: Mapping[str, str]
    images: tuple[float, float]
    rows: int
    basis: str

    def fits(self, recipe: Recipe) -> bool:
        """Whether the recipe trains this model with this algorithm on this task, in a single phase."""
        if recipe.phases is not None:
            return False
        document = recipe.document()
        return all(re.search(pattern, json.dumps(value_at(document, key))) for key, pattern in self.where.items())


TARGETS = (
    Target(
        target="OCR correctness of 0.90, from 0.59",
        where={
            "policy.model.path": r"stable-diffusion-3\.5-medium",
            "reward.kind": r"^.ocr.$",
            "objective.kind": "policy_gradient",
            "rollout.transition.kind": "sde",
        },
        images=(500 * 1152, 1000 * 1152),
        rows=1152,
        basis="Flow-GRPO (arXiv 2505.05470), whose authors name 1000 steps, and 16 hours on 24 A-series or 8 on 24 H-series GPUs "
        "(github.com/yifan123/flow_grpo/issues/96). Their code counts two optimizer steps for each rollout, so these are 500 or "
        "1000 of this recipe's steps. Issue 227 there reports that it was not reproduced on 8 H200",
    ),
    Target(
        target="VIEScore of 4.80 on six benchmarks, from 3.88",
        where={
            "policy.model.kind": "emu3",
            "policy.model.path": "sft[_-]s(imple)?(/|.$)",
            "policy.model.think": "false",
            "data.lists": "omniedit.*human-edit",
            "reward.kind": "viescore",
            "objective.kind": "policy_gradient",
        },
        images=(2000 * 128, 3000 * 128),
        rows=128,
        basis="EARL (arXiv 2508.01119), whose authors name 2000 to 3000 steps",
    ),
    Target(
        target="a quarter of the gap on the playground's compound edits",
        where={
            "policy.model.kind": r"^.playground.$",
            "policy.model.path": "null",
            "reward.kind": r"^.playground.$",
            "objective.kind": "policy_gradient",
            "rollout.transition.kind": "cps",
            "data.complexity": r'"[23]"',
        },
        images=(685, 3_942),
        rows=48,
        basis="the curve fitted in docs/scaling.md to runs of this network of 2.5 million parameters, with its interval. It was "
        "measured at no other size and does not carry over to one",
    ),
)


def forecast_of(recipe: Recipe, step_hours: float, ranks: str, *, targets: Sequence[Target] = TARGETS) -> Finding:
    """Hours to the recipe's target, or hours of 1000 steps if the recipe has no known target.

    ``step_hours``: the modelled time of a step of the last phase. ``ranks``: the GPUs that it was modelled for, as in "8 x h100".
    """
    rows = recipe.resolved_phases()[-1].rows
    found = next((each for each in targets if each.fits(recipe)), None)
    if found is None:
        return note(
            "forecast",
            f"1000 steps take {duration(1000 * step_hours)} on {ranks}. How many steps a target takes is not known: there is no "
            "published or measured curve of this model, task and algorithm, and other curves do not carry over",
        )
    steps = [images / rows for images in found.images]
    span = " to ".join(duration(each * step_hours) for each in steps)
    refill = ", rounds of refill" if recipe.resolved_phases()[-1].rollout.refill is not None else ""
    lines = [
        f"{found.target}: {span} on {ranks} ({steps[0]:,.0f} to {steps[1]:,.0f} steps, without evaluations{refill} and rewards)",
        CAUTION,
        f"from {found.basis}",
    ]
    if rows != found.rows:
        lines.append(f"a step of that run has {found.rows:,} images, one of this recipe {rows:,}: images are compared, not steps")
    return note("forecast", "\n".join(lines))
