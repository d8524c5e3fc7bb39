"""Advantage-weighted matching: loss and gradient against a hand-written sum."""

import itertools
from dataclasses import replace

import pytest
import torch

import tiny_policies as tiny
from retouch.core.random import generator
from retouch.objectives.base import ObjectiveContext
from retouch.objectives.nft import AWM, draw_points
from retouch.recipe.recipe import load

ADVANTAGES = torch.tensor([1.5, -0.5, 0.0, 2.0])
CONTEXT = ObjectiveContext(
    objective="objective",
    rollout="rollout",
    model="sd3",
    is_autoregressive=False,
    token_kinds=None,
    stochastic=False,
    noise_level=None,
    reduction="mean",
    actions=None,
    microbatch=4,
    optimizer_steps=1,
    lora_dropout=None,
)
"""A recipe with deterministic chains."""


@pytest.mark.parametrize("reference_weight", [0.0, 0.7])
def test_loss_and_gradient_match_a_hand_written_sum(reference_weight):
    policy, batch = tiny.policy(train="lora"), tiny.batch()
    tiny.perturb(policy)
    trajectory = policy.rollout(batch)
    minibatch = tiny.minibatch(batch, trajectory, ADVANTAGES, epoch=1)
    objective = AWM(reference_weight=reference_weight, samples=2, shift=2.0)
    found, losses = tiny.gradient(policy, objective, minibatch)
    rows, total = slice(0, len(batch)), torch.zeros(())
    for draw in range(2):
        x0 = trajectory.outputs
        x, noise, sigma = draw_points(x0, batch, rows, purpose="awm", epoch=1, draw=draw, sigma_sampling="uniform", shift=2.0)
        velocity = policy.velocity(trajectory, rows, x, sigma, "current")
        for row in range(len(batch)):
            error = (velocity[row] - (noise[row] - x0[row])).square().mean()
            reference = policy.velocity(trajectory, rows, x, sigma, "reference")[row]
            away = (velocity[row] - reference).square().mean()
            total = total + (ADVANTAGES[row] * error + reference_weight * away) / len(batch) / 2
    slopes = torch.autograd.grad(total, list(tiny.trained(policy).values()), allow_unused=True)
    torch.testing.assert_close(sum(loss.value for loss in losses), total, rtol=1e-4, atol=1e-6)
    by_hand = {
        name: torch.zeros_like(parameter) if slope is None else slope
        for (name, parameter), slope in zip(tiny.trained(policy).items(), slopes, strict=True)
    }
    assert tiny.distance(found, by_hand) < 1e-4


def test_initial_noise_loss_and_gradient_match_a_loop_over_noise_and_image_pairs():
    """The noise is drawn again from the keys of the rows; Euler steps from it give the image of the same row."""
    objective = AWM(noise="initial", reference_weight=0.7, samples=2, shift=2.0)
    policy, batch = tiny.policy(kind="ode", train="lora", objective=objective), tiny.batch()
    tiny.perturb(policy)
    trajectory = policy.rollout(batch)
    found, losses = tiny.gradient(policy, objective, tiny.minibatch(batch, trajectory, ADVANTAGES, epoch=1))
    rows, total = slice(0, len(batch)), torch.zeros(())
    keys = [generator(batch.seed, "noise", batch.step, group, slot) for group, slot in zip(batch.group, batch.slot, strict=True)]
    noise = torch.stack([torch.randn(trajectory.outputs.shape[1:], generator=key) for key in keys])
    x = noise
    for sigma, after in itertools.pairwise(trajectory.sigmas):
        with torch.no_grad():
            x = x + (after - sigma) * policy.velocity(trajectory, rows, x, sigma.expand(len(x)), "current")
    torch.testing.assert_close(x, trajectory.outputs)
    for draw in range(2):
        x0 = trajectory.outputs
        _, _, sigma = draw_points(x0, batch, rows, purpose="awm", epoch=1, draw=draw, sigma_sampling="uniform", shift=2.0)
        x = torch.stack([(1 - sigma[row]) * x0[row] + sigma[row] * noise[row] for row in range(len(batch))])
        velocity = policy.velocity(trajectory, rows, x, sigma, "current")
        reference = policy.velocity(trajectory, rows, x, sigma, "reference")
        for row in range(len(batch)):
            error = (velocity[row] - (noise[row] - x0[row])).square().mean()
            away = (velocity[row] - reference[row]).square().mean()
            total = total + (ADVANTAGES[row] * error + 0.7 * away) / len(batch) / 2
    slopes = torch.autograd.grad(total, list(tiny.trained(policy).values()), allow_unused=True)
    torch.testing.assert_close(sum(loss.value for loss in losses), total, rtol=1e-4, atol=1e-6)
    by_hand = {
        name: torch.zeros_like(parameter) if slope is None else slope
        for (name, parameter), slope in zip(tiny.trained(policy).items(), slopes, strict=True)
    }
    assert tiny.distance(found, by_hand) < 1e-4


def test_initial_noise_is_refused_with_stochastic_transitions_and_with_an_engine():
    image = ['objective={"kind":"awm","noise":"initial"}', 'advantage={"kind":"best"}']
    load("recipes/playground/raft.jsonnet", image)
    with pytest.raises(ValueError, match=r"objective.noise: the transitions add more noise.*rollout.transition.kind to ode"):
        load("recipes/playground/grpo.jsonnet", image)
    (problem,) = AWM(noise="initial").problems(replace(CONTEXT, engine=True))
    assert problem == "objective.noise: an engine returns no initial noise; remove rollout.engine, or use 'drawn'"
    assert not [*AWM(noise="initial").problems(CONTEXT)]
    assert not [*AWM().problems(replace(CONTEXT, engine=True))]


def test_the_default_noise_is_absent_from_a_stored_recipe():
    """So the digest of a recipe from before this key is unchanged."""
    assert "noise" not in AWM().model_dump()
    assert AWM(noise="initial").model_dump()["noise"] == "initial"
