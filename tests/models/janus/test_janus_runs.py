"""Runs whose policy generates images with Janus."""

import json

import pytest
import torch
from safetensors.torch import load_file

import tiny_janus
import tiny_writer_runs
import tiny_writing
from retouch.cli import main
from retouch.inference.opening import open_recipe, read_target
from retouch.models.janus import load_janus
from retouch.types import Task
from tiny_janus import SIDE


@pytest.fixture
def document(tmp_path):
    folder = tmp_path / "janus"
    tiny_janus.whole().save_pretrained(folder)
    tiny_janus.tokenizer().save_pretrained(folder)

    def made(**changes):
        settings = {
            "policy__model": {"kind": "janus", "path": str(folder), "dtype": "float32"},
            "policy__train": {"kind": "lora", "rank": 4, "alpha": 8},
            "renderer": {"kind": "codes"},
            "rollout__max_new_tokens": SIDE * SIDE + 1,
            "data": {"kind": "playground-scenes", "complexity": [1, 2], "count": 32},
            "reward": {"kind": "compressibility", "quality": 20, "combine": {"compressibility": 1}},
        }
        return tiny_writer_runs.recipe(tmp_path / "runs", folder, **{**settings, **changes})

    return made


def trained(tmp_path, document):
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(document))
    assert main(["train", str(file)]) == 0
    run = tmp_path / "runs" / document["name"]
    return run, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_run_trains_and_transformers_loads_the_exported_adapter(tmp_path, document):
    run, steps = trained(tmp_path, document())
    assert all(step["policy/ratio_max_first"] <= 1e-5 and step["policy/grad_norm"] > 0 for step in steps)
    assert all(step["completion/cut_off_fraction"] == 0 for step in steps)
    assert main(["export", str(run), "--to", str(tmp_path / "exported"), "--weights", "current"]) == 0
    whole = tiny_janus.whole()
    ids = torch.arange(8)[None]
    before = whole.model.language_model(ids).last_hidden_state
    whole.load_adapter(str(tmp_path / "exported"))
    assert not torch.equal(whole.model.language_model(ids).last_hidden_state, before)


@pytest.mark.slow
def test_exported_full_weights_generate_the_same_tokens_when_loaded_again(tmp_path, document):
    run, _ = trained(tmp_path, document(policy__train={"kind": "full"}, learning_rate=1e-2))
    exported = tmp_path / "exported"
    assert main(["export", str(run), "--to", str(exported), "--weights", "current"]) == 0
    parts, _ = open_recipe(*read_target(str(run)), trained=True)
    parts.judge.close()
    base, settings = tmp_path / "janus", {"dtype": torch.float32, "device": "cpu"}
    again = load_janus(base, weights=exported / "writer", **settings)
    wanted, found = parts.model.module.state_dict(), again.module.state_dict()
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    tasks = (Task("1", "a red circle"), Task("2", "two cats"))
    first, second, untrained = (greedy(model, tasks) for model in (parts.model, again, load_janus(base, **settings)))
    assert torch.equal(first, second)
    assert not torch.equal(first, untrained)
    whole = tiny_janus.whole()
    assert whole.load_state_dict(load_file(exported / "writer" / "model.safetensors"), strict=False).unexpected_keys == []
    assert torch.equal(tiny_janus.generate_with_transformers(whole, again.encode(tasks)), first[:, : SIDE * SIDE])
    with pytest.raises(ValueError, match="does not contain the weights of this Janus model's trainable modules"):
        load_janus(base, weights=base, **settings)


def greedy(model, tasks):
    made = tiny_writing.policy(writer=model, train="full", sampling={"max_new_tokens": SIDE * SIDE + 1})
    return made.sample(tiny_writing.batch(tasks, group_size=1)).ids
