"""A recipe of a few small steps with a ``watch`` section, and a judge whose answers can be shifted."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import ImageStat

from kill_places import document_of
from retouch.types import Column
from retouch_judge.base import Panel, Prompt
from retouch_judge.questions import Answer, ScoresForm
from retouch_judge.wording import Scale


class ShiftedClient:
    """Answers with the brightness of an image, plus 2 * the environment variable JUDGE_SHIFT. It stands for a model behind a server
    that changes unnoticed: it is not part of the judge's identity."""

    identity = "fickle"

    def ask(self, questions):
        shift = float(os.environ.get("JUDGE_SHIFT", "0"))
        means = [ImageStat.Stat(question.parts[-1].convert("L")).mean[0] / 255 for question in questions]
        return [Answer(scores={"tone": mean + 2 * shift}) for mean in means]


class PanelJudge:
    """A judge with a panel, so that the ledger stores its answers."""

    columns: Mapping[str, Column] = {"tone": Column(0.0, 2.0)}

    def __init__(self):
        self.panel = Panel(ShiftedClient())

    def __call__(self, samples):
        form = ScoresForm({"tone": Scale(0, 2)})
        verdicts = self.panel.judge([Prompt("How light?", (sample.image,), form) for sample in samples])
        return {"tone": torch.tensor([float(verdict.mean("tone")) for verdict in verdicts])}


class FallingJudge:
    """A held-out judge: the brightness of an image minus ``drop``."""

    columns: Mapping[str, Column] = {"fidelity": Column(-1.0, 1.0)}
    drop = 0.0

    def __call__(self, samples):
        light = [ImageStat.Stat(sample.image.convert("L")).mean[0] / 255 for sample in samples]
        return {"fidelity": torch.tensor(light) - self.drop}


def recipe(out: Path, *, limit: float | None, on_alarm: str, reward: str | None = None) -> dict[str, Any]:
    """Return a recipe of four steps on a few rows, watched every two steps. ``limit``: of the brightness rule; None: no rule."""
    document = document_of(out, "watched") | {
        "checkpoints": {"every": 2, "keep": 2},
        "samples": {"every": 0, "tasks": 3, "groups": 1},
        "watch": {
            "every": 2,
            "tasks": 3,
            "judge": {"reward": {"kind": "playground", "combine": {"exact": 1}}},
            "canaries": {"count": 2, "on_alarm": on_alarm},
            "brightness": None if limit is None else {"limit": limit, "on_alarm": on_alarm},
            "diversity": None,
        },
    }
    if reward is not None:
        document["reward"] = {"kind": "import", "class": reward, "combine": {"tone": 1}}
    return document
