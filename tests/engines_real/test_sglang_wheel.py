"""The SGLang engine against SGLang's own sources: its request and response classes, its serialization, scheduler and rollout step.

Its server needs a GPU; these parts run on a CPU. They need ``sglang`` 0.5.23 to be importable, with what its modules import.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sglang_double
import tiny_policies
from retouch.core.transitions import transition
from retouch.models.common.lora import write_lora
from retouch.policies.engines.base import ChainRequest
from retouch.policies.engines.sglang.wire import RolloutRequest, parse_rollout
from retouch.policies.engines.wire import InvalidResponse

pytestmark = [
    pytest.mark.slow,
    pytest.mark.engines,
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang 0.5.23 is not installed (docs/engines.md)"),
]
SHAPE = (4, 6, 6)


def chain(kind="sde", *, actions=range(4), level=0.7, guidance=1.0):
    sigmas = _scheduler(5).sigmas
    return ChainRequest(transition=kind, noise_level=level, guidance_scale=guidance, sigmas=sigmas, actions=actions, shape=SHAPE)


def request(count=2, **options):
    return RolloutRequest(prompt="a cat", negative="", seed=2**61 + 3, count=count, size=(48, 48), chain=chain(**options))


def _scheduler(steps):
    from sglang.multimodal_gen.runtime.models.schedulers.scheduling_flow_match_euler_discrete import (
        FlowMatchEulerDiscreteScheduler,
    )

    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(steps)
    return scheduler


def _velocity(x, sigma):
    return torch.tanh(x) * (1 - sigma) + 0.3 * sigma


def served(asked, *, dtype=torch.float32):
    """What a server would answer: SGLang's scheduler and rollout step over a velocity of ours, serialized by SGLang."""
    import msgspec
    from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import RolloutRequest as Theirs
    from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import RolloutResponse
    from sglang.multimodal_gen.runtime.entrypoints.post_training.utils import _maybe_serialize
    from sglang.multimodal_gen.runtime.post_training.flow_rollout_controller import FlowRolloutController

    theirs = Theirs.model_validate(asked.body())
    rows = []
    for number in range(theirs.num_outputs_per_prompt):
        random = torch.Generator().manual_seed(theirs.seed + number)
        x = torch.randn((1, *SHAPE), generator=random).to(dtype)
        scheduler = _scheduler(theirs.num_inference_steps)
        controller = FlowRolloutController(
            sde_type=theirs.rollout_sde_type,
            noise_level=theirs.rollout_noise_level,
            log_prob_no_const=theirs.rollout_log_prob_no_const,
            debug_mode=theirs.rollout_debug_mode,
            sde_step_indices=theirs.rollout_sde_step_indices,
            generator=random,
            return_dit_trajectory=theirs.rollout_return_dit_trajectory,
            return_step_indices=theirs.rollout_return_step_indices,
            shard_for_sp=lambda batch, latents: latents,
            gather_for_sp=lambda batch, latents: latents,
            sigmas=scheduler.sigmas,
            latents_shape=tuple(x.shape),
        )

        def step(controller=controller, **inputs):
            return controller.transition(batch=SimpleNamespace(), **inputs)

        for index, time in enumerate(scheduler.timesteps):
            velocity = _velocity(x.float(), scheduler.sigmas[index]).to(dtype)
            x = scheduler.step(velocity, time, x, transition=step, return_dict=False)[0]
        controller.record_trajectory_step(x, scheduler.timesteps.new_zeros(()), theirs.num_inference_steps)
        rows.append(
            RolloutResponse(
                request_id="one",
                prompt=theirs.prompt,
                seed=theirs.seed,
                generated_output=_maybe_serialize(torch.zeros(3, 8, 8)),
                rollout_log_probs=_maybe_serialize(controller.collect_rollout_log_probs()[0]),
                dit_trajectory={
                    "latents": _maybe_serialize(torch.stack(controller.step_latents, dim=1)[0]),
                    "timesteps": _maybe_serialize(torch.stack(controller.step_timesteps)),
                    "sigmas": _maybe_serialize(scheduler.sigmas),
                },
            ).model_dump()
        )
    return msgspec.msgpack.encode(rows)


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


def test_requests_have_only_fields_that_sglang_and_its_sampling_parameters_accept():
    from sglang.multimodal_gen.configs.sample.flux import FluxSamplingParams
    from sglang.multimodal_gen.configs.sample.qwenimage import QwenImageSamplingParams
    from sglang.multimodal_gen.configs.sample.stablediffusion3 import StableDiffusion3SamplingParams
    from sglang.multimodal_gen.runtime.entrypoints.post_training.io_struct import RolloutRequest as Theirs

    for guidance in (1.0, 4.5):
        body = request(guidance=guidance).body()
        assert body.keys() <= Theirs.model_fields.keys()
        kept = {name: value for name, value in body.items() if value is not None}
        for kind in (FluxSamplingParams, QwenImageSamplingParams, StableDiffusion3SamplingParams):
            parameters = kind(**kept)
            parameters._validate()
            assert parameters.should_use_classifier_free_guidance() == (guidance > 1)


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


def test_another_schedule_raises_and_another_noise_level_changes_log_probabilities():
    asked = request()
    body = served(asked)
    other = replace(asked, chain=replace(asked.chain, sigmas=_scheduler(5).sigmas * 0.99))
    with pytest.raises(InvalidResponse, match="its sigmas are off"):
        parse_rollout(body, other)
    louder = replace(asked, chain=replace(asked.chain, noise_level=0.8))
    row = parse_rollout(body, louder)[0]
    assert (ours(louder, row) - row.log_probs).abs().min() > 1e-3  # a hundred times the difference at the same noise level
