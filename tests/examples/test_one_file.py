"""The one-file Flow-GRPO is short, does not import Retouch, and matches diffusers' pipeline and the gradient of the library."""

import ast
import importlib.util
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from retouch.core.advantages import group_relative
from retouch.objectives.policy_gradient import PolicyGradient
from retouch.policies.denoising import DenoisingPolicy
from retouch.policies.rollout import CPSTransition, DenoisingRollout, RandomWindow
from retouch.policies.weights import WeightCopies
from retouch.types import Batch, Minibatch, Task
from retouch_models.sd3.model import SD3

PATH = Path(__file__).parents[2] / "examples" / "one_file_flow_grpo.py"
GOLDEN = Path(__file__).parents[1] / "support" / "golden" / "flow_transitions.json"
CPS_CASES = [case for case in json.loads(GOLDEN.read_text())["cases"] if case["kind"] == "cps"]
SEED = 5


def load():
    spec = importlib.util.spec_from_file_location("one_file_flow_grpo", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


one_file = load()


@pytest.fixture(scope="module")
def pipeline():
    models = one_file.build_models(SEED)
    one_file.add_lora(models.transformer, SEED)
    models.set_progress_bar_config(disable=True)
    return models


@pytest.fixture(scope="module")
def history():
    return list(one_file.train(3, 0))


def without_times(history):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in history]


def lora(transformer):
    return {name: weight for name, weight in transformer.named_parameters() if weight.requires_grad}


def test_the_example_has_at_most_250_lines_and_does_not_import_retouch():
    source = PATH.read_text()
    assert len(source.splitlines()) <= 250
    imported = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    assert imported - sys.stdlib_module_names == {"torch", "diffusers", "transformers", "peft"}


def test_the_ratio_is_one_before_each_update_and_rewards_are_between_0_and_1(history):
    assert len(history) == 3
    for row in history:
        assert row["ratio_max_first"] <= 1e-6
        assert 0 < row["reward"] < 1
        assert row["grad_norm"] > 0


def test_training_is_deterministic_for_a_seed(history):
    assert without_times(list(one_file.train(2, 0))) == without_times(history[:2])
    assert not torch.equal(one_file.draw_noise(0, 0).initial, one_file.draw_noise(1, 0).initial)


def test_weights_change_the_ratio(pipeline):
    noise = one_file.draw_noise(SEED, 1)
    text = one_file.for_groups(one_file.encode(pipeline, one_file.PROMPTS), torch.tensor([2, 0]))
    actions, _ = one_file.rollout(pipeline, text, noise)
    factors = [weight for name, weight in lora(pipeline.transformer).items() if "lora_B" in name]
    with torch.no_grad():
        torch._foreach_add_(factors, 0.01)
    assert one_file.backward(pipeline, text, actions, torch.ones(16)) > 1e-6
    pipeline.transformer.zero_grad()
    with torch.no_grad():
        torch._foreach_zero_(factors)


def test_building_models_does_not_change_the_global_random_state():
    before = torch.random.get_rng_state()
    models = one_file.build_models(SEED)
    one_file.add_lora(models.transformer, SEED)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_without_noise_the_images_match_the_diffusers_pipeline(pipeline, monkeypatch):
    monkeypatch.setattr(one_file, "NOISE_LEVEL", 0.0)
    prompts = one_file.PROMPTS[:2]
    noise = one_file.draw_noise(SEED, 0)
    text = one_file.for_groups(one_file.encode(pipeline, prompts), torch.arange(2))
    _, latents = one_file.rollout(pipeline, text, noise)
    options = {"num_images_per_prompt": one_file.GROUP_SIZE, "latents": noise.initial, "max_sequence_length": 128}
    theirs = pipeline(prompts, num_inference_steps=one_file.NUM_STEPS, guidance_scale=1.0, output_type="latent", **options).images
    assert (latents - theirs).abs().max() < 1e-5

    pictures = one_file.decode(pipeline, theirs).permute(0, 2, 3, 1).numpy()
    shown = pipeline.image_processor.postprocess(
        pipeline.vae.decode(theirs / pipeline.vae.config.scaling_factor + pipeline.vae.config.shift_factor).sample.detach()
    )
    assert np.array_equal(pictures, np.stack([np.asarray(picture) for picture in shown]))


@pytest.mark.parametrize("case", CPS_CASES, ids=lambda case: f"{case['num_steps']}-{case['step']}")
def test_transition_matches_the_golden_vectors(case, monkeypatch):
    monkeypatch.setattr(one_file, "NOISE_LEVEL", case["noise_level"])
    sigma, sigma_next = case["sigmas"][case["step"] : case["step"] + 2]
    x, v, x_next, mean = (torch.tensor(case[name]) for name in ("sample", "velocity", "next_sample", "mean"))
    ours, std = one_file.cps_transition(x, v, sigma, sigma_next)
    assert (ours - mean).abs().max() <= 1e-6
    assert std == pytest.approx(sigma_next * math.sin(case["noise_level"] * math.pi / 2))
    assert (one_file.log_prob(x_next, ours) - torch.tensor(case["log_prob_mean_over_dims"])).abs().max() <= 1e-6


def test_share_of_red_equals_hand_computed_values():
    colours = torch.tensor([[255, 0, 0], [90, 90, 90], [0, 0, 0], [50, 100, 50]], dtype=torch.uint8)
    shares = one_file.share_of_red(colours.view(4, 3, 1, 1).expand(4, 3, 2, 2))
    assert shares.tolist() == pytest.approx([1, 1 / 3, 1 / 3, 1 / 4])


def library_policy(pipeline):
    """The library's policy on the very same modules."""
    model = SD3(
        transformer=pipeline.transformer, vae=pipeline.vae,
        text_encoders=(pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3),
        tokenizers=[pipeline.tokenizer, pipeline.tokenizer_2, pipeline.tokenizer_3],
        scheduler_config=dict(pipeline.scheduler.config), max_sequence_length=128,
    )  # fmt: skip
    window = RandomWindow(mode="window", size=one_file.WINDOW, low=0, high=one_file.WINDOW_END)
    sampling = DenoisingRollout(
        num_steps=one_file.NUM_STEPS, transition=CPSTransition(noise_level=one_file.NOISE_LEVEL), window=window
    )
    return DenoisingPolicy(model, sampling=sampling, eval_steps=one_file.NUM_STEPS, microbatch=8, copies=WeightCopies(model.module))


def library_batch(prompts, step):
    group = tuple(k for k in range(len(prompts)) for _ in range(one_file.GROUP_SIZE))
    tasks = tuple(Task(id=prompt, instruction=prompt) for prompt in prompts)
    slot = tuple(range(one_file.GROUP_SIZE)) * len(prompts)
    return Batch(seed=SEED, step=step, tasks=tasks, group_ids=tuple(range(len(prompts))), group=group, slot=slot)


def library_gradient(policy, batch, trajectory, advantages):
    advantages = advantages[:, None].expand_as(trajectory.log_probs)
    weights = torch.full_like(trajectory.log_probs, 1 / trajectory.log_probs.numel())
    objective = PolicyGradient(clip_low=one_file.CLIP_RANGE, clip_high=one_file.CLIP_RANGE)
    for loss in objective.losses(policy, Minibatch(batch=batch, trajectory=trajectory, advantages=advantages, weights=weights)):
        loss.value.backward()
    gradients = {name: weight.grad for name, weight in lora(policy.module).items()}
    policy.module.zero_grad()
    return gradients


def relative_difference(ours, theirs):
    assert ours.keys() == theirs.keys()
    size = sum(gradient.square().sum().item() for gradient in theirs.values())
    assert size > 0
    return math.sqrt(sum((ours[name] - theirs[name]).square().sum().item() for name in ours) / size)


@pytest.fixture(params=[pytest.param("at the start", marks=pytest.mark.slow), "later on"])
def pipeline_and_later(request, pipeline):
    """With the initial LoRA, where half of its gradient is 0, and with a LoRA in which both factors are not 0."""
    factors = [weight for name, weight in lora(pipeline.transformer).items() if "lora_B" in name]
    if request.param == "later on":
        with torch.no_grad():
            for k, factor in enumerate(factors):
                factor.copy_(0.05 * torch.randn(factor.shape, generator=one_file.generator("moved", k)))
    yield pipeline
    with torch.no_grad():
        torch._foreach_zero_(factors)


def test_the_gradient_matches_that_of_the_library(pipeline_and_later):
    pipeline, prompts, step = pipeline_and_later, one_file.PROMPTS[1:3], 0
    noise = one_file.draw_noise(SEED, step)
    ours = one_file.first_gradient(pipeline, prompts, noise)

    policy, batch = library_policy(pipeline), library_batch(prompts, step)
    trajectory = policy.rollout(batch)
    pictures = [torch.from_numpy(np.array(picture)) for picture in policy.model.decode(trajectory.outputs, trajectory.conditioning)]
    rewards = one_file.share_of_red(torch.stack(pictures).permute(0, 3, 1, 2))
    theirs = library_gradient(policy, batch, trajectory, group_relative(rewards, torch.tensor(batch.group)))
    # Latents equal to rounding may round to a neighbouring 8-bit colour in a pixel or two, which moves the advantages by 1e-3.
    assert relative_difference(ours, theirs) < 1e-2

    text = one_file.for_groups(one_file.encode(pipeline, prompts), torch.arange(2))
    actions, latents = one_file.rollout(pipeline, text, noise)
    assert (latents - trajectory.outputs).abs().max() < 1e-5
    advantages = one_file.group_advantages(rewards)
    assert (advantages - group_relative(rewards, torch.tensor(batch.group))).abs().max() < 1e-5
    one_file.backward(pipeline, text, actions, advantages)
    ours = {name: weight.grad.clone() for name, weight in lora(pipeline.transformer).items()}
    pipeline.transformer.zero_grad()
    assert relative_difference(ours, library_gradient(policy, batch, trajectory, advantages)) < 1e-5
