"""Runs that imitate their own best samples: RAFT and reward-weighted regression, through the loop."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import tiny_loop
import tiny_policies as tiny
from retouch.cli import main
from retouch.core.advantages import exponential_weights
from retouch.core.random import generator
from retouch.core.surrogates import loss_weights
from retouch.objectives.advantages import BestAdvantage, ExponentialAdvantage
from retouch.objectives.nft import AWM, draw_points
from retouch.objectives.policy_gradient import REINFORCE
from retouch.recipe.recipe import load
from retouch.run.step import train, weighted_rows
from retouch.types import Minibatch
from slow_params import slow_after
from token_policy import TokenPolicy

OBJECTIVE, BEST = AWM(samples=2, shift=2.0), BestAdvantage()


class Counted:
    """A policy that records how many rows are evaluated with gradient."""

    def __init__(self, policy: Any) -> None:
        self._policy, self.rows = policy, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def velocity(self, trajectory: Any, rows: slice, x: Any, sigma: Any, weights: Any) -> Any:
        self.rows.append(len(x))
        return self._policy.velocity(trajectory, rows, x, sigma, weights)


def step_on(ranks=tiny_loop.ALONE, *, policy=None, judge=tiny_loop.RedJudge, advantage=BEST, missing=(), max_missing=0.5, **sizes):
    """The gradient, the metrics, the scored rollout and the numbers of evaluated rows of a run's first step."""
    policy = policy or tiny.policy(kind="ode", microbatch=2)
    run = tiny_loop.run(policy, judge=judge(missing), ranks=ranks, chunk=100, max_missing=max_missing)
    sizes = {"count": 3, "group_size": 4, **sizes}
    phase = tiny_loop.phase(OBJECTIVE, ranks=ranks, steps=range(1), advantage=advantage, **sizes)
    counted = Counted(run.policy)
    ((_, collected, metrics),) = train(replace(run, policy=counted), phase, start=0)
    return tiny_loop.gradient(run), metrics, collected, counted.rows


def by_hand(collected, weights):
    """The gradient and the value of the flow matching loss, summed row by row with the given weights."""
    policy = tiny.policy(kind="ode")
    batch, trajectory, total = collected.batch, collected.trajectory, torch.zeros(())
    every = slice(0, len(batch))
    for draw in range(2):
        x0 = trajectory.outputs
        x, noise, sigma = draw_points(x0, batch, every, purpose="awm", epoch=0, draw=draw, sigma_sampling="uniform", shift=2.0)
        velocity = policy.velocity(trajectory, every, x, sigma, "current")
        for row in range(len(batch)):
            total = total + weights[row] * (velocity[row] - (noise[row] - x0[row])).square().mean() / 2
    parameters = tiny.trained(policy)
    slopes = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
    filled = [torch.zeros_like(p) if slope is None else slope for p, slope in zip(parameters.values(), slopes, strict=True)]
    return dict(zip(parameters, filled, strict=True)), total.item()


def test_initial_noise_of_the_best_images_comes_from_their_own_chains():
    """Through a training step, which keeps only the rows of the best images: each is paired with the noise of its own chain."""
    objective, seen = AWM(noise="initial"), []

    class Seen(Counted):
        def velocity(self, trajectory: Any, rows: slice, x: Any, sigma: Any, weights: Any) -> Any:
            seen.extend(zip(x, sigma, trajectory.outputs[rows], strict=True))
            return super().velocity(trajectory, rows, x, sigma, weights)

    run = tiny_loop.run(tiny.policy(kind="ode", microbatch=2, objective=objective), judge=tiny_loop.RedJudge(()), chunk=5)
    phase = tiny_loop.phase(objective, steps=range(1), advantage=BEST, count=3, group_size=4)
    ((_, collected, _),) = train(replace(run, policy=Seen(run.policy)), phase, start=0)
    batch, kept = collected.batch, best_rows(collected.judged.rewards, 4)
    assert len(seen) == len(kept) == 3
    for row, (x, sigma, x0) in zip(kept, seen, strict=True):
        key = generator(batch.seed, "noise", batch.step, batch.group_ids[batch.group[row]], batch.slot[row])
        assert torch.equal(x0, collected.trajectory.outputs[row])
        torch.testing.assert_close(x, (1 - sigma) * x0 + sigma * torch.randn(x0.shape, generator=key))


def best_rows(rewards, group_size):
    return [
        start + int(rewards[start : start + group_size].nan_to_num(-1.0).argmax()) for start in range(0, len(rewards), group_size)
    ]


def test_best_advantage_gradient_equals_flow_matching_on_the_best_images():
    """The mean over the best image of each group; the best image of the first group has a missing score."""
    _, _, first, _ = step_on()
    best = best_rows(first.judged.rewards, 4)
    lost = [(0, best[0])]
    found, metrics, collected, rows = step_on(missing=lost)
    kept = best_rows(collected.judged.rewards, 4)
    assert kept[0] != best[0]
    weights = torch.zeros(12)
    weights[kept] = torch.tensor([3.0, 4.0, 4.0]) / 11  # a row has weight 1 / 11; the best row gets the weight of its whole group
    wanted, value = by_hand(collected, weights)
    assert tiny.distance(found, wanted) < 1e-5
    assert metrics["policy/loss"] == pytest.approx(value, abs=1e-6)
    assert metrics["policy/matching"] == pytest.approx(value, abs=1e-6)
    assert rows == [2, 1] * 2, "only the three best images are evaluated, in microbatches of two, twice"


def test_gradient_of_reward_weighted_regression_matches_a_hand_written_sum():
    advantage = ExponentialAdvantage(temperature=0.5, over="step")
    found, metrics, collected, _ = step_on(advantage=advantage, missing=[(1, 2)])
    weights = exponential_weights(collected.judged.rewards, torch.zeros(12, dtype=torch.long), temperature=0.5) / 11
    wanted, value = by_hand(collected, weights)
    assert tiny.distance(found, wanted) < 1e-5
    assert metrics["policy/loss"] == pytest.approx(value, abs=1e-6)
    assert weights[6] == 0
    assert weights.sum().item() == pytest.approx(1, abs=1e-6)


def test_best_advantage_gradient_equals_cross_entropy_of_the_best_completions():
    policy = TokenPolicy()
    batch = tiny.batch(count=2, group_size=3)
    trajectory = policy.rollout(batch)
    weights = loss_weights(trajectory.mask, torch.ones(6, dtype=torch.bool), normalise="token")
    advantages = BestAdvantage(keep=2)(torch.tensor([0.1, 0.9, 0.5, 0.4, 0.3, 0.2]), torch.arange(6) // 3, reward_range=(0, 1))
    minibatch = Minibatch(batch, trajectory, advantages[:, None].expand_as(weights), weights)
    chosen = weighted_rows(tiny_loop.ALONE, minibatch)
    assert [(chosen.batch.group[row], chosen.batch.slot[row]) for row in range(4)] == [(0, 1), (0, 2), (1, 0), (1, 1)]
    found, _ = tiny.gradient(policy, REINFORCE(normalise="token"), chosen)
    log_probs = policy._log_probs(trajectory.outputs)[[1, 2, 3, 4]]
    words = trajectory.mask[[1, 2, 3, 4]]
    (wanted,) = torch.autograd.grad(-1.5 * log_probs[words].sum() / trajectory.mask.sum(), [policy.module.table])
    torch.testing.assert_close(found["table"], wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("advantage", [BestAdvantage(), ExponentialAdvantage()], ids=["best", "exponential"])
def test_gradient_and_metrics_on_several_ranks_match_one_rank(world, advantage):
    """Three groups of four over two or three ranks, one row missing: groups span ranks, which keep unequal numbers of rows."""
    options = {"advantage": advantage, "missing": [(1, 1)], "judge": tiny_loop.RandomJudge}
    alone, wanted, _, _ = step_on(**options)
    policies = [tiny.policy(kind="ode", microbatch=2) for _ in range(world)]
    results = tiny_loop.run_on_threads(world, lambda ranks: step_on(ranks, policy=policies[ranks.rank], **options))
    for found, metrics, _, rows in results:
        assert tiny.distance(found, alone) < 1e-5
        assert rows == results[0][3], "every rank evaluates equally many rows"
        for name, value in wanted.items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (['advantage={"kind":"best","keep":12}'], "group_size: 12 gives every sample the advantage 0; use 13 or more"),
        (['advantage={"kind":"exponential"}', "group_size=1"], "group_size: 1 gives every sample the advantage 0; use 2 or more"),
        (['advantage={"kind":"best"}', 'objective={"kind":"nft"}'], "objective.kind: nft also learns from bad samples"),
        (['advantage={"kind":"exponential"}', 'objective={"kind":"dpo"}'], "objective.kind: dpo also learns from bad samples"),
        (['advantage={"kind":"best","keep":0}'], "advantage.keep: should be greater than or equal to 1"),
    ],
)
def test_invalid_settings_with_best_or_exponential_advantage_raise_on_recipe_load(overrides, line):
    with pytest.raises(ValueError, match=line):
        load("recipes/playground/grpo.jsonnet", overrides)


@pytest.mark.parametrize("kind", ["best", "exponential"])
def test_best_and_exponential_advantages_work_with_awm_for_images_and_reinforce_for_tokens(kind):
    advantage = f'advantage={{"kind":"{kind}"}}'
    images, tokens = 'objective={"kind":"awm"}', 'objective={"kind":"policy_gradient","surrogate":"reinforce"}'
    load("recipes/playground/grpo.jsonnet", [advantage, images])
    load("recipes/playground/writer-blind.jsonnet", [advantage, tokens])
    with pytest.raises(ValueError, match=r"objective.kind: awm trains velocities, and a policy that writes tokens has none"):
        load("recipes/playground/writer-blind.jsonnet", [advantage, images])


@pytest.mark.parametrize("name", slow_after(1, ["raft", "rwr", "distill"]))
def test_imitation_recipes_train_one_step(name, tmp_path):
    settings = [
        *("tasks_per_step=2", "group_size=4", "steps=1", "microbatch=8", "eval.tasks=3", "eval.every=0", "eval.best_of_k=0"),
        *("samples.tasks=1", "samples.every=0", "trackers=[]", "device=cpu", f"out={tmp_path}", "name=run"),
    ]
    words = [word for setting in settings for word in ("--set", setting)]
    assert main(["train", f"recipes/playground/{name}.jsonnet", *words]) == 0
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["policy/grad_norm"] > 0
    assert line["policy/loss"] > 0
