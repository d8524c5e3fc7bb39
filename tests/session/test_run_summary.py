"""The summary of a run whose reward leaves scores out."""

import json
from pathlib import Path

import pytest

import retouch
from tiny_recipes import SMALL


def test_gain_is_over_the_tasks_with_a_score_before_and_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No score changes, but the task with score 0 has none in the second evaluation."""
    module = tmp_path / "steady_reward.py"
    module.write_text(
        "import math, torch\n"
        "from retouch.types import Column\n"
        "class Steady:\n"
        "    columns = {'same': Column(0.0, 1.0)}\n"
        "    def __init__(self):\n"
        "        self.first, self.calls = None, 0\n"
        "    def score(self, task):\n"
        "        self.first = self.first or task.id\n"
        "        if task.id != self.first:\n"
        "            return 1.0\n"
        "        self.calls += 1\n"
        "        return 0.0 if self.calls == 1 else math.nan\n"
        "    def __call__(self, samples):\n"
        "        return {'same': torch.tensor([self.score(sample.task) for sample in samples])}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    changes = {"out": str(tmp_path / "runs"), "device": "cpu", "trackers": [], "eval": {"tasks": 8}, "steps": 1}
    reward = {"kind": "import", "class": "steady_reward:Steady", "combine": {"same": 1}}
    trainer = retouch.Trainer.from_recipe({**SMALL, **changes, "reward": reward}, allow_imports=["steady_reward"], progress=False)
    summary = trainer.train()
    assert (summary.before, summary.after, summary.gain, summary.gain_ci95) == (1, 1, 0, (0, 0))
    assert (summary.independent_tasks, summary.needed_tasks) == (7, None)
    evals = [json.loads(line) for line in (trainer.folder / "evals.jsonl").read_text().splitlines()]
    assert [line["table"]["all"]["same"] for line in evals] == [0.875, 1.0]
