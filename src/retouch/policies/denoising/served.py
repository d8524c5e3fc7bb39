"""Chains that an engine samples: how far they are from the policy's own chains, and the weights that correct the difference.

An engine's velocities differ from the policy's, because it has other kernels, batches and number types. A step of the engine
reaches the state x = mean + std * noise; the policy computes another mean for this step. With both log-probabilities averaged over
elements, their difference is (mean(z_policy^2) - mean(z_engine^2)) / 2, where z is (x - mean) / std. Let d be the difference of the
two means in standard deviations. The noise is independent of d, so the difference of the log-probabilities is d^2 / 2 on average. A
log-ratio of 5e-5 thus means that the means differ by a hundredth of the noise, which is hard to see from the log-ratio.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from retouch.core.random import generator
from retouch.core.surrogates import importance_weights
from retouch.policies.denoising.rollout import DenoisingRollout
from retouch.policies.denoising.trajectory import DenoisingTrajectory
from retouch.policies.engine import ChainRequest, DenoisingEngine, EngineFault
from retouch.protocols import DenoisingModel
from retouch.types import Batch, Kind, Slice


def sample_chains(
    engine: DenoisingEngine, batch: Batch, actions: range, *, model: DenoisingModel, sampling: DenoisingRollout, group: Tensor
) -> tuple[DenoisingTrajectory, Float[Tensor, "b t"]]:
    """Sample chains with the engine; returns the trajectory and the engine's log-probabilities of its transitions.

    The log-probabilities in the trajectory are 0. ``group``: the index of each row's task, on the policy's device. Raises
    EngineFault if the engine fails.
    """
    conditioning = model.encode(batch.tasks)
    sigmas = model.sigmas(sampling.num_steps, conditioning)
    x = model.initial_noise(conditioning.take(slice(0, 1)), [generator(batch.seed, "shape")])[0]
    request = ChainRequest(
        transition=getattr(sampling.transition, "kind", ""),
        noise_level=sampling.transition.exploration or 0.0,
        guidance_scale=sampling.guidance_scale,
        sigmas=sigmas,
        actions=actions,
        shape=tuple(x.shape),
    )
    chains = engine.sample_chains(batch, conditioning, request)
    reported = chains.log_probs.to(x.device) * (x.numel() if sampling.reduction == "sum" else 1)
    made = DenoisingTrajectory(
        log_probs=torch.zeros_like(reported),
        mask=torch.ones_like(reported, dtype=torch.bool),
        kind=torch.full_like(reported, Kind.TRANSITION, dtype=torch.long),
        outputs=chains.outputs.to(x.device),
        latents=chains.latents.to(x.device),
        means=None,
        sigmas=sigmas.to(x.device),
        first=actions.start,
        conditioning=conditioning,
        group=group,
    )
    return made, reported


def with_own_log_probs(
    trajectory: DenoisingTrajectory,
    log_probs: Float[Tensor, "b t"],
    reported: Float[Tensor, "b t"],
    *,
    sampling: DenoisingRollout,
    any_rank: Callable[[bool], bool],
) -> DenoisingTrajectory:
    """Return an engine's chains with the policy's ``log_probs``; the ``reported`` ones become ``behaviour_log_probs``.

    Raises EngineFault if they differ too much. ``any_rank``: as in ``check_deviations``. Source: truncated importance sampling for
    rollout engines (Yao et al. 2025), applied to denoising steps.
    """
    elements = trajectory.outputs[0].numel() if sampling.reduction == "sum" else 1
    sigma = trajectory.sigmas[trajectory.first : trajectory.first + reported.shape[1] + 1]
    flat = reported.new_zeros(reported.shape[1], 1)
    step = sampling.transition.step(
        *(flat, flat, sigma[:-1], sigma[1:]), sigma_max=trajectory.sigmas[1], reduction=sampling.reduction, next=flat
    )
    deviations = squared_deviations(
        log_probs / elements,
        reported / elements,
        step_std=step.step_std,
        with_variance=getattr(sampling.transition, "kind", "") != "cps",
    )
    assert sampling.engine is not None
    check_deviations(deviations, log_probs, limit=sampling.engine.max_mismatch, any_rank=any_rank)
    return replace(trajectory, log_probs=log_probs, behaviour_log_probs=reported, deviations=deviations)


def squared_deviations(
    policy: Float[Tensor, "b t"], engine: Float[Tensor, "b t"], *, step_std: Float[Tensor, " t"], with_variance: bool
) -> Float[Tensor, "b t"]:
    """Estimate the mean squared distance between the engine's and the policy's means, in units of the variance of the step.

    ``policy`` and ``engine`` are log-probabilities, averaged over elements. ``step_std``: the standard deviation of each step.
    ``with_variance``: the log-probabilities are log-densities; False for "cps", whose log-probability is minus the mean squared
    distance to the mean.
    """
    difference = (policy - engine).abs()
    return 2 * difference if with_variance else difference / step_std.square()


def check_deviations(
    deviations: Float[Tensor, "b t"], log_probs: Float[Tensor, "b t"], *, limit: float, any_rank: Callable[[bool], bool]
) -> None:
    """Raise EngineFault on all ranks if on any rank a log-probability is not finite, or the root of the mean deviation is above
    ``limit``. ``any_rank``: tells whether a flag is true on at least one rank; all ranks must call it."""
    off = deviations.mean().sqrt().item() if log_probs.isfinite().all() else float("nan")
    if any_rank(not off <= limit):
        raise EngineFault(
            f"the engine's steps are off from the policy's by {off:.3g} standard deviations of their noise on this rank, and the "
            f"recipe allows {limit:g} (rollout.engine.max_mismatch). The server may have other weights, text encoders, guidance or "
            "number types than the policy, or approximate the model (caches, quantised layers, sparse attention)"
        )


def mismatch_weights(trajectory: DenoisingTrajectory, part: Slice, *, truncate_at: float | None) -> Float[Tensor, "r a"] | None:
    """The importance weights of a slice of chains that an engine sampled; None if ``truncate_at`` is None."""
    assert trajectory.behaviour_log_probs is not None, "an engine sampled these chains"
    if truncate_at is None:
        return None
    policy, engine = (each[part.rows, part.actions] for each in (trajectory.log_probs, trajectory.behaviour_log_probs))
    return importance_weights(policy, engine, trajectory.mask[part.rows, part.actions], cap=truncate_at)
