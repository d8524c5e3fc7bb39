"""Diffusion DPO on pairs from groups and from the data: hand-written losses, and rows that form no pair."""

from dataclasses import replace

import pytest
import torch

import tiny_models
import tiny_policies as tiny
from retouch.core.random import generator
from retouch.objectives.dpo import DPO, HELDOUT_POINTS
from retouch_worlds.testing import check_objective

ADVANTAGES = torch.tensor([0.2, 1.5, -0.7, -0.5])


def minibatch(policy, advantages=ADVANTAGES, batch=None):
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
    slopes = torch.autograd.grad(total, list(tiny.trained(policy).values()), allow_unused=True)
    torch.testing.assert_close(sum(loss.value for loss in losses), total, rtol=1e-4, atol=1e-6)
    by_hand = {
        name: torch.zeros_like(parameter) if slope is None else slope
        for (name, parameter), slope in zip(tiny.trained(policy).items(), slopes, strict=True)
    }
    assert tiny.distance(found, by_hand) < 1e-3


@pytest.mark.parametrize("advantages", [(1.0, 1.0, 0.0, 0.0), (0.0, 0.0, 0.0, 0.0)])
def test_groups_with_equal_advantages_have_zero_gradient(advantages):
    policy = moved()
    found, losses = tiny.gradient(policy, DPO(), minibatch(policy, torch.tensor(advantages)))
    assert len(losses) == 2
    assert all(not slope.any() for slope in found.values())


def test_metrics_of_group_pairs_report_the_share_of_groups_with_a_pair():
    """With opposite advantages the other half of the pairs is in the right order, and a group without a pair counts in neither."""
    policy = moved()

    def means(advantages):
        losses = list(DPO(samples=2).losses(policy, minibatch(policy, advantages)))
        return [sum(float(loss.sums[f"policy/{name}"]) for loss in losses) for name in ("pairs", "preferred")]

    for advantages, share in ((ADVANTAGES, 1.0), (torch.tensor([0.5, 0.5, -0.7, -0.5]), 0.5), (torch.zeros(4), 0.0)):
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


@pytest.mark.parametrize("microbatch", [1, 3, 4, 32])
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
    slopes = torch.autograd.grad(total, list(tiny.trained(policy).values()), allow_unused=True)
    by_hand = {
        name: torch.zeros_like(parameter) if slope is None else slope
        for (name, parameter), slope in zip(tiny.trained(policy).items(), slopes, strict=True)
    }
    assert tiny.distance(found, by_hand) < 1e-3
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


def test_task_without_chosen_and_rejected_image_raises_with_its_id():
    with pytest.raises(ValueError, match=r"task t0 has no chosen and rejected image; add both to the data"):
        DPO(pairs="data").demonstrate(tiny.policy(), tiny.batch())
