"""Supervised flow matching, and the points (noise and sigma) at which its loss is computed."""

import pytest
import torch

import tiny_policies as tiny
from retouch.core.random import generator
from retouch.objectives.imitation import Supervised


@pytest.mark.parametrize("family", ["sd3", "edit"])
@pytest.mark.parametrize(("sigma_sampling", "shift"), [("uniform", 1.0), ("logit_normal", 3.0)])
def test_loss_and_gradient_are_those_of_a_hand_written_regression(family, sigma_sampling, shift):
    policy, batch = tiny.policy(family, train="full"), tiny.batch()
    trajectory = policy.demonstrate(batch)
    minibatch = tiny.minibatch(batch, trajectory, torch.ones(4), epoch=2)
    found, losses = tiny.gradient(policy, Supervised(sigma_sampling=sigma_sampling, shift=shift), minibatch)
    errors = []
    for row, (group, slot) in enumerate(zip(batch.group, batch.slot, strict=True)):
        x0 = policy.model.encode_images([batch.tasks[group].target])[0]
        random = generator(batch.seed, "supervised", batch.step, batch.group_ids[group], slot, 2, 0)
        sigma = torch.rand((), generator=random) if sigma_sampling == "uniform" else torch.randn((), generator=random).sigmoid()
        sigma = shift * sigma / (1 + (shift - 1) * sigma)
        noise = torch.randn(x0.shape, generator=random)
        x = ((1 - sigma) * x0 + sigma * noise)[None]
        velocity = policy.velocity(trajectory, slice(row, row + 1), x, sigma[None], "current")[0]
        errors.append((velocity - (noise - x0)).square().mean())
    wanted = torch.stack(errors).mean()
    slopes = torch.autograd.grad(wanted, list(tiny.trained(policy).values()), allow_unused=True)
    torch.testing.assert_close(sum(loss.value for loss in losses), wanted, rtol=1e-4, atol=0)
    by_hand = {
        name: torch.zeros_like(parameter) if slope is None else slope
        for (name, parameter), slope in zip(tiny.trained(policy).items(), slopes, strict=True)
    }
    assert tiny.distance(found, by_hand) < 1e-4
