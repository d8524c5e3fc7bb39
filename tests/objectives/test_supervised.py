"""Supervised flow matching, and the points (noise and sigma) at which its loss is computed."""

from dataclasses import replace

import pytest
import torch

import tiny_policies as tiny
from retouch.core.random import generator
from retouch.objectives.imitation import Supervised
from retouch.objectives.nft import draw_points


def drawn(batch, x0, rows=None, **options):
    options = {"purpose": "supervised", "epoch": 0, "draw": 0, "sigma_sampling": "logit_normal", "shift": 1.0, **options}
    return draw_points(x0 if rows is None else x0[rows], batch, rows or slice(0, len(batch)), **options)


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


def test_gradient_is_independent_of_microbatch_size():
    batch, gradients = tiny.batch(), []
    for microbatch in (1, 3, 4):
        policy = tiny.policy(train="full", microbatch=microbatch)
        minibatch = tiny.minibatch(batch, policy.demonstrate(batch), torch.ones(4))
        gradients.append(tiny.gradient(policy, Supervised(), minibatch)[0])
    for cut in gradients[:2]:
        assert tiny.distance(cut, gradients[2]) < 1e-5


def test_points_lie_on_the_line_from_data_to_noise():
    batch = tiny.batch()
    x0 = torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    x, noise, sigma = drawn(batch, x0)
    torch.testing.assert_close(x, x0 + sigma[:, None, None] * (noise - x0))
    assert len({float(each) for each in sigma}) == 4


def test_drawn_points_depend_on_the_keys_of_their_row_and_not_on_other_rows():
    batch = tiny.batch()
    x0 = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    whole = drawn(batch, x0)
    for rows in (slice(1, 3), slice(3, 4)):
        for part, all_of_it in zip(drawn(batch, x0, rows), whole, strict=True):
            assert torch.equal(part, all_of_it[rows])
    moved = replace(batch, group_ids=(7, 8))
    others = [
        {"epoch": 1},
        {"draw": 1},
        {"purpose": "nft"},
    ]
    for options in others:
        assert (drawn(batch, x0, **options)[1] - whole[1]).flatten(1).abs().amax(1).min() > 0
    for other in (moved, replace(batch, seed=9), replace(batch, step=9)):
        assert (drawn(other, x0)[1] - whole[1]).flatten(1).abs().amax(1).min() > 0


@pytest.mark.parametrize(("sigma_sampling", "quartiles"), [("uniform", [0.25, 0.5, 0.75]), ("logit_normal", [0.3375, 0.5, 0.6625])])
@pytest.mark.parametrize("shift", [1.0, 4.0])
def test_sigma_follows_the_configured_distribution_and_shift(sigma_sampling, quartiles, shift):
    batch = tiny.batch(1, 3000)
    _, _, sigma = drawn(batch, torch.zeros(3000, 1), sigma_sampling=sigma_sampling, shift=shift)
    for share, place in zip([0.25, 0.5, 0.75], quartiles, strict=True):
        shifted = shift * place / (1 + (shift - 1) * place)
        assert (sigma < shifted).float().mean().item() == pytest.approx(share, abs=0.03)
    assert sigma.min() > 0
    assert sigma.max() <= 1
