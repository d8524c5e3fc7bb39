"""PPO with a value head: the values of denoising and of writing policies, and the sum of policy loss and value loss."""

from dataclasses import replace

import pytest
import torch

import tiny_policies as tiny
import tiny_writers
import tiny_writing
from retouch.core.gae import clipped_value_loss, gae
from retouch.objectives.base import ValueHead
from retouch.objectives.policy_gradient import Kl, NoKl, PolicyGradient
from retouch.policies.value_heads import LatentValues, TokenValues, channels_of, summary
from retouch.types import Needs, Slice
from retouch_worlds.testing import check_policy

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


# Values


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
        ids = trajectory.ids.clone()
        ids[:, 2:] = ids[:, 2:].flip(0)
        changed = replace(trajectory, ids=ids)
        same = slice(0, 3)
    else:
        latents = trajectory.latents.clone()
        latents[:, 1:] += 1.0
        changed = replace(trajectory, latents=latents)
        same = slice(0, 1)
    everything = Slice(slice(0, rows), slice(0, actions))
    with torch.no_grad():
        found = policy.evaluate(changed, everything, Needs(values=True)).values
    mask = trajectory.mask
    torch.testing.assert_close(found[:, same] * mask[:, same], trajectory.values[:, same] * mask[:, same], atol=1e-5, rtol=0)
    assert (found - trajectory.values)[:, same.stop :].abs().max() > 1e-4


@pytest.mark.parametrize("kernel", KERNELS)
def test_new_value_head_predicts_zero_and_is_initialized_from_its_seed(kernel):
    features = torch.randn(3, 2, 5)
    made = TokenValues(5, width=4, seed=1)
    assert made(features.flatten(0, 1)).abs().max() == 0
    twin, other = TokenValues(5, width=4, seed=1), TokenValues(5, width=4, seed=2)
    assert torch.equal(made.network.inner.weight, twin.network.inner.weight)
    assert not torch.equal(made.network.inner.weight, other.network.inner.weight)


# The loss


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
