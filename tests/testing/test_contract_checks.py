"""The contract checks: correct parts pass, and every violation is reported."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from PIL import Image

import tiny_policies as tiny
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
from retouch.objectives.dpo import CRD, DGPO, DPO
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
from retouch.protocols import Policy
from retouch.renderers.base import LatentRenderer
from retouch.rewards.function import reward
from retouch.rewards.pixels import ShareReward
from retouch.types import Column, Evaluation, Loss, Needs, Sample, Slice
from retouch_worlds.data import PlaygroundData
from retouch_worlds.models.family import PlaygroundModel
from retouch_worlds.rewards import PlaygroundReward
from retouch_worlds.testing import (
    check_advantage,
    check_model,
    check_objective,
    check_policy,
    check_renderer,
    check_reward,
    check_transition,
    check_window,
    playground_policy,
)
from token_policy import LENGTH, TokenPolicy

# The contract check of policies

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


class NoKl(TokenPolicy):
    def evaluate(self, trajectory, part, needs):
        return super().evaluate(trajectory, part, Needs())


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (UsesGlobalRandomState, "draws from torch's global generator"), (KeyedByPosition, r"rows 2 to 4 rolled out alone"),
        (NonDeterministic, "the same rollout again: they differ by"), (ChangesWeightsInRollout, "rollout changed table"),
        (FreezesWeights, "rollout changed requires_grad of table"), (OtherTemperature, r"\|ratio - 1\| is \d\.\d\de"),
        (ForgetsTheLastRow, r"do not cover each|cover \(row, action\)"), (ScoresARowTwice, r"\[(\(0, 2\)|\[0, 2\])\]"),
        (DependsOnMicrobatches, "the gradient depends on the slicing"),
        (ConstantRatio, r"masked actions change the gradient|still exactly 1"),
        (MaskedActionsMatter, "masked actions change the gradient by"),
        (ReferenceFollowsPolicy, "the reference changes with them"), (NoKl, "returns no KL"),
    ],
)  # fmt: skip
def test_broken_policies_fail_with_the_violated_requirement(broken, says):
    with pytest.raises(AssertionError, match=says):
        check_policy(broken(), BATCH, needs=K3)


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
    policy.module.table.requires_grad_(False)
    with pytest.raises(AssertionError, match="requires a gradient"):
        check_policy(policy, batch)


# The contract checks of rewards, renderers and models

# Rewards

UNIT = {"a": Column(0.0, 1.0)}


def samples(count=4):
    return [Sample(task, task.target) for task in tiny.tasks(count)]


@reward(low=0, high=1)
def redness(images, **kwargs):
    return [image.convert("RGB").resize((1, 1)).getpixel((0, 0))[0] / 255 for image in images]


@reward(low=0, high=0.1)
def too_red(images):
    return redness(images)


@reward(low=0, high=1)
def of_the_corner(images):
    return [image.getpixel((8, 8))[0] / 255 for image in images]


def test_rewards_with_and_without_missing_scores_pass_the_contract_checks():
    tasks = PlaygroundData(seed=0, count=5, complexity=[1, 2, 3]).tasks(in_turn=True)
    check_reward(PlaygroundReward(), [Sample(task, task.target if k % 2 else task.images[0]) for k, task in enumerate(tasks)])
    check_reward(redness, samples())
    check_reward(ShareReward(), samples())
    check_reward(judging(lambda samples: brightness(samples).where(brightness(samples) > 0.49, torch.nan)), samples())


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (too_red, "'too_red' gives .* outside its range 0.0 to 0.1"),
        (of_the_corner, "raised an error on an image of one pixel; .*\nIndexError: image index out of range"),
        (PlaygroundReward, r"PlaygroundReward is a class; give an object of it, such as PlaygroundReward\(\)"),
    ],
)
def test_broken_reward_functions_and_classes_fail_with_the_violated_requirement(wrong, says):
    with pytest.raises(AssertionError, match=says):
        check_reward(wrong, samples())


def judging(judge, columns=UNIT):
    """A reward that gives one column, from the samples."""

    class Reward:
        def __init__(self):
            self.columns = columns

        def __call__(self, samples):
            return {"a": judge(samples)}

    return Reward()


def brightness(samples):
    return torch.tensor([sample.image.convert("L").resize((1, 1)).getpixel((0, 0)) / 255 for sample in samples])


def above_the_darkest(samples):
    return brightness(samples) - brightness(samples).min()


@pytest.mark.parametrize(
    ("judge", "columns", "says"),
    [
        (brightness, {**UNIT, "b": Column(0.0, 1.0)}, r"declares the columns \['a', 'b'\] and returns \['a'\]"),
        (brightness, {"a": Column(0.0, 0.1)}, "outside its range 0.0 to 0.1"),
        (lambda samples: brightness(samples)[:-1], UNIT, r"shape \(3,\) for 4 samples"),
        (lambda samples: brightness(samples).round().long(), UNIT, "which cannot represent NaN"),
        (lambda samples: torch.arange(len(samples)) / 10, UNIT, "column 'a' in the order"),
        (lambda samples: brightness(samples) * torch.rand(1), UNIT, "draws from torch's global generator"),
        (above_the_darkest, UNIT, "of a sample in a batch with an image of one pixel"),
        (
            lambda samples: torch.tensor([sample.image.getpixel((8, 8))[0] / 255 for sample in samples]),
            UNIT,
            "raised an error on an image of one pixel",
        ),
        (
            lambda samples: torch.tensor([1 / len(sample.image.getcolors(9999)) for sample in samples]) * torch.inf,
            UNIT,
            "outside its range",
        ),
    ],
)
def test_broken_rewards_fail_with_the_violated_requirement(judge, columns, says):
    with pytest.raises(AssertionError, match=says):
        check_reward(judging(judge, columns), samples())


# Renderers


def acted():
    policy, batch = tiny.policy("sd3"), tiny.batch()
    return policy, [batch.tasks[k] for k in batch.group], policy.rollout(batch)


def brighter(images):
    return [None if image is None else image.point(lambda level: min(255, level + len(images))) for image in images]


def test_broken_renderers_fail_with_the_violated_requirement():
    policy, tasks, trajectory = acted()
    good = LatentRenderer(policy.model)

    def spoils(tasks, trajectory):
        images = good(tasks, trajectory)
        trajectory.outputs.add_(1e-3)
        return images

    broken = {
        "3 images for 4 rows": lambda tasks, trajectory: good(tasks, trajectory)[:3],
        "row 0 rendered alone": lambda tasks, trajectory: brighter(good(tasks, trajectory)),
        "mode L, not RGB": lambda tasks, trajectory: [image.convert("L") for image in good(tasks, trajectory)],
        "is not finite was rendered": lambda tasks, trajectory: policy.model.decode(
            trajectory.outputs.nan_to_num(), trajectory.conditioning
        ),
        "changed the trajectory's outputs": spoils,
        "rendered again": lambda tasks, trajectory: [Image.effect_noise((8, 8), 60).convert("RGB") for _ in range(len(trajectory))],
    }
    check_renderer(good, tasks, trajectory)
    for says, renderer in broken.items():
        with pytest.raises(AssertionError, match=says):
            check_renderer(renderer, tasks, replace(trajectory, outputs=trajectory.outputs.clone()))


# Models

PARTS = ("module", "encode", "encode_negative", "combine", "initial_noise", "sigmas", "velocity", "encode_images", "decode")


def changed(model, **parts):
    """The model with some of its methods replaced."""
    return SimpleNamespace(**{name: getattr(model, name) for name in PARTS} | parts)


def masked(conditioning, mask):
    return replace(conditioning, tensors={**conditioning.tensors, "mask": mask})


@pytest.fixture(scope="module")
def model():
    return tiny.edit_model()


def test_broken_models_fail_with_the_violated_requirement(model):
    velocity, tasks = model.velocity, tiny.tasks(3)
    swapped = changed(
        model, velocity=lambda module, x, sigma, given: velocity(module, x, sigma, masked(given, given.tensors["mask"].flip(0)))
    )
    blind = changed(
        model,
        velocity=lambda module, x, sigma, given: velocity(module, x, sigma, masked(given, torch.ones_like(given.tensors["mask"]))),
    )
    broken = [
        (swapped, "velocity of "),
        (blind, "velocity of tasks encoded one by one|velocity of row . alone|places of padding"),
        (
            changed(model, velocity=lambda module, x, sigma, given: velocity(module, x, sigma.mean().expand_as(sigma), given)),
            "velocity of ",
        ),
        (changed(model, velocity=lambda module, x, sigma, given: velocity(module, x, sigma, given).double()), "in torch.float64"),
        (changed(model, velocity=lambda module, x, sigma, given: velocity(module, x, sigma, given) / 0), "not finite"),
        (
            changed(model, initial_noise=lambda given, keys: model.initial_noise(given, keys[:1] * len(keys))),
            "other rows' generators",
        ),
        (changed(model, initial_noise=lambda given, keys: 2 * model.initial_noise(given, keys)), "variance"),
        (changed(model, initial_noise=lambda given, keys: torch.randn(len(keys), 4, 64)), "draws from torch's global generator"),
        (changed(model, sigmas=lambda steps, given: model.sigmas(steps, given)[:-1]), r"\(4,\) sigmas for 4 steps, not 5"),
        (changed(model, sigmas=lambda steps, given: model.sigmas(steps, given).flip(0)), "do not decrease from about 1 to 0"),
        (changed(model, combine=lambda positive, negative, scale: positive + scale * (positive - negative)), "guidance at scale 1"),
        (changed(model, encode_negative=lambda tasks: model.encode_negative(tasks[:1])), "has 1 rows for 3 tasks"),
        (changed(model, decode=lambda x, given: model.decode(x[:1], given)), "1 images for 3 rows"),
        (
            changed(model, decode=lambda x, given: model.decode(x * len(next(iter(given.tensors.values()))), given)),
            "decode reads rows of the conditioning",
        ),
        (changed(model, encode_images=lambda images: model.encode_images(images)[:, :2]), "encode_images gives"),
    ]
    check_model(model, tasks)
    for each, says in broken:
        with pytest.raises(AssertionError, match=says):
            check_model(each, tasks)


def test_fault_12_a_velocity_that_ignores_its_arguments_fails_the_check(model):
    velocity, tasks = model.velocity, tiny.tasks(3)
    first = model.encode([tasks[0]])
    broken = [
        (lambda module, x, sigma, given: velocity(model.module, x, sigma, given), "ignores `module`"),
        (lambda module, x, sigma, given: velocity(module, x, 1000 * sigma, given), "scaled twice"),
        (lambda module, x, sigma, given: velocity(module, x, torch.full_like(sigma, 0.5), given), "does not change with sigma"),
        (
            lambda module, x, sigma, given: velocity(module, x, sigma, first.take(torch.zeros(len(x), dtype=torch.long))),
            "does not change with the instruction",
        ),
    ]
    for each, says in broken:
        with pytest.raises(AssertionError, match=says):
            check_model(changed(model, velocity=each), tasks)


def test_fault_12_a_model_that_ignores_only_the_instruction_fails_the_check():
    """Its velocities of different tasks still differ, because their source images do."""
    trained = PlaygroundModel().build(device=torch.device("cpu"))
    tasks = list(PlaygroundData(count=3, complexity=[1]).tasks())
    encode = trained.encode
    ignoring = changed(trained, encode=lambda given: encode([replace(task, instruction="make it red") for task in given]))
    with pytest.raises(AssertionError, match="does not change with the instruction alone"):
        check_model(ignoring, tasks)
    same = [replace(task, instruction="make it red") for task in tasks]
    with pytest.raises(AssertionError, match="an instruction of its own"):
        check_model(trained, same)


def test_fault_12_with_trained_weights_the_sign_of_the_velocity_is_checked():
    trained = PlaygroundModel().build(device=torch.device("cpu"))
    tasks = list(PlaygroundData(count=3, complexity=[1]).tasks())
    check_model(trained, tasks, trained=True)
    velocity, encode = trained.velocity, trained.encode_images
    broken = [
        changed(trained, velocity=lambda module, x, sigma, given: -velocity(module, x, sigma, given)),
        changed(trained, velocity=lambda module, x, sigma, given: velocity(module, x, 1 - sigma, given)),
        changed(trained, encode_images=lambda images: 20 * encode(images)),
    ]
    check_model(broken[0], tasks)
    for each in broken:
        with pytest.raises(AssertionError, match="the velocity explains"):
            check_model(each, tasks, trained=True)
    with pytest.raises(AssertionError, match="every task needs a target"):
        check_model(trained, [replace(task, target=None) for task in tasks], trained=True)


# Objectives, advantages, transitions and windows


@pytest.fixture(scope="module")
def policy():
    return playground_policy()


@pytest.mark.parametrize(
    "objective",
    [
        PolicyGradient(clip_low=1e-4, clip_high=1e-4, kl=Kl(kind="closed", weight=0.1)), PolicyGradient(surrogate="reinforce"),
        NFT(reference_weight=0.1), AWM(samples=2), Supervised(),
        CRD(), DGPO(beta=10.0), DPO(beta=10.0),  # at the reference its margin is 0, but the gradient is not
    ],
    ids=lambda objective: objective.label,
)  # fmt: skip
def test_objectives_pass_the_contract_checks(policy, objective):
    check_objective(objective, *policy)


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
        ("average", "larger microbatches change the gradient"), ("weights", "rows with weight 0 change the gradient"),
        ("metric", "policy/loss is"), ("random", "global generator"), ("infinite", "not finite"), ("constant", "no gradient"),
    ],
)  # fmt: skip
def test_broken_objectives_fail_with_the_violated_requirement(policy, how, message):
    with pytest.raises(AssertionError, match=message):
        check_objective(Broken(how=how), *policy)


def test_advantages_pass_the_contract_checks():
    for advantage in (
        GroupAdvantage(), GroupAdvantage(baseline="leave_one_out"), BatchAdvantage(), BestAdvantage(keep=2), ExponentialAdvantage(),
        ExponentialAdvantage(over="step", temperature=0.5), GAEAdvantage(),
    ):  # fmt: skip
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


def test_transitions_and_windows_pass_the_contract_checks():
    dance = SDETransition(kind="dance", noise_level=0.3)
    for transition in (SDETransition(noise_level=0.7), dance, CPSTransition(noise_level=0.5), ODETransition()):
        check_transition(transition)
    for window in (AllSteps(), RandomWindow(size=2), RandomWindow(mode="branch", size=3), SlidingWindow(size=2)):
        check_window(window)


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
