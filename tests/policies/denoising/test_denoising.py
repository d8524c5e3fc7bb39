"""The denoising policy: contract checks on tiny models of the real classes, its KL against definitions, and its shapes."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tiny_policies as tiny
from retouch.core.random import generator
from retouch.core.transitions import transition
from retouch.models.pipeline import Guided
from retouch.policies.denoising import DenoisingPolicy
from retouch.policies.rollout import AllSteps, RandomWindow, SlidingWindow
from retouch.protocols import VelocityPolicy
from retouch.renderers.base import LatentRenderer
from retouch.types import Batch, Kind, Needs, Slice
from retouch_worlds.testing import check_model, check_policy, check_renderer
from slow_params import slow_except

# The denoising policy


@pytest.mark.parametrize("kind", ["sde", "ode"])
@torch.no_grad()
def test_search_continues_the_candidate_whose_predicted_image_has_the_highest_reward(kind):
    """Two candidates for each of two tasks; the first candidate of the first task has no reward."""
    policy, batch, asked = tiny.policy(kind=kind), tiny.batch(2, 1), []

    def score(tried, images):
        asked.append(set(tried.slot))
        rewards = images.outputs.flatten(1).mean(dim=1)
        return rewards.where(torch.tensor([len(asked) % 2 == 0, True]), torch.nan)

    made = policy.search(batch, k=2, score=score)
    assert asked == [{slot} for slot in range(1, 2 * tiny.NUM_STEPS - 1)], "no two questions have the same key"
    how: dict[str, Any] = {"sde": ("sde", 0.7), "ode": ("cps", 0.7)}
    name, noise_level = how[kind]
    for row in (0, 1):
        one = policy.model.encode(batch.tasks).take(torch.tensor([row]))
        sigmas = policy.model.sigmas(tiny.NUM_STEPS, one)
        x = policy.model.initial_noise(one, [generator(batch.seed, "noise", batch.step, row, 0)])
        for step, (sigma, after) in enumerate(itertools.pairwise(sigmas)):
            velocity = policy.model.velocity(policy.module, x, sigma[None], one)
            if step == tiny.NUM_STEPS - 1:
                x = x - sigma * velocity
                break
            candidates = []
            for candidate in (0, 1):
                noise = torch.randn(x.shape[1:], generator=generator(batch.seed, "search", batch.step, row, 0, step, candidate))
                options: dict[str, Any] = {"noise_level": noise_level, "sigma_max": sigmas[1], "reduction": "mean"}
                reached = transition(name, x, velocity, sigma[None], after[None], noise=noise[None], **options).next
                predicted = reached - after * policy.model.velocity(policy.module, reached, after[None], one)
                candidates.append((float(predicted.mean()), reached))
            x = candidates[1][1] if row == 0 else max(candidates, key=lambda each: each[0])[1]
        torch.testing.assert_close(made.outputs[row], x[0], rtol=1e-3, atol=1e-4)


COMBINATIONS = list(itertools.product(["sde", "cps", "dance"], tiny.WINDOWS, [1.0, 3.0]))


@pytest.mark.parametrize(
    "number",
    slow_except(range(0, len(COMBINATIONS), 7), range(len(COMBINATIONS))),
    ids=["-".join(map(str, each)) for each in COMBINATIONS],
)
def test_denoising_policy_passes_the_contract_checks(number):
    kind, mode, guidance = COMBINATIONS[number]
    # Every kind and window is tested with both models, and LoRA and full weights with every other option.
    family = ("sd3", "edit")[(number // 2 + number) % 2]
    train = ("lora", "full")[(number // 4 + number) % 2]
    policy = tiny.policy(family, kind=kind, mode=mode, guidance=guidance, train=train, microbatch=(3, 4, 1)[number % 3])
    assert isinstance(policy, VelocityPolicy)
    check_policy(policy, tiny.batch(), needs=Needs(kl=("closed", "velocity")[number % 2]))


@pytest.mark.parametrize(("family", "kind"), [("sd3", "sde"), ("sd3", "cps"), ("sd3", "dance"), ("sd3", "ode"), ("edit", "ode")])
def test_denoising_policy_with_ratio_norm_or_ode_steps_passes_the_contract_checks(family, kind):
    normed = {"mode": "window", "keep_means": True} if kind != "ode" else {}
    check_policy(
        tiny.policy(family, kind=kind, **normed), tiny.batch(), needs=Needs(kl="closed", log_ratio="norm") if normed else Needs()
    )


@pytest.mark.parametrize("family", ["sd3", "edit"])
@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_models_and_the_latent_renderer_pass_the_contract_checks(family, guidance):
    policy = tiny.policy(family, guidance=guidance)
    check_model(policy.model, tiny.tasks(3))
    batch = tiny.batch()
    check_renderer(LatentRenderer(policy.model), [batch.tasks[k] for k in batch.group], policy.rollout(batch))


@pytest.mark.parametrize(
    ("method", "wrong", "says"),
    [
        ("sigmas", lambda sigmas: sigmas[:-1], r"sigmas returned the shape \(4,\) in place of \(5,\)"),
        ("velocity", lambda velocity: velocity[:, 0], r"velocity returned the shape .* in place of .*; test the class with"),
    ],
)
def test_a_model_that_returns_a_wrong_shape_is_refused_with_the_name_of_the_method(monkeypatch, method, wrong, says):
    policy = tiny.policy()
    right = getattr(policy.model, method)
    monkeypatch.setattr(policy.model, method, lambda *inputs: wrong(right(*inputs)))
    with pytest.raises(ValueError, match=says):
        policy.rollout(tiny.batch())


@pytest.mark.parametrize(("mode", "kind"), [("all", "sde"), ("window", "cps"), ("branch", "dance")])
def test_stored_states_follow_from_means_and_keyed_noise(kind, mode):
    """Each stored state is the mean plus the standard deviation times its own keyed noise; the last steps are Euler steps."""
    policy = tiny.policy(kind=kind, mode=mode, keep_means=True)
    batch = tiny.batch()
    trajectory = policy.rollout(batch)
    actions = policy.sampling.window.actions(num_steps=tiny.NUM_STEPS, seed=batch.seed, step=batch.step)
    assert trajectory.first == actions.start
    assert trajectory.mask.shape == (4, len(actions))
    assert (trajectory.kind == Kind.TRANSITION).all()
    conditioning = trajectory.conditioning.take(trajectory.group)
    x = trajectory.latents[:, -1]
    for k in range(actions.stop, tiny.NUM_STEPS):
        sigma = trajectory.sigmas[k].expand(4)
        with torch.no_grad():
            x = x + (trajectory.sigmas[k + 1] - trajectory.sigmas[k]) * policy.model.velocity(policy.module, x, sigma, conditioning)
    torch.testing.assert_close(x, trajectory.outputs, atol=1e-5, rtol=0)
    for action in range(len(actions)):
        spread = (trajectory.latents[:, action + 1] - trajectory.means[:, action]).flatten(1)
        keys = [("transition", batch.step, g, slot, action) for g, slot in zip(batch.group, batch.slot, strict=True)]
        draws = [torch.randn(trajectory.outputs.shape[1:], generator=generator(batch.seed, *key)) for key in keys]
        noise = torch.stack(draws).flatten(1)
        ratio = (spread * noise).sum(1) / noise.square().sum(1)
        torch.testing.assert_close(spread, ratio[0] * noise, atol=1e-5, rtol=0)
        assert ratio[0] > 1e-3


def test_samples_of_a_group_start_from_different_noise_unless_it_is_shared():
    own, shared = (tiny.policy(mode="all", shared_noise=shared).rollout(tiny.batch()) for shared in (False, True))
    assert not torch.equal(own.latents[0, 0], own.latents[1, 0])
    assert torch.equal(shared.latents[0, 0], shared.latents[1, 0])
    assert not torch.equal(shared.latents[0, 0], shared.latents[2, 0])
    assert not torch.equal(shared.outputs[0], shared.outputs[1])


def test_tasks_with_the_same_instruction_stay_separate_groups():
    """A group is a row of the data, not a prompt: each has its own source image and its own noise."""
    first, second = (replace(task, instruction="make it red") for task in tiny.tasks(2))
    policy = tiny.policy("edit")
    apart = [Batch(3, 5, (task,), (k,), (0,), (0,)) for k, task in enumerate((first, second))]
    together = policy.rollout(Batch(3, 5, (first, second), (0, 1), (0, 1), (0, 0)))
    torch.testing.assert_close(together.outputs, torch.cat([policy.rollout(each).outputs for each in apart]), atol=1e-4, rtol=0)
    swapped = policy.rollout(Batch(3, 5, (second, first), (0, 1), (0, 1), (0, 0)))
    assert (swapped.outputs - together.outputs).abs().max() > 1e-3


def test_sample_is_deterministic_and_equals_an_ode_rollout_of_the_averaged_weights():
    policy, batch = tiny.policy(kind="sde", copies=("average",)), tiny.batch()
    sampled = policy.sample(batch)
    assert (sampled.kind == Kind.IMAGE).all()
    assert sampled.log_probs.isnan().all()
    assert torch.equal(sampled.outputs, tiny.policy(kind="ode").rollout(batch).outputs)
    tiny.perturb(policy)
    assert torch.equal(policy.sample(batch).outputs, sampled.outputs)
    policy.copies.snapshot("average")
    assert not torch.equal(policy.sample(batch).outputs, sampled.outputs)


def test_rollout_and_evaluation_use_the_current_weights():
    """Averaged, old and reference weights have other values, and neither rollout nor evaluation uses them."""
    policy = tiny.policy(mode="window", copies=("average", "old", "reference"))
    tiny.perturb(policy)
    check_policy(policy, tiny.batch())


def test_demonstrations_are_the_targets():
    policy, batch = tiny.policy("edit"), tiny.batch()
    shown = policy.demonstrate(batch)
    expected = policy.model.encode_images([batch.tasks[k].target for k in batch.group])
    assert torch.equal(shown.outputs, expected)
    assert (shown.kind == Kind.IMAGE).all()
    lacking = replace(batch, tasks=(batch.tasks[0], replace(batch.tasks[1], target=None)))
    with pytest.raises(ValueError, match="t1 has no target"):
        policy.demonstrate(lacking)


def test_closed_form_kl_equals_the_mean_log_ratio_of_sampled_actions():
    """Many rows sample one action from the same state with changed weights: the mean of log p - log q is the KL."""
    policy = tiny.policy(kind="sde", mode="window", reduction="sum", shared_noise=True, microbatch=1000)
    tiny.perturb(policy, 0.4)
    rows = 200
    trajectory = policy.rollout(tiny.batch(1, rows))
    part = Slice(slice(0, rows), slice(0, 1))
    with torch.no_grad():
        kl = policy.evaluate(trajectory, part, Needs(kl="closed")).kl
        with policy.copies.using("reference"):
            reference = policy.evaluate(trajectory, part, Needs()).log_probs
    torch.testing.assert_close(kl, kl[:1].expand_as(kl), rtol=1e-3, atol=0)
    drawn = trajectory.log_probs[:, :1] - reference
    error = drawn.std() / rows**0.5
    assert kl[0].item() > 8 * error.item()
    assert abs(drawn.mean() - kl[0]) < 4 * error


@pytest.mark.parametrize("kind", ["sde", "cps", "dance"])
@pytest.mark.parametrize("kl", ["closed", "velocity"])
def test_kl_equals_its_formula(kind, kl):
    policy = tiny.policy(kind=kind, mode="window", train="full")
    trajectory = policy.rollout(tiny.batch())
    tiny.perturb(policy, 0.02)
    part = Slice(slice(1, 3), slice(0, 2))
    found = policy.evaluate(trajectory, part, Needs(kl=kl)).kl
    for row, action in itertools.product(range(2), range(2)):
        index = trajectory.first + action
        x, sigma, to = trajectory.latents[1 + row, action][None], trajectory.sigmas[index], trajectory.sigmas[index + 1]
        rows = slice(1 + row, 2 + row)
        current, reference = (policy.velocity(trajectory, rows, x, sigma[None], weights) for weights in ("current", "reference"))
        squared = (current - reference).square().mean()
        if kl == "closed":
            level = tiny.TRANSITIONS[kind].exploration or 0.0
            if kind == "cps":  # the mean is linear in velocity: its coefficient and the spread, as published
                s = to * torch.sin(torch.tensor(level * torch.pi / 2))
                coefficient = -(1 - to) * sigma + (to**2 - s**2).sqrt() * (1 - sigma)
                variance = s**2
            else:
                top = trajectory.sigmas[1] if kind == "sde" and sigma == 1 else sigma
                s2 = level**2 * (sigma / (1 - top) if kind == "sde" else 1)
                coefficient = (to - sigma) * (1 + s2 * (1 - sigma) / (2 * sigma))
                variance = s2 * (sigma - to)
            squared = coefficient**2 * squared / (2 * variance)
        torch.testing.assert_close(found[row, action], squared, rtol=1e-3, atol=1e-9)


@pytest.mark.parametrize(("microbatch", "rows"), [(1, 2), (3, 5), (4, 1), (100, 5)])
def test_slices_are_no_larger_than_a_microbatch(rows, microbatch):
    policy = tiny.policy(mode="all", microbatch=microbatch)
    trajectory = policy.rollout(tiny.batch(1, rows))
    sizes = [
        (part.rows.stop - part.rows.start) * (part.actions.stop - part.actions.start) for part in policy.microbatches(trajectory)
    ]
    assert sum(sizes) == trajectory.mask.numel()
    assert max(sizes) <= microbatch
    assert max(rows.stop - rows.start for rows in policy.row_slices(trajectory)) <= microbatch


# A model in 16 bits computes the velocities of a ratio in forward passes of the same shape in rollout

ROWS = 8


def policy(family: str, dtype: torch.dtype, *, guidance: float = 1.0, microbatch: int = 4, **how: Any) -> DenoisingPolicy:
    """A policy for rollout chunks of 8 rows and, by default, microbatches of 2 rows with 2 actions."""
    made = tiny.policy(family, **{"train": "full", "copies": (), "mode": "window", "kind": "cps", "noise_level": 0.7, **how})
    made.module.to(dtype)
    model = Guided(made.model, guidance) if guidance > 1 else made.model
    options = {"sampling": made.sampling, "eval_steps": tiny.NUM_STEPS, "microbatch": microbatch, "copies": made.copies}
    return DenoisingPolicy(model, **options)


def ratios(policy: DenoisingPolicy) -> Tensor:
    """The largest |ratio - 1| of each row before any update."""
    trajectory = policy.rollout(tiny.batch(2, ROWS // 2))
    with torch.no_grad():
        made = [policy.evaluate(trajectory, part, Needs()).log_ratio for part in policy.microbatches(trajectory)]
    return (torch.cat(made).exp() - 1).abs()


def shapes(policy: DenoisingPolicy) -> list[int]:
    """A list to which each later forward pass appends its number of rows."""
    rows: list[int] = []
    policy.module.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(len(kwargs["hidden_states"])), with_kwargs=True
    )
    return rows


@pytest.mark.parametrize(("family", "guidance"), [("sd3", 1.0), ("edit", 4.5)])
def test_the_ratio_of_a_model_in_16_bits_is_1_before_the_first_update(family: str, guidance: float) -> None:
    assert ratios(policy(family, torch.bfloat16, guidance=guidance)).max() == 0


def test_the_kl_of_a_model_in_16_bits_is_0_before_the_first_update() -> None:
    made = policy("sd3", torch.bfloat16, microbatch=6, copies=("reference",))
    trajectory = made.rollout(tiny.batch(2, ROWS // 2))
    rows = shapes(made)
    for part in made.microbatches(trajectory):  # the last one has 2 rows with 2 actions
        assert made.evaluate(trajectory, part, Needs(kl="velocity")).kl.max() == 0
    assert rows == [6] * 6


@pytest.mark.parametrize(
    ("dtype", "options", "passes", "of_the_update"),
    [
        (torch.bfloat16, {}, [6] * 4 + [ROWS] * (tiny.NUM_STEPS - 2), [6, 6, 6]),
        (torch.float32, {}, [ROWS] * tiny.NUM_STEPS, [6, 6, 4]),
        (torch.bfloat16, {"equal_shapes": False}, [ROWS] * tiny.NUM_STEPS, [6, 6, 4]),
    ],
)
def test_rollout_passes_of_transitions_have_the_row_count_of_the_update(
    dtype: Any, options: Any, passes: list[int], of_the_update: list[int]
) -> None:
    """In 16 bits; in fp32 or without equal shapes, all rows are computed in one forward pass."""
    made = policy("sd3", dtype, microbatch=6, **options)
    rows = shapes(made)
    trajectory = made.rollout(tiny.batch(2, ROWS // 2))
    assert trajectory.mask.shape[1] == 2
    assert sorted(rows) == passes
    rows.clear()
    for part in made.microbatches(trajectory):
        made.evaluate(trajectory, part, Needs())
    assert rows == of_the_update


def test_padding_rows_of_a_forward_pass_do_not_change_the_gradient() -> None:
    """7 rows in passes of 4: the last pass is padded with one row, which must not count."""
    torch.manual_seed(0)
    made = policy("sd3", torch.bfloat16)
    trajectory = made.rollout(tiny.batch(1, 7))
    x, sigma = trajectory.latents[:, 0], trajectory.sigmas[:1].expand(7)
    conditioning = trajectory.conditioning.take(trajectory.group)
    gradients = []
    for at_once in (4, None):
        velocity = made._velocity(made.module.float(), x, sigma, conditioning, at_once=at_once)
        assert len(velocity) == 7
        gradients.append(torch.autograd.grad(velocity.square().sum(), made.module.proj_out.weight)[0])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


# Which denoising steps are transitions, given the run's seed and the training step


@pytest.mark.parametrize("mode", ["window", "branch"])
def test_random_window_depends_only_on_seed_and_step(mode):
    window, whole = RandomWindow(mode=mode, size=2, low=1, high=6), RandomWindow(mode=mode, size=2)
    drawn = [window.actions(num_steps=8, seed=0, step=step) for step in range(40)]
    assert drawn == [window.actions(num_steps=8, seed=0, step=step) for step in range(40)]
    assert {actions.start for actions in drawn} == {1, 2, 3, 4}
    assert drawn != [window.actions(num_steps=8, seed=1, step=step) for step in range(40)]
    assert {whole.actions(num_steps=5, seed=0, step=step).stop for step in range(60)} == {2, 3, 4}  # all steps except the last
    with pytest.raises(ValueError, match="last step has no density"):
        RandomWindow(mode=mode, size=2, high=5).actions(num_steps=5, seed=0, step=0)


def test_all_steps_and_sliding_window_return_the_expected_ranges():
    assert AllSteps().actions(num_steps=5, seed=0, step=9) == range(4)
    sliding = SlidingWindow(size=2, every=3, stride=1)
    assert [sliding.actions(num_steps=5, seed=9, step=step).start for step in range(10)] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0]
