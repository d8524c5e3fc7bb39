"""Advantage-weighted matching: loss and gradient against a hand-written sum."""

import pytest
import torch

import tiny_policies as tiny
from retouch.objectives.awm import AWM
from retouch.objectives.flow_matching import draw_points
from retouch.protocols import SupportsLosses

ADVANTAGES = torch.tensor([1.5, -0.5, 0.0, 2.0])


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
    assert isinstance(objective, SupportsLosses)


def test_gradient_is_independent_of_microbatch_size():
    batch, gradients = tiny.batch(), []
    for microbatch in (1, 3, 4):
        policy = tiny.policy(microbatch=microbatch)
        tiny.perturb(policy)
        minibatch = tiny.minibatch(batch, policy.rollout(batch), ADVANTAGES)
        gradients.append(tiny.gradient(policy, AWM(reference_weight=0.3), minibatch)[0])
    for cut in gradients[:2]:
        assert tiny.distance(cut, gradients[2]) < 1e-4


def test_a_zero_advantage_has_no_gradient():
    policy, batch = tiny.policy(), tiny.batch()
    tiny.perturb(policy)
    minibatch = tiny.minibatch(batch, policy.rollout(batch), torch.zeros(4))
    found, _ = tiny.gradient(policy, AWM(), minibatch)
    assert all(not slope.any() for slope in found.values())
