"""Objectives that compare velocities: DiffusionNFT, AWM, DPO and supervised flow matching, against hand-written losses."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import tiny_loop
import tiny_models
import tiny_policies as tiny
from retouch.core.random import generator
from retouch.objectives.base import ObjectiveContext
from retouch.objectives.dpo import CRD, DGPO, DPO, HELDOUT_POINTS
from retouch.objectives.imitation import Supervised
from retouch.objectives.nft import AWM, NFT, OldDecay
from retouch.objectives.policy_gradient import PolicyGradient
from retouch.recipe.recipe import load
from retouch.run.step import train
from retouch_worlds.testing import check_objective

# DiffusionNFT

ADVANTAGES = [1.0, -0.5, 0.0, 7.0]


def slopes_of(policy, total):
    """The gradient of a loss that was computed by hand, by parameter name."""
    parameters = tiny.trained(policy)
    slopes = torch.autograd.grad(total, list(parameters.values()), allow_unused=True, retain_graph=True)
    return {
        name: torch.zeros_like(parameter) if slope is None else slope
        for (name, parameter), slope in zip(parameters.items(), slopes, strict=True)
    }


def old_rollout(moved=0.0, **options):
    """A policy with old weights, a batch, and a trajectory with images of the old weights."""
    policy = tiny.policy(kind="ode", train="full", copies=("old", "reference"), acting="old", **options)
    batch = tiny.batch()
    trajectory = policy.rollout(batch)
    if moved:
        tiny.perturb(policy, moved)
    return policy, batch, trajectory


def points(batch, trajectory, draw=0, epoch=0):
    return NFT().draw_points(trajectory.outputs, batch, slice(0, len(batch)), purpose="nft", epoch=epoch, draw=draw)


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


@pytest.mark.parametrize(
    ("beta", "used", "goodness"),
    [
        (0.1, "all", [0.6, 0.45, 0.5, 1.0]),
        (1.0, "all", [0.6, 0.45, 0.5, 1.0]),
        (0.5, "positive", [0.6, 0.5, 0.5, 1.0]),
        (0.5, "negative", [0.5, 0.45, 0.5, 0.5]),
        (0.5, "indicator", [0.6, 0.5, 0.5, 0.6]),
        (0.5, "sign", [0.6, 0.4, 0.5, 0.6]),
    ],
)
def test_nft_loss_matches_the_hand_written_formula(beta, used, goodness):
    policy, batch, trajectory = old_rollout(moved=0.05)
    objective = NFT(beta=beta, advantage_clip=5.0, advantages=used)
    _, losses = tiny.gradient(policy, objective, tiny.minibatch(batch, trajectory, ADVANTAGES))
    wanted = sum(by_hand(*row, r, beta)[0] for row, r in zip(rows(policy, batch, trajectory), goodness, strict=True)) / 4
    torch.testing.assert_close(sum(loss.value for loss in losses).double(), wanted, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("moved", "beta"), [(0.0, 1.0), (0.05, 0.1)])
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
    assert tiny.distance(found, slopes_of(policy, (velocity * torch.stack(slopes)).sum())) < 1e-4


def test_gradient_adds_the_kl_to_the_reference_with_its_weight():
    policy, batch, trajectory = old_rollout(moved=0.05)
    minibatch = tiny.minibatch(batch, trajectory, ADVANTAGES)
    plain, _ = tiny.gradient(policy, NFT(), minibatch)
    pulled, losses = tiny.gradient(policy, NFT(reference_weight=0.5), minibatch)
    x, _, sigma = points(batch, trajectory)
    current, reference = (policy.velocity(trajectory, slice(0, 4), x, sigma, which) for which in ("current", "reference"))
    kl = (current - reference).square().mean()
    slopes = slopes_of(policy, 0.5 * kl)
    assert tiny.distance(pulled, {name: slope + slopes[name] for name, slope in plain.items()}) < 1e-4
    torch.testing.assert_close(sum(loss.sums["policy/kl"] for loss in losses), kl.detach(), rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", [NFT, AWM])
@pytest.mark.parametrize("reference_weight", [0.0, 0.3])
def test_norm_guard_adds_a_hinge_on_the_norm_of_the_velocity(kind, reference_weight):
    """One of four images has no reward."""
    policy, batch, trajectory = old_rollout(moved=0.2, microbatch=3)
    some = tiny.minibatch(batch, trajectory, ADVANTAGES)
    some = replace(some, weights=some.weights * torch.tensor([[1.0], [1.0], [0.0], [1.0]]))
    x, _, sigma = kind().draw_points(trajectory.outputs, batch, slice(0, 4), purpose=kind().label, epoch=0, draw=0)
    now, then = (policy.velocity(trajectory, slice(0, 4), x, sigma, which) for which in ("current", "reference"))
    ratio = torch.stack([(a.square().sum() / b.square().sum()).sqrt() for a, b in zip(now, then, strict=True)])
    longer = (ratio[[0, 1, 3]] - 1).sort().values
    margin = max(0.0, longer[1:].mean().item())
    assert longer[1] < margin < longer[2]
    hinge = 0.7 * (some.weights[:, 0] * torch.where(ratio > 1 + margin, ratio - 1 - margin, 0.0)).sum()
    keys = {"reference_weight": reference_weight}
    plain, before = tiny.gradient(policy, kind(**keys), some)
    found, after = tiny.gradient(policy, kind(**keys, norm_guard={"weight": 0.7, "margin": margin}), some)
    slopes = slopes_of(policy, hinge)
    assert tiny.distance(found, {name: slope + slopes[name] for name, slope in plain.items()}) < 1e-4
    added = sum(loss.value for loss in after) - sum(loss.value for loss in before)
    torch.testing.assert_close(added, hinge, rtol=1e-3, atol=1e-5)
    told = sum(loss.sums["policy/velocity_norm"] for loss in after)
    torch.testing.assert_close(told, (some.weights[:, 0] * ratio).sum().detach(), rtol=1e-4, atol=0)
    assert ("policy/kl" in after[0].sums) == bool(reference_weight)
    assert "norm_guard" not in kind().model_dump()


def test_gradient_is_independent_of_microbatch_size_and_number_of_actions():
    """An image that was sampled with several stochastic steps counts as one image."""
    batch, gradients = tiny.batch(), []
    for kind, size in (("ode", 4), ("ode", 3), ("sde", 3)):
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


# Advantage-weighted matching

AWM_ADVANTAGES = torch.tensor([1.5, -0.5, 0.0, 2.0])
CONTEXT = ObjectiveContext(
    **{"objective": "objective", "rollout": "rollout", "model": "sd3", "is_autoregressive": False, "token_kinds": None},
    **{"stochastic": False, "noise_level": None, "reduction": "mean", "actions": None, "microbatch": 4, "optimizer_steps": 1},
    lora_dropout=None,
)
"""A recipe with deterministic chains."""


@pytest.mark.parametrize(("noise_kind", "reference_weight"), [("drawn", 0.0), ("drawn", 0.7), ("initial", 0.7)])
def test_loss_and_gradient_match_a_hand_written_sum(noise_kind, reference_weight):
    """Initial noise is drawn again from the keys of the rows; Euler steps from it give the image of the same row."""
    objective = AWM(noise=noise_kind, reference_weight=reference_weight, samples=2, shift=2.0)
    continued = objective if noise_kind == "initial" else None
    policy, batch = tiny.policy(kind="ode", train="lora", objective=continued), tiny.batch()
    tiny.perturb(policy)
    trajectory = policy.rollout(batch)
    found, losses = tiny.gradient(policy, objective, tiny.minibatch(batch, trajectory, AWM_ADVANTAGES, epoch=1))
    rows, total, x0 = slice(0, len(batch)), torch.zeros(()), trajectory.outputs
    keys = [generator(batch.seed, "noise", batch.step, group, slot) for group, slot in zip(batch.group, batch.slot, strict=True)]
    first = x = torch.stack([torch.randn(x0.shape[1:], generator=key) for key in keys])
    for sigma, after in itertools.pairwise(trajectory.sigmas):
        with torch.no_grad():
            x = x + (after - sigma) * policy.velocity(trajectory, rows, x, sigma.expand(len(x)), "current")
    torch.testing.assert_close(x, x0)
    for draw in range(2):
        x, noise, sigma = AWM(shift=2.0).draw_points(x0, batch, rows, purpose="awm", epoch=1, draw=draw)
        if noise_kind == "initial":
            noise = first
            x = torch.stack([(1 - sigma[row]) * x0[row] + sigma[row] * noise[row] for row in range(len(batch))])
        velocity, reference = (policy.velocity(trajectory, rows, x, sigma, which) for which in ("current", "reference"))
        for row in range(len(batch)):
            error = (velocity[row] - (noise[row] - x0[row])).square().mean()
            away = (velocity[row] - reference[row]).square().mean()
            total = total + (AWM_ADVANTAGES[row] * error + reference_weight * away) / len(batch) / 2
    torch.testing.assert_close(sum(loss.value for loss in losses), total, rtol=1e-4, atol=1e-6)
    assert tiny.distance(found, slopes_of(policy, total)) < 1e-4


def test_initial_noise_is_refused_with_stochastic_transitions_and_with_an_engine():
    image = ['objective={"kind":"awm","noise":"initial"}', 'advantage={"kind":"best"}']
    load("recipes/playground/raft.jsonnet", image)
    with pytest.raises(ValueError, match=r"objective.noise: the transitions add more noise.*rollout.transition.kind to ode"):
        load("recipes/playground/grpo.jsonnet", image)
    (problem,) = AWM(noise="initial").problems(replace(CONTEXT, engine=True))
    assert problem == "objective.noise: an engine returns no initial noise; remove rollout.engine, or use 'drawn'"
    assert not [*AWM(noise="initial").problems(CONTEXT), *AWM().problems(replace(CONTEXT, engine=True))]
    # The default is absent, so the digest of a recipe from before this key is unchanged.
    assert "noise" not in AWM().model_dump()
    assert AWM(noise="initial").model_dump()["noise"] == "initial"


# Diffusion DPO on pairs from groups and from the data

DPO_ADVANTAGES = torch.tensor([0.2, 1.5, -0.7, -0.5])


def minibatch(policy, advantages=DPO_ADVANTAGES, batch=None):
    batch = tiny.batch() if batch is None else batch
    return tiny.minibatch(batch, policy.rollout(batch), advantages)


def pairs(count=3):
    """A batch of tasks with a chosen and a rejected image, 8 x 16 px."""
    tasks = tuple(
        replace(task, chosen=tiny_models.image(200 + k, 16, 8), rejected=tiny_models.image(300 + k, 16, 8))
        for k, task in enumerate(tiny.tasks(count))
    )
    return tiny.batch(count, tasks=lambda count: tasks)


def moved(**options):
    policy = tiny.policy(**options)
    tiny.perturb(policy)
    return policy


def test_loss_and_gradient_of_group_pairs_match_a_hand_written_formula():
    policy = moved()
    some = minibatch(policy)
    objective = DPO(beta=3.0, shift=2.0)
    found, losses = tiny.gradient(policy, objective, some)
    total = torch.zeros(())
    for best, worst, group in ((1, 0, 0), (3, 2, 1)):
        x0 = some.trajectory.outputs
        key = generator(some.batch.seed, "dpo", some.batch.step, some.batch.group_ids[group], 0, some.epoch, 0)
        s = torch.rand((), generator=key)
        sigma = 2 * s / (1 + s)
        noise = torch.randn(x0.shape[1:], generator=key)

        def gained(row, sigma=sigma, noise=noise, x0=x0):
            x = ((1 - sigma) * x0[row] + sigma * noise)[None]
            rows = slice(row, row + 1)
            now, then = (policy.velocity(some.trajectory, rows, x, sigma[None], which)[0] for which in ("current", "reference"))
            wanted = noise - x0[row]
            return (now - wanted).square().mean() - (then - wanted).square().mean()

        total = total - torch.log(torch.sigmoid(-3.0 * (gained(best) - gained(worst)))) / 2
    torch.testing.assert_close(sum(loss.value for loss in losses), total, rtol=1e-4, atol=1e-6)
    assert tiny.distance(found, slopes_of(policy, total)) < 1e-3


def test_groups_with_equal_advantages_have_zero_gradient():
    policy = moved()
    found, losses = tiny.gradient(policy, DPO(), minibatch(policy, torch.tensor((1.0, 1.0, 0.0, 0.0))))
    assert len(losses) == 2
    assert all(not slope.any() for slope in found.values())


def test_metrics_of_group_pairs_report_the_share_of_groups_with_a_pair():
    """With opposite advantages the other half of the pairs is in the right order, and a group without a pair counts in neither."""
    policy = moved()

    def means(advantages):
        losses = list(DPO(samples=2).losses(policy, minibatch(policy, advantages)))
        return [sum(float(loss.sums[f"policy/{name}"]) for loss in losses) for name in ("pairs", "preferred")]

    for advantages, share in ((DPO_ADVANTAGES, 1.0), (torch.tensor([0.5, 0.5, -0.7, -0.5]), 0.5), (torch.zeros(4), 0.0)):
        (pairs, preferred), (same, other) = means(advantages), means(-advantages)
        assert pairs == same == pytest.approx(share)
        assert preferred + other == pytest.approx(share)


def test_row_with_zero_weight_is_in_no_pair():
    policy = moved()
    whole = minibatch(policy)
    weights = whole.weights.clone()
    weights[1] = 0  # the best of the first group
    found, _ = tiny.gradient(policy, DPO(beta=3.0), replace(whole, weights=weights))
    weights[0] = 0
    both, _ = tiny.gradient(policy, DPO(beta=3.0), replace(whole, weights=weights))
    assert tiny.distance(found, both) < 1e-6


@pytest.mark.parametrize("microbatch", [1, 4])
def test_loss_and_gradient_of_data_pairs_match_the_published_formula(microbatch):
    """- log sigmoid(- beta T w (e(chosen) - e_ref(chosen) - e(rejected) + e_ref(rejected))) at one noise and sigma, by hand."""
    policy = moved(microbatch=microbatch)
    objective = DPO(beta=3.0, pairs="data", samples=2)
    batch = pairs()
    trajectory = objective.demonstrate(policy, batch)
    some = tiny.minibatch(batch, trajectory, torch.ones(6))
    found, losses = tiny.gradient(policy, objective, some)
    total = torch.zeros(())
    for number, task in enumerate(batch.tasks):
        for draw in range(2):
            key = generator(batch.seed, "dpo", batch.step, number, 0, 0, draw)
            sigma = torch.rand((), generator=key)
            margin = torch.zeros(())
            noise = None
            for slot, image in enumerate((task.chosen, task.rejected)):
                x0 = policy.model.encode_images([image])
                noise = torch.randn(x0.shape[1:], generator=key)[None] if noise is None else noise
                x = (1 - sigma) * x0 + sigma * noise
                row = slice(2 * number + slot, 2 * number + slot + 1)
                now, then = (policy.velocity(trajectory, row, x, sigma[None], which) for which in ("current", "reference"))
                error, error_before = ((each - (noise - x0)).square().mean() for each in (now, then))
                margin = margin + (error - error_before) * (-1 if slot else 1)
            total = total - torch.log(torch.sigmoid(-3.0 * margin)) / 6
    torch.testing.assert_close(sum(loss.value for loss in losses), total, rtol=1e-4, atol=1e-6)
    assert tiny.distance(found, slopes_of(policy, total)) < 1e-3
    preferred, margin = (sum(loss.sums[f"policy/{name}"] for loss in losses) for name in ("preferred", "margin"))
    assert 0 <= preferred <= 1
    assert margin.isfinite()


def test_metrics_of_held_out_pairs_match_hand_computed_means_over_several_points():
    objective = DPO(beta=3.0, pairs="data")
    batch = pairs()
    assert objective.measure(tiny.policy(), batch)["pairs/preferred"].tolist() == [0.5] * 3  # the policy is the reference
    policy = moved(microbatch=2)
    found = objective.measure(policy, batch)
    assert found.keys() == objective.heldout_columns.keys()
    assert all(not column.requires_grad for column in found.values())
    trajectory = objective.demonstrate(policy, batch)
    margins = torch.zeros(3)
    for number in range(3):
        for draw in range(HELDOUT_POINTS):
            key = generator(batch.seed, "dpo", batch.step, number, 0, 0, draw)
            sigma, noise = torch.rand((), generator=key), None
            for slot in (0, 1):
                row = slice(2 * number + slot, 2 * number + slot + 1)
                x0 = trajectory.outputs[row]
                noise = torch.randn(x0.shape[1:], generator=key)[None] if noise is None else noise
                x = (1 - sigma) * x0 + sigma * noise
                now, then = (policy.velocity(trajectory, row, x, sigma[None], which).detach() for which in ("current", "reference"))
                gained = (then - (noise - x0)).square().mean() - (now - (noise - x0)).square().mean()
                margins[number] += gained * (-1 if slot else 1) / HELDOUT_POINTS
    torch.testing.assert_close(found["pairs/margin"], 3 * margins, rtol=1e-3, atol=1e-6)
    assert found["pairs/preferred"].tolist() == (margins > 0).float().tolist()
    assert DPO().heldout_columns == {}


def test_dpo_on_data_pairs_passes_the_contract_checks():
    check_objective(DPO(beta=10.0, pairs="data"), moved(), pairs())
    with pytest.raises(ValueError, match=r"task t0 has no chosen and rejected image; add both to the data"):
        DPO(pairs="data").demonstrate(tiny.policy(), tiny.batch())


# Direct group preference optimisation


@pytest.mark.parametrize("microbatch", [1, 3, 8])
def test_dgpo_matches_a_hand_written_loss_of_whole_groups_for_every_microbatch(microbatch):
    """Two groups of four; one image has no score, so the mean of its group is over three."""
    policy, batch = moved(microbatch=microbatch), tiny.batch(2, 4)
    trajectory, valid = policy.rollout(batch), torch.tensor([True, True, False, *[True] * 5])
    advantages = torch.tensor([1.5, -0.5, 0.0, -1.0, 0.3, 2.0, -1.5, -0.8])
    some = tiny.minibatch(batch, trajectory, advantages, valid=valid, epoch=1)
    found, losses = tiny.gradient(policy, DGPO(beta=30.0, shift=2.0, samples=2), some)
    total, preferred = torch.zeros(()), 0.0
    for group, draw in itertools.product((0, 1), (0, 1)):
        key = generator(batch.seed, "dgpo", batch.step, batch.group_ids[group], 0, 1, draw)
        s = torch.rand((), generator=key)
        sigma, noise = 2 * s / (1 + s), torch.randn(trajectory.outputs.shape[1:], generator=key)
        scored = [row for row in range(4 * group, 4 * group + 4) if valid[row]]
        preference = torch.zeros(())
        for row in scored:
            x0 = trajectory.outputs[row]
            x = ((1 - sigma) * x0 + sigma * noise)[None]
            now, then = (
                policy.velocity(trajectory, slice(row, row + 1), x, sigma[None], which)[0] for which in ("current", "reference")
            )
            risen = (now - (noise - x0)).square().mean() - (then - (noise - x0)).square().mean()
            preference = preference + advantages[row] * risen / len(scored)
        total = total - torch.log(torch.sigmoid(-30.0 * preference)) * len(scored) / 7 / 2
        preferred += float(preference < 0) * len(scored) / 7 / 2
    assert abs(total.item() - math.log(2)) > 1e-2
    torch.testing.assert_close(sum(loss.value for loss in losses), total, rtol=1e-4, atol=1e-6)
    assert tiny.distance(found, slopes_of(policy, total)) < 1e-3
    told = [sum(float(loss.sums[f"policy/{name}"]) for loss in losses) for name in ("loss", "preferred", "pairs")]
    assert told == pytest.approx([total.item(), preferred, 1.0], rel=1e-4)
    equal = advantages.clone()
    equal[:4] = 0
    half, losses = tiny.gradient(policy, DGPO(beta=30.0), tiny.minibatch(batch, trajectory, equal, valid=valid))
    assert sum(float(loss.sums["policy/pairs"]) for loss in losses) == pytest.approx(4 / 7)
    assert any(slope.any() for slope in half.values())
    none, _ = tiny.gradient(policy, DGPO(), tiny.minibatch(batch, trajectory, torch.zeros(8)))
    assert not any(slope.any() for slope in none.values())


@pytest.mark.parametrize("microbatch", [1, 3, 8])
def test_crd_matches_a_hand_written_loss_of_whole_groups_for_every_microbatch(microbatch):
    """Two groups of four; one image has no score. The old policy is neither the current one nor the reference."""
    policy, batch = moved(microbatch=microbatch, copies=("old", "reference")), tiny.batch(2, 4)
    policy.follow_old(0.5)
    trajectory, valid = policy.rollout(batch), torch.tensor([True, True, False, *[True] * 5])
    advantages = torch.tensor([1.5, -0.5, 0.0, -1.0, 0.3, 9.0, -1.5, -0.8])
    some = tiny.minibatch(batch, trajectory, advantages, valid=valid, epoch=1)
    found, losses = tiny.gradient(policy, CRD(beta=2.0, advantage_clip=4.0, shift=2.0, reference_weight=0.3), some)
    total, kl = torch.zeros(()), 0.0
    for group in (0, 1):
        scored = [row for row in range(4 * group, 4 * group + 4) if valid[row]]
        implicit = []
        for row in scored:
            key = generator(batch.seed, "crd", batch.step, batch.group_ids[group], batch.slot[row], 1, 0)
            s = torch.rand((), generator=key)
            sigma, noise = 2 * s / (1 + s), torch.randn(trajectory.outputs.shape[1:], generator=key)
            x0 = trajectory.outputs[row]
            x = ((1 - sigma) * x0 + sigma * noise)[None]
            now, old, reference = (
                policy.velocity(trajectory, slice(row, row + 1), x, sigma[None], which)[0] - (noise - x0)
                for which in ("current", "old", "reference")
            )
            apart = (now - reference).square().mean() / 7
            total, kl = total + 0.3 * apart, kl + apart.item()
            implicit.append(old.square().mean() / old.abs().mean() - now.square().mean() / now.detach().abs().mean())
        r, wanted = torch.stack(implicit), (advantages[scored] / 8 + 0.5).clamp(0, 1)
        error = 2.0 * (r - r.mean()) - (wanted - wanted.mean())
        total = total + 4.0 / 2.0 * error.square().mean() * len(scored) / 7
    torch.testing.assert_close(sum(loss.value for loss in losses), total, rtol=1e-4, atol=1e-6)
    assert tiny.distance(found, slopes_of(policy, total)) < 1e-3
    told = [sum(float(loss.sums[f"policy/{name}"]) for loss in losses) for name in ("loss", "kl")]
    assert told == pytest.approx([total.item(), kl], rel=1e-4)


@pytest.mark.parametrize(
    ("objective", "sampling"),
    [
        (DGPO(beta=30.0), {"kind": "ode"}),
        (CRD(), {"kind": "ode", "copies": ("old",)}),
        (AWM(norm_guard={"weight": 1.0}), {"kind": "ode"}),
        (PolicyGradient(surrogate="dppo", kl_limit=1e-7), {"kind": "sde", "mode": "all", "keep_means": True}),
    ],
    ids=["dgpo", "crd", "awm", "dppo"],
)
def test_gradient_and_metrics_on_two_ranks_match_one_rank(objective, sampling):
    """One image has no score. In the second epoch the policy has moved."""
    policies = [moved(microbatch=2, **sampling) for _ in range(3)]

    def act(ranks, policy=None):
        run = tiny_loop.run(policy or policies[ranks.rank], judge=tiny_loop.RandomJudge([(1, 1)]), ranks=ranks)
        phase = tiny_loop.phase(objective, ranks=ranks, steps=range(1), epochs=2)
        ((_, _, metrics),) = train(run, phase, start=0)
        return tiny_loop.gradient(run), metrics

    alone, wanted = act(tiny_loop.ALONE, policies[2])
    for found, metrics in tiny_loop.run_on_threads(2, act):
        assert tiny.distance(found, alone) < 1e-3
        for name, value in wanted.items():
            assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
    assert {"policy/preferred", "policy/velocity_norm", "policy/clip_fraction"} & {name for name, value in wanted.items() if value}


# Supervised flow matching, and the points (noise and sigma) at which its loss is computed


@pytest.mark.parametrize(("family", "sigma_sampling", "shift"), [("sd3", "uniform", 1.0), ("edit", "logit_normal", 3.0)])
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
    torch.testing.assert_close(sum(loss.value for loss in losses), wanted, rtol=1e-4, atol=0)
    assert tiny.distance(found, slopes_of(policy, wanted)) < 1e-4


def drawn(batch, x0, **keys):
    return Supervised(**keys).draw_points(x0, batch, slice(0, len(batch)), purpose="supervised", epoch=0, draw=0)


def test_points_lie_on_the_line_from_data_to_noise():
    batch, x0 = tiny.batch(), torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))
    x, noise, sigma = drawn(batch, x0)
    torch.testing.assert_close(x, x0 + sigma[:, None, None] * (noise - x0))
    assert len({float(each) for each in sigma}) == 4


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


def test_zero_advantage_has_zero_gradient_at_the_old_policy_and_else_moves_the_policy_towards_it():
    """v+ = v- = v_old, and the gradients of the two halves cancel."""
    policy, batch, trajectory = old_rollout()
    found, losses = tiny.gradient(policy, NFT(), tiny.minibatch(batch, trajectory, [0.0] * 4))
    good, _ = tiny.gradient(policy, NFT(), tiny.minibatch(batch, trajectory, [5.0] * 4))
    assert tiny.distance(found, good) == pytest.approx(1.0, abs=1e-4)  # |0 - good| / |good|
    assert sum(loss.value for loss in losses) > 0
    policy, batch, trajectory = old_rollout(moved=0.05)

    def apart():
        return sum((velocity - old).square().mean() for velocity, old, *_ in rows(policy, batch, trajectory))

    before, (found, _) = apart(), tiny.gradient(policy, NFT(), tiny.minibatch(batch, trajectory, [0.0] * 4))
    with torch.no_grad():
        for name, parameter in tiny.trained(policy).items():
            parameter.sub_(1e-2 * found[name])
    assert apart() < before


def test_loss_equals_log_2_if_the_policy_equals_the_reference():
    policy = tiny.policy()
    _, losses = tiny.gradient(policy, DPO(), minibatch(policy))
    torch.testing.assert_close(sum(loss.value for loss in losses), torch.tensor(2.0).log(), rtol=1e-5, atol=0)
