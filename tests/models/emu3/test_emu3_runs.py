"""Runs whose policy generates images as tokens, from the recipe to the export."""

import json

import pytest
import torch
from PIL import Image

import tiny_writer_runs
from retouch.cli import main
from retouch.config.packaged import available
from retouch.models.emu3 import DRAW, load_emu3
from retouch.recipe.recipe import load, parse
from slow_params import slow_except


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("emu3")
    tiny_writer_runs.save_emu3(path)
    return path


@pytest.fixture
def document(tmp_path, folder):
    def made(**changes):
        # The playground's judge gives random images no reward, so there would be no gradient.
        reward = {"kind": "compressibility", "combine": {"compressibility": 1}}
        settings = {**tiny_writer_runs.image_tokens(folder), "policy__train": {"kind": "full"}, "reward": reward, **changes}
        return tiny_writer_runs.recipe(tmp_path / "runs", folder, **settings)

    return made


def trained(tmp_path, document):
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(document))
    assert main(["train", str(file)]) == 0
    return tmp_path / "runs" / document["name"]


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_run_trains_samples_and_exports_loadable_weights(tmp_path, folder, document):
    run = trained(tmp_path, document())
    steps = metrics(run)
    assert len(steps) == 2
    assert all(step["policy/ratio_max_first"] <= 1e-5 for step in steps)
    assert all(step["completion/cut_off_fraction"] == 0 for step in steps)
    source, out, exported = tmp_path / "source.png", tmp_path / "out.png", tmp_path / "exported"
    Image.new("RGB", (24, 24), (90, 90, 90)).save(source)
    assert main(["sample", str(run), "--instruction", "add a red circle", "--image", str(source), "--out", str(out)]) == 0
    with Image.open(out) as shown:
        assert shown.size == (24, 24)
    assert main(["export", str(run), "--to", str(exported), "--weights", "current"]) == 0
    settings = {"size": (24, 24), "prefill": DRAW, "dtype": torch.float32, "device": "cpu", "autoencoder": folder}
    editor = load_emu3(exported / "writer", tokenizer=folder, **settings)
    before = load_emu3(folder, **settings)
    assert not torch.equal(editor.module.lm_head.weight, before.module.lm_head.weight)
    assert "report.html" in {path.name for path in run.iterdir()}


@pytest.mark.parametrize(
    "stem",
    slow_except(
        ["sft_s__rl_c", "sft_think_s"], ["sft_s__rl_c", "sft_sc__rl_sc", "sft_sc2stage__rl_sc", "sft_think_s__rl_s", "sft_think_s"]
    ),
)
def test_the_playgrounds_twins_of_earls_recipes_take_a_step(tmp_path, stem):
    twin = load(f"recipes/emu3/{stem}-playground.jsonnet").document()
    twin |= {"out": str(tmp_path), "tasks_per_step": 8, "trackers": [], "eval": {"tasks": 3, "complexity": [1, 2, 3]}}
    if twin["phases"] is None:
        twin["steps"] = 1
    for phase in twin["phases"] or ():
        phase |= {"steps": 1, "tasks_per_step": 2}
    file = tmp_path / "twin.json"
    file.write_text(json.dumps(twin))
    assert main(["train", str(file)]) == 0
    lines = metrics(tmp_path / twin["name"])
    assert len(lines) == len(twin["phases"] or [None])
    if stem == "sft_think_s__rl_s":
        assert lines[-1]["completion/length"] > 24  # more than an image


def test_all_of_earls_recipes_have_a_twin():
    names = [name for name in available() if name.startswith("recipes/emu3/")]
    twins = {name.replace("-playground", "") for name in names if "-playground" in name}
    assert twins == {name for name in names if "-playground" not in name and "-published" not in name}
    assert len(twins) == 14


def test_incompatible_recipe_parts_raise_when_the_recipe_is_parsed(document, folder):
    with pytest.raises(ValueError, match=r"renderer\.kind: emu3 writes image tokens"):
        parse(document(renderer={"kind": "response", "model": {"kind": "playground"}, "encoder": "frozen", "num_steps": 2}))
    with pytest.raises(ValueError, match=r"renderer\.kind: playground-writer writes text"):
        parse(document(policy__model={"kind": "playground-writer"}))
    server = {"kind": "vllm", "url": "http://127.0.0.1:1/v1", "adapters": "a"}
    assert parse(document(rollout__engine=server)).policy.train.kind == "full"  # a server loads all weights too
    with pytest.raises(ValueError, match="engine cached"):
        parse(document(rollout__engine=server, rollout__top_k=5))
    with pytest.raises(ValueError, match=r"devices\.renderer"):
        parse(document(devices={"renderer": "cuda:1"}))
    gradient = {"kind": "policy_gradient", "surrogate": "reinforce"}
    for tokens in ("text", {"text_steps": 2, "vision_steps": 3}):
        with pytest.raises(ValueError, match=r"objective\.tokens: without policy\.model\.think"):
            parse(document(objective={**gradient, "tokens": tokens}))
    kept = parse(document(objective={**gradient, "tokens": "text"}, policy__model__think=True)).document()
    assert kept["objective"]["tokens"] == "text"
    assert "tokens" not in parse(document(objective=gradient)).document()["objective"]
    with pytest.raises(ValueError, match="no source image"):
        parse(document(data={"kind": "prompts", "path": "prompts.txt"}))
