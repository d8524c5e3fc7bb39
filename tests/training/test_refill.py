"""Groups of equal rewards are replaced: which groups, by which tasks, the metrics, and which recipes are rejected."""

import json
import sqlite3
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import pytest
import torch

import tiny_loop
import tiny_policies as tiny
from image_levels import ROUNDING, encode, max_level_difference
from retouch.cli import main
from retouch.core.advantages import equal_groups, group_relative
from retouch.data.tasks import further_tasks, tasks_for_step
from retouch.recipe.recipe import load
from retouch.run.build import build_phase
from retouch.run.collecting import collect_refilled
from retouch.run.step import TooManyMissing, collect, train, update

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
    _, _, plain, _ = one_step(["t1"], rounds=0)
    _, _, metrics, _ = one_step(["t1"])
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


def test_too_many_missing_scores_raise_before_more_tasks_are_sampled():
    judge = EqualScores(["t1"], [(0, slot) for slot in range(4)])
    run = tiny_loop.run(tiny.policy(mode="window"), judge=judge, chunk=100, max_missing=0.2)
    with pytest.raises(TooManyMissing):
        list(train(run, refilled(3), start=0))
    assert judge.sample_counts == [12]


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


@pytest.mark.parametrize("world", [2, 3, 4])
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


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (['advantage={"kind":"batch"}'], r"rollout.refill: advantage batch also learns from groups of equal rewards"),
        (['advantage={"kind":"exponential","over":"step"}'], r"rollout.refill: advantage exponential also learns"),
        (["rollout.staleness=1"], r"rollout.refill: with rollout.staleness, samples of later steps are made before"),
        (['objective={"kind":"supervised"}'], r"rollout.refill: supervised samples nothing; remove it"),
        (["rollout.refill.rounds=0"], r"rollout.refill.rounds: should be greater than or equal to 1"),
    ],
)
def test_settings_incompatible_with_refill_raise_when_the_recipe_is_loaded(overrides, line):
    with pytest.raises(ValueError, match=line):
        load("recipes/playground/grpo.jsonnet", ['rollout.refill={"rounds":2}', *overrides])


class Stream:
    """A stream of tasks in a fixed order."""

    first = SPARE

    def at_step(self, step, *, count, places):
        return SPARE[:count]

    def state(self):
        return None

    def load_state(self, state):
        pass

    def close(self):
        pass


def test_refill_with_streamed_tasks_raises():
    recipe = load("recipes/playground/refill.jsonnet")
    (phase,) = recipe.resolved_phases()
    with pytest.raises(ValueError, match=r"rollout.refill: a stream has no further tasks for a step"):
        build_phase(recipe, phase, steps=range(1), tasks=Stream(), ranks=tiny_loop.ALONE, reward_range=(0.0, 10.0))


def test_ledger_records_every_sample_including_those_of_replaced_groups(tmp_path):
    """Scores below 0.8 count as 0.8, so that many pairs of samples are equal."""
    settings = [
        *("tasks_per_step=4", "group_size=2", "microbatch=8", "steps=1"),
        *("reward.combine=max(overall, 0.8)", "eval.every=0", "eval.tasks=3", "eval.best_of_k=0", "samples.tasks=1"),
        *("samples.every=1", "trackers=[]", "device=cpu", f"out={tmp_path}", "name=run"),
    ]
    assert main(["train", "recipes/playground/refill.jsonnet", *(word for setting in settings for word in ("--set", setting))]) == 0
    (line,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert line["refill/rounds"] >= 1
    with sqlite3.connect(tmp_path / "run" / "ledger.sqlite") as ledger:
        rows = ledger.execute("SELECT group_id, task FROM samples WHERE split = 'train'").fetchall()
    assert len(rows) == line["refill/samples"] > 8
    assert len({task for _, task in rows}) == len({group for group, _ in rows}) == len(rows) // 2
