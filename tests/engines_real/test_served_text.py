"""All weights of a text writer in a real vLLM server with development endpoints, a whole run, and a server without LoRA."""

import json

import pytest
import torch
from transformers import Qwen2ForCausalLM

import like_vllm
import served_models
import tiny_policies
import tiny_writer_runs
import tiny_writers
import tiny_writing
import vllm_server
from retouch.objectives.policy_gradient import PolicyGradient
from retouch.policies.engine import EngineFault
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.run.session import run
from retouch_plan.checks import check_engines
from retouch_serve.engines import vllm as full_weights
from retouch_serve.engines.vllm import diagnose_sleep, is_asleep
from retouch_serve.engines.vllm_wire import query_sampling, query_server
from vllm_double import Double

pytestmark = [pytest.mark.slow, pytest.mark.engines, vllm_server.NEEDS_VLLM]
GRPO = PolicyGradient(clip_low=0.2, clip_high=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("model")
    tiny_writer_runs.save_language_model(found, hidden_size=64)
    return found


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with vllm_server.running(folder, tmp_path_factory.mktemp("server"), dev_mode=True) as found:
        yield found


def batch(step=0):
    return tiny_writing.batch(served_models.tasks(images=False), 4, step=step)


def gap(trajectory):
    return (trajectory.log_probs - trajectory.behaviour_log_probs)[trajectory.mask].abs().max()


def test_the_test_double_answers_like_the_real_server(server, folder):
    double = Double(
        Qwen2ForCausalLM.from_pretrained(folder).eval(), max_num_seqs=16, max_model_len=512, has_lora=False, dev_mode=True
    )
    exchanges = (*like_vllm.ALL_SERVERS, *like_vllm.NO_ADAPTERS, *like_vllm.DEVELOPMENT)
    assert like_vllm.differences(server.url, double, exchanges) == []


def test_every_update_is_reloaded_and_stale_weights_raise(server, folder, tmp_path):
    policy = served_models.policy(served_models.writer(folder, train="full"), server.url, tmp_path, max_mismatch=1e-3)
    optimizer = torch.optim.SGD(tiny_policies.trained(policy).values(), lr=0.05)
    for step in range(3):
        trajectory = policy.rollout(batch(step))
        assert gap(trajectory) < 1e-3
        advantages = torch.tensor([1.0, -1.0] * 6)
        found, _ = tiny_policies.gradient(policy, GRPO, tiny_policies.minibatch(batch(step), trajectory, advantages))
        for name, parameter in tiny_policies.trained(policy).items():
            parameter.grad = found[name]
        optimizer.step()
    stale = policy.engine._weights._loaded
    policy.engine._weights.publish = lambda client: policy.engine._weights.served(stale)
    with pytest.raises(EngineFault, match="off from the policy's own"):
        policy.rollout(batch())


def test_a_failed_reload_raises_and_the_next_one_succeeds(server, folder, tmp_path):
    policy = served_models.policy(served_models.writer(folder, train="full"), server.url, tmp_path, max_mismatch=1e-3)
    wanted = policy.rollout(batch())
    publisher = policy.engine._weights
    save, publisher._save = publisher._save, lambda folder: None
    tiny_writers.perturb(policy.module)
    with pytest.raises(EngineFault, match=r"did not load the weights .*HTTP 500"):
        policy.rollout(batch())
    publisher._save = save
    again = policy.rollout(batch())
    assert gap(again) < 1e-3
    assert not torch.equal(again.ids, wanted.ids)


def test_weights_of_another_client_are_replaced(server, folder, tmp_path):
    """As after a restart: the server has another version of the weights than the policy published."""
    policy = served_models.policy(served_models.writer(folder, train="full"), server.url, tmp_path)
    wanted = policy.rollout(batch())
    other = served_models.policy(served_models.writer(folder, train="full"), server.url, tmp_path / "other")
    tiny_writers.perturb(other.module)
    other.rollout(batch())
    again = policy.rollout(batch())
    assert torch.equal(again.ids, wanted.ids)
    assert gap(again) < 1e-4


def test_a_server_sleeps_between_rollouts(server, folder, tmp_path):
    """On a CPU it keeps its memory, and everything else is as on a GPU: while it is asleep, it answers no request to generate."""
    policy = served_models.policy(served_models.writer(folder, train="full"), server.url, tmp_path, max_mismatch=1e-3, sleep=True)
    for step in range(2):
        assert gap(policy.rollout(batch(step))) < 1e-3
        with policy.engine._connect() as client:
            assert is_asleep(client)
            assert "keeps its GPU memory" in diagnose_sleep(client)[1]
        tiny_writers.perturb(policy.module, key=step)
    policy.engine.close()
    with policy.engine._connect() as client:
        assert not is_asleep(client)


def test_server_properties_are_read_and_a_server_without_lora_is_rejected(server, folder, tmp_path):
    policy = served_models.policy(served_models.writer(folder), server.url, tmp_path)
    with policy.engine._connect() as client:
        found = query_server(client)
        assert (found.version, found.base.root, found.takes_ids, found.reloads) == ("0.32.0", str(folder), True, True)
        assert (found.loads_adapters, found.has_lora) == (True, False)
        sampling = query_sampling(client)
        assert (sampling.processed, sampling.returns_mask) == (True, False)
        assert json.loads(client.get("/weight_info"))["weight_version"]
    with pytest.raises(EngineFault, match=r"LoRA is not enabled.*--enable-lora"):
        policy.rollout(batch())


def recipe(folder, tmp_path, server):
    """A recipe that trains all weights of a prompt writer for a tiny SD3."""
    (tmp_path / "prompts.txt").write_text("\n".join(f"a red cat number {k}" for k in range(8)))
    changes = {
        "policy__model": {"kind": "qwen", "path": str(folder), "dtype": "float32", "system": "Write a prompt."},
        "policy__train": {"kind": "full"},
        "renderer": {
            **{"kind": "prompt", "model": {"kind": "import", "class": "tiny_writer_runs:TinySD3"}, "num_steps": 2},
            "cut_off": "draw",
        },
        "rollout__engine": {"kind": "vllm", "url": server.url, "patience": 600.0, "timeout": 600.0, "max_mismatch": 1e-3},
        "data": {"kind": "prompts", "path": str(tmp_path / "prompts.txt"), "held_out": 2},
        "reward": {"kind": "share", "combine": {"share": 1}, "max_missing": 0.9},
        "eval": {"tasks": 2},
    }
    return parse(tiny_writer_runs.recipe(tmp_path, folder, **changes, steps=4))


def test_a_recipe_with_full_weights_continues_after_the_server_is_restarted(server, folder, tmp_path, monkeypatch):
    loads, starts = served_models.record_reloads(monkeypatch), server.starts
    made = recipe(folder, tmp_path, server)
    with vllm_server.restarted_after_first_step(server, made.folder / "metrics.jsonl"):
        assert run(made, fresh=False) == 0
    metrics = RunFolder(made.folder).read_metrics()
    assert len(metrics) == 4
    assert all(0 < line["engine/mismatch_max"] < 1e-3 and line["policy/grad_norm"] > 0 for line in metrics)
    assert len(set(loads)) == 4  # the weights of each step
    assert server.starts == starts + 1
    assert not [finding.text for finding in check_engines(made) if finding.status == "FAILED"]


def test_a_run_whose_server_keeps_the_first_weights_stops(server, folder, tmp_path, monkeypatch):
    """Its responses have the right version, so only the log-probabilities show it."""
    monkeypatch.setattr(full_weights, "RPC", "/reset_prefix_cache")
    with pytest.raises(EngineFault, match="off from the policy's own"):
        run(recipe(folder, tmp_path, server), fresh=False)
    assert len(RunFolder(tmp_path / "written").read_metrics()) < 4
