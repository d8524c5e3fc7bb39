"""Rollouts ahead of the updates: which weights sample, importance weights of stale actions, and rejected settings."""

import copy
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

import tiny_loop
import tiny_policies as tiny
import tiny_writers
import tiny_writing
from retouch.core.surrogates import importance_weights
from retouch.objectives.policy_gradient import PolicyGradient
from retouch.policies.rollout import CachedEngine
from retouch.policies.weights import stale_copies
from retouch.recipe.recipe import load
from retouch.run.collecting import collect_ahead, under_current_weights
from retouch.run.step import begin_collecting, collect, make_minibatch, train, update
from retouch.types import Needs

WIDE = PolicyGradient(clip_low=0.9, clip_high=9.0)
CAP = 1.2


def stale_run(ahead, *, cap=CAP, rate=1e-2, steps=4, objective=WIDE):
    """A run whose weights change so much that the probabilities of stale actions change."""
    policy = tiny.policy(mode="window", reduction="sum", copies=("reference", *stale_copies(ahead)))
    source = partial(collect_ahead, staleness=ahead, truncate_at=cap) if ahead else None
    return tiny_loop.run(policy), tiny_loop.phase(objective, steps=range(steps), learning_rate=lambda step: rate, source=source)


def weights_of(run):
    return copy.deepcopy(tiny.trained(run.policy))


@pytest.mark.parametrize("ahead", [1, 2])
def test_stale_trajectories_are_sampled_by_earlier_weights_with_current_log_probabilities(ahead):
    """Each trajectory is sampled by the weights of the earlier step; its log-probabilities are those of the current weights."""
    run, phase = stale_run(ahead)
    before, seen = [], []
    for step, collected in enumerate(phase.source(run, phase, 0)):
        before.append(weights_of(run))
        seen.append(collected)
        update(run, phase, step, collected)
    assert [found.metrics["staleness/steps"] for found in seen] == [float(min(step, ahead)) for step in range(4)]
    current = tiny.trained(run.policy)
    for step, found in enumerate(seen):
        for name, parameter in current.items():
            parameter.data = before[max(0, step - ahead)][name].data
        again = begin_collecting(run, phase.batch(step)).trajectory
        assert torch.equal(found.trajectory.latents, again.latents)
        assert torch.equal(found.trajectory.log_probs, again.log_probs) == (step == 0)
        for name, parameter in current.items():
            parameter.data = before[step][name].data
        for part in run.policy.microbatches(again):
            found_here = found.trajectory.log_probs[part.rows, part.actions]
            with torch.no_grad():
                expected = run.policy.evaluate(again, part, Needs()).log_probs
            torch.testing.assert_close(found_here, expected, atol=1e-4, rtol=1e-5)


def test_gradient_of_a_stale_step_matches_the_truncated_importance_sampling_formula():
    """- sum of weight * min(p / p_acting, cap) * A * grad log p; without the importance weights it differs."""
    run, phase = stale_run(1)
    every = phase.source(run, phase, 0)
    update(run, phase, 0, next(every))
    acting = begin_collecting(tiny_loop.run(tiny.policy(mode="window", reduction="sum")), phase.batch(1)).trajectory.log_probs
    collected = next(every)
    minibatch = make_minibatch(run, phase, collected, slice(0, len(collected.batch)), epoch=0)
    found, losses = tiny.gradient(run.policy, WIDE, minibatch)
    assert max(float(loss.maxima["policy/ratio_max"]) for loss in losses) <= 1e-5

    def formula(weighted):
        parameters = tiny.trained(run.policy)
        total = torch.zeros(())
        for part in run.policy.microbatches(collected.trajectory):
            log_probs = run.policy.evaluate(collected.trajectory, part, Needs()).log_probs
            ratio = (log_probs.detach() - acting[part.rows, part.actions]).exp().clamp(max=CAP)
            factor = minibatch.weights * collected.advantages
            total = total - (factor[part.rows, part.actions] * (ratio if weighted else 1.0) * log_probs).sum()
        return dict(zip(parameters, torch.autograd.grad(total, list(parameters.values())), strict=True))

    assert tiny.distance(found, formula(weighted=True)) < 1e-4
    assert tiny.distance(found, formula(weighted=False)) > 1e-2  # far above rounding


def test_metrics_report_the_staleness_of_the_samples():
    run, phase = stale_run(1, cap=1.0)
    metrics = [metrics for _, _, metrics in train(run, phase, start=0)]
    assert metrics[0]["staleness/steps"] == 0
    assert "staleness/weight" not in metrics[0]
    for each in metrics[1:]:
        assert each["staleness/steps"] == 1
        assert 0 < each["staleness/weight"] < 1
        assert 0 < each["staleness/truncated"] < 1
        assert math.isfinite(each["staleness/kl"])
        assert each["policy/ratio_max_first"] <= 1e-5


def test_without_staleness_there_are_no_weight_copies_metrics_or_importance_weights():
    run, phase = stale_run(0)
    plain = [metrics for _, _, metrics in train(run, phase, start=0)]
    assert not any(name.startswith("staleness/") for name in plain[0])
    assert run.policy.copies.copies.keys() == {"reference"}
    assert collect(run, phase, 0).importance is None


def test_engine_mismatch_weight_of_stale_completions_is_unchanged_by_an_update():
    """The log-probabilities of an engine are 0.25 too large: the mismatch weight is still exp(-0.25) after an update."""
    writer = tiny_writers.writer(stop=tiny_writing.STOPS)
    policy = tiny_writing.policy(writer=writer)
    policy.limits = CachedEngine(truncate_at=2.0)
    trajectory = policy.rollout(tiny_writing.batch())
    trajectory = replace(trajectory, behaviour_log_probs=trajectory.log_probs + 0.25)
    tiny_writers.perturb(writer.module, size=0.02)
    part = next(policy.microbatches(trajectory))
    with torch.no_grad():
        stale = policy.evaluate(trajectory, part, Needs()).log_probs
    weights = importance_weights(stale, trajectory.log_probs[part.rows], trajectory.mask[part.rows], cap=math.inf)
    assert (weights - 1).abs().max() > 1e-3
    all_stale = trajectory.log_probs.clone()
    all_stale[part.rows] = stale
    scale = policy.evaluate(trajectory.with_log_probs(all_stale), part, Needs()).scale
    expected = torch.where(trajectory.mask[part.rows], math.exp(-0.25), 1.0)
    torch.testing.assert_close(scale, expected, atol=1e-5, rtol=1e-5)


def test_stale_completions_get_truncated_importance_weights():
    writer = tiny_writers.writer(stop=tiny_writing.STOPS)
    policy = tiny_writing.policy(writer=writer)
    run = tiny_loop.run(tiny.policy(mode="window"))
    phase = tiny_loop.phase(WIDE, count=2, group_size=3)
    images = collect(run, phase, 0)  # rewards and advantages of six images
    trajectory = policy.rollout(tiny_writing.batch(group_size=2))
    advantages = images.advantages[:, :1].expand(trajectory.mask.shape)
    made = replace(images, trajectory=trajectory, advantages=advantages)
    tiny_writers.perturb(writer.module, size=0.05)
    found = under_current_weights(replace(run, policy=policy), made, age=1, truncate_at=CAP)
    assert found.importance is not None
    expected = importance_weights(found.trajectory.log_probs, trajectory.log_probs, trajectory.mask, cap=CAP)
    assert torch.equal(found.importance, expected)
    assert (found.importance[trajectory.mask] != 1).any()
    assert found.importance.max() <= CAP


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (['objective={"kind": "nft"}'], "nft has no probabilities"),
        (["objective.surrogate=gspo"], "gspo has one ratio per row"),
        (["objective.ratio_norm=true"], "ratio_norm needs the means"),
        (['advantage={"kind": "gae"}'], "a value head would be stale"),
        (['objective={"kind": "supervised"}'], "supervised samples nothing; remove it"),
    ],
)
def test_settings_incompatible_with_staleness_raise_when_the_recipe_is_loaded(changes, told):
    with pytest.raises(ValueError, match=rf"rollout\.staleness: .*{told}"):
        load("recipes/playground/grpo.jsonnet", ["rollout.staleness=1", *changes])


def test_truncation_without_staleness_is_refused():
    with pytest.raises(ValueError, match=r"rollout\.truncate_at: has an effect only with staleness; set rollout\.staleness"):
        load("recipes/playground/grpo.jsonnet", ["rollout.truncate_at=3"])
