"""Problems of first users: the recipes for photographs of one's own."""

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from retouch.config.packaged import available, find, short_name
from retouch.recipe.document import evaluate
from retouch.recipe.recipe import load
from retouch.run.build import build_sets

TOY_REWARDS = {"photos", "grade", "share"}
SMALL = ("-playground", "tiny", "playground/", "quickstart", "photos")
"""Parts of the names of recipes for tiny models."""


def rewards_of(document: Any) -> set[str]:
    """The kinds of the rewards in a recipe's document, also of those inside a ``several``."""
    inner = (document.get("rewards") or {}).values()
    return {document["kind"], *(kind for each in inner for kind in rewards_of(each))}


def test_fault_14_no_full_size_recipe_has_a_reward_that_needs_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("APP__DATA_DIR", "APP__BASE_EXP_DIR", "APP__REWARD_FUNCTION_API_BASE", "APP__RUN_NAME"):
        monkeypatch.setenv(name, "x")
    documents = {short_name(name): evaluate(find(name)) for name in available()}
    full = {name: read for name, read in documents.items() if name == "flux-kontext/photos" or not any(p in name for p in SMALL)}
    assert len(full) > 20
    found = {name: rewards_of(read["reward"]) & TOY_REWARDS for name, read in full.items() if read.get("reward")}
    assert {name: kinds for name, kinds in found.items() if kinds} == {}


def test_fault_14_the_recipe_for_photographs_on_a_gpu_has_published_rewards() -> None:
    recipe = load("recipes/flux-kontext/photos.jsonnet")
    document = recipe.document()
    assert recipe.ranks in (None, 1)
    assert rewards_of(document["reward"]) == {"several", "pickscore", "dino"}
    assert document["policy"]["model"]["path"] == "black-forest-labs/FLUX.1-Kontext-dev"


def test_fault_14_three_of_ten_photographs_are_held_out(tmp_path: Path) -> None:
    for index in range(10):
        Image.new("RGB", (60, 50), (20 * index, 90, 60)).save(tmp_path / f"{index}.png")
    rows = [{"file_name": f"{index}.png", "instruction": "warmer"} for index in range(10)]
    (tmp_path / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = load("recipes/photos.jsonnet", [f"data.path={tmp_path}"])
    sets = build_sets(recipe, recipe.data, size=recipe.image_size)
    sources = [{task.images[0].getpixel((0, 0)) for task in tasks} for tasks in (sets.train, sets.heldout)]
    assert [len(found) for found in sources] == [7, 3]
    assert not sources[0] & sources[1]
