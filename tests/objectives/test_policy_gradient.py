"""The policy gradient on tokens and transitions, with a value head, and cross entropy: hand-written losses."""

import math
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from jaxtyping import TypeCheckError

import tiny_emu3
import tiny_models
import tiny_policies as tiny
import tiny_writers
import tiny_writing
from retouch.core.gae import clipped_value_loss, gae
from retouch.core.surrogates import loss_weights
from retouch.core.transitions import gradient_balance, ratio_norm
from retouch.objectives.base import Objective, ObjectiveContext, ValueHead
from retouch.objectives.imitation import CrossEntropy
from retouch.objectives.policy_gradient import Kl, NoKl, PolicyGradient, check_clip
from retouch.policies.value_heads import LatentValues, TokenValues, channels_of, summary
from retouch.types import Minibatch, Needs, Slice
from retouch_models.emu3 import DRAW, THINK
from retouch_worlds.testing import check_policy
from token_policy import VOCABULARY_SIZE, TokenPolicy

# The policy gradient on tokens and transitions

ADVANTAGES = [1.0, -0.5, 0.25, -2.0]
CLIP = {"clip_low": 0.2, "clip_high": 0.3}
SURROGATES = ["clip", "gspo", "cispo", "reinforce", "dppo"]


def objective(surrogate="clip", **options):
    bounds = {"reinforce": {}, "dppo": {"kl_limit": 0.01}}.get(surrogate, CLIP)
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
            elif surrogate == "dppo":
                p, q = trajectory.log_probs[row, place].exp().item(), log_probs[row, place].exp().item()
                kl = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
                losses.append(-advantage * ratio * (0 if kl >= 0.01 and (q - p) * advantage > 0 else 1))
            elif surrogate == "cispo":
                losses.append(-ratio.detach().clamp(0.8, 1.3) * advantage * log_probs[row, place])
            else:
                loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.3))
                losses.append(loss if dual is None or advantage > 0 else torch.minimum(loss, torch.tensor(-advantage * dual)))
        rows.append(torch.stack(losses).mean())
    return torch.stack(rows).mean()


@pytest.mark.parametrize("surrogate", SURROGATES)
@pytest.mark.parametrize("key", [0])
def test_loss_and_gradient_match_hand_written_surrogates(surrogate, key):
    """Also if the log-probabilities of masked actions are NaN."""
    policy, trajectory, minibatch = changed_token_policy(key)
    log_probs = policy._log_probs(trajectory.outputs)
    wanted = by_hand(surrogate, trajectory, log_probs)
    (slope,) = torch.autograd.grad(wanted, policy.module.table)
    found, losses = tiny.gradient(policy, objective(surrogate), minibatch)
    torch.testing.assert_close(sum(loss.value for loss in losses), wanted)
    torch.testing.assert_close(found["table"], slope, rtol=1e-5, atol=1e-7)
    assert ("policy/clip_fraction" in losses[0].sums) == (surrogate != "reinforce")
    told = objective(surrogate, kl=Kl(kind="k3", weight=0.3))
    clean, _ = tiny.gradient(policy, told, minibatch)
    dirty = replace(trajectory, log_probs=trajectory.log_probs.masked_fill(~trajectory.mask, torch.nan))
    found, losses = tiny.gradient(policy, told, replace(minibatch, trajectory=dirty))
    assert tiny.distance(found, clean) == 0
    assert all(torch.isfinite(torch.as_tensor(value)) for loss in losses for value in {**loss.sums, **loss.maxima}.values())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_dppo_leaves_out_transitions_whose_means_have_moved_far_with_the_advantage(reduction):
    """The steps of Flow-GRPO's SDE are computed by hand. The limit is between their KLs, and one row has no reward."""
    policy, batch = tiny.policy(mode="all", keep_means=True, reduction=reduction), tiny.batch()
    trajectory = policy.rollout(batch)
    assert (trajectory.mask.shape, policy.sampling.transition.noise_level) == ((4, 3), 0.7)

    def step(action):
        sigma, after = trajectory.sigmas[action], trajectory.sigmas[action + 1]
        scale = 0.7**2 * sigma / (1 - torch.where(sigma == 1, trajectory.sigmas[1], sigma))
        x = trajectory.latents[:, action]
        v = policy.velocity(trajectory, slice(0, 4), x, sigma.expand(4), "current")
        dt = after - sigma
        mean = x * (1 + scale * dt / (2 * sigma)) + v * (1 + scale * (1 - sigma) / (2 * sigma)) * dt
        return mean.flatten(1), 2 * scale * -dt

    with torch.no_grad():
        acting = [step(action)[0] for action in range(3)]
    tiny.perturb(policy)
    advantages, kls, ratios = torch.tensor(ADVANTAGES), [], []
    for action, before in enumerate(acting):
        (mean, variances), reached = step(action), trajectory.latents[:, action + 1].flatten(1)
        away = [(each.square() / variances).mean(1) * (1 if reduction == "mean" else mean.shape[1])
                for each in (mean - before, reached - before, reached - mean)]  # fmt: skip
        kls.append(away[0].detach())
        ratios.append((away[1] - away[2]).exp())
    kl, ratio = torch.stack(kls, dim=1), torch.stack(ratios, dim=1)
    along = (ratio - 1) * advantages[:, None] > 0
    limit = kl[along].median().item() * 0.999
    left_out = along & (kl >= limit)
    assert 0 < left_out[[0, 1, 3]].sum() < along[[0, 1, 3]].sum()
    assert (~along & (kl >= limit)).any()
    minibatch = tiny.minibatch(batch, trajectory, ADVANTAGES)
    minibatch.weights[2] = 0
    wanted = (minibatch.weights * torch.where(left_out, 0.0, -advantages[:, None] * ratio)).sum()
    slopes = torch.autograd.grad(wanted, list(tiny.trained(policy).values()))
    found, losses = tiny.gradient(policy, PolicyGradient(surrogate="dppo", kl_limit=limit), minibatch)
    torch.testing.assert_close(sum(loss.value for loss in losses), wanted, rtol=1e-3, atol=1e-5)
    assert tiny.distance(found, dict(zip(tiny.trained(policy), slopes, strict=True))) < 1e-2
    told = sum(float(loss.sums["policy/clip_fraction"]) for loss in losses)
    assert told == pytest.approx((minibatch.weights * left_out).sum().item())


def test_a_writer_measures_the_kl_of_sampling_each_token_or_another_one():
    policy = tiny_writing.policy()
    trajectory = policy.rollout(tiny_writing.batch())
    tiny.perturb(policy, 0.2)
    with torch.no_grad():
        found = policy.evaluate(
            trajectory, Slice(slice(0, len(trajectory)), slice(0, trajectory.mask.shape[1])), Needs(divergence=True)
        )
    p, q = (each[trajectory.mask].double().exp() for each in (trajectory.log_probs, found.log_probs))
    kl = p * (p / q).log() + ((1 - p) * ((1 - p) / (1 - q)).log()).nan_to_num()
    torch.testing.assert_close(found.divergence[trajectory.mask].double(), kl, rtol=1e-3, atol=1e-5)
    assert kl.max() > 1e-3
    assert (found.divergence[~trajectory.mask] == 0).all()


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


def test_the_kl_is_added_with_its_weight():
    policy, trajectory, minibatch = changed_token_policy()
    plain, _ = tiny.gradient(policy, objective(), minibatch)
    found, losses = tiny.gradient(policy, objective(kl=Kl(kind="k3", weight=0.7)), minibatch)
    evaluation = policy.evaluate(trajectory, Slice(slice(0, 4), slice(0, 5)), Needs(kl="k3"))
    kl = (minibatch.weights * torch.where(trajectory.mask, evaluation.kl, 0)).sum()
    (slope,) = torch.autograd.grad(kl, policy.module.table)
    torch.testing.assert_close(found["table"], plain["table"] + 0.7 * slope)
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


def test_a_missing_clip_bound_and_a_row_split_over_microbatches_raise():
    for options in (
        {},
        {"clip_low": 0.2},
        {"surrogate": "cispo", "clip_low": 0.2},
        {"surrogate": "gspo", "clip_high": 1.0},
        {"surrogate": "dppo"},
    ):
        with pytest.raises(ValueError, match="give the missing one"):
            PolicyGradient(**options).build()
    policy, batch = tiny.policy(mode="all", microbatch=2), tiny.batch()
    with pytest.raises(ValueError, match="raise microbatch to at least 3"):
        tiny.gradient(policy, objective("gspo"), tiny.minibatch(batch, policy.rollout(batch), ADVANTAGES))


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
        *(("mean", low, high, None) for low, high in ((1e-4, 1e-4), (2e-6, 4e-6), (None, 1e-4))),
        *(("sum", low, high, None) for low, high in ((0.2, 0.28), (None, 0.2))),
        *(("token", low, high, None) for low, high in ((0.2, 0.28), (3e-4, 4e-4), (None, 1.5))),
    ],
)
def test_clip_ranges_that_do_not_fit_their_reduction_raise(reduction, low, high, says):
    refused = pytest.raises((ValueError, TypeCheckError), match=f"{says}|Type-check")
    with refused if says else nullcontext():
        check_clip(reduction, low, high)


class Likelihood(Objective):
    """A user's objective that needs log-probabilities."""

    needs_log_probs = True


CONTEXT = ObjectiveContext(
    **{"objective": "objective", "rollout": "rollout", "model": "sd3", "is_autoregressive": False, "token_kinds": None},
    **{"stochastic": True, "noise_level": 0.7, "reduction": "mean", "actions": None, "microbatch": 1, "optimizer_steps": 1},
    lora_dropout=None,
)


TOKENS = replace(CONTEXT, is_autoregressive=True, reduction="token")
SMALL_CLIP = {"clip_low": 1e-6, "clip_high": 1e-6}
NO_DENSITY = "rollout.transition.kind: ode has no log-probabilities, which Likelihood needs; use cps or sde"
ONE_SCALE = "objective.step_weights: ratio_norm already gives every step the same scale; remove one of them"
ONLY_CLIP = "objective.ratio_norm: it balances the steps only with surrogate clip; remove it, or use clip"
BOTH = "objective.clip_low, objective.clip_high"
NO_RATIO = "objective.ratio_norm: reinforce has no ratio; remove it"
NO_ENTROPY = "objective.entropy_bonus: the entropy of a transition does not depend on the policy; remove it"


@pytest.mark.parametrize(
    ("told", "context", "line"),
    [
        (Likelihood(), replace(CONTEXT, noise_level=None), None),
        (Likelihood(), replace(CONTEXT, stochastic=False, noise_level=None), NO_DENSITY),
        (PolicyGradient(**SMALL_CLIP, step_weights="noise", ratio_norm=True), CONTEXT, ONE_SCALE),
        (objective(step_weights="noise"), TOKENS, "objective.step_weights: it weights denoising steps, and tokens have none"),
        (PolicyGradient(**SMALL_CLIP, ratio_norm=True), CONTEXT, None),
        (PolicyGradient(**SMALL_CLIP, surrogate="gspo", ratio_norm=True), CONTEXT, ONLY_CLIP),
        (PolicyGradient(**SMALL_CLIP, surrogate="cispo", ratio_norm=True), CONTEXT, ONLY_CLIP),
        (PolicyGradient(surrogate="reinforce", ratio_norm=True), CONTEXT, NO_RATIO),
        (PolicyGradient(surrogate="dppo", kl_limit=1e-5), CONTEXT, None),
        (PolicyGradient(surrogate="dppo", kl_limit=0.05), TOKENS, None),
        (PolicyGradient(surrogate="dppo"), TOKENS, "objective.kl_limit: dppo needs it; 0.05 is usual"),
        (PolicyGradient(surrogate="dppo", kl_limit=0.05), CONTEXT, "objective.kl_limit: a KL averaged over .* use 1e-6 to 1e-4"),
        (PolicyGradient(surrogate="dppo", kl_limit=1e-5, clip_high=1e-4), CONTEXT, f"{BOTH}: dppo does not clip; remove both"),
        (PolicyGradient(surrogate="dppo", kl_limit=1e-5, ratio_norm=True), CONTEXT, ONLY_CLIP),
        (PolicyGradient(surrogate="dppo", kl_limit=1e-5), replace(CONTEXT, lora_dropout=("d", 0.1)), "d: 0.1 makes the ratio"),
        (PolicyGradient(**SMALL_CLIP, kl_limit=1e-5), CONTEXT, "objective.kl_limit: clip does not read it; remove it"),
        (PolicyGradient(surrogate="cispo", clip_high=1.5), TOKENS, None),
        (PolicyGradient(surrogate="cispo", clip_high=0.2), CONTEXT, "objective.clip_high: clip range 0.2 on "),
        (PolicyGradient(surrogate="cispo", clip_low=1.5, clip_high=1.5), TOKENS, f"{BOTH}: clip range low 1.5"),
        (PolicyGradient(surrogate="cispo"), TOKENS, "objective.clip_high: cispo needs it; 0.2 is usual"),
        (PolicyGradient(surrogate="cispo", clip_low=0.2), TOKENS, "objective.clip_high: cispo needs it; 0.2 is usual"),
        (PolicyGradient(clip_high=0.2), TOKENS, f"{BOTH}: clip needs both; 0.2 is usual"),
        (PolicyGradient(clip_low=1e-4, clip_high=1e-4, entropy_bonus=0.01), CONTEXT, NO_ENTROPY),
        (objective(entropy_bonus=0.01), TOKENS, None),
    ],
)
def test_settings_that_do_not_fit_the_recipe_are_reported_with_their_key(told, context, line):
    found = list(told.problems(context))
    assert len(found) == (line is not None)
    assert all(re.match(line, each) for each in found)
    assert not {"step_weights", "kl_limit"} & objective().model_dump().keys()


# PPO with a value head

ACTOR = PolicyGradient(clip_low=1e-4, clip_high=1e-4, kl=Kl(kind="closed", weight=0.01))
WORDS = PolicyGradient(clip_low=0.2, clip_high=0.2, kl=Kl(kind="k3", weight=0.01))
PPO = ACTOR.build(value_head=ValueHead(clip=0.2))


def with_noise(head, key=0):
    """The head, with random numbers added to its weights."""
    random = torch.Generator().manual_seed(key)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=random))
    return head


def denoising_policy(family="sd3", *, head_key=0, **options):
    policy = tiny.policy(family, **{"mode": "window", **options})
    conditioning = policy.model.encode(tiny.tasks(4))
    x = policy.model.initial_noise(conditioning, [torch.Generator().manual_seed(k) for k in range(4)])
    policy.head = with_noise(LatentValues(channels_of(x), summary(conditioning), width=8, seed=0), head_key)
    return policy


def writing(coefficient=0.0, **options):
    policy = tiny_writing.policy(**options)
    prompts = policy.model.encode(tiny_writers.tasks(1))
    features = policy.model.prefill(policy.module, prompts)[0].shape[1]
    policy.head = with_noise(TokenValues(features, width=8, seed=0, coefficient=coefficient))
    return policy


KERNELS = {
    "sd3": (denoising_policy, tiny.batch, ACTOR),
    "edit": (lambda **options: denoising_policy("edit", **options), tiny.batch, ACTOR),
    "words": (writing, tiny_writing.batch, WORDS),
}


def rewarded_minibatch(policy, batch):
    """A minibatch of a rollout with rewards, and the advantages and returns that follow from them."""
    trajectory = policy.rollout(batch)
    rewards = torch.linspace(-0.9, 0.9, len(batch))
    advantages = gae(rewards, trajectory.values, trajectory.mask, gamma=0.9, lam=0.8)
    minibatch = tiny.minibatch(batch, trajectory, rewards)
    return replace(minibatch, advantages=advantages, returns=advantages + trajectory.values)


@pytest.mark.parametrize("kernel", KERNELS)
def test_policy_with_a_value_head_passes_the_contract_checks(kernel):
    made, batch, actor = KERNELS[kernel]
    check_policy(made(microbatch=3), batch(), needs=Needs(kl=actor.kl_kind, values=True))


@pytest.mark.parametrize("kernel", KERNELS)
def test_values_depend_only_on_the_state_before_each_action(kernel):
    """Changed later tokens or latents of a row do not change its earlier values."""
    made, batch, _ = KERNELS[kernel]
    policy, batch = made(), batch()
    trajectory = policy.rollout(batch)
    rows, actions = trajectory.mask.shape
    if kernel == "words":
        ids, same = trajectory.ids.clone(), 3
        ids[:, 2:] = ids[:, 2:].flip(0)
        changed = replace(trajectory, ids=ids)
    else:
        latents, same = trajectory.latents.clone(), 1
        latents[:, 1:] += 1.0
        changed = replace(trajectory, latents=latents)
    with torch.no_grad():
        found = policy.evaluate(changed, Slice(slice(0, rows), slice(0, actions)), Needs(values=True)).values
    mask = trajectory.mask[:, :same]
    torch.testing.assert_close(found[:, :same] * mask, trajectory.values[:, :same] * mask, atol=1e-5, rtol=0)
    assert (found - trajectory.values)[:, same:].abs().max() > 1e-4


def test_prompt_padding_does_not_change_the_input_of_the_value_head():
    policy = denoising_policy("edit")
    alone, together = (summary(policy.model.encode(tiny.tasks(count)))[0] for count in (1, 4))
    torch.testing.assert_close(alone, together, atol=1e-4, rtol=0)


def test_new_value_head_predicts_zero_and_is_initialized_from_its_seed():
    made = TokenValues(5, width=4, seed=1)
    assert made(torch.randn(6, 5)).abs().max() == 0
    twin, other = TokenValues(5, width=4, seed=1), TokenValues(5, width=4, seed=2)
    assert torch.equal(made.network.inner.weight, twin.network.inner.weight)
    assert not torch.equal(made.network.inner.weight, other.network.inner.weight)


@pytest.mark.parametrize("kernel", KERNELS)
def test_loss_is_the_sum_of_policy_loss_and_value_loss(kernel):
    made, batch, actor = KERNELS[kernel]
    policy, batch = made(), batch()
    minibatch = rewarded_minibatch(policy, batch)
    with_noise(policy.head, key=1)
    tiny.perturb(policy, 0.02)
    plain, alone = tiny.gradient(policy, actor, minibatch)
    objective = actor.build(value_head=ValueHead(clip=0.2))
    found, losses = tiny.gradient(policy, objective, minibatch)
    assert tiny.distance(found, plain) < 1e-6  # the value loss has no gradient in the policy's weights

    rows, actions = minibatch.weights.shape
    values = policy.evaluate(minibatch.trajectory, Slice(slice(0, rows), slice(0, actions)), Needs(values=True)).values
    mask = minibatch.trajectory.mask
    loss = clipped_value_loss(values, minibatch.trajectory.values, minibatch.returns, clip=0.2, mask=mask)
    wanted = (minibatch.weights * loss).sum().detach()
    assert wanted > 1e-3
    assert sum(float(loss.sums["value/loss"]) for loss in losses) == pytest.approx(float(wanted), rel=1e-4)
    together = sum(loss.value.item() for loss in losses)
    assert together == pytest.approx(sum(loss.value.item() for loss in alone) + float(wanted), rel=1e-4, abs=1e-6)
    assert sum(float(loss.sums["policy/loss"]) for loss in losses) == pytest.approx(
        sum(float(loss.sums["policy/loss"]) for loss in alone), rel=1e-4, abs=1e-6
    )


def head_gradient(policy, minibatch, objective):
    loss = sum(loss.value for loss in objective.losses(policy, minibatch))
    return torch.autograd.grad(loss, list(policy.head.parameters()))


def test_rows_with_zero_weight_do_not_affect_the_value_head_gradient():
    policy, batch = denoising_policy(), tiny.batch()
    minibatch = rewarded_minibatch(policy, batch)
    with_noise(policy.head, key=1)
    missing = minibatch.weights.clone()
    missing[1] = 0
    spoilt = minibatch.returns.clone()
    spoilt[1] = 100.0
    wanted = head_gradient(policy, replace(minibatch, weights=missing), PPO)
    found = head_gradient(policy, replace(minibatch, weights=missing, returns=spoilt), PPO)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_coefficient_scales_the_value_gradient_of_the_writer_but_not_of_the_head():
    gradients, heads = [], []
    for coefficient in (0.0, 0.5, 1.0):
        policy = writing(coefficient)
        minibatch = rewarded_minibatch(policy, tiny_writing.batch())
        minibatch = replace(minibatch, advantages=torch.zeros_like(minibatch.advantages))
        with_noise(policy.head, key=1)
        tiny.perturb(policy, 0.02)
        objective = WORDS.model_copy(update={"kl": NoKl()}).build(value_head=ValueHead(clip=None))
        gradients.append(tiny.gradient(policy, objective, minibatch)[0])
        heads.append(head_gradient(policy, minibatch, objective))
    assert all(part.abs().max() == 0 for part in gradients[0].values())
    assert max(part.abs().max() for part in gradients[2].values()) > 1e-4
    for name, whole in gradients[2].items():
        torch.testing.assert_close(gradients[1][name], 0.5 * whole, atol=1e-7, rtol=1e-4)
    for own in heads[1:]:
        for a, b in zip(own, heads[0], strict=True):
            torch.testing.assert_close(a, b, atol=1e-7, rtol=1e-5)


# Supervised learning of a writer

THOUGHTS = (40, 2, 33, 5, 0, 38, 1, 36)  # letters of each row's thought
MICROBATCH = 2


class Unordered:
    """The policy without ordering by length."""

    def __init__(self, policy):
        self._policy = policy

    def __getattr__(self, name):
        return getattr(self._policy, name)

    def order_by_length(self, trajectory):
        return torch.arange(len(trajectory))


def tasks():
    picture = tiny_models.image(0, 16, 24)
    plain = tiny_models.task("plain", "make it red", picture)
    return tuple(
        replace(plain, id=str(row), target=tiny_models.image(row, 16, 24), meta={"thought": "a" * letters})
        for row, letters in enumerate(THOUGHTS)
    )


def pairs(lengths):
    return [sorted(pair) for pair in zip(lengths[::2], lengths[1::2], strict=True)]


def demonstrated(prefill, *, share=True, group_size=1):
    editor = tiny_emu3.editor(prefill=prefill, train="full")
    policy = tiny_writing.policy(
        writer=editor, train="full", copies=(), sampling={"max_new_tokens": 220}, microbatch=MICROBATCH, share=share
    )
    batch = tiny_writing.batch(tasks(), group_size=group_size)
    trajectory = policy.demonstrate(batch)
    valid = torch.ones(len(batch), dtype=torch.bool)
    valid[2] = False
    weights = loss_weights(trajectory.mask, valid, normalise="sequence")
    return policy, Minibatch(batch, trajectory, torch.ones_like(weights), weights, 0)


def padded(policy, minibatch):
    """The gradient, and the number of padding tokens in the inputs of the decoder."""
    counts = []

    def count(module, args, kwargs):
        width = kwargs["inputs_embeds"].shape[1]
        counts.append(int((kwargs["attention_mask"][:, -width:] == 0).sum()))

    hook = policy.model.decoder(policy.module).register_forward_pre_hook(count, with_kwargs=True)
    found, _ = tiny.gradient(policy, CrossEntropy(), minibatch)
    hook.remove()
    return found, sum(counts)


@pytest.mark.parametrize("share", [True, False])
def test_ordering_rows_by_length_reduces_padding_and_keeps_the_gradient(share):
    policy, minibatch = demonstrated(THINK, share=share)
    ordered, few = padded(policy, minibatch)
    as_they_come, many = padded(Unordered(policy), minibatch)
    longest = max(float(gradient.abs().max()) for gradient in as_they_come.values())
    for name, gradient in ordered.items():
        assert (gradient - as_they_come[name]).abs().max() <= 1e-5 * max(1.0, longest), name
    # Padding of the shorter row in pairs of the sorted and of the unsorted rows. The last token of a row is not an input.
    assert few == sum(b - a - 1 for a, b in pairs(sorted(THOUGHTS)))
    assert many == sum(b - a - 1 for a, b in pairs(THOUGHTS))
    assert few * 5 < many
    policy.microbatch = len(THOUGHTS)
    assert policy.order_by_length(minibatch.trajectory).tolist() == list(range(len(THOUGHTS)))


def test_loss_is_the_weighted_sum_of_negative_log_probabilities():
    policy, minibatch = demonstrated(THINK)
    _, losses = tiny.gradient(policy, CrossEntropy(), minibatch)
    policy.microbatch, wanted = len(THOUGHTS), 0.0
    with torch.no_grad():
        for part in policy.microbatches(minibatch.trajectory):
            log_probs = policy.evaluate(minibatch.trajectory, part, Needs()).log_probs
            for weights, row in zip(minibatch.weights[part.rows, part.actions], log_probs, strict=True):
                wanted += sum(-weight * log_prob for weight, log_prob in zip(weights.tolist(), row.tolist(), strict=True) if weight)
    assert wanted > 0
    assert sum(loss.value.item() for loss in losses) == pytest.approx(wanted, rel=1e-4)


def test_ordering_by_length_keeps_rows_of_one_task_together_and_orders_equal_completions_by_their_prompts():
    policy, minibatch = demonstrated(THINK, group_size=2)
    order = policy.order_by_length(minibatch.trajectory)
    groups = minibatch.trajectory.group[order].tolist()
    assert groups[::2] == groups[1::2]
    assert [THOUGHTS[group] for group in groups[::2]] == sorted(THOUGHTS)
    taken = minibatch.trajectory.take(order)
    assert [len(written.ids) + 1 for written in taken.outputs] == taken.lengths.tolist()
    policy, minibatch = demonstrated(DRAW)
    told = tuple(replace(task, instruction="x" * letters) for task, letters in zip(tasks(), THOUGHTS, strict=True))
    trajectory = policy.demonstrate(tiny_writing.batch(told, group_size=1))
    assert len(set(trajectory.lengths.tolist())) == 1
    assert [THOUGHTS[row] for row in policy.order_by_length(trajectory).tolist()] == sorted(THOUGHTS)
    few, many = (padded(each, replace(minibatch, trajectory=trajectory))[1] for each in (policy, Unordered(policy)))
    assert few * 5 < many


def test_entropy_bonus_alone_makes_the_policy_uniform():
    """With advantages of 0 only the bonus has a gradient: the distributions at the sampled positions become uniform."""
    policy, _, minibatch = changed_token_policy()
    minibatch = replace(minibatch, advantages=torch.zeros_like(minibatch.advantages))
    for _ in range(100):
        found, losses = tiny.gradient(policy, objective("reinforce", entropy_bonus=1.0), minibatch)
        with torch.no_grad():
            policy.module.table.sub_(10.0 * found["table"])
    assert sum(loss.sums["policy/entropy"] for loss in losses).item() == pytest.approx(math.log(VOCABULARY_SIZE), rel=1e-3)
