"""Image tokens from a real vLLM server with the grammar plug-in, with chunked prefill and preempted requests."""

import json
import logging
import re
from pathlib import Path

import pytest
import torch

import served_models
import tiny_models
import tiny_writer_runs
import tiny_writers
import tiny_writing
import vllm_server
from retouch.models.base import PretrainedLanguageModel
from retouch.recipe.recipe import load, parse
from retouch.records.folder import RunFolder
from retouch.run.session import run
from retouch_models.emu3 import DRAW, load_emu3, save_for_vllm
from retouch_plan.checks import check_engines
from retouch_serve.engines.vllm_wire import PLUGIN
from retouch_worlds.models.language import PlaygroundEmu3
from retouch_worlds.pretraining.emu3 import LONGEST

pytestmark = [pytest.mark.slow, pytest.mark.engines, vllm_server.NEEDS_VLLM]
RECIPE = Path(__file__).parents[2] / "recipes" / "emu3" / "sft_s__rl_s-playground.jsonnet"
TOKENS = 10_000
log = logging.getLogger(__name__)
BLOCKS = ("--max-num-seqs", "64", "--block-size", "32", "--num-gpu-blocks-override", "80")
"""Room for fewer than 64 requests, so that some are preempted."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("emu3")


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    served = served_models.save_emu3_for_server(folder)
    flags = (*vllm_server.LORA_FLAGS, "--max-num-batched-tokens", "96", *BLOCKS, "--logits-processors", PLUGIN)
    with vllm_server.running(served, tmp_path_factory.mktemp("server"), *flags, runner=2) as found:
        yield found


def preemptions(client):
    found = re.search(r"^vllm:num_preemptions_total{.*} ([\d.]+)$", client.get("/metrics").decode(), re.MULTILINE)
    assert found is not None
    return float(found[1])


@pytest.mark.timeout(3600)  # ten thousand tokens by Triton's interpreter, on a machine that may be busy
def test_all_served_image_tokens_follow_the_grammar(server, folder, tmp_path):
    """Also with chunked prefill, and for requests that are preempted and resumed."""
    editor = load_emu3(folder, size=(24, 24), prefill=DRAW, dtype=torch.float32, device="cpu")
    tiny_models.make_trainable(editor.module, "lora", PretrainedLanguageModel.lora_targets)
    tiny_writers.perturb(editor.module)
    policy = served_models.policy(editor, server.url, tmp_path, sampling={"max_new_tokens": LONGEST})
    tasks = tuple(tiny_models.task(f"t{k}", "make it red " * k, tiny_models.image(k, 24, 24)) for k in range(8))
    with policy.engine._connect() as client:
        before, tokens, step, largest = preemptions(client), 0, 0, 0.0
        while tokens < TOKENS:
            trajectory = policy.rollout(tiny_writing.batch(tasks, 8, step=step))  # the engine checks every token
            assert all(editor.codes_in(row.ids) is not None for row in trajectory.outputs)
            off = (trajectory.log_probs - trajectory.behaviour_log_probs)[trajectory.mask].abs()
            tokens, step, largest = tokens + int(trajectory.lengths.sum()), step + 1, max(largest, off.max().item())
        assert largest < 1e-3
        log.info("%d tokens, %g preemptions, largest mismatch %.1e", tokens, preemptions(client) - before, largest)
        assert preemptions(client) > before


def test_requests_without_a_grammar_are_not_changed(server, folder, tmp_path):
    editor = load_emu3(folder, size=(24, 24), prefill=DRAW, grammar=False, dtype=torch.float32, device="cpu")
    tiny_models.make_trainable(editor.module, "lora", PretrainedLanguageModel.lora_targets)
    policy = served_models.policy(editor, server.url, tmp_path, sampling={"max_new_tokens": 8})
    trajectory = policy.rollout(tiny_writing.batch((tiny_models.task("a", "red", tiny_models.image(0, 24, 24)),), 4))
    assert (trajectory.log_probs - trajectory.behaviour_log_probs)[trajectory.mask].abs().max() < 1e-3


def test_a_recipe_with_image_tokens_runs_on_the_server(server, folder, tmp_path):
    section = {"kind": "vllm", "url": server.url, "patience": 60.0, "timeout": 600.0, "max_mismatch": 1e-3}
    reward = {"kind": "compressibility", "combine": {"compressibility": 1}}
    tokens = tiny_writer_runs.image_tokens(folder)
    recipe = parse(tiny_writer_runs.recipe(tmp_path, folder, **tokens, rollout__engine=section, reward=reward, steps=2))
    assert not [finding.text for finding in check_engines(recipe) if finding.status == "FAILED"]
    assert run(recipe, fresh=False) == 0
    for line in RunFolder(recipe.folder).read_metrics():
        assert 0 < line["engine/mismatch_max"] < 1e-3
        assert line["completion/cut_off_fraction"] == 0


def test_the_recipe_of_all_weights_and_image_tokens_runs_on_the_server(tmp_path, monkeypatch):
    """EARL's twin with its own model, weights and objective, in a few small steps."""
    editor = PlaygroundEmu3(start="s").build(device=torch.device("cpu"), gradient_checkpointing=False)
    save_for_vllm(editor, tmp_path / "served")
    flags = ("--max-num-batched-tokens", "96", "--logits-processors", PLUGIN)
    with vllm_server.running(tmp_path / "served", tmp_path / "server", *flags, runner=2, dev_mode=True) as server:
        section = {"kind": "vllm", "url": server.url, "patience": 60.0, "timeout": 600.0, "max_mismatch": 1e-3}
        changes = {
            "out": str(tmp_path / "runs"),
            "device": "cpu",
            "steps": 3,
            "tasks_per_step": 2,
            "group_size": 4,
            "microbatch": 8,
            "rollout.engine": section,
            "rollout.temperature": 1.5,  # so that the samples of a task differ, and the weights change
            "eval.tasks": 3,
            "samples.tasks": 3,
        }
        recipe = load(RECIPE, [f"{name}={json.dumps(value)}" for name, value in changes.items()])
        assert recipe.policy.train.kind == "full"
        loads = served_models.record_reloads(monkeypatch)
        assert run(recipe, fresh=False) == 0
        assert not [finding.text for finding in check_engines(recipe) if finding.status == "FAILED"]
    metrics = RunFolder(recipe.folder).read_metrics()
    assert len(metrics) == 3
    assert len(set(loads)) > 1
    assert all(0 < line["engine/mismatch_max"] < 1e-3 for line in metrics)
    assert all(line["completion/cut_off_fraction"] == line["reward/fault_fraction"] == 0 for line in metrics)
