"""The policy gradient on tokens and transitions: hand-written losses, metrics, and no effect of microbatches and masks."""

from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError

import tiny_policies as tiny
from retouch.core.surrogates import loss_weights
from retouch.core.transitions import gradient_balance, ratio_norm
from retouch.objectives.base import Objective, ObjectiveContext
from retouch.objectives.policy_gradient import Kl, PolicyGradient, check_clip
from retouch.types import Needs, Slice
from token_policy import TokenPolicy

ADVANTAGES = [1.0, -0.5, 0.25, -2.0]
CLIP = {"clip_low": 0.2, "clip_high": 0.3}
SURROGATES = ["clip", "gspo", "cispo", "reinforce"]


def objective(surrogate="clip", **options):
    bounds = {} if surrogate == "reinforce" else CLIP
    return PolicyGradient(**{"surrogate": surrogate, **bounds, **options})


def changed_token_policy(key=0, moved=0.5):
    """A token policy whose weights changed after its rollout, the trajectory, and the minibatch."""
    policy, batch = TokenPolicy(), tiny.batch(seed=12)
    trajectory = policy.rollout(batch)
    assert trajectory.mask.sum(1).tolist() == [1, 3, 4, 1]  # unequal, so that using the mask of another row would be detected
    tiny.perturb(policy, moved, key)
    return policy, trajectory, tiny.minibatch(batch, trajectory, ADVANTAGES)


def by_hand(surrogate, trajectory, log_probs, dual=None):
    """The loss of each row, token by token, with weights 1 / (rows * tokens of the row)."""
    rows = []
    for row, advantage in enumerate(ADVANTAGES):
        places = trajectory.mask[row].nonzero().flatten().tolist()
        ratios = [(log_probs[row, place] - trajectory.log_probs[row, place]).exp() for place in places]
        if surrogate == "gspo":
            ratios = [torch.stack(ratios).log().mean().exp()] * len(places)
        losses = []
        for place, ratio in zip(places, ratios, strict=True):
            if surrogate == "reinforce":
                losses.append(-advantage * log_probs[row, place])
            elif surrogate == "cispo":
                losses.append(-ratio.detach().clamp(0.8, 1.3) * advantage * log_probs[row, place])
            else:
                loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.3))
                losses.append(loss if dual is None or advantage > 0 else torch.minimum(loss, torch.tensor(-advantage * dual)))
        rows.append(torch.stack(losses).mean())
    return torch.stack(rows).mean()


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("key", range(3))
def test_loss_and_gradient_match_hand_written_surrogates(surrogate, key):
    policy, trajectory, minibatch = changed_token_policy(key)
    log_probs = policy._log_probs(trajectory.outputs)
    wanted = by_hand(surrogate, trajectory, log_probs)
    (slope,) = torch.autograd.grad(wanted, policy.module.table)
    found, losses = tiny.gradient(policy, objective(surrogate), minibatch)
    torch.testing.assert_close(sum(loss.value for loss in losses), wanted)
    torch.testing.assert_close(found["table"], slope, rtol=1e-5, atol=1e-7)


def test_gspo_trains_only_the_actions_with_a_weight():
    """The ratio of a row is that of the actions that train, as if the others were masked."""
    policy, trajectory, minibatch = changed_token_policy()
    trained = trajectory.mask & (torch.arange(5) < 3)
    minibatch = replace(minibatch, weights=loss_weights(trained, torch.ones(4, dtype=torch.bool), normalise="sequence"))
    found, losses = tiny.gradient(policy, objective("gspo"), minibatch)
    assert found["table"][3:].abs().max() == 0
    masked = replace(minibatch, trajectory=replace(trajectory, mask=trained))
    wanted, wanted_losses = tiny.gradient(policy, objective("gspo"), masked)
    assert tiny.distance(found, wanted) < 1e-6
    for name in ("policy/loss", "policy/clip_fraction"):
        assert sum(loss.sums[name] for loss in losses) == sum(loss.sums[name] for loss in wanted_losses)


def test_dual_clip_bounds_the_loss_of_actions_with_negative_advantage():
    policy, trajectory, minibatch = changed_token_policy(moved=1.5)
    log_probs = policy._log_probs(trajectory.outputs)
    _, losses = tiny.gradient(policy, objective(dual=1.5), minibatch)
    wanted = by_hand("clip", trajectory, log_probs, dual=1.5)
    torch.testing.assert_close(sum(loss.value for loss in losses), wanted)
    assert by_hand("clip", trajectory, log_probs) > wanted


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_nan_log_probabilities_of_masked_actions_do_not_affect_gradient_or_metrics(surrogate):
    policy, trajectory, minibatch = changed_token_policy()
    told = objective(surrogate, kl=Kl(kind="k3", weight=0.3))
    clean, _ = tiny.gradient(policy, told, minibatch)
    dirty = replace(trajectory, log_probs=trajectory.log_probs.masked_fill(~trajectory.mask, torch.nan))
    found, losses = tiny.gradient(policy, told, replace(minibatch, trajectory=dirty))
    assert tiny.distance(found, clean) == 0
    assert all(torch.isfinite(torch.as_tensor(value)) for loss in losses for value in {**loss.sums, **loss.maxima}.values())


@pytest.mark.parametrize("weight", [0.1, 0.7])
def test_the_kl_is_added_with_its_weight(weight):
    policy, trajectory, minibatch = changed_token_policy()
    plain, _ = tiny.gradient(policy, objective(), minibatch)
    found, losses = tiny.gradient(policy, objective(kl=Kl(kind="k3", weight=weight)), minibatch)
    evaluation = policy.evaluate(trajectory, Slice(slice(0, 4), slice(0, 5)), Needs(kl="k3"))
    kl = (minibatch.weights * torch.where(trajectory.mask, evaluation.kl, 0)).sum()
    (slope,) = torch.autograd.grad(kl, policy.module.table)
    torch.testing.assert_close(found["table"], plain["table"] + weight * slope)
    torch.testing.assert_close(sum(loss.sums["policy/kl"] for loss in losses), kl.detach())


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_the_entropy_is_subtracted_with_its_weight(surrogate):
    policy, trajectory, minibatch = changed_token_policy()
    plain, _ = tiny.gradient(policy, objective(surrogate), minibatch)
    found, losses = tiny.gradient(policy, objective(surrogate, entropy_bonus=0.3), minibatch)
    chances = policy._logits(trajectory.outputs).softmax(-1)
    entropy = (minibatch.weights * trajectory.mask * -(chances * chances.log()).sum(-1)).sum()
    (slope,) = torch.autograd.grad(entropy, policy.module.table)
    torch.testing.assert_close(found["table"], plain["table"] - 0.3 * slope)
    torch.testing.assert_close(sum(loss.sums["policy/entropy"] for loss in losses), entropy.detach())


def test_clip_fraction_kl_loss_and_ratio_metrics_match_hand_computed_values():
    policy, trajectory, minibatch = changed_token_policy()
    _, losses = tiny.gradient(policy, objective(), minibatch)
    ratio = (policy._log_probs(trajectory.outputs) - trajectory.log_probs).detach().exp()[trajectory.mask]
    weights = minibatch.weights[trajectory.mask]
    told = {name: sum(float(loss.sums[name]) for loss in losses) for name in losses[0].sums}
    advantages = minibatch.advantages[trajectory.mask]
    outside = ((ratio < 0.8) & (advantages < 0)) | ((ratio > 1.3) & (advantages > 0))  # where the clip cuts the gradient
    assert 0 < outside.sum() < ((ratio < 0.8) | (ratio > 1.3)).sum()
    assert told["policy/clip_fraction"] == pytest.approx((weights * outside).sum().item())
    assert told["policy/approx_kl"] == pytest.approx((weights * ratio.log().square() / 2).sum().item(), rel=1e-5)
    assert told["policy/loss"] == pytest.approx(sum(loss.value for loss in losses).item())
    assert max(float(loss.maxima["policy/ratio_max"]) for loss in losses) == pytest.approx((ratio - 1).abs().max().item())


def test_clip_fraction_is_reported_for_cispo_and_not_for_reinforce():
    policy, _, minibatch = changed_token_policy()
    for told in (objective("reinforce"), PolicyGradient(surrogate="cispo", clip_high=0.3)):
        _, losses = tiny.gradient(policy, told, minibatch)
        assert ("policy/clip_fraction" in losses[0].sums) == (told.surrogate == "cispo")


@pytest.mark.parametrize(
    "options", [{}, {"clip_low": 0.2}, {"surrogate": "cispo", "clip_low": 0.2}, {"surrogate": "gspo", "clip_high": 1.0}]
)
def test_building_with_a_missing_clip_bound_raises(options):
    with pytest.raises(ValueError, match="give the missing one"):
        PolicyGradient(**options).build()


def test_gspo_raises_if_a_row_is_split_over_microbatches():
    policy, batch = tiny.policy(mode="all", microbatch=2), tiny.batch()
    minibatch = tiny.minibatch(batch, policy.rollout(batch), ADVANTAGES)
    with pytest.raises(ValueError, match="raise microbatch to at least 3"):
        tiny.gradient(policy, objective("gspo"), minibatch)


# Transitions


@pytest.mark.parametrize("ratio_normed", [False, True])
def test_the_first_gradient_of_transitions_is_that_of_weighted_log_probabilities(ratio_normed):
    """Before the first step the ratio is 1, so its gradient is that of log p; RatioNorm's is step_std / |dt| times that."""
    policy, batch = tiny.policy(mode="all", keep_means=True), tiny.batch()
    trajectory = policy.rollout(batch)
    found, _ = tiny.gradient(policy, objective(ratio_norm=ratio_normed), tiny.minibatch(batch, trajectory, ADVANTAGES))
    wanted = {name: torch.zeros_like(parameter) for name, parameter in tiny.trained(policy).items()}
    for action in range(3):
        part = Slice(slice(0, 4), slice(action, action + 1))
        log_probs = policy.evaluate(trajectory, part, Needs()).log_probs[:, 0]
        scale = 1.0
        if ratio_normed:
            sigma, to = trajectory.sigmas[action], trajectory.sigmas[action + 1]
            top = trajectory.sigmas[1] if sigma == 1 else sigma
            step_std = 0.7 * (sigma / (1 - top) * (sigma - to)).sqrt()
            scale = step_std / (sigma - to)
        loss = -(torch.tensor(ADVANTAGES) * log_probs * scale).sum() / 12
        slopes = torch.autograd.grad(loss, list(tiny.trained(policy).values()))
        wanted = {name: total + slope for (name, total), slope in zip(wanted.items(), slopes, strict=True)}
    assert tiny.distance(found, wanted) < 1e-4


def test_ratio_norm_takes_its_ratio_and_scale_from_the_stored_means():
    policy, batch = tiny.policy(mode="window", keep_means=True), tiny.batch()
    trajectory = policy.rollout(batch)
    tiny.perturb(policy)
    part = Slice(slice(1, 3), slice(1, 2))
    with torch.no_grad():
        evaluation = policy.evaluate(trajectory, part, Needs(log_ratio="norm"))
    k = trajectory.first + 1
    sigma, to = trajectory.sigmas[k].expand(2), trajectory.sigmas[k + 1].expand(2)
    with torch.no_grad():
        made = policy.sampling.transition.step(
            trajectory.latents[1:3, 1],
            policy.velocity(trajectory, slice(1, 3), trajectory.latents[1:3, 1], sigma, "current"),
            sigma,
            to,
            sigma_max=trajectory.sigmas[1],
            reduction="mean",
            next=trajectory.latents[1:3, 2],
        )
    wanted = ratio_norm(trajectory.latents[1:3, 2], made.mean, trajectory.means[1:3, 1], step_std=made.step_std, reduction="mean")
    torch.testing.assert_close(evaluation.log_ratio[:, 0], wanted, rtol=1e-3, atol=1e-7)
    torch.testing.assert_close(evaluation.scale[:, 0], gradient_balance(sigma, to))
    assert wanted.abs().min() > 0


@pytest.mark.parametrize("mode", ["all", "window", "branch"])
def test_noise_step_weights_multiply_the_loss_of_each_denoising_step(mode):
    """TempFlow-GRPO: s sqrt(-dt), divided by its mean over all steps that can train, also those outside of the window."""
    policy, batch = tiny.policy(mode=mode), tiny.batch()
    trajectory = policy.rollout(batch)
    sigma, after = trajectory.sigmas[:-2], trajectory.sigmas[1:-1]
    stds = 0.7 * (sigma / (1 - torch.where(sigma == 1, trajectory.sigmas[1], sigma)) * (sigma - after)).sqrt()
    wanted = (stds / stds.mean())[trajectory.first : trajectory.first + trajectory.mask.shape[1]]
    every = Slice(slice(0, 4), slice(0, len(wanted)))
    with torch.no_grad():
        scale = policy.evaluate(trajectory, every, Needs(step_weights="noise")).scale
        assert policy.evaluate(trajectory, every, Needs()).scale is None
    torch.testing.assert_close(scale, wanted.expand(4, -1))
    found, _ = tiny.gradient(policy, objective(step_weights="noise"), tiny.minibatch(batch, trajectory, ADVANTAGES))
    weighted = tiny.minibatch(batch, trajectory, ADVANTAGES)
    weighted = replace(weighted, advantages=weighted.advantages * wanted)
    assert tiny.distance(found, tiny.gradient(policy, objective(), weighted)[0]) < 1e-5


def test_noise_step_weights_are_rejected_with_ratio_norm_and_for_tokens():
    told = PolicyGradient(clip_low=1e-6, clip_high=1e-6, step_weights="noise", ratio_norm=True)
    (line,) = told.problems(CONTEXT)
    assert line == "objective.step_weights: ratio_norm already gives every step the same scale; remove one of them"
    (line,) = objective(step_weights="noise").problems(replace(CONTEXT, is_autoregressive=True, reduction="token"))
    assert line == "objective.step_weights: it weights denoising steps, and tokens have none; remove it"
    assert "step_weights" not in objective().model_dump()


@pytest.mark.parametrize("surrogate", SURROGATES)
def test_ratio_norm_is_rejected_with_all_surrogates_but_clip(surrogate):
    bounds = {} if surrogate == "reinforce" else {"clip_low": 1e-6, "clip_high": 1e-6}
    found = list(PolicyGradient(surrogate=surrogate, ratio_norm=True, **bounds).problems(CONTEXT))
    only_clip = "objective.ratio_norm: it balances the steps only with surrogate clip; remove it, or use clip"
    reinforce = "objective.ratio_norm: reinforce has no ratio; remove it"
    assert found == {"clip": [], "reinforce": [reinforce]}.get(surrogate, [only_clip])


def test_clip_ranges_that_fit_their_reduction_pass():
    for reduction, low, high in [
        ("mean", 1e-4, 1e-4),
        ("mean", 2e-6, 4e-6),
        ("sum", 0.2, 0.28),
        ("token", 0.2, 0.28),
        ("token", 3e-4, 4e-4),
        ("token", None, 1.5),
        ("mean", None, 1e-4),
        ("sum", None, 0.2),
    ]:
        check_clip(reduction, low, high)


@pytest.mark.parametrize(
    ("reduction", "low", "high", "says"),
    [
        ("mean", 1e-4, 0.2, "never clip; use .* or reduction 'sum'"),
        ("sum", 1e-4, 0.2, "always clip; use about 0.2, or reduction 'mean'"),
        ("mean", None, 0.2, "^clip range 0.2 on .* never clip"),
        ("sum", None, 1e-4, "^clip range 0.0001 on .* always clip"),
        ("token", 1.0, 0.2, "0 <= low < 1"),
        ("token", 0.2, -0.1, "high >= 0"),
        ("max", 0.1, 0.1, "'mean', 'sum' or 'token'"),
    ],
)
def test_clip_ranges_that_do_not_fit_their_reduction_raise(reduction, low, high, says):
    with pytest.raises((ValueError, TypeCheckError), match=f"{says}|Type-check"):
        check_clip(reduction, low, high)


class Likelihood(Objective):
    """A user's objective that needs log-probabilities."""

    needs_log_probs = True


CONTEXT = ObjectiveContext(
    objective="objective",
    rollout="rollout",
    model="sd3",
    is_autoregressive=False,
    token_kinds=None,
    stochastic=True,
    noise_level=0.7,
    reduction="mean",
    actions=None,
    microbatch=1,
    optimizer_steps=1,
    lora_dropout=None,
)


@pytest.mark.parametrize("stochastic", [True, False])
def test_user_objective_that_needs_log_probabilities_is_rejected_with_ode_transitions(stochastic):
    context = replace(CONTEXT, stochastic=stochastic, noise_level=None)
    said = "rollout.transition.kind: ode has no log-probabilities, which Likelihood needs; use cps or sde"
    assert list(Likelihood().problems(context)) == ([] if stochastic else [said])


def test_cispo_without_a_lower_bound_is_checked_by_its_upper_bound_alone():
    tokens = replace(CONTEXT, is_autoregressive=True, reduction="token")
    assert list(PolicyGradient(surrogate="cispo", clip_high=1.5).problems(tokens)) == []
    (said,) = PolicyGradient(surrogate="cispo", clip_high=0.2).problems(CONTEXT)
    assert said.startswith("objective.clip_high: clip range 0.2 on ")
    (said,) = PolicyGradient(surrogate="cispo", clip_low=1.5, clip_high=1.5).problems(tokens)
    assert said.startswith("objective.clip_low, objective.clip_high: clip range low 1.5")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"surrogate": "cispo"}, "objective.clip_high: cispo needs it; 0.2 is usual"),
        ({"surrogate": "cispo", "clip_low": 0.2}, "objective.clip_high: cispo needs it; 0.2 is usual"),
        ({"clip_high": 0.2}, "objective.clip_low, objective.clip_high: clip needs both; 0.2 is usual"),
    ],
)
def test_problems_report_the_key_of_a_missing_clip_bound(options, says):
    assert list(PolicyGradient(**options).problems(replace(CONTEXT, is_autoregressive=True, reduction="token"))) == [says]


def test_entropy_bonus_is_rejected_for_transitions_and_accepted_for_tokens():
    told = PolicyGradient(clip_low=1e-4, clip_high=1e-4, entropy_bonus=0.01)
    assert list(told.problems(CONTEXT)) == [
        "objective.entropy_bonus: the entropy of a transition does not depend on the policy; remove it"
    ]
    words_context = replace(CONTEXT, is_autoregressive=True, reduction="token")
    assert list(objective(entropy_bonus=0.01).problems(words_context)) == []
