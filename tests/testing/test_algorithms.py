"""Objectives, advantages, transitions and windows of Retouch pass the contract checks, and every violation is reported."""

from typing import Literal

import pytest
import torch

from retouch.core.transitions import gaussian_step
from retouch.objectives.advantages import (
    Advantage,
    BatchAdvantage,
    BestAdvantage,
    ExponentialAdvantage,
    GAEAdvantage,
    GroupAdvantage,
)
from retouch.objectives.base import Objective
from retouch.objectives.dpo import DPO
from retouch.objectives.imitation import Supervised
from retouch.objectives.nft import AWM, NFT
from retouch.objectives.policy_gradient import Kl, PolicyGradient
from retouch.policies.rollout import (
    AllSteps,
    CPSTransition,
    ODETransition,
    RandomWindow,
    SDETransition,
    SlidingWindow,
    Transition,
    Window,
)
from retouch.types import Loss, Needs
from retouch_worlds.testing import check_advantage, check_objective, check_transition, check_window, playground_policy

OBJECTIVES = [
    PolicyGradient(clip_low=1e-4, clip_high=1e-4, kl=Kl(kind="closed", weight=0.1)),
    PolicyGradient(surrogate="reinforce"),
    NFT(reference_weight=0.1),
    AWM(samples=2),
    Supervised(),
]


@pytest.fixture(scope="module")
def policy():
    return playground_policy()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective.label)
def test_objectives_pass_the_contract_checks(policy, objective):
    check_objective(objective, *policy)


def test_dpo_passes_the_contract_checks(policy):
    """At the reference the margin is 0, but its gradient is not 0."""
    check_objective(DPO(beta=10.0), *policy)


class Broken(Objective):
    """A REINFORCE that violates the requirement ``how``."""

    how: Literal["average", "weights", "metric", "random", "infinite", "constant"]

    def losses(self, policy, minibatch):
        for part in policy.microbatches(minibatch.trajectory):
            log_probs = policy.evaluate(minibatch.trajectory, part, Needs()).log_probs
            weights, advantages = minibatch.weights[part.rows, part.actions], minibatch.advantages[part.rows, part.actions]
            loss = -(weights * advantages * log_probs).sum()
            if self.how == "average":
                loss = -(advantages * log_probs).mean()
            if self.how == "weights":
                loss = -(advantages * log_probs).sum() / minibatch.weights.numel()
            if self.how == "random":
                loss = loss * torch.rand(())
            if self.how == "infinite":
                loss = loss / 0.0
            if self.how == "constant":
                loss = 0.0 * loss
            yield Loss(loss, {"policy/loss": loss.detach() * (2.0 if self.how == "metric" else 1.0)})


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("average", "larger microbatches change the gradient"),
        ("weights", "rows with weight 0 change the gradient"),
        ("metric", "policy/loss is"),
        ("random", "global generator"),
        ("infinite", "not finite"),
        ("constant", "no gradient"),
    ],
)
def test_broken_objectives_fail_with_the_violated_requirement(policy, how, message):
    with pytest.raises(AssertionError, match=message):
        check_objective(Broken(how=how), *policy)


@pytest.mark.parametrize(
    "advantage",
    [
        GroupAdvantage(),
        GroupAdvantage(baseline="leave_one_out"),
        BatchAdvantage(),
        BestAdvantage(keep=2),
        ExponentialAdvantage(),
        ExponentialAdvantage(over="step", temperature=0.5),
        GAEAdvantage(),
    ],
)
def test_advantages_pass_the_contract_checks(advantage):
    check_advantage(advantage)
    check_advantage(advantage, reward_range=(-5.0, 10.0))


class Ranked(Advantage):
    how: Literal["good", "position", "nan", "shape"] = "good"

    def __call__(self, rewards, group, *, reward_range):
        if self.how == "position":
            return torch.arange(len(rewards)).float()
        if self.how == "nan":
            return rewards - rewards.mean()
        if self.how == "shape":
            return rewards[:, None]
        return rewards - reward_range[0]


@pytest.mark.parametrize(("how", "message"), [("position", "permuted rows"), ("nan", "missing reward"), ("shape", "one a row")])
def test_broken_advantages_fail_with_the_violated_requirement(how, message):
    check_advantage(Ranked())
    with pytest.raises(AssertionError, match=message):
        check_advantage(Ranked(how=how))


@pytest.mark.parametrize(
    "transition",
    [SDETransition(noise_level=0.7), SDETransition(kind="dance", noise_level=0.3), CPSTransition(noise_level=0.5), ODETransition()],
)
def test_transitions_pass_the_contract_checks(transition):
    check_transition(transition)


class Halved(Transition):
    """Half of CPS's noise; ``how`` selects the requirement that is violated."""

    how: Literal["good", "std", "mean", "detached"] = "good"

    def step(self, x, velocity, sigma, sigma_next, *, sigma_max, reduction, noise=None, next=None):
        std = 0.5 * sigma_next
        if self.how == "detached":
            velocity = velocity.detach() + 0 * velocity
        drift = sigma_next - sigma if self.how != "mean" or noise is None else 0.5 * (sigma_next - sigma)
        made = gaussian_step(x, velocity, None, drift, std, reduction=reduction, noise=noise, next=next)
        return type(made)(made.next, made.log_prob, made.mean, 2 * std) if self.how == "std" else made


@pytest.mark.parametrize(
    ("how", "message"), [("std", "standard deviation"), ("mean", "rollout and of evaluation"), ("detached", "no gradient")]
)
def test_broken_transitions_fail_with_the_violated_requirement(how, message):
    check_transition(Halved())
    with pytest.raises(AssertionError, match=message):
        check_transition(Halved(how=how))


@pytest.mark.parametrize("window", [AllSteps(), RandomWindow(size=2), RandomWindow(mode="branch", size=3), SlidingWindow(size=2)])
def test_windows_pass_the_contract_checks(window):
    check_window(window)


class Late(Window):
    how: Literal["last", "global", "empty"]

    def actions(self, *, num_steps, seed, step):
        if self.how == "empty":
            return range(0)
        start = int(torch.randint(0, 3, ())) if self.how == "global" else num_steps - 2
        return range(start, start + 2)


@pytest.mark.parametrize(
    ("how", "message"), [("last", "the last step never trains"), ("global", "global generator"), ("empty", "no range")]
)
def test_broken_windows_fail_with_the_violated_requirement(how, message):
    with pytest.raises(AssertionError, match=message):
        check_window(Late(how=how))
