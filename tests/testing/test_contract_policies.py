"""The contract check of policies: a correct one passes, and every violation is reported."""

from dataclasses import replace

import pytest
import torch

import tiny_policies as tiny
from retouch.protocols import Policy
from retouch.types import Evaluation, Needs, Slice
from retouch_worlds.testing import check_policy
from token_policy import LENGTH, TokenPolicy

K3 = Needs(kl="k3")
BATCH = tiny.batch(seed=12)  # words of unequal lengths


def test_a_correct_token_policy_passes_and_is_unchanged():
    policy = TokenPolicy()
    assert isinstance(policy, Policy)
    before = policy.module.table.detach().clone()
    check_policy(policy, BATCH, needs=K3)
    assert torch.equal(policy.module.table, before)
    assert policy.module.table.grad is None


class UsesGlobalRandomState(TokenPolicy):
    def rollout(self, batch):
        torch.rand(1)
        return super().rollout(batch)


class KeyedByPosition(TokenPolicy):
    def rollout(self, batch):
        return super().rollout(replace(batch, slot=tuple(range(len(batch)))))


class NonDeterministic(TokenPolicy):
    calls = 0

    def rollout(self, batch):
        self.calls += 1
        return super().rollout(replace(batch, seed=self.calls))


class ChangesWeightsInRollout(TokenPolicy):
    def rollout(self, batch):
        with torch.no_grad():
            self.module.table.add_(1e-3)
        return super().rollout(batch)


class FreezesWeights(TokenPolicy):
    def rollout(self, batch):
        self.module.table.requires_grad_(False)
        return super().rollout(batch)


class OtherTemperature(TokenPolicy):
    """Samples at another temperature than it is evaluated at."""

    def evaluate(self, trajectory, part, needs):
        evaluation = super().evaluate(trajectory, part, needs)
        return replace(evaluation, log_ratio=1.1 * evaluation.log_probs - trajectory.log_probs[part.rows, part.actions])


class ForgetsTheLastRow(TokenPolicy):
    def microbatches(self, trajectory):
        return list(super().microbatches(trajectory))[:-1]


class ScoresARowTwice(TokenPolicy):
    def microbatches(self, trajectory):
        return [*super().microbatches(trajectory), Slice(slice(0, 1), slice(2, 3))]


class DependsOnMicrobatches(TokenPolicy):
    """Right in value, but its gradient is that of a mean over the rows of a microbatch."""

    def evaluate(self, trajectory, part, needs):
        given = super().evaluate(trajectory, part, needs)
        log_probs = given.log_probs.detach() + (given.log_probs - given.log_probs.detach()) / len(given.log_probs)
        return replace(given, log_probs=log_probs)


class ConstantRatio(TokenPolicy):
    def evaluate(self, trajectory, part, needs):
        given = super().evaluate(trajectory, part, needs)
        return Evaluation(log_probs=given.log_probs, log_ratio=given.log_ratio * 0, kl=given.kl)


class MaskedActionsMatter(TokenPolicy):
    """Values that are stored for masked actions influence the other actions."""

    def evaluate(self, trajectory, part, needs):
        given = super().evaluate(trajectory, part, needs)
        return replace(given, log_ratio=given.log_ratio + 0 * given.log_ratio.sum())


class ReferenceFollowsPolicy(TokenPolicy):
    def __init__(self):
        super().__init__()
        self.copies.copies["reference"] = {"table": self.module.table.data}


class OtherReference(TokenPolicy):
    def __init__(self):
        super().__init__()
        self.copies.copies["reference"]["table"] += torch.linspace(0, 1, 6)


class NoKl(TokenPolicy):
    def evaluate(self, trajectory, part, needs):
        return super().evaluate(trajectory, part, Needs())


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (UsesGlobalRandomState, "draws from torch's global generator"),
        (KeyedByPosition, r"rows 2 to 4 rolled out alone"),
        (NonDeterministic, "the same rollout again: they differ by"),
        (ChangesWeightsInRollout, "rollout changed table"),
        (FreezesWeights, "rollout changed requires_grad of table"),
        (OtherTemperature, r"\|ratio - 1\| is \d\.\d\de"),
        (ForgetsTheLastRow, r"do not cover each|cover \(row, action\)"),
        (ScoresARowTwice, r"\[(\(0, 2\)|\[0, 2\])\]"),
        (DependsOnMicrobatches, "the gradient depends on the slicing"),
        (ConstantRatio, r"masked actions change the gradient|still exactly 1"),
        (MaskedActionsMatter, "masked actions change the gradient by"),
        (ReferenceFollowsPolicy, "the reference changes with them"),
        (OtherReference, r"the k3 KL is \d.\d\de-\d\d at the reference"),
        (NoKl, "returns no KL"),
    ],
)
def test_broken_policies_fail_with_the_violated_requirement(broken, says):
    with pytest.raises(AssertionError, match=says):
        check_policy(broken(), BATCH, needs=K3)


def test_a_policy_without_trainable_weights_fails_the_check():
    policy = TokenPolicy()
    policy.module.table.requires_grad_(False)
    with pytest.raises(AssertionError, match="requires a gradient"):
        check_policy(policy, BATCH)


def test_a_velocity_that_mixes_rows_fails_the_check():
    policy = tiny.policy(kind="ode")
    whole = policy.velocity
    policy.velocity = lambda *arguments: whole(*arguments) - whole(*arguments).mean(0)
    with pytest.raises(AssertionError, match="velocity of rows"):
        check_policy(policy, tiny.batch(3, 2))


def test_a_ratio_deviation_above_the_limit_fails_the_check():
    policy, batch = TokenPolicy(), BATCH
    trajectory = policy.rollout(batch)
    assert trajectory.mask.shape == (4, LENGTH)
    off = replace(trajectory, log_probs=trajectory.log_probs + 5e-6)
    policy.rollout = lambda batch: off.take(slice(4 - len(batch), 4)) if len(batch) != 1 else off.take(slice(0, 1))
    check_policy(policy, batch)
    with pytest.raises(AssertionError, match="the limit is 1e-06"):
        check_policy(policy, batch, ratio_limit=1e-6)
    with pytest.raises(AssertionError, match=r"the limit is 0e\+00"):
        check_policy(policy, batch, ratio_limit=0.0)
