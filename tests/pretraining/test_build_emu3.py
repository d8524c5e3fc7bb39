"""A small `retouch playground build --emu3` writes files that a recipe can load."""

import json
from itertools import combinations
from unittest.mock import patch

import pytest
import torch

from retouch_worlds.data import PlaygroundData
from retouch_worlds.models import language
from retouch_worlds.models.language import PlaygroundEmu3
from retouch_worlds.playground import playground_weights
from retouch_worlds.pretraining import emu3 as build_module
from retouch_worlds.pretraining.emu3 import CodesTraining, Emu3Training, build_emu3

CODES = CodesTraining(steps=3, free_steps=2, batch=4)
STARTS = {
    "s": Emu3Training(complexity={1: 1.0}, rounds=(2,), batch=2),
    "sc": Emu3Training(complexity={1: 0.5, 2: 0.5}, rounds=(1, 1), batch=2),
}
FURTHER = {
    "s-distractors": ("s", Emu3Training(complexity={1: 1.0}, rounds=(1,), before=1, batch=2, impossible=1.0)),
    "sc-unfinished": ("sc", Emu3Training(complexity={2: 1.0}, rounds=(1,), before=2, batch=2, unfinished=1.0)),
}
ALL = (*STARTS, *FURTHER)


def build(path):
    """A few steps of training, and a few tasks to measure."""
    with patch.object(build_module, "HELD_OUT", 6):
        return build_emu3(path, seed=3, codes=CODES, starts=STARTS, further=FURTHER)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    path = tmp_path_factory.mktemp("built") / "emu3"
    return path, build(path)


@pytest.mark.slow
def test_every_start_can_be_loaded_from_the_build_folder(built, monkeypatch):
    path, scores = built
    told = json.loads((path / "build.json").read_text())
    assert told["command"] == "retouch playground build --emu3 --seed 3"
    assert told["held_out"] == scores
    assert {name for name in scores if "ceiling" in name} == {
        f"{start}, ceiling {what}" for start in ALL for what in ("overall", "exact")
    }
    monkeypatch.setattr(language, "playground_weights", lambda name: path)
    heads = []
    for start in ALL:
        section = PlaygroundEmu3(start=start)
        editor = section.build(device=torch.device("cpu"), gradient_checkpointing=False)
        assert editor.grid == (3, 3)
        heads.append(editor.module.lm_head.weight)
    assert all(not torch.equal(a, b) for a, b in combinations(heads, 2))


@pytest.mark.slow
def test_the_same_seed_makes_the_same_weights(built, tmp_path):
    path, _ = built
    build(tmp_path)
    for part in ("autoencoder", *ALL):
        assert (tmp_path / part / "model.safetensors").read_bytes() == (path / part / "model.safetensors").read_bytes()


def test_the_packaged_weights_score_well_on_single_edits_and_contain_no_local_path():
    shipped = playground_weights("emu3")
    scores = json.loads((shipped / "build.json").read_text())["held_out"]
    assert min(scores["s, ceiling overall"], scores["sc, ceiling overall"]) >= 9
    assert min(scores["s, complexity=1 overall"], scores["sc, complexity=1 overall"]) >= 7
    assert min(scores[f"s-distractors, complexity={number} overall"] for number in (1, 2)) >= 7
    for config in shipped.rglob("*.json"):
        assert "/tmp/" not in config.read_text()
        assert "_name_or_path" not in json.loads(config.read_text())


def test_distractors_are_requests_that_the_target_ignores():
    """A demonstration of the base editor `s-distractors` has one edit, and most instructions have more clauses than that."""
    start, settings = build_module.FURTHER["s-distractors"]
    assert start == "s"
    assert set(settings.complexity) == {1}
    data = PlaygroundData(seed=0, count=40, complexity={1: 1.0}, filler=settings.filler, impossible=settings.impossible)
    plain = PlaygroundData(seed=0, count=40, complexity={1: 1.0}, filler=settings.filler)
    pairs = [*zip(data.tasks(), plain.tasks(), strict=True)]
    assert all(len(task.meta["edits"]) == 1 for task, _ in pairs)
    assert sum(len(task.instruction) > len(without.instruction) for task, without in pairs) >= 10
