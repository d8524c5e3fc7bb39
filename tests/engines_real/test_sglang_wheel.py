"""The SGLang engine against SGLang's own ``/rollout/generate`` on a CPU, from the HTTP request to the HTTP response.

``sglang_wheel`` says which parts are SGLang's: all but the queue, the transformer and the decoder, which need a GPU and weights.
``make engines-sglang`` runs these tests.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import sglang_double
import sglang_wheel
import tiny_policies
from retouch.core.transitions import transition
from retouch.models.lora import write_lora
from retouch.policies.rollout import ChainRequest
from retouch_serve.engines.sglang import RolloutRequest, parse_rollout
from retouch_serve.engines.vllm_wire import InvalidResponse
from retouch_serve.wire import unpack

pytestmark = [*sglang_wheel.MARKS]
SHAPE = (4, 6, 6)


def chain(kind="sde", *, actions=range(4), level=0.7, guidance=1.0):
    sigmas = sglang_wheel.scheduler(5).sigmas
    return ChainRequest(transition=kind, noise_level=level, guidance_scale=guidance, sigmas=sigmas, actions=actions, shape=SHAPE)


def request(count=2, **options):
    return RolloutRequest(prompt="a cat", negative="", seed=2**61 + 3, count=count, size=(48, 48), chain=chain(**options))


def _velocity(x, sigma):
    return torch.tanh(x) * (1 - sigma) + 0.3 * sigma


@pytest.fixture(scope="module", autouse=True)
def process():
    with sglang_wheel.one_process():
        yield


def served(asked, *, dtype=torch.float32):
    """The body of SGLang's response."""
    reply = sglang_wheel.Server(_velocity, shape=SHAPE, dtype=dtype).post(asked.body())
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/msgpack")
    return reply.content


def ours(asked, row):
    """Our log-probabilities of the states of a row, under the same velocity."""
    sigmas, actions = asked.chain.sigmas, asked.chain.actions
    sigma, sigma_next = sigmas[actions.start : actions.stop], sigmas[actions.start + 1 : actions.stop + 1]
    x, after = row.latents[:-1], row.latents[1:]
    velocity = _velocity(x, sigma.view(-1, 1, 1, 1))
    return transition(
        asked.chain.transition,
        x,
        velocity,
        sigma,
        sigma_next,
        noise_level=asked.chain.noise_level,
        sigma_max=sigmas[1],
        reduction="mean",
        next=after,
    ).log_prob


@pytest.mark.parametrize("kind", ["sde", "cps"])
@pytest.mark.parametrize("actions", [range(4), range(1, 3), range(3, 4)])
def test_sglang_steps_and_log_probabilities_match_ours(kind, actions):
    asked = request(kind=kind, actions=actions)
    for row in parse_rollout(served(asked), asked):
        assert row.latents.shape == (len(actions) + 1, *SHAPE)
        torch.testing.assert_close(ours(asked, row), row.log_probs, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("kind", ["sde", "cps"])
def test_sglang_bf16_log_probabilities_belong_to_the_states_before_rounding(kind):
    """Why the policy computes log-probabilities again: the returned states are rounded, the reported log-probabilities are not."""
    asked = request(kind=kind, actions=range(3))
    for row in parse_rollout(served(asked, dtype=torch.bfloat16), asked):
        assert torch.equal(row.latents, row.latents.bfloat16().float())
        off = (ours(asked, row) - row.log_probs).abs()
        assert 0 < off.max() < 2e-2


@pytest.mark.parametrize("family", sglang_wheel.PIPELINES)
@pytest.mark.parametrize("guidance", [1.0, 4.5])
def test_all_fields_of_a_request_reach_the_sampling_parameters_of_sglang(family, guidance):
    shape = SHAPE if family == "sd3" else (9, 16)  # the other families pack their latents into tokens
    server = sglang_wheel.Server(_velocity, shape=shape, family=family)
    asked = request(guidance=guidance, actions=range(1, 3))
    asked = replace(asked, chain=replace(asked.chain, shape=shape))
    body = asked.body()
    assert len(parse_rollout(server.post(body).content, asked)) == 2
    (read,) = server.requests
    assert read.sampling_params.should_use_classifier_free_guidance() == (guidance > 1)
    known = {name: value for name, value in body.items() if value is not None and hasattr(read, name)}
    assert {name: getattr(read, name) for name in known} == known
    assert {name for name in body if body[name] is not None} - known.keys() <= {"true_cfg_scale"}


def test_sglang_rejects_a_request_with_an_unknown_transition():
    """The response of a request that its worker cannot do is an error, and no image."""
    body = request().body() | {"rollout_sde_type": "dance"}
    reply = sglang_wheel.Server(_velocity, shape=SHAPE).post(body)
    assert reply.status_code in (400, 422, 500)
    assert "dance" in reply.text


def test_the_sglang_loader_reads_the_published_adapter(tmp_path):
    import sglang
    from safetensors.torch import load_file

    # Alone, since its package imports torchvision.
    file = Path(sglang.__path__[0]) / "multimodal_gen/runtime/pipelines_core/lora/peft_adapter.py"
    spec = importlib.util.spec_from_file_location("sglang_peft_adapter", file)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)

    policy = tiny_policies.policy("sd3")
    tiny_policies.perturb(policy)
    write_lora(policy.module, tmp_path, pipeline=None)
    written = tmp_path / "adapter_model.safetensors"
    config = theirs.load_peft_config(str(written))
    read = theirs.apply_peft_config(theirs.normalize_peft_keys(load_file(written)), config)
    assert theirs.get_peft_lora_alpha(config) == policy.module.peft_config["default"].lora_alpha
    trained = {name.replace(".default.", "."): parameter for name, parameter in tiny_policies.trained(policy).items()}
    assert read.keys() == trained.keys()
    assert all(torch.equal(read[name], trained[name]) for name in read)


def test_the_test_double_has_the_request_fields_and_serialization_of_sglang():
    import msgspec
    from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import RolloutRequest as Theirs
    from sglang.multimodal_gen.runtime.entrypoints.post_training.utils import _maybe_deserialize

    double = sglang_double.RolloutRequest.model_fields
    assert double.keys() == Theirs.model_fields.keys()
    assert {name: each.default for name, each in double.items() if not each.is_required()} == {
        name: each.default for name, each in Theirs.model_fields.items() if not each.is_required()
    }
    value = {"a": [torch.randn(2, 3), 1, 2**63], "b": {"c": None, "d": 0.5, "e": "é", "f": True}}
    read = _maybe_deserialize(msgspec.msgpack.decode(sglang_double.pack(value)))
    assert torch.equal(read["a"][0], value["a"][0])
    assert (read["a"][1:], read["b"]) == (value["a"][1:], value["b"])


def structure(value):
    """The names, types, shapes and dtypes of a response; ``...`` for a value that the client does not read."""
    if isinstance(value, dict) and value.get("__tensor__"):
        return value["dtype"], tuple(value["shape"]), sorted(value)
    if isinstance(value, dict):
        unread = ("request_id", "generated_output", "inference_time_s", "peak_memory_mb")
        return {name: ... if name in unread else structure(each) for name, each in value.items()}
    return [structure(each) for each in value] if isinstance(value, list) else type(value)


def test_the_test_double_answers_with_the_structure_of_sglang():
    model = tiny_policies.policy("sd3").model
    double = sglang_double.double_of(model)
    asked = request(actions=range(1, 3))
    status, found = double.answer(sglang_double.GENERATE, asked.body())
    assert status == 200
    rows = unpack(found, most=10**6)
    shape = tuple(rows[0]["dit_trajectory"]["latents"]["shape"][1:])
    real = sglang_wheel.Server(_velocity, shape=shape).post(asked.body())
    assert structure(rows) == structure(unpack(real.content, most=10**6))


def test_another_schedule_raises_and_another_noise_level_changes_log_probabilities():
    asked = request()
    body = served(asked)
    other = replace(asked, chain=replace(asked.chain, sigmas=sglang_wheel.scheduler(5).sigmas * 0.99))
    with pytest.raises(InvalidResponse, match="its sigmas are off"):
        parse_rollout(body, other)
    louder = replace(asked, chain=replace(asked.chain, noise_level=0.8))
    row = parse_rollout(body, louder)[0]
    assert (ours(louder, row) - row.log_probs).abs().min() > 1e-3  # a hundred times the difference at the same noise level
