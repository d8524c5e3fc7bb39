"""The training loop: the gradient of a step does not depend on chunks, microbatches, ranks, or rows without a score."""

import json
import math
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import Field
from safetensors.torch import load_file

import tiny_loop
import tiny_policies as tiny
from image_levels import ROUNDING, encode, max_level_difference
from retouch.core.advantages import group_relative
from retouch.distributed.optimizer import NonFiniteGradient, ReplicatedStepper
from retouch.objectives.advantages import BatchAdvantage, GroupAdvantage
from retouch.objectives.base import Objective
from retouch.objectives.distillation import OPD, Teacher
from retouch.objectives.imitation import Supervised
from retouch.objectives.nft import NFT, OldDecay
from retouch.objectives.policy_gradient import Kl, PolicyGradient
from retouch.objectives.reward_gradient import DRaFT
from retouch.rewards.base import BudgetSpent
from retouch.rewards.pixels import TargetReward
from retouch.run.step import ScoredRollout, TooManyMissing, accumulate, collect, make_minibatch, train
from retouch.types import Loss, Needs, Slice
from token_policy import TokenPolicy
from warm_python import run_python

SUPPORT = Path(__file__).parents[1] / "support"
STRONG_KL = tiny_loop.GRPO.model_copy(update={"kl": Kl(kind="closed", weight=10.0)})
NFT_OPTIONS = {"kind": "ode", "copies": ("old",), "acting": "old"}
DRAFT = DRaFT(reward=TargetReward(), steps=2)
DRAFT_OPTIONS = {"kind": "ode", "objective": DRAFT}
TAUGHT = OPD(teachers={"guided": Teacher(guidance_scale=3.0)})
TAUGHT_OPTIONS = {"kind": "ode", "objective": TAUGHT}


def first_step(policy=None, *, missing=(), chunk=4, phase=None, **options):
    """The gradient and the metrics of a run's first step."""
    run = tiny_loop.run(policy or tiny.policy(mode="window"), judge=tiny_loop.RedJudge(missing), chunk=chunk, **options)
    ((_, _, metrics),) = train(run, phase or tiny_loop.phase(steps=range(1)), start=0)
    return tiny_loop.gradient(run), metrics


def test_training_step_matches_a_hand_written_grpo_loop():
    """Two epochs of two minibatches: rollout, rewards, advantages, four AdamW steps."""
    policy = tiny.policy(mode="window")
    run = tiny_loop.run(policy, chunk=8)  # one chunk, so that both sides render batches of eight
    phase = tiny_loop.phase(count=2, group_size=4, minibatches=2, epochs=2, steps=range(1))
    ((step, collected, metrics),) = train(run, phase, start=0)

    twin = tiny.policy(mode="window")
    batch = phase.batch(0)
    trajectory = twin.rollout(batch)
    images = tiny_loop.LatentRenderer(twin.model)([batch.tasks[k] for k in batch.group], trajectory)
    rewards = torch.tensor([_share_of_red(image) for image in images], dtype=torch.float32)
    advantages = torch.cat([(group - group.mean()) / (group.std(correction=0) + 1e-4) for group in rewards.split(4)])
    optimizer = torch.optim.AdamW(tiny.trained(twin).values(), lr=1e-3, weight_decay=0.0)
    for epoch in range(2):
        for rows in (slice(0, 4), slice(4, 8)):
            minibatch = tiny.minibatch(batch.take(rows), trajectory.take(rows), advantages[rows], epoch=epoch)
            found, _ = tiny.gradient(twin, tiny_loop.GRPO, minibatch)
            for name, parameter in tiny.trained(twin).items():
                parameter.grad = found[name]
            optimizer.step()
    for name, parameter in tiny.trained(twin).items():
        torch.testing.assert_close(tiny.trained(policy)[name], parameter, atol=2e-5, rtol=0)
    torch.testing.assert_close(collected.advantages, advantages[:, None].expand(-1, 2), atol=1e-3, rtol=1e-3)
    assert step == 0
    assert metrics["reward/mean"] == pytest.approx(rewards.mean().item(), abs=1e-6)
    error = rewards.view(2, 4).mean(dim=1).std().item() / math.sqrt(2)  # of the means of the two groups; t(1) = 12.7062
    assert metrics["reward/ci95"] == pytest.approx(12.7062 * error, rel=1e-4, abs=1e-6)
    assert metrics["policy/ratio_max_first"] <= 1e-6 < metrics["policy/ratio_max"]
    assert metrics["policy/learning_rate"] == 1e-3


def _share_of_red(image):
    pixels = np.asarray(image).astype(float)
    return (pixels[..., 0] / pixels.sum(-1)).mean()


def weights_of(policy):
    return {name: parameter.detach().clone() for name, parameter in tiny.trained(policy).items()}


def unchanged(policy, before):
    return all(torch.equal(parameter, before[name]) for name, parameter in tiny.trained(policy).items())


def test_collected_images_rewards_and_advantages_belong_to_the_same_rows():
    run, phase = tiny_loop.run(tiny.policy(mode="window"), chunk=4), tiny_loop.phase(count=3, group_size=2)
    collected = collect(run, phase, 0)
    assert run.judge.sample_counts == [4, 2]
    assert len(collected.images) == len(collected.trajectory) == len(collected.advantages) == 6
    drawn = [_share_of_red(image) for image in collected.images]
    assert collected.judged.rewards.tolist() == pytest.approx(drawn, abs=1e-6)
    wanted = group_relative(collected.judged.rewards, torch.arange(6) // 2)
    torch.testing.assert_close(collected.advantages, wanted[:, None].expand(-1, 2))
    again = run.renderer([collected.batch.tasks[k] for k in collected.batch.group], collected.trajectory)
    assert max_level_difference(encode(again), encode(collected.images)) <= ROUNDING  # six rows, and chunks of four and two


@pytest.fixture(scope="module")
def whole():
    return first_step(tiny.policy(mode="window", microbatch=100), chunk=100)


@pytest.mark.parametrize("microbatch", [1])
def test_microbatches_do_not_change_the_gradient(whole, microbatch):
    found, metrics = first_step(tiny.policy(mode="window", microbatch=microbatch), chunk=100)
    assert tiny.distance(found, whole[0]) < 1e-5
    for name in ("policy/loss", "policy/kl", "policy/approx_kl", "policy/grad_norm", "reward/mean"):
        assert metrics[name] == pytest.approx(whole[1][name], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("chunk", [4])
def test_chunks_change_nothing_but_rounding(whole, chunk):
    """Groups of three in chunks of four: rows of one group are sampled and scored in different chunks, and encoded twice."""
    found, _ = first_step(tiny.policy(mode="window", microbatch=100), chunk=chunk)
    # Rewards move by less than a level of 255, which the advantages divide by a small spread.
    assert tiny.distance(found, whole[0]) < 1e-2
    runs = [tiny_loop.run(tiny.policy(mode="window"), chunk=size) for size in (chunk, 100)]
    one, other = (collect(run, tiny_loop.phase(), 0).trajectory for run in runs)
    for name in ("latents", "outputs", "log_probs"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), atol=1e-4, rtol=0)


def step_on(ranks, policy, objective, missing):
    run = tiny_loop.run(policy, judge=tiny_loop.RandomJudge(missing), ranks=ranks, chunk=100)
    phase = tiny_loop.phase(objective, count=3, group_size=2, ranks=ranks, steps=range(1))
    ((_, collected, metrics),) = train(run, phase, start=0)
    return tiny_loop.gradient(run), metrics, collected


@pytest.mark.parametrize(
    ("objective", "options", "world"),
    [(tiny_loop.GRPO, {"mode": "window"}, 3), (NFT(), NFT_OPTIONS, 2), (DRAFT, DRAFT_OPTIONS, 2), (TAUGHT, TAUGHT_OPTIONS, 2)],
    ids=["grpo-3", "nft-2", "draft-2", "opd-2"],
)
def test_gradient_on_several_ranks_matches_one_rank(world, objective, options):
    """Three groups of two over two or three ranks, one row missing: groups span ranks, and the ranks' valid rows are unequal."""
    alone, wanted, _ = step_on(tiny_loop.ALONE, tiny.policy(microbatch=2, **options), objective, [(1, 1)])
    policies = [tiny.policy(microbatch=2, **options) for _ in range(world)]
    results = tiny_loop.run_on_threads(world, lambda ranks: step_on(ranks, policies[ranks.rank], objective, [(1, 1)]))
    for found, metrics, collected in results:
        assert len(collected.batch) == 6 // world
        assert tiny.distance(found, alone) < 1e-5
        for name, value in wanted.items():
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name
    for policy in policies[1:]:
        for name, parameter in tiny.trained(policy).items():
            assert torch.equal(parameter, tiny.trained(policies[0])[name])


def test_batch_relative_advantages_are_relative_to_the_rows_of_all_ranks():
    policies = [tiny.policy(mode="window") for _ in range(3)]

    def advantages(policy, ranks):
        run = tiny_loop.run(policy, judge=tiny_loop.RandomJudge(), ranks=ranks, chunk=100)
        phase = tiny_loop.phase(count=4, group_size=1, ranks=ranks, advantage=BatchAdvantage())
        return collect(run, phase, 0).advantages[:, 0]

    wanted = advantages(policies[0], tiny_loop.ALONE)
    shared = tiny_loop.run_on_threads(2, lambda ranks: advantages(policies[1 + ranks.rank], ranks))
    torch.testing.assert_close(torch.cat(shared), wanted, atol=1e-3, rtol=1e-3)
    assert wanted.abs().min() > 1e-2


@pytest.mark.parametrize(
    ("objective", "options"),
    [
        (STRONG_KL, {"mode": "window", "copies": ("reference",)}),
        (NFT(), NFT_OPTIONS),
        (DRAFT, DRAFT_OPTIONS),
        (TAUGHT, TAUGHT_OPTIONS),
    ],
    ids=["grpo", "nft", "draft", "opd"],
)
def test_gradient_with_a_missing_score_equals_the_gradient_without_that_row(objective, options):
    """The policy differs from the reference and the old policy: a row with advantage 0 and a weight would have a gradient."""

    def step(missing, **cut):
        policy = tiny.policy(**options)
        tiny.perturb(policy)
        phase = tiny_loop.phase(objective, steps=range(1), **cut)
        batch = phase.batch(0).take(slice(0, len(phase.order)))
        return first_step(policy, missing=missing, chunk=100, phase=replace(phase, batch=lambda step: batch))

    missing, metrics = step([(1, 2)])
    absent, _ = step([], order=torch.arange(5), group=torch.tensor([0, 0, 0, 1, 1]))
    assert tiny.distance(missing, absent) < 1e-5
    assert metrics["reward/missing_fraction"] == pytest.approx(1 / 6)
    assert metrics["reward/count"] == 5
    everything, _ = step([])
    assert tiny.distance(everything, missing) > 0.05


def test_nan_advantages_of_missing_scores_do_not_change_the_gradient():
    class NanAdvantage(GroupAdvantage):
        """A user's advantage that is NaN where the reward is missing."""

        def __call__(self, rewards, group, *, reward_range):
            return super().__call__(rewards, group, reward_range=reward_range).masked_fill(rewards.isnan(), torch.nan)

    found, wanted = (
        first_step(missing=[(1, 2)], phase=tiny_loop.phase(steps=range(1), advantage=advantage))[0]
        for advantage in (NanAdvantage(), GroupAdvantage())
    )
    assert tiny.distance(found, wanted) == 0


def test_output_that_cannot_be_rendered_gets_the_lowest_score_and_is_not_missing():
    policy = tiny.policy(mode="window")
    run = tiny_loop.run(policy, chunk=100)
    draw = run.renderer
    run = replace(run, renderer=lambda tasks, trajectory: [None, *draw(tasks, trajectory)[1:]])
    collected = collect(run, tiny_loop.phase(), 0)
    assert collected.judged.rewards[0] == 0.0
    assert collected.valid.all()
    assert (collected.advantages[0] < -0.5).all()
    assert collected.metrics["reward/fault_fraction"] == pytest.approx(1 / 6)
    assert collected.metrics["reward/missing_fraction"] == 0


def test_too_many_missing_scores_raise_before_any_weight_changes():
    """2 of 10 missing scores are no more than a share of 0.2, although 0.2 in fp32 is greater than 0.2."""
    policy = tiny.policy(mode="window")
    before = weights_of(policy)
    run = tiny_loop.run(policy, judge=tiny_loop.RedJudge([(0, 0), (0, 1), (1, 0)]), max_missing=0.4)
    with pytest.raises(TooManyMissing, match=r"50% of the samples .*, and the recipe allows 40%.*on purpose, set max_missing"):
        list(train(run, tiny_loop.phase(), start=0))
    assert unchanged(policy, before)
    accepting = tiny_loop.run(policy, judge=tiny_loop.RedJudge([(0, 0), (1, 0)]), max_missing=0.2, chunk=100)
    collected = collect(accepting, tiny_loop.phase(group_size=5), 0)
    assert collected.valid.tolist() == [False, True, True, True, True] * 2


def test_spent_budget_of_one_rank_raises_on_all_ranks_after_all_chunks_are_submitted():
    """The budget is spent at the second chunk of rank 1; both ranks stop, after rank 1 has also submitted its third chunk."""
    collected = []

    class OutOfBudget(tiny_loop.RedJudge):
        def __call__(self, batch, samples):
            future = super().__call__(batch, samples)
            if len(self.sample_counts) == 2:
                future = Future()
                future.set_exception(BudgetSpent("10 of 10"))
            collected.append(future)
            return future

    policies = [tiny.policy(mode="window") for _ in range(2)]

    def act(ranks):
        judge = tiny_loop.RedJudge() if ranks.is_main else OutOfBudget()
        run = tiny_loop.run(policies[ranks.rank], judge=judge, ranks=ranks, chunk=1)
        with pytest.raises(BudgetSpent, match="as another rank's log says" if ranks.is_main else "10 of 10"):
            collect(run, tiny_loop.phase(count=2, group_size=3, ranks=ranks), 0)
        return ranks.rank

    assert tiny_loop.run_on_threads(2, act) == [0, 1]
    assert len(collected) == 3


class Counting(Objective):
    """An objective with zero gradient that records its minibatches."""

    seen: list = Field(default_factory=list)
    taken: list = Field(default_factory=list)

    def losses(self, policy, minibatch):
        self.seen.append((minibatch.batch.step, minibatch.epoch, minibatch.batch.group_ids, len(minibatch.batch)))
        assert minibatch.weights.sum().item() == pytest.approx(1)
        parameter = next(iter(tiny.trained(policy).values()))
        yield Loss((parameter * 0).sum(), {"policy/loss": 2.0})

    def after_step(self, policy, step):
        self.taken.append(step)


def test_epochs_iterate_over_minibatches_and_count_optimizer_steps():
    objective, averaged = Counting(), []
    run = tiny_loop.run(tiny.policy(mode="window"), average=averaged.append)
    phase = tiny_loop.phase(objective, count=2, group_size=2, minibatches=2, epochs=3, steps=range(5, 7))
    assert [step for step, _, _ in train(run, phase, start=0)] == [5, 6]
    assert objective.seen == [(step, epoch, (group,), 2) for step in (5, 6) for epoch in range(3) for group in range(2)]
    assert objective.taken == averaged == list(range(1, 13))


def test_resumed_phase_continues_its_step_and_optimizer_step_counts():
    objective = Counting()
    phase = tiny_loop.phase(objective, count=1, group_size=2, epochs=2, steps=range(5, 8))
    assert [step for step, _, _ in train(tiny_loop.run(tiny.policy(mode="window")), phase, start=6)] == [6, 7]
    assert objective.taken == [3, 4, 5, 6]


@pytest.mark.parametrize("world", [2])
def test_policy_metrics_with_dr_grpo_are_means_over_the_actions_of_all_ranks(world):
    """Rows of 1, 3, 4 and 1 actions of at most 20: the weights sum to 9 / 80, and the loss is that of the published formula."""
    batch = tiny.batch(seed=12)
    trajectory = TokenPolicy().rollout(batch)
    objective = PolicyGradient(clip_low=0.2, clip_high=0.3, normalise="dr_grpo", kl=Kl(kind="k3", weight=0.1))
    phase = replace(tiny_loop.phase(objective), max_length=20)

    def act(ranks):
        policy = TokenPolicy()
        tiny.perturb(policy, 0.5)
        rows = slice(ranks.rank * 4 // world, (ranks.rank + 1) * 4 // world)
        stepper = ReplicatedStepper(policy.module, ranks, max_grad_norm=None)
        run = replace(tiny_loop.run(tiny.policy(), ranks=ranks), policy=policy, stepper=stepper)
        valid = torch.ones(4 // world, dtype=torch.bool)
        mine = trajectory.take(rows)
        collected = ScoredRollout(batch.take(rows), mine, torch.ones(mine.mask.shape), valid, {})
        minibatch = make_minibatch(run, phase, collected, slice(0, 4 // world), 0)
        return accumulate(run, objective.build(entropy=True), minibatch)[0]

    moved = TokenPolicy()
    tiny.perturb(moved, 0.5)
    with torch.no_grad():
        evaluation = moved.evaluate(trajectory, Slice(slice(0, 4), slice(0, 5)), Needs(kl="k3", entropy=True))
    mask, log_ratio = trajectory.mask, evaluation.log_ratio
    loss = -torch.minimum(log_ratio.exp(), log_ratio.exp().clamp(0.8, 1.3)) + 0.1 * evaluation.kl
    wanted = {
        "policy/loss": loss[mask].sum() / 80,
        "policy/approx_kl": (log_ratio**2 / 2)[mask].mean(),
        "policy/clip_fraction": (log_ratio.exp() > 1.3)[mask].float().mean(),
        "policy/kl": evaluation.kl[mask].mean(),
        "policy/entropy": evaluation.entropy[mask].mean(),
    }
    for found in tiny_loop.run_on_threads(world, act):
        assert found == pytest.approx({name: value.item() for name, value in wanted.items()}, rel=1e-5)


def test_supervised_phase_calls_no_judge_and_weights_all_rows_equally():
    policy = tiny.policy(train="full")
    run = tiny_loop.run(policy)
    phase = tiny_loop.phase(Supervised(), count=3, group_size=1, advantage=None, steps=range(1))
    ((_, collected, metrics),) = train(run, phase, start=0)
    assert run.judge.sample_counts == []
    assert isinstance(collected, ScoredRollout)
    assert collected.judged is None
    twin = tiny.policy(train="full")
    batch = phase.batch(0)
    wanted, losses = tiny.gradient(twin, Supervised(), tiny.minibatch(batch, twin.demonstrate(batch), torch.ones(3)))
    assert tiny.distance(tiny_loop.gradient(run), wanted) < 1e-5
    assert metrics["policy/loss"] == pytest.approx(sum(loss.value.item() for loss in losses), rel=1e-5)


def test_nft_samples_with_the_old_weights_and_updates_them_after_each_step():
    policy = tiny.policy(**NFT_OPTIONS)
    run = tiny_loop.run(policy)
    phase = tiny_loop.phase(NFT(old_decay=OldDecay(rate=0.4, max=0.9)), steps=range(2), learning_rate=lambda step: 0.05)
    name = next(name for name in tiny.trained(policy) if "lora_B" in name)
    old = policy.copies.copies["old"][name].clone()
    for step, (_, collected, _) in enumerate(train(run, phase, start=0)):
        decay = 0.4 * (step + 1)
        old = decay * old + (1 - decay) * tiny.trained(policy)[name].detach()
        torch.testing.assert_close(policy.copies.copies["old"][name], old)
        assert old.abs().max() > 0
        followed = collected
    twin = tiny.policy(**NFT_OPTIONS)
    ((_, _, _),) = train(tiny_loop.run(twin), replace(phase, steps=range(1)), start=0)
    twin.acting = "current"
    with twin.copies.using("old"):
        torch.testing.assert_close(twin.rollout(phase.batch(1)).outputs, followed.trajectory.outputs, atol=1e-4, rtol=0)
    assert (twin.rollout(phase.batch(1)).outputs - followed.trajectory.outputs).abs().max() > 1e-2


def test_nan_gradient_raises_and_changes_no_weight():
    class Broken(Counting):
        def losses(self, policy, minibatch):
            yield Loss(sum((parameter * torch.nan).sum() for parameter in tiny.trained(policy).values()))

    policy = tiny.policy(mode="window")
    before = weights_of(policy)
    with pytest.raises(NonFiniteGradient, match="the optimizer step was skipped"):
        list(train(tiny_loop.run(policy), tiny_loop.phase(Broken()), start=0))
    assert unchanged(policy, before)
    assert all(parameter.grad is None for parameter in tiny.trained(policy).values())


def test_tasks_with_the_same_instruction_form_separate_groups():
    alike = tuple(replace(task, instruction="the same") for task in tiny.tasks(2))
    phase = tiny_loop.phase(count=2, group_size=3)
    batch = replace(phase.batch(0), tasks=alike)
    collected = collect(tiny_loop.run(tiny.policy(mode="window")), replace(phase, batch=lambda step: batch), 0)
    for group in collected.advantages[:, 0].view(2, 3):
        assert group.sum().item() == pytest.approx(0, abs=1e-3)
        assert group.abs().max() > 0.1


def test_gradient_of_two_rank_processes_matches_one_rank(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run_python(*launcher, SUPPORT / "two_ranks.py", tmp_path, search=[SUPPORT], OMP_NUM_THREADS="1")
    alone, wanted, _ = step_on(tiny_loop.ALONE, tiny.policy(mode="window", microbatch=2), tiny_loop.GRPO, [(1, 1)])
    assert tiny.distance(load_file(tmp_path / "gradient.safetensors"), alone) < 1e-5
    # Images drawn two at a time may differ by a level of 255 in a pixel or two.
    assert json.loads((tmp_path / "metrics.json").read_text()) == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_all_ranks_raise_if_too_many_scores_are_missing_on_one_rank():
    """Only scores of rank 1 are missing, and both ranks stop."""
    policies = [tiny.policy(mode="window") for _ in range(2)]

    def act(ranks):
        run = tiny_loop.run(policies[ranks.rank], judge=tiny_loop.RedJudge([(1, 0), (1, 1)]), ranks=ranks, max_missing=0.4)
        with pytest.raises(TooManyMissing):
            collect(run, tiny_loop.phase(count=2, group_size=2, ranks=ranks), 0)

    tiny_loop.run_on_threads(2, act)
