"""DRaFT and ReFL: gradients against hand-written ones, finite differences and fp64; memory; and recipes that are rejected."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch.autograd.graph import saved_tensors_hooks

import tiny_policies as tiny
from changed_recipes import changed
from retouch import cli
from retouch.core.random import generator
from retouch.objectives.reward_gradient import DRaFT, ReFL
from retouch.policies.denoising import DenoisingPolicy, DenoisingTrajectory
from retouch.protocols import DecodesTensors, DifferentiableReward, ImageGradientPolicy
from retouch.recipe.recipe import parse
from retouch.rewards.pixels import CompressibilityReward, ShareReward, TargetReward
from retouch.rewards.several import SeveralRewards
from retouch.types import Conditioning, Sample
from retouch_worlds.testing import check_objective, playground_policy
from slow_params import slow_after
from tiny_recipes import SMALL

TARGET = TargetReward()
BOTH = SeveralRewards(rewards={"near": TARGET, "red": ShareReward()}, combine={"near/closeness": 1.0, "red": -0.5})


def made(objective, family="sd3", **options):
    """A policy whose weights differ from its reference, a batch, and the minibatch of its rollout."""
    policy = tiny.policy(family, kind="ode", objective=objective, **options)
    tiny.perturb(policy)
    batch = tiny.batch()
    return policy, batch, tiny.minibatch(batch, policy.rollout(batch), [1.0, -2.0, 0.0, 5.0])


def chain(policy, batch, *, constant):
    """The images of whole chains, computed step by step, whose first ``constant`` steps have no gradient."""
    model, group = policy.model, torch.tensor(batch.group)
    trajectory = policy.rollout(batch)
    conditioning = trajectory.conditioning.take(group)
    keys = [(batch.group_ids[k], slot) for k, slot in zip(batch.group, batch.slot, strict=True)]
    x = model.initial_noise(conditioning, [generator(batch.seed, "noise", batch.step, *key) for key in keys])
    for k, (sigma, after) in enumerate(zip(trajectory.sigmas[:-1], trajectory.sigmas[1:], strict=True)):
        x = x + (after - sigma) * model.velocity(model.module, x, sigma.expand(len(x)), conditioning)
        x = x.detach() if k < constant else x
    return model.decode_tensors(x, conditioning)


def by_hand(policy, value):
    found = torch.autograd.grad(value, list(tiny.trained(policy).values()), allow_unused=True)
    pairs = zip(tiny.trained(policy).items(), found, strict=True)
    return {name: torch.zeros_like(parameter) if part is None else part for (name, parameter), part in pairs}


@pytest.mark.parametrize(("steps", "family"), [(3, "sd3"), (1, "edit"), (tiny.NUM_STEPS, "edit")])
def test_draft_gradient_equals_backpropagation_through_the_last_steps_of_the_chain(family, steps):
    objective = DRaFT(reward=TARGET, steps=steps)
    policy, batch, minibatch = made(objective, family)
    found, losses = tiny.gradient(policy, objective, minibatch)
    tasks = [batch.tasks[k] for k in batch.group]
    scores = TARGET.score_tensors(chain(policy, batch, constant=tiny.NUM_STEPS - steps), tasks)
    assert tiny.distance(found, by_hand(policy, -scores.mean())) < 1e-4
    torch.testing.assert_close(sum(loss.value for loss in losses), -scores.mean(), rtol=1e-5, atol=0)
    torch.testing.assert_close(sum(loss.sums["policy/score"] for loss in losses), scores.mean().detach(), rtol=1e-5, atol=0)
    assert isinstance(policy, ImageGradientPolicy)
    assert isinstance(policy.model, DecodesTensors)
    assert isinstance(TARGET, DifferentiableReward)


def test_refl_scores_the_clean_image_that_the_model_predicts():
    objective = ReFL(reward=TARGET, low=1, high=2)
    policy, batch, minibatch = made(objective)
    found, _ = tiny.gradient(policy, objective, minibatch)
    trajectory, tasks = minibatch.trajectory, [batch.tasks[k] for k in batch.group]
    x, sigma = trajectory.latents[:, 0], trajectory.sigmas[1]
    velocity = policy.velocity(trajectory, slice(0, len(x)), x, sigma.expand(len(x)), "current")
    image = policy.model.decode_tensors(x - sigma * velocity, trajectory.conditioning)
    assert tiny.distance(found, by_hand(policy, -TARGET.score_tensors(image, tasks).mean())) < 1e-5


def test_several_rewards_give_their_weighted_sum_and_pass_gradcheck():
    random = torch.Generator().manual_seed(0)
    images = torch.rand((2, 3, 4, 5), generator=random, dtype=torch.float64, requires_grad=True)
    tasks = [tiny.batch().tasks[0]] * 2
    score = BOTH.build(device="cpu").score_tensors
    assert torch.autograd.gradcheck(lambda pixels: score(pixels, tasks), images)
    wanted = TARGET.score_tensors(images, tasks) - 0.5 * ShareReward().score_tensors(images, tasks)
    torch.testing.assert_close(score(images, tasks), wanted, rtol=0, atol=0)
    with torch.no_grad():  # on 8-bit images also the weighted sum of the columns of the rewards
        shown = (images * 255).round() / 255
        pixels = (shown * 255).byte().movedim(1, -1)
        columns = BOTH.build(device="cpu")(
            [Sample(task, Image.fromarray(each.numpy())) for task, each in zip(tasks, pixels, strict=True)]
        )
        measured = columns["near/closeness"] - 0.5 * columns["red/share"]
        torch.testing.assert_close(score(shown, tasks).float(), measured, rtol=1e-5, atol=1e-6)


class Bare:
    """A model of one matrix, which cannot decode with gradient."""

    def __init__(self, weight):
        self.module = torch.nn.Module()
        self.module.weight = weight

    def velocity(self, module, x, sigma, conditioning):
        return torch.tanh(x @ module.weight) * (1 + sigma[:, None])


class Smooth(Bare):
    """Its images are the sigmoid of its latents."""

    def decode_tensors(self, x, conditioning):
        return torch.sigmoid(x).view(-1, 3, 1, 2)


def matrix_trajectory():
    """A trajectory in fp64 whose state before the second of three steps was kept, and a weight."""
    random = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=random, dtype=torch.float64) for shape in ((2, 6), (6, 6)))
    flags, sigmas = torch.ones(2, 1), torch.tensor([1, 0.8, 0.5, 0.0], dtype=torch.float64)
    kept = {"outputs": x, "latents": x[:, None], "means": None, "sigmas": sigmas, "first": 1, "group": torch.arange(2)}
    given = {"log_probs": flags, "mask": flags.bool(), "kind": flags.long(), "conditioning": Conditioning({"embeds": x})}
    return DenoisingTrajectory(**given, **kept), weight


@pytest.mark.parametrize("predicted", [False, True])
def test_image_gradient_passes_gradcheck_in_fp64(predicted):
    trajectory, weight = matrix_trajectory()

    def images(model):
        policy = SimpleNamespace(model=model, module=model.module)
        return DenoisingPolicy.images(policy, trajectory, slice(0, 2), predicted=predicted)

    assert torch.autograd.gradcheck(lambda weight: images(Smooth(weight)), weight.requires_grad_())
    with pytest.raises(ValueError, match="Bare has no decode_tensors"):
        images(Bare(weight))


def test_refl_draws_its_gradient_step_deterministically_from_seed_and_training_step():
    objective = ReFL(reward=TARGET, low=10, high=30)
    drawn = [objective.first_gradient_step(40, seed=3, step=step) for step in range(300)]
    assert drawn == [objective.first_gradient_step(40, seed=3, step=step) for step in range(300)]
    assert set(drawn) == set(range(10, 30))
    _, _, minibatch = made(ReFL(reward=TARGET, low=1, high=3))
    assert minibatch.trajectory.first in (1, 2)
    assert minibatch.trajectory.latents.shape[1] == 1
    assert not torch.equal(minibatch.trajectory.latents[:, 0], minibatch.trajectory.outputs)


def test_rollout_for_draft_makes_bitwise_the_images_of_a_plain_rollout():
    batch = tiny.batch()
    kept = tiny.policy(kind="ode", objective=DRaFT(reward=TARGET, steps=2)).rollout(batch)
    plain = tiny.policy(kind="ode").rollout(batch)
    assert torch.equal(kept.outputs, plain.outputs)
    assert (kept.first, plain.first) == (tiny.NUM_STEPS - 2, tiny.NUM_STEPS)


def saved(objective, num_steps):
    """Number and bytes of the tensors that autograd keeps for the loss of a minibatch."""
    policy, _, minibatch = made(objective, num_steps=num_steps)
    sizes = []

    def pack(tensor):
        sizes.append(tensor.nbytes)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        list(objective.losses(policy, minibatch))
    return len(sizes), sum(sizes)


def test_memory_depends_on_the_steps_with_gradient_alone():
    one, two = DRaFT(reward=TARGET, steps=1), DRaFT(reward=TARGET, steps=2)
    assert saved(one, 3) == saved(one, 9) == saved(ReFL(reward=TARGET, low=0), 9)
    assert saved(two, 9)[1] > saved(one, 9)[1]


def test_image_with_a_score_above_the_cap_has_zero_gradient():
    objective = DRaFT(reward=TARGET)
    policy, _, minibatch = made(objective, microbatch=1)
    _, losses = tiny.gradient(policy, objective, minibatch)
    scores = [4 * loss.sums["policy/score"].item() for loss in losses]
    capped = DRaFT(reward=TARGET, cap=sorted(scores)[2] - 1e-6)
    for loss, score in zip(capped.losses(policy, minibatch), scores, strict=True):
        slopes = torch.autograd.grad(loss.value, list(tiny.trained(policy).values()), allow_unused=True)
        assert any(slope is not None and slope.any() for slope in slopes) == (score < capped.cap)
        assert 4 * loss.sums["policy/score"].item() == pytest.approx(score)


def test_gradient_with_guidance_is_independent_of_microbatch_size():
    objective = DRaFT(reward=TARGET, steps=2)
    whole, cut = (made(objective, microbatch=size, guidance=2.0) for size in (100, 3))
    found, other = (tiny.gradient(policy, objective, minibatch)[0] for policy, _, minibatch in (whole, cut))
    assert tiny.distance(other, found) < 1e-5


@pytest.mark.parametrize("objective", [DRaFT(reward=TARGET, steps=2), ReFL(reward=ShareReward(), low=0)], ids=["draft", "refl"])
def test_draft_and_refl_pass_the_contract_checks(objective):
    rollout = tiny.sampling("ode", num_steps=3)
    policy, batch = playground_policy(rollout)
    policy.first_gradient_step = objective.first_gradient_step
    check_objective(objective, policy, batch)


# Recipes

DRAFT: dict[str, Any] = {
    **SMALL,
    "rollout": {"num_steps": 3, "transition": {"kind": "ode"}},
    "objective": {"kind": "draft", "reward": {"kind": "target"}, "steps": 2},
}


def test_draft_recipe_with_group_size_1_is_valid_and_round_trips() -> None:
    recipe = parse(changed(DRAFT, group_size=1, tasks_per_step=1))
    reward = {**TARGET.model_dump(mode="json")}
    assert recipe.document()["objective"] == {"kind": "draft", "reward": reward, "steps": 2, "cap": None}
    assert parse(recipe.document()) == recipe


OTHER, COMBINED = {"kind": "share"}, {"kind": "target", "combine": {"closeness": 1}}
REFL = {"kind": "refl", "reward": {"kind": "target"}}


def two_rewards(other: dict[str, Any], **keys: Any) -> dict[str, Any]:
    rewards = {"near": {"kind": "target"}, "other": other}
    return {"objective__reward": {"kind": "several", "rewards": rewards, "combine": {"near": 1}, **keys}}


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"objective__steps": 4}, "objective.steps: 4 steps with gradient, and the chain has 3 (rollout.num_steps); use 3"),
        ({"objective": {**REFL, "low": 3}}, "objective.low: 3 leaves no step below 3; use 2"),
        ({"objective": {**REFL, "low": 0, "high": 4}}, "objective.high: 4 is past the last of 3"),
        (
            {"objective__reward": {"kind": "playground"}},
            "objective.reward.kind: 'playground' is not one of 'target', 'share', 'grade'",
        ),
        ({"objective__reward": COMBINED}, "objective.reward: combine: the loss differentiates a single"),
        ({"objective__reward": {}}, "objective.reward.kind: missing: one of 'target', 'share', 'grade'"),
        (two_rewards({"kind": "playground"}), "objective.reward: rewards.other: playground has no gradient in the image"),
        (two_rewards(OTHER, combine="near * other"), "objective.reward: combine: a formula cannot be used here, because its roots"),
        (two_rewards(OTHER, combine={}), "objective.reward: combine names no column"),
        (two_rewards(OTHER, combine={"other/gone": 1}), "'other/gone', but the reward has no such column; it has near/closeness"),
        (two_rewards({**OTHER, "combine": {"share": 1}}), "objective.reward: rewards.other: combine and max_missing belong to all"),
        (two_rewards(OTHER, max_missing=0.5), "objective.reward: max_missing: the loss differentiates a single score"),
        ({"rollout__transition": {"kind": "cps", "noise_level": 0.7}}, "rollout.transition.kind: draft differentiates determin"),
        ({"rollout__staleness": 1}, "rollout.staleness: draft has no probabilities"),
        ({"rollout__refill": {"rounds": 2}}, "rollout.refill: draft also learns from groups of equal rewards; remove it"),
        ({"advantage": {"kind": "best"}}, "advantage.kind: best: it would weight the samples of draft"),
        ({"advantage": {"kind": "exponential"}}, "advantage.kind: exponential: it would weight the samples of draft"),
        ({"watch": {"judge": {"reward": COMBINED}}}, "watch.judge.reward: the run is trained on its columns closeness, so"),
        ({"devices": {"offload": True}}, "devices.offload: draft decodes with gradient"),
        (
            {
                "objective__reward": {"kind": "target"},
                "data": {"kind": "prompts", "path": "x"},
                "reward": {"kind": "share", "combine": {"share": 1}},
                "policy__model": {"kind": "sd3", "path": "x", "size": [64, 64]},
            },
            "objective.reward.kind: target compares with a target image",
        ),
        (
            {
                "policy": {"kind": "autoregressive", "model": {"kind": "playground-writer"}},
                "rollout": {"kind": "tokens", "max_new_tokens": 5},
                "renderer": {"kind": "response", "model": {"kind": "playground"}, "num_steps": 2, "encoder": "frozen"},
            },
            "objective.kind: draft needs the gradient of an image, and tokens have none; use policy_gradient",
        ),
    ],
)
def test_invalid_draft_and_refl_settings_raise_when_the_recipe_is_parsed(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(ValueError, match=r"objective|rollout|devices|watch|advantage") as refused:
        parse(changed(DRAFT, **changes))
    assert line in str(refused.value)


def test_objectives_built_in_python_raise_for_invalid_rewards_and_steps() -> None:
    class Detached(TargetReward):
        def score_tensors(self, images, tasks):
            return super().score_tensors(images.detach(), tasks)

    detached = DRaFT(reward=Detached())
    policy, _, minibatch = made(detached)
    refl, draft = ReFL(reward=TARGET, low=3), DRaFT(reward=TARGET, steps=4)
    for message, call in (
        (r"CompressibilityReward has no gradient in the image \(no method score_tensors\); use target",
         lambda: DRaFT(reward=CompressibilityReward())),
        ("4 steps with gradient in a chain of 3; use 3 or fewer", lambda: draft.first_gradient_step(3, seed=0, step=0)),
        (r"no step in \[3, 3\) of a chain of 3", lambda: refl.first_gradient_step(3, seed=0, step=0)),
        (r"it gave scores of shape \(4,\), without gradient, for 4 images", lambda: list(detached.losses(policy, minibatch))),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


# Whole runs


def trained(root, **objective: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The metrics of a run of one step, and the checks before it."""
    file = root / "small.json"
    file.write_text(json.dumps({**DRAFT, "objective": objective, "out": str(root), "name": "whole", "steps": 1}))
    assert cli.main(["train", str(file), "--set", "device=cpu", "--set", "trackers=[]", "--set", "eval.every=0"]) == 0
    (line,) = [json.loads(line) for line in (root / "whole" / "metrics.jsonl").read_text().splitlines()]
    return line, {check["name"]: check["ok"] for check in json.loads((root / "whole" / "preflight.json").read_text())}


@pytest.mark.parametrize("objective", slow_after(1, [DRAFT["objective"], {**REFL, "low": 1}]), ids=["draft", "refl"])
def test_a_run_passes_its_preflight_and_takes_a_step(objective: dict[str, Any], tmp_path) -> None:
    line, checks = trained(tmp_path, **objective)
    assert 0 < line["policy/score"] < 1
    assert line["policy/grad_norm"] > 0
    assert "reward/mean" in line
    assert checks["moved"]
    assert checks["frozen"]


def test_a_run_starts_although_its_images_have_reached_the_cap(tmp_path) -> None:
    """The preflight, which needs a gradient, ignores the cap; the steps of the run then have zero gradient."""
    line, checks = trained(tmp_path, **DRAFT["objective"], cap=0.0)
    assert line["policy/grad_norm"] == 0
    assert checks["gradient"]


def test_error_about_a_reward_of_a_phase_contains_the_key_of_the_phase() -> None:
    top = {**DRAFT, "objective": SMALL["objective"], "steps": None}
    phase = {"name": "second", "steps": 1, "objective": DRAFT["objective"], "data": {"kind": "prompts", "path": "x"}}
    with pytest.raises(ValueError, match=r"phases\.0\.objective\.reward\.kind: target compares with a target image"):
        parse({**top, "phases": [phase]})


def test_one_step_of_draft_is_refl_at_the_last_step():
    draft, refl = DRaFT(reward=TARGET, steps=1), ReFL(reward=TARGET, low=tiny.NUM_STEPS - 1)
    found, other = (tiny.gradient(*(policy, objective, minibatch))[0] for objective, (policy, _, minibatch) in
                    ((each, made(each)) for each in (draft, refl)))  # fmt: skip
    assert all(torch.equal(found[name], other[name]) for name in found)
