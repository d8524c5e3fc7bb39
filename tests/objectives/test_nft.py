"""DiffusionNFT: hand-written loss and gradient, the direction of an update, and the updates of the old policy."""

from dataclasses import replace

import pytest
import torch

import tiny_policies as tiny
from retouch.objectives.nft import NFT, OldDecay, draw_points

ADVANTAGES = [1.0, -0.5, 0.0, 7.0]


def old_rollout(moved=0.0, **options):
    """A policy with old weights, a batch, and a trajectory with images of the old weights."""
    policy = tiny.policy(kind="ode", train="full", copies=("old", "reference"), acting="old", **options)
    batch = tiny.batch()
    trajectory = policy.rollout(batch)
    if moved:
        tiny.perturb(policy, moved)
    return policy, batch, trajectory


def points(batch, trajectory, draw=0, epoch=0):
    return draw_points(
        trajectory.outputs, batch, slice(0, len(batch)), purpose="nft", epoch=epoch, draw=draw, sigma_sampling="uniform", shift=1.0
    )


def by_hand(velocity, old, x, x0, sigma, goodness, beta, widths=None):
    """One row's loss in float64, and the two widths, which can be given as constants."""
    clean = [x - sigma * (beta * velocity + (1 - beta) * old), x - sigma * ((1 + beta) * old - beta * velocity)]
    if widths is None:
        widths = [max((each - x0).abs().mean().item(), 1e-5) for each in clean]
    good, bad = (((each - x0) ** 2).mean() / width for each, width in zip(clean, widths, strict=True))
    return (goodness * good + (1 - goodness) * bad) / beta, widths


def rows(policy, batch, trajectory, epoch=0):
    """Each row's (velocity, old, x, x0, sigma) in float64."""
    x, _, sigma = points(batch, trajectory, epoch=epoch)
    with torch.no_grad():
        current, old = (policy.velocity(trajectory, slice(0, 4), x, sigma, weights) for weights in ("current", "old"))
    return [tuple(part.double() for part in row) for row in zip(current, old, x, trajectory.outputs, sigma, strict=True)]


@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_nft_loss_matches_the_hand_written_formula(beta):
    policy, batch, trajectory = old_rollout(moved=0.05)
    _, losses = tiny.gradient(policy, NFT(beta=beta, advantage_clip=5.0), tiny.minibatch(batch, trajectory, ADVANTAGES))
    goodness = [0.6, 0.45, 0.5, 1.0]
    wanted = sum(by_hand(*row, r, beta)[0] for row, r in zip(rows(policy, batch, trajectory), goodness, strict=True)) / 4
    torch.testing.assert_close(sum(loss.value for loss in losses).double(), wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    ("used", "goodness"),
    [
        ("positive", [0.6, 0.5, 0.5, 1.0]),
        ("negative", [0.5, 0.45, 0.5, 0.5]),
        ("indicator", [0.6, 0.5, 0.5, 0.6]),
        ("sign", [0.6, 0.4, 0.5, 0.6]),
    ],
)
def test_advantage_modes_match_the_published_code(used, goodness):
    policy, batch, trajectory = old_rollout(moved=0.05)
    objective = NFT(beta=0.5, advantage_clip=5.0, advantages=used)
    _, losses = tiny.gradient(policy, objective, tiny.minibatch(batch, trajectory, ADVANTAGES))
    wanted = sum(by_hand(*row, r, 0.5)[0] for row, r in zip(rows(policy, batch, trajectory), goodness, strict=True)) / 4
    torch.testing.assert_close(sum(loss.value for loss in losses).double(), wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize("moved", [0.0, 0.05])
@pytest.mark.parametrize("beta", [0.1, 1.0])
def test_nft_gradient_matches_the_hand_written_formula_and_finite_differences(moved, beta):
    """dL/dv of a row by hand with constant widths, backpropagated through the velocity to the weights."""
    policy, batch, trajectory = old_rollout(moved=moved)
    found, _ = tiny.gradient(policy, NFT(beta=beta, advantage_clip=5.0), tiny.minibatch(batch, trajectory, ADVANTAGES))
    slopes = []
    for (velocity, old, x, x0, sigma), r in zip(rows(policy, batch, trajectory), [0.6, 0.45, 0.5, 1.0], strict=True):
        _, (good, bad) = by_hand(velocity, old, x, x0, sigma, r, beta)
        plus = x - sigma * (beta * velocity + (1 - beta) * old) - x0
        minus = x - sigma * ((1 + beta) * old - beta * velocity) - x0
        slope = 2 * sigma * ((1 - r) * minus / bad - r * plus / good) / x.numel()
        direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        ends = [by_hand(velocity + s * direction, old, x, x0, sigma, r, beta, (good, bad))[0] for s in (1e-4, -1e-4)]
        torch.testing.assert_close((ends[0] - ends[1]) / 2e-4, (slope * direction).sum(), rtol=1e-6, atol=1e-9)
        slopes.append(slope.float() / 4)
    x, _, sigma = points(batch, trajectory)
    velocity = policy.velocity(trajectory, slice(0, 4), x, sigma, "current")
    carried = torch.autograd.grad(velocity, list(tiny.trained(policy).values()), torch.stack(slopes), allow_unused=True)
    wanted = {
        name: torch.zeros_like(parameter) if part is None else part
        for (name, parameter), part in zip(tiny.trained(policy).items(), carried, strict=True)
    }
    assert tiny.distance(found, wanted) < 1e-4


def step(policy, objective, minibatch, size):
    found, _ = tiny.gradient(policy, objective, minibatch)
    with torch.no_grad():
        for name, parameter in tiny.trained(policy).items():
            parameter.sub_(size * found[name])


def test_gradient_adds_the_kl_to_the_reference_with_its_weight():
    policy, batch, trajectory = old_rollout(moved=0.05)
    minibatch = tiny.minibatch(batch, trajectory, ADVANTAGES)
    plain, _ = tiny.gradient(policy, NFT(), minibatch)
    pulled, losses = tiny.gradient(policy, NFT(reference_weight=0.5), minibatch)
    x, _, sigma = points(batch, trajectory)
    apart = policy.velocity(trajectory, slice(0, 4), x, sigma, "current") - policy.velocity(
        trajectory, slice(0, 4), x, sigma, "reference"
    )
    kl = apart.square().mean()
    slopes = torch.autograd.grad(0.5 * kl, list(tiny.trained(policy).values()), allow_unused=True)
    wanted = {name: plain[name] + (0 if slope is None else slope) for (name, _), slope in zip(plain.items(), slopes, strict=True)}
    assert tiny.distance(pulled, wanted) < 1e-4
    torch.testing.assert_close(sum(loss.sums["policy/kl"] for loss in losses), kl.detach(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("microbatch", [1, 3, 100])
def test_gradient_is_independent_of_microbatch_size_and_number_of_actions(microbatch):
    """An image that was sampled with several stochastic steps counts as one image."""
    batch = tiny.batch()
    gradients = []
    for kind, size in (("ode", 4), ("ode", microbatch), ("sde", microbatch)):
        policy = tiny.policy(kind=kind, mode="window", train="full", copies=("old",), microbatch=size)
        trajectory = policy.rollout(batch)
        trajectory = replace(trajectory, outputs=tiny.policy(kind="ode", train="full").rollout(batch).outputs)
        tiny.perturb(policy, 0.05)
        gradients.append(tiny.gradient(policy, NFT(), tiny.minibatch(batch, trajectory, ADVANTAGES))[0])
    assert tiny.distance(gradients[1], gradients[0]) < 1e-5
    assert tiny.distance(gradients[2], gradients[0]) < 1e-5


def test_noise_draws_are_averaged_and_differ_between_epochs():
    policy, batch, trajectory = old_rollout(moved=0.05)
    minibatch = tiny.minibatch(batch, trajectory, ADVANTAGES)
    one, (first,) = tiny.gradient(policy, NFT(), minibatch)
    two, losses = tiny.gradient(policy, NFT(samples=2), minibatch)
    assert len(losses) == 2
    torch.testing.assert_close(losses[0].value, first.value / 2)
    assert tiny.distance(two, one) > 0.05
    again, _ = tiny.gradient(policy, NFT(), replace(minibatch, epoch=1))
    assert tiny.distance(again, one) > 0.05


def test_decay_schedules_of_the_old_policy_match_the_published_code():
    none, slow = OldDecay(rate=0.0, max=0.0), OldDecay(flat=75, rate=0.0075, max=0.999)
    assert [OldDecay().at(step) for step in (1, 100, 500, 2000)] == [0.001, 0.1, 0.5, 0.5]
    assert [none.at(step) for step in (1, 2000)] == [0.0, 0.0]
    assert [slow.at(step) for step in (1, 75, 76, 175, 300)] == [0.0, 0.0, 0.0075, 0.75, 0.999]
