"""A vision-language writer in a real vLLM server: distribution, adapters, seeds, limits, a whole run, a kill and a restart."""

import json
import time

import pytest
import torch

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
from retouch.types import Needs, Slice
from retouch_plan.checks import check_engines
from retouch_serve.engines import vllm as vllm_decoding
from retouch_serve.engines.vllm_wire import data_url

pytestmark = [pytest.mark.slow, pytest.mark.engines, vllm_server.NEEDS_VLLM]
GRPO = PolicyGradient(clip_low=0.2, clip_high=0.2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("model")
    served_models.save_writer(found)
    return found


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with vllm_server.running(folder, tmp_path_factory.mktemp("server"), *vllm_server.LORA_FLAGS) as found:
        yield found


def all_actions(trajectory):
    return Slice(slice(0, len(trajectory)), slice(0, trajectory.mask.shape[1]))


def gap(trajectory):
    return (trajectory.log_probs - trajectory.behaviour_log_probs)[trajectory.mask].abs()


@pytest.mark.parametrize("temperature", [0.8, 1.5])
def test_served_completions_match_the_distribution_of_the_policy(server, folder, tmp_path, temperature):
    """Also with an image that the processor resizes, which is sent at its final size."""
    policy = served_models.policy(
        served_models.writer(folder), server.url, tmp_path, sampling={"temperature": temperature, "max_new_tokens": 12}
    )
    tiny_writers.perturb(policy.module)
    batch = tiny_writing.batch(served_models.tasks(), 4)
    trajectory = policy.rollout(batch)
    assert gap(trajectory).max() < 1e-4
    assert len(set(trajectory.lengths.tolist())) > 2
    evaluation = policy.evaluate(trajectory, all_actions(trajectory), Needs())
    assert (evaluation.log_ratio.exp() - 1).abs().max() <= 1e-5
    ended = trajectory.ids.gather(1, trajectory.lengths[:, None] - 1)[:, 0]
    stops = torch.isin(ended, torch.tensor(policy.model.stop))
    assert (stops | (trajectory.lengths == 12)).all()
    assert stops.any()
    assert not torch.isin(trajectory.ids[trajectory.mask], (~policy.model.grammar.vocabularies[0]).nonzero()[:, 0]).any()


def test_every_update_is_loaded_and_a_stale_adapter_raises(server, folder, tmp_path):
    policy = served_models.policy(served_models.writer(folder), server.url, tmp_path, max_mismatch=1e-3)
    optimizer = torch.optim.SGD(tiny_policies.trained(policy).values(), lr=2.0)
    for step in range(3):
        batch = tiny_writing.batch(served_models.tasks(), 4, step=step)
        trajectory = policy.rollout(batch)
        assert gap(trajectory).max() < 1e-3
        advantages = torch.tensor([1.0, -1.0] * 8)
        found, _ = tiny_policies.gradient(policy, GRPO, tiny_policies.minibatch(batch, trajectory, advantages))
        for name, parameter in tiny_policies.trained(policy).items():
            parameter.grad = found[name]
        optimizer.step()
    with policy.engine._connect() as client:
        adapters = [card["id"] for card in json.loads(client.get("/v1/models"))["data"] if card["parent"] is not None]
        assert len(adapters) == 1
        policy.engine._weights.publish = lambda client: policy.engine._weights.served(adapters[0])
        tiny_writers.perturb(policy.module, size=0.5)
        with pytest.raises(EngineFault, match="off from the policy's own"):
            policy.rollout(tiny_writing.batch(served_models.tasks(), 4))
        policy.engine.close()
        assert not [card for card in json.loads(client.get("/v1/models"))["data"] if card["parent"] is not None]


def test_served_completions_depend_on_the_seed_and_not_on_the_batch(server, folder, tmp_path):
    """20 rows of a task are above ``--max-num-seqs 16``."""
    policy = served_models.policy(served_models.writer(folder), server.url, tmp_path)
    batch = tiny_writing.batch(served_models.tasks(1, images=False), 20)
    first, second = policy.rollout(batch), policy.rollout(batch)
    assert torch.equal(first.ids, second.ids)
    assert torch.equal(policy.rollout(batch.take(slice(3, 4))).ids, first.ids[3:4])
    assert len({written.ids for written in first.outputs}) > 10
    other = policy.rollout(tiny_writing.batch(served_models.tasks(1, images=False), 20, seed=9))
    assert not torch.equal(other.ids, first.ids)


def test_requests_that_the_server_rejects_raise_with_its_message(server, folder, tmp_path, monkeypatch):
    writer = served_models.writer(folder, train="none")
    tiny_writers.tiny_models.make_trainable(writer.module, "lora", ["q_proj"])
    for parameter in ("lora_A", "lora_B"):
        for module in writer.module.modules():
            if hasattr(module, parameter):
                matrix = getattr(module, parameter)["default"]
                shape = (40, matrix.weight.shape[1]) if parameter == "lora_A" else (matrix.weight.shape[0], 40)
                matrix.weight = torch.nn.Parameter(torch.zeros(shape))
                module.r["default"] = 40
    writer.module.peft_config["default"].r = 40
    policy = served_models.policy(writer, server.url, tmp_path)
    began = time.monotonic()
    with pytest.raises(EngineFault, match=r"LoRA rank 40 is greater than max_lora_rank 32.*--max-lora-rank"):
        policy.rollout(tiny_writing.batch(served_models.tasks(1, images=False)))
    assert time.monotonic() - began < 20
    long = served_models.policy(served_models.writer(folder), server.url, tmp_path / "long", sampling={"max_new_tokens": 600})
    long.model.stop = (long.model.image_token,)  # which is never sampled
    with pytest.raises(EngineFault, match=r"raise the server's --max-model-len"):
        long.rollout(tiny_writing.batch(served_models.tasks(1, images=False), 1))
    wrong = served_models.policy(served_models.writer(folder), server.url, tmp_path / "wrong")
    monkeypatch.setattr(vllm_decoding, "data_url", lambda image: data_url(image.resize((64, 64))))
    with pytest.raises(EngineFault, match="another tokenizer or image processor"):
        wrong.rollout(tiny_writing.batch(served_models.tasks(1)))


def test_a_run_continues_after_the_server_is_killed_and_restarted(server, folder, tmp_path):
    section = {"kind": "vllm", "url": server.url, "patience": 600.0, "timeout": 600.0, "max_mismatch": 1e-3}
    recipe = parse(tiny_writer_runs.recipe(tmp_path, folder, rollout__engine=section, steps=4, learning_rate=0.05))
    with vllm_server.restarted_after_first_step(server, tmp_path / "written" / "metrics.jsonl"):
        assert run(recipe, fresh=False) == 0
    metrics = RunFolder(recipe.folder).read_metrics()
    assert len(metrics) == 4
    assert all(0 < line["engine/mismatch_max"] < 1e-3 and line["policy/ratio_max_first"] <= 1e-5 for line in metrics)
    assert server.starts == 2
    assert not [finding for finding in check_engines(recipe) if finding.status == "FAILED"]
