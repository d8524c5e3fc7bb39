"""Which samples a step learns from: refilled groups, stale rollouts, and the best of its own samples."""

import copy
import json
import math
import sqlite3
import statistics
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import tiny_loop
import tiny_policies as tiny
import tiny_writers
import tiny_writing
from image_levels import ROUNDING, encode, max_level_difference
from retouch.cli import main
from retouch.core.advantages import equal_groups, exponential_weights, group_relative
from retouch.core.random import generator
from retouch.core.surrogates import importance_weights, loss_weights
from retouch.data.tasks import further_tasks, tasks_for_step
from retouch.objectives.advantages import BestAdvantage, ExponentialAdvantage, GDPOAdvantage
from retouch.objectives.nft import AWM
from retouch.objectives.policy_gradient import REINFORCE, PolicyGradient
from retouch.policies.rollout import CachedEngine
from retouch.policies.weights import stale_copies
from retouch.recipe.recipe import load
from retouch.rewards.judging import ScoredBatch
from retouch.run.build import build_phase
from retouch.run.collecting import collect_ahead, collect_refilled, under_current_weights
from retouch.run.step import begin_collecting, collect, compute_advantages, make_minibatch, train, update, weighted_rows
from retouch.types import Column, Minibatch, Needs
from slow_params import slow_after
from token_policy import TokenPolicy

# Groups of equal rewards are replaced

SPARE = tuple(replace(task, id=f"spare-{k}") for k, task in enumerate(tiny.tasks(12)))


class EqualScores(tiny_loop.RedJudge):
    """How red an image is, but 0.5 for every sample of the tasks in ``dull``."""

    def __init__(self, dull=(), missing=()):
        super().__init__(missing)
        self.dull, self.seen = set(dull), []

    def __call__(self, batch, samples):
        judged = super().__call__(batch, samples).result()
        self.seen += [(batch.group_ids[g], slot, batch.tasks[g].id) for g, slot in zip(batch.group, batch.slot, strict=True)]
        equal = torch.tensor([sample.task.id in self.dull for sample in samples])
        future = Future()
        future.set_result(replace(judged, rewards=torch.where(equal & ~judged.rewards.isnan(), 0.5, judged.rewards)))
        return future


def refilled(rounds, **options):
    """Three groups of four; the tasks of round k are spare tasks 3 (k - 1) to 3 k - 1."""
    source = partial(collect_refilled, rounds=rounds, further=lambda step, turn: SPARE[3 * (turn - 1) : 3 * turn])
    return tiny_loop.phase(count=3, group_size=4, steps=range(1), source=source, **options)


def one_step(dull=(), *, rounds=3, missing=(), ranks=tiny_loop.ALONE, policy=None, max_missing=0.5):
    judge = EqualScores(dull, missing)
    run = tiny_loop.run(policy or tiny.policy(mode="window"), judge=judge, ranks=ranks, chunk=100, max_missing=max_missing)
    ((_, collected, metrics),) = train(run, refilled(rounds, ranks=ranks), start=0)
    return run, collected, metrics, judge


def test_step_without_equal_groups_is_bitwise_unchanged_by_refill():
    plain = collect(tiny_loop.run(tiny.policy(mode="window"), chunk=100), tiny_loop.phase(count=3, group_size=4), 0)
    _, collected, metrics, judge = one_step()
    assert torch.equal(collected.trajectory.latents, plain.trajectory.latents)
    assert torch.equal(collected.advantages, plain.advantages)
    assert judge.sample_counts == [12]
    assert {name: metrics[name] for name in plain.metrics} == plain.metrics
    told = {name: value for name, value in metrics.items() if name.startswith("refill/")}
    assert told == {"refill/rounds": 0, "refill/samples": 12, "refill/dropped_fraction": 0, "refill/equal_fraction": 0}


def test_a_group_of_equal_rewards_is_replaced_and_the_others_stay():
    """Group 1 is replaced twice: its first replacement, spare task 1, has equal rewards too."""
    plain = collect(tiny_loop.run(tiny.policy(mode="window"), chunk=100), tiny_loop.phase(count=3, group_size=4), 0)
    run, collected, metrics, judge = one_step(["t1", "spare-1"])
    assert [task.id for task in collected.batch.tasks] == ["t0", "spare-4", "t2"]
    assert collected.batch.group_ids == (0, 7, 2)
    others = [*range(4), *range(8, 12)]
    assert torch.equal(collected.trajectory.latents[others], plain.trajectory.latents[others])
    assert judge.sample_counts == [12, 4, 4]
    assert judge.seen[12:] == [(4, slot, "spare-1") for slot in range(4)] + [(7, slot, "spare-4") for slot in range(4)]
    twin = tiny.policy(mode="window").rollout(collected.batch)
    torch.testing.assert_close(collected.trajectory.latents, twin.latents, atol=1e-5, rtol=0)
    images = run.renderer([collected.batch.tasks[k] for k in collected.batch.group], collected.trajectory)
    assert max_level_difference(encode(images), encode(collected.images)) <= ROUNDING  # they were rendered 12, 4 and 4 at a time
    wanted = group_relative(collected.judged.rewards, torch.arange(12) // 4)
    torch.testing.assert_close(collected.advantages, wanted[:, None].expand(-1, 2))
    assert (collected.advantages != 0).all()
    assert metrics["refill/rounds"] == 2
    assert metrics["refill/samples"] == 20
    assert metrics["refill/dropped_fraction"] == pytest.approx(2 / 5)
    assert metrics["refill/equal_fraction"] == 0


def test_reward_metrics_cover_only_the_original_tasks_of_the_step():
    (_, _, plain, _), (_, _, metrics, _) = one_step(["t1"], rounds=0), one_step(["t1"])
    assert metrics["group/zero_std_fraction"] == pytest.approx(1 / 3)
    for name in ("reward/mean", "reward/std", "reward/share", "group/zero_std_fraction"):
        assert metrics[name] == plain[name]


def test_refill_stops_after_the_configured_number_of_rounds():
    dull = ["t0", "t1", "t2", *(task.id for task in SPARE)]
    _, collected, metrics, judge = one_step(dull, rounds=2)
    assert judge.sample_counts == [12, 12, 12]
    assert metrics["refill/samples"] == 36
    assert metrics["refill/equal_fraction"] == 1
    assert metrics["refill/dropped_fraction"] == pytest.approx(6 / 9)
    assert metrics["policy/grad_norm"] == 0
    assert not collected.advantages.any()


def test_missing_scores_do_not_count_as_equal_rewards():
    """Group 0 has no score, group 1 has one score, and group 2 has two different scores. None of them is replaced."""
    missing = [(0, slot) for slot in range(4)] + [(1, slot) for slot in range(3)] + [(2, 0), (2, 1)]
    _, collected, metrics, judge = one_step(["t0", "t1"], missing=missing, max_missing=0.8)
    assert judge.sample_counts == [12]
    assert metrics["refill/dropped_fraction"] == 0
    assert collected.batch.group_ids == (0, 1, 2)
    rewards = torch.tensor([0.5, 0.5, torch.nan, 0.2, 0.3, torch.nan, 0.7, torch.nan])
    assert equal_groups(rewards, torch.tensor([4, 4, 4, 1, 1, 2, 2, 3])).tolist() == [4]


def test_refilled_step_depends_only_on_weights_and_step_number():
    """A resumed run makes the same step again without the steps before it."""
    policy = tiny.policy(mode="window")
    run, phase = tiny_loop.run(policy, judge=EqualScores(["t1", "spare-1"]), chunk=100), replace(refilled(3), steps=range(3))
    seen = []
    for step, collected in enumerate(phase.source(run, phase, 0)):
        seen.append(collected)
        if step < 2:
            update(run, phase, step, collected)
    again = next(phase.source(replace(run, judge=EqualScores(["t1", "spare-1"])), phase, 2))
    assert again.batch.group_ids == seen[2].batch.group_ids == (0, 7, 2)
    assert torch.equal(again.trajectory.latents, seen[2].trajectory.latents)
    assert torch.equal(again.advantages, seen[2].advantages)
    assert again.metrics == seen[2].metrics


@pytest.mark.parametrize("world", [3])
def test_refill_on_several_ranks_matches_one_rank(world):
    """Groups 1 and 2 are replaced. They span ranks. Ranks have unequal numbers of their rows, but all sample the same number."""
    dull = ["t1", "t2", "spare-2"]
    run, _, wanted, _ = one_step(dull, policy=tiny.policy(mode="window", microbatch=2))
    alone = tiny_loop.gradient(run)
    policies = [tiny.policy(mode="window", microbatch=2) for _ in range(world)]
    results = tiny_loop.run_on_threads(world, lambda ranks: one_step(dull, ranks=ranks, policy=policies[ranks.rank]))
    for run, collected, metrics, judge in results:
        assert judge.sample_counts == results[0][3].sample_counts
        assert tiny.distance(tiny_loop.gradient(run), alone) < 1e-4
        assert not {1, 2} & set(collected.batch.group_ids)
        for name, value in wanted.items():
            if name != "refill/samples":
                assert metrics[name] == pytest.approx(value, rel=1e-3, abs=1e-6), name
        assert metrics["refill/samples"] == world * sum(judge.sample_counts) >= wanted["refill/samples"]


def test_further_tasks_differ_from_those_of_the_step_and_do_not_repeat():
    """Of 20 tasks, a step has 4, and four rounds take the other 16."""
    for step in range(7):
        own = tasks_for_step(seed=3, step=step, count=4, size=20)
        further = [row for turn in range(1, 5) for row in further_tasks(seed=3, step=step, count=4, size=20, turn=turn)]
        assert sorted([*own, *further]) == list(range(20))
    assert further_tasks(seed=3, step=0, count=4, size=20, turn=1) != further_tasks(seed=3, step=5, count=4, size=20, turn=1)
    assert sorted(set(further_tasks(seed=3, step=0, count=4, size=3, turn=1))) == [0, 1, 2]
    assert len(further_tasks(seed=3, step=0, count=4, size=5, turn=2)) == 4


REFILL = 'rollout.refill={"rounds":2}'


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([REFILL, 'advantage={"kind":"batch"}'], r"rollout.refill: advantage batch also learns from groups of equal rewards"),
        ([REFILL, 'advantage={"kind":"exponential","over":"step"}'], r"rollout.refill: advantage exponential also learns"),
        (['advantage={"kind":"gdpo","weights":{"IF":1}}'], "advantage.weights: has 'IF', and reward.combine uses 'overall'; give"),
        ([REFILL, 'advantage={"kind":"gdpo","weights":{"overall":1}}'], r"rollout.refill: advantage gdpo also learns from groups"),
        ([REFILL, "rollout.staleness=1"], r"rollout.refill: with rollout.staleness, samples of later steps are made before"),
        ([REFILL, 'objective={"kind":"supervised"}'], r"rollout.refill: supervised samples nothing; remove it"),
        ([REFILL, "rollout.refill.rounds=0"], r"rollout.refill.rounds: should be greater than or equal to 1"),
        *(
            (["rollout.staleness=1", change], rf"rollout\.staleness: .*{told}")
            for change, told in (
                ('objective={"kind": "nft"}', "nft has no probabilities"),
                ("objective.surrogate=gspo", "gspo has one ratio per row"),
                ("objective.ratio_norm=true", "ratio_norm and surrogate dppo need the means"),
                ('objective={"kind": "policy_gradient", "surrogate": "dppo", "kl_limit": 1e-5}', "surrogate dppo need the means"),
                ('advantage={"kind": "gae"}', "a value head would be stale"),
                ('objective={"kind": "supervised"}', "supervised samples nothing; remove it"),
            )
        ),
        (["rollout.truncate_at=3"], r"rollout\.truncate_at: has an effect only with staleness; set rollout\.staleness"),
        (['advantage={"kind":"best","keep":12}'], "group_size: 12 gives every sample the advantage 0; use 13 or more"),
        (['advantage={"kind":"exponential"}', "group_size=1"], "group_size: 1 gives every sample the advantage 0; use 2 or more"),
        (['advantage={"kind":"best"}', 'objective={"kind":"nft"}'], "objective.kind: nft also learns from bad samples"),
        (['advantage={"kind":"exponential"}', 'objective={"kind":"dpo"}'], "objective.kind: dpo also learns from bad samples"),
        (['advantage={"kind":"best"}', 'objective={"kind":"dgpo"}'], "objective.kind: dgpo also learns from bad samples"),
        (['advantage={"kind":"best","keep":0}'], "advantage.keep: should be greater than or equal to 1"),
    ],
)
def test_settings_that_do_not_go_together_raise_when_the_recipe_is_loaded(overrides, line):
    with pytest.raises(ValueError, match=line):
        load("recipes/playground/grpo.jsonnet", overrides)


def test_refill_with_streamed_tasks_raises():
    class Stream:
        """A stream of tasks in a fixed order."""

        first = SPARE

        def at_step(self, step, *, count, places):
            return SPARE[:count]

        def state(self, *given):
            return None

        load_state = close = state

    recipe = load("recipes/playground/refill.jsonnet")
    (phase,) = recipe.resolved_phases()
    with pytest.raises(ValueError, match=r"rollout.refill: a stream has no further tasks for a step"):
        build_phase(recipe, phase, steps=range(1), tasks=Stream(), ranks=tiny_loop.ALONE, reward_range=(0.0, 10.0))


def trained(name, out, *words):
    """The metrics of the first step of a packaged recipe."""
    settings = [
        *("steps=1", "microbatch=8", "eval.tasks=3", "eval.every=0", "eval.best_of_k=0", "samples.tasks=1"),
        *("samples.every=1", "trackers=[]", "device=cpu", f"out={out}", "name=run", *words),
    ]
    given = [word for setting in settings for word in ("--set", setting)]
    assert main(["train", f"recipes/playground/{name}.jsonnet", *given]) == 0
    (line,) = [json.loads(line) for line in (out / "run" / "metrics.jsonl").read_text().splitlines()]
    return line


@pytest.mark.slow
def test_ledger_records_every_sample_including_those_of_replaced_groups(tmp_path):
    """Scores below 0.8 count as 0.8, so that many pairs of samples are equal."""
    line = trained("refill", tmp_path, "tasks_per_step=4", "group_size=2", "reward.combine=max(overall, 0.8)")
    assert line["refill/rounds"] >= 1
    with sqlite3.connect(tmp_path / "run" / "ledger.sqlite") as ledger:
        rows = ledger.execute("SELECT group_id, task FROM samples WHERE split = 'train'").fetchall()
    assert len(rows) == line["refill/samples"] > 8
    assert len({task for _, task in rows}) == len({group for group, _ in rows}) == len(rows) // 2


# Rollouts ahead of the updates

WIDE = PolicyGradient(clip_low=0.9, clip_high=9.0)
CAP = 1.2


def stale_run(ahead, *, cap=CAP, rate=1e-2, steps=4, objective=WIDE):
    """A run whose weights change so much that the probabilities of stale actions change."""
    policy = tiny.policy(mode="window", reduction="sum", copies=("reference", *stale_copies(ahead)))
    source = partial(collect_ahead, staleness=ahead, truncate_at=cap) if ahead else None
    return tiny_loop.run(policy), tiny_loop.phase(objective, steps=range(steps), learning_rate=lambda step: rate, source=source)


def weights_of(run):
    return copy.deepcopy(tiny.trained(run.policy))


@pytest.mark.parametrize("ahead", [2])
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


def test_engine_mismatch_weight_of_stale_completions_is_unchanged_by_an_update():
    """The log-probabilities of an engine are 0.25 too large: the mismatch weight is still exp(-0.25) after an update."""
    writer = tiny_writers.writer(stop=tiny_writing.STOPS)
    policy = tiny_writing.policy(writer=writer)
    policy.limits = CachedEngine(truncate_at=2.0)
    trajectory = policy.rollout(tiny_writing.batch())
    trajectory = replace(trajectory, behaviour_log_probs=trajectory.log_probs + 0.25)
    tiny_writers.perturb(writer.module, size=0.02)
    part, all_stale = next(policy.microbatches(trajectory)), trajectory.log_probs.clone()
    mask = trajectory.mask[part.rows]
    with torch.no_grad():
        all_stale[part.rows] = policy.evaluate(trajectory, part, Needs()).log_probs
    weights = importance_weights(all_stale[part.rows], trajectory.log_probs[part.rows], mask, cap=math.inf)
    assert (weights - 1).abs().max() > 1e-3
    scale = policy.evaluate(trajectory.with_log_probs(all_stale), part, Needs()).scale
    torch.testing.assert_close(scale, torch.where(mask, math.exp(-0.25), 1.0), atol=1e-5, rtol=1e-5)


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


# Runs that imitate their own best samples

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
        x, noise, sigma = AWM(shift=2.0).draw_points(x0, batch, every, purpose="awm", epoch=0, draw=draw)
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
    best = rewards.nan_to_num(-1.0).view(-1, group_size).argmax(1)
    return (best + torch.arange(len(best)) * group_size).tolist()


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


@pytest.mark.parametrize(
    ("advantage", "world"), [(BestAdvantage(), 2), (ExponentialAdvantage(), 3)], ids=["best-2", "exponential-3"]
)
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


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gdpo_normalises_the_columns_of_all_ranks_and_gives_a_row_with_a_missing_score_the_advantage_0(world):
    good, cost = [1.0, 0.0, 0.0, 5.0, 5.0, 4.0], [10.0, 30.0, 20.0, 0.0, 40.0, math.nan]

    def z(values):
        return [(value - statistics.fmean(values)) / (statistics.stdev(values) + 1e-4) for value in values]

    sums = [a - 0.5 * b for rows in (slice(0, 3), slice(3, 5)) for a, b in zip(z(good[rows]), z(cost[rows]), strict=True)]
    wanted = torch.tensor([*z(sums), 0.0])
    policies = [tiny.policy(kind="ode") for _ in range(world)]

    def act(ranks):
        advantage = GDPOAdvantage(weights={"cost": -0.5, "good": 1.0})
        run, phase = tiny_loop.run(policies[ranks.rank], ranks=ranks), tiny_loop.phase(ranks=ranks, advantage=advantage)
        mine = phase.order.view(world, -1)[ranks.rank]
        scores = {"good": torch.tensor(good)[mine].double(), "note": torch.full((len(mine),), math.nan).double()}
        scores["cost"] = torch.tensor(cost)[mine].double()
        found, _ = compute_advantages(run, phase, ScoredBatch(scores, scores["good"] - scores["cost"], 0))
        torch.testing.assert_close(found, wanted[mine], atol=1e-5, rtol=1e-4)
        assert (found[scores["cost"].isnan()] == 0).all()
        return len(mine)

    assert tiny_loop.run_on_threads(world, act) == [6 // world] * world


@pytest.mark.parametrize(
    ("weights", "combined", "says"),
    [
        ({"good": 1.0}, ["good", "cost"], "has 'good', and reward.combine uses 'good', 'cost'; give each of these a weight"),
        ({"good": 1.0, "cost": 0.5}, ["good", "cost"], "lower is better for 'cost'; give it a weight below 0"),
        ({"good": 0.0}, ["good"], "all weights are 0"),
    ],
)
def test_gdpo_refuses_weights_that_do_not_fit_the_reward(weights, combined, says):
    columns = {"good": Column(0.0, 1.0), "cost": Column(0.0, 9.0, higher_is_better=False)}
    with pytest.raises(ValueError, match=f"advantage.weights: {says}"):
        GDPOAdvantage(weights=weights).check_columns(columns, combined)


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
    line = trained(name, tmp_path, "tasks_per_step=2", "group_size=4")
    assert line["policy/grad_norm"] > 0
    assert line["policy/loss"] > 0
