"""Building the playground's base writer: the same bits from the same seed, and vague where it is meant to be."""

from pathlib import Path

import pytest
import torch

from retouch.bases import build_writer as building
from retouch.bases.build_writer import build_writer
from retouch.bases.writer import WriterTraining, imperfect
from retouch.core.random import generator
from retouch.playground.indirect import indirect
from retouch.playground.tasks import PlaygroundTasks

TINY = WriterTraining(steps=2, batch=4, warmup=1)


def test_the_same_seed_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "HELD_OUT", 4)
    monkeypatch.setattr(building, "EVAL_STEPS", 1)
    before = torch.get_num_threads()
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        scores = build_writer(tmp_path / name, seed=seed, writer=TINY)
        assert 0 <= scores["all overall"] <= 10
    one, two, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two", "other"))
    assert one == two != other
    assert torch.get_num_threads() == before


def test_completions_are_vague_where_they_are_meant_to_be() -> None:
    settings = WriterTraining(steps=1, vague=0.6, vague_kinds=("recolour",))
    tasks = PlaygroundTasks(seed=0, count=400, complexity=[1], split="train")
    changed = {"recolour": 0, "other": 0}
    for task in tasks:
        kind = task.tags["kinds"] if task.tags["kinds"] == "recolour" else "other"
        right = indirect(task).meta["completion"]
        told = imperfect(task, generator("test", task.id), settings).meta["completion"]
        changed[kind] += told != right
        assert len(str(told).split()) == len(str(right).split()) - (told != right)
    recolours = sum(task.tags["kinds"] == "recolour" for task in tasks)
    assert changed["other"] == 0
    assert 0.45 < changed["recolour"] / recolours < 0.75
