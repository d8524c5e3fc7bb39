"""The denoising policy: a flow-matching model samples by denoising, and its transitions are evaluated one by one.

Sigma runs from 1 to 0, velocity = noise - data. Action ``j`` of a trajectory is the transition from ``latents[:, j]`` to
``latents[:, j + 1]``, at ``sigmas[first + j]``. All other steps of the chain are deterministic Euler steps. Noise is drawn on the
CPU, keyed by (seed, step, group, slot), that of a transition by its number too, and without the slot if the group shares it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Literal

import torch
from jaxtyping import Float, Int
from PIL.Image import Image
from torch import Tensor, nn

from retouch.core.random import generator
from retouch.core.surrogates import gaussian_kl, importance_weights, velocity_mse
from retouch.core.transitions import append_dims, gradient_balance, ratio_norm
from retouch.models.parts import compute_device, to_device
from retouch.models.pipeline import Guided
from retouch.policies.engine import EngineFault
from retouch.policies.rollout import ChainRequest, CPSTransition, DenoisingEngine, DenoisingRollout, FirstGradientStep
from retouch.policies.value_heads import LatentValues, summary
from retouch.policies.weights import WeightCopies
from retouch.protocols import DecodesTensors, DenoisingModel
from retouch.types import Batch, Conditioning, Evaluation, Kind, Lesson, Needs, Slice, Task, Trajectory, Weights

_COLUMNS = ("log_probs", "mask", "kind", "outputs", "latents", "means", "values", "behaviour_log_probs", "deviations")
"""The tensors of a trajectory with one row per sample; ``means`` and those after it may be None."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class DenoisingTrajectory(Trajectory):
    """The trajectory of a denoising policy. ``latents``: the fp32 states before each action and after the last action.

    ``group``: for each row, the index of its task in ``conditioning``. ``means``: the means of the transitions, if they are
    needed. ``sigmas``: the whole schedule. ``first``: the number of the denoising step that is action 0. Without transitions,
    ``latents`` is a single state (b, 1, ...), the state before step ``first``: the end of the chain, or the state that was kept for
    the loss: for a gradient through the steps after it, or the initial noise. ``deviations``: for chains that an engine sampled,
    the mean squared distance between the engine's and the policy's means, in units of the variance of the step; else None.
    """

    latents: Float[Tensor, "b t_plus_1 ..."]
    means: Float[Tensor, "b t ..."] | None
    sigmas: Float[Tensor, " n_plus_1"]
    first: int
    conditioning: Conditioning
    group: Int[Tensor, " b"]
    deviations: Float[Tensor, "b t"] | None = None

    @classmethod
    def of_images(cls, x: Tensor, *, sigmas: Tensor, conditioning: Conditioning, group: Tensor) -> "DenoisingTrajectory":
        """A trajectory without transitions: each row of clean latents ``x`` is one action without a log-probability."""
        log_probs = x.new_full((len(x), 1), torch.nan)
        return cls(
            log_probs=log_probs,
            mask=torch.ones_like(log_probs, dtype=torch.bool),
            kind=torch.full_like(log_probs, Kind.IMAGE, dtype=torch.long),
            outputs=x,
            latents=x.unsqueeze(1),
            means=None,
            sigmas=sigmas,
            first=len(sigmas) - 1,
            conditioning=conditioning,
            group=group,
        )

    def take(self, rows: slice | Int[Tensor, " r"]) -> "DenoisingTrajectory":
        columns = {name: getattr(self, name) for name in (*_COLUMNS, "group")}
        return replace(self, **{name: column[rows] for name, column in columns.items() if column is not None})

    @classmethod
    def concat(cls, parts: "Sequence[DenoisingTrajectory]") -> "DenoisingTrajectory":  # type: ignore[override]
        groups, tasks = [], 0
        for part in parts:
            groups.append(part.group + tasks)
            tasks += int(next(iter(part.conditioning.tensors.values())).shape[0])
        columns = {name: [column for part in parts if (column := getattr(part, name)) is not None] for name in _COLUMNS}
        return cls(
            **{name: torch.cat(found) if found else None for name, found in columns.items()},  # type: ignore[arg-type]
            sigmas=parts[0].sigmas,
            first=parts[0].first,
            conditioning=Conditioning.concat([part.conditioning for part in parts]),
            group=torch.cat(groups),
        )


def squared_deviations(
    policy: Float[Tensor, "b t"], engine: Float[Tensor, "b t"], *, step_std: Float[Tensor, " t"], with_variance: bool
) -> Float[Tensor, "b t"]:
    """Estimate the mean squared distance between the engine's and the policy's means, in units of the variance of the step.

    A step of the engine reaches the state x = mean + std * noise; the policy computes another mean for this step. The difference of
    the log-probabilities, averaged over elements, is (mean(z_policy^2) - mean(z_engine^2)) / 2, where z is (x - mean) / std. The
    noise is independent of the distance d of the two means in standard deviations, so this is d^2 / 2 on average: a log-ratio of
    5e-5 means that the means differ by a hundredth of the noise.

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


def _normal(x: Float[Tensor, "b ..."], keyed: Sequence[torch.Generator]) -> Float[Tensor, "b ..."]:
    """Standard normal noise like ``x``, of one generator for each row."""
    return to_device(torch.stack([torch.randn(x.shape[1:], generator=each) for each in keyed]), x.device)


class DenoisingPolicy:
    """A flow-matching model as a policy (implements ``retouch.protocols.VelocityPolicy``).

    ``sampling``: the rollout section of the recipe. ``acting``: the weights that sample rollouts. ``microbatch``: number of
    velocities per forward pass with gradient. ``eval_steps``: number of deterministic denoising steps in evaluation and inference.
    ``copies`` may contain ``reference``, ``old`` and ``average`` weights. ``keep_means``: store the means of the transitions, for
    RatioNorm and DPPO. ``head``: the value head, which predicts rewards before each action. ``engine``: samples the chains of
    rollouts, with other numerics than the model; None means that the model samples them. ``any_rank``: tells whether a flag is true
    on at least one rank. ``reference_dropout``: fraction, 0 to 1, of tasks whose demonstrations are encoded without the reference
    image; rollouts always use it, otherwise their ratio would not be 1. ``first_gradient_step``: gives the step before which a
    rollout keeps the state of the chain, for ``images``. ``keep_states``: the steps of deterministic chains are actions too,
    without log-probabilities, for ``divergence``.

    Source: the denoising chain as a Markov decision process (DDPO, arXiv 2305.13301; Flow-GRPO, arXiv 2505.05470).
    """

    def __init__(
        self,
        model: DenoisingModel,
        *,
        sampling: DenoisingRollout,
        acting: Literal["current", "old"] = "current",
        eval_steps: int,
        microbatch: int,
        copies: WeightCopies,
        keep_means: bool = False,
        head: LatentValues | None = None,
        engine: DenoisingEngine | None = None,
        any_rank: Callable[[bool], bool] = bool,
        reference_dropout: float = 0.0,
        first_gradient_step: FirstGradientStep | None = None,
        keep_states: bool = False,
    ) -> None:
        self.model = model
        self.module: nn.Module = model.module
        self.sampling = sampling
        self.acting = acting
        self.eval_steps = eval_steps
        self.microbatch = microbatch
        self.copies = copies
        self.keep_means = keep_means
        self.head = head
        self.engine = engine
        self.any_rank = any_rank
        self.reference_dropout = reference_dropout
        self.first_gradient_step = first_gradient_step
        self.keep_states = keep_states
        self._in_16_bits = any(parameter.dtype.itemsize == 2 for parameter in model.module.parameters())

    @torch.no_grad()
    def rollout(self, batch: Batch) -> DenoisingTrajectory:
        """Sample with exploration in the window of this step. ``outputs``: clean latents (b, ...), fp32.

        Raises EngineFault if the engine fails, or if its chains differ too much from the policy's.
        """
        actions = range(0)
        if self.sampling.transition.stochastic:  # a deterministic chain may be too short for a window
            actions = self.sampling.window.actions(num_steps=self.sampling.num_steps, seed=batch.seed, step=batch.step)
        elif self.keep_states:
            actions = range(self.sampling.num_steps)
        with self.copies.using("old") if self.acting == "old" else nullcontext():
            if self.engine is not None:
                made = self._served(self.engine, batch, actions)
            else:
                num_steps, shared = self.sampling.num_steps, self.sampling.shared_noise
                kept = None
                if self.first_gradient_step is not None:
                    kept = self.first_gradient_step(num_steps, seed=batch.seed, step=batch.step)
                made = self._denoise(batch, num_steps=num_steps, actions=actions, shared_noise=shared, kept=kept)
        if self.head is None:
            return made
        rows, count = made.mask.shape
        return replace(made, values=self._values(made, Slice(slice(0, rows), slice(0, count))))

    def sample(self, batch: Batch) -> DenoisingTrajectory:
        """Sample deterministically, under the average weights if there are any."""
        with self.copies.using("average") if "average" in self.copies.copies else nullcontext():
            return self._denoise(batch, num_steps=self.eval_steps, actions=range(0), shared_noise=False)

    @torch.no_grad()
    def search(self, batch: Batch, *, k: int, score: Callable[[Batch, DenoisingTrajectory], Tensor]) -> DenoisingTrajectory:
        """Sample with guidance by a reward that need not be differentiable: of ``k`` noisy steps, the best one continues the chain.

        ``score``: the rewards (b,) of images, NaN for a missing one; it gets the batch with another slot for each step and
        candidate. A candidate is scored by its predicted image, x - sigma v(x). The last step has no noise. If the rollout is
        deterministic, the noisy steps are those of CPS with noise level 0.7.

        Source: SVDD-PM (Li et al. 2024, arXiv 2408.08252), with the best candidate in place of a draw by their rewards.
        """
        transition = self.sampling.transition if self.sampling.transition.stochastic else CPSTransition(noise_level=0.7)
        conditioning = self.model.encode(batch.tasks)
        group = torch.tensor(batch.group, device=compute_device(self.model.module))
        rows, sigmas = conditioning.take(group), self.model.sigmas(self.eval_steps, conditioning).to(group.device)
        keys = [(batch.group_ids[place], slot) for place, slot in zip(batch.group, batch.slot, strict=True)]
        images_of = partial(DenoisingTrajectory.of_images, sigmas=sigmas, conditioning=conditioning, group=group)
        x = self.model.initial_noise(rows, [generator(batch.seed, "noise", batch.step, *key) for key in keys])
        velocity = self.model.velocity(self.model.module, x, sigmas[0].expand(len(x)), rows)
        for step in range(self.eval_steps - 1):
            sigma, sigma_next = sigmas[step].expand(len(x)), sigmas[step + 1].expand(len(x))
            rewards, states, velocities = [], [], []
            for candidate in range(k):
                keyed = [generator(batch.seed, "search", batch.step, *key, step, candidate) for key in keys]
                noise = _normal(x, keyed)
                reached = transition.step(
                    x, velocity, sigma, sigma_next, sigma_max=sigmas[1], reduction=self.sampling.reduction, noise=noise
                ).next
                velocities.append(self.model.velocity(self.model.module, reached, sigma_next, rows))
                states.append(reached)
                tried = replace(batch, slot=(1 + step * k + candidate,) * len(batch))
                rewards.append(score(tried, images_of(reached - append_dims(sigma_next, reached) * velocities[-1])))
            best = torch.stack(rewards).nan_to_num(nan=-math.inf).argmax(dim=0).to(x.device)
            x, velocity = (torch.stack(each)[best, torch.arange(len(x), device=x.device)] for each in (states, velocities))
        return images_of(x - sigmas[-2] * velocity)

    def demonstrate(self, batch: Batch, *, images: Sequence[Image] | None = None) -> DenoisingTrajectory:
        """Encode the tasks' target images, or ``images`` (one per row), as outputs.

        Raises ValueError if a task has no target, or if an output of the tasks has another size than these images.
        """
        targets = [batch.tasks[k].target for k in batch.group] if images is None else images
        found = [target for target in targets if target is not None]
        if len(found) < len(targets):
            lacking = next(batch.tasks[k].id for k in batch.group if batch.tasks[k].target is None)
            raise ValueError(f"task {lacking} has no target image, which supervised learning needs; give the data a `target`")
        conditioning = drop_references(self.model.encode(batch.tasks), batch, fraction=self.reference_dropout)
        with torch.no_grad():
            x = self.model.encode_images(found)
        group = torch.tensor(batch.group, device=compute_device(self.model.module))
        output = self.model.initial_noise(conditioning.take(group[:1]), [generator(batch.seed, "shape")]).shape[1:]
        if x.shape[1:] != output:
            raise ValueError(
                f"policy.model.size: the target of task {batch.tasks[0].id} ({found[0].width} x {found[0].height} px) becomes "
                f"{tuple(x.shape[1:])}, and the output of the task is {tuple(output)}; set policy.model.size, or give targets the "
                "size of the source images"
            )
        return DenoisingTrajectory.of_images(x, sigmas=x.new_zeros(1), conditioning=conditioning, group=group)

    def _require_shape(self, method: str, made: Tensor, shape: tuple[int, ...]) -> None:
        """Raise ValueError if the method of the model returned a tensor of another shape."""
        if tuple(made.shape) != shape:
            name = f"{type(self.model).__module__}:{type(self.model).__qualname__}"
            raise ValueError(
                f"policy.model: {name}.{method} returned the shape {tuple(made.shape)} in place of {shape}; test the class with "
                "retouch.testing.check_model"
            )

    @torch.no_grad()
    def _denoise(
        self, batch: Batch, *, num_steps: int, actions: range, shared_noise: bool, kept: int | None = None
    ) -> DenoisingTrajectory:
        conditioning = self.model.encode(batch.tasks)
        group = torch.tensor(batch.group, device=compute_device(self.model.module))
        sigmas = self.model.sigmas(num_steps, conditioning).to(group.device)
        self._require_shape("sigmas", sigmas, (num_steps + 1,))
        transition = partial(self.sampling.transition.step, sigma_max=sigmas[1], reduction=self.sampling.reduction)
        keys = [(batch.group_ids[k], slot) for k, slot in zip(batch.group, batch.slot, strict=True)]
        branch = self.sampling.window.branches and len(actions) > 0
        rows = conditioning if branch else conditioning.take(group)
        of_noise: list[tuple[int, ...]] = [(gid,) for gid in batch.group_ids] if branch else [*keys]
        if shared_noise:  # the noise of the group, which is the same for all its rows
            of_noise = [key[:1] for key in of_noise]
        x = self.model.initial_noise(rows, [generator(batch.seed, "noise", batch.step, *key) for key in of_noise])

        latents, log_probs, means, state = [], [], [], x
        for k in range(num_steps):
            if k == kept:
                state = x
            if branch and k == actions.start:
                x, rows = x[group], conditioning.take(group)
            if k == actions.start and len(actions):
                latents.append(x)
            sigma, sigma_next = sigmas[k].expand(len(x)), sigmas[k + 1].expand(len(x))
            at_once = self._forward_rows(len(actions)) if self._in_16_bits and k in actions else None
            velocity = self._velocity(self.model.module, x, sigma, rows, at_once=at_once)
            self._require_shape("velocity", velocity, tuple(x.shape))
            if k in actions:
                noise = None
                if self.sampling.transition.stochastic:
                    keyed = [generator(batch.seed, "transition", batch.step, *key, k - actions.start) for key in keys]
                    noise = _normal(x, keyed)
                made = transition(x, velocity, sigma, sigma_next, noise=noise)
                x = made.next
                latents.append(x)
                log_probs.append(made.log_prob)
                means.append(made.mean)
            else:
                x = x + append_dims(sigma_next - sigma, x) * velocity

        if not len(actions):
            images = DenoisingTrajectory.of_images(x, sigmas=sigmas, conditioning=conditioning, group=group)
            return images if kept is None else replace(images, latents=state.unsqueeze(1), first=kept)
        logged = torch.stack(log_probs, dim=1)
        return DenoisingTrajectory(
            log_probs=logged,
            mask=torch.ones_like(logged, dtype=torch.bool),
            kind=torch.full_like(logged, Kind.TRANSITION, dtype=torch.long),
            outputs=x,
            latents=torch.stack(latents, dim=1),
            means=torch.stack(means, dim=1) if self.keep_means else None,
            sigmas=sigmas,
            first=actions.start,
            conditioning=conditioning,
            group=group,
        )

    def _served(self, engine: DenoisingEngine, batch: Batch, actions: range) -> DenoisingTrajectory:
        """Sample chains with the engine, and compute the policy's own log-probabilities of their transitions.

        An engine's velocities differ from the policy's, because it has other kernels, batches and number types. Source: truncated
        importance sampling for rollout engines (Yao et al. 2025), applied to denoising steps.
        """
        model, sampling, transition = self.model, self.sampling, self.sampling.transition
        conditioning = model.encode(batch.tasks)
        sigmas = model.sigmas(sampling.num_steps, conditioning)
        x = model.initial_noise(conditioning.take(slice(0, 1)), [generator(batch.seed, "shape")])[0]
        request = ChainRequest(
            transition=getattr(transition, "kind", ""),
            noise_level=transition.exploration or 0.0,
            guidance_scale=sampling.guidance_scale,
            sigmas=sigmas,
            actions=actions,
            shape=tuple(x.shape),
        )
        chains = engine.sample_chains(batch, conditioning, request)
        elements = x.numel() if sampling.reduction == "sum" else 1
        reported = chains.log_probs.to(x.device) * elements
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
            group=torch.tensor(batch.group, device=compute_device(model.module)),
        )
        log_probs = torch.zeros_like(reported)
        for part in self.microbatches(made):
            # The log-probabilities stored in ``made`` are 0 here, so the ratio of this evaluation has no meaning and is not used.
            log_probs[part.rows, part.actions] = self.evaluate(made, part, Needs()).log_probs
        sigma = made.sigmas[made.first : made.first + reported.shape[1] + 1]
        flat = reported.new_zeros(reported.shape[1], 1)
        step = transition.step(flat, flat, sigma[:-1], sigma[1:], sigma_max=made.sigmas[1], reduction=sampling.reduction, next=flat)
        deviations = squared_deviations(
            log_probs / elements,
            reported / elements,
            step_std=step.step_std,
            with_variance=getattr(transition, "kind", "") != "cps",
        )
        assert sampling.engine is not None
        check_deviations(deviations, log_probs, limit=sampling.engine.max_mismatch, any_rank=self.any_rank)
        return replace(made, log_probs=log_probs, behaviour_log_probs=reported, deviations=deviations)

    def microbatches(self, trajectory: DenoisingTrajectory) -> Iterator[Slice]:
        """Slices with all actions of one or more rows if they fit into a microbatch, otherwise with some actions of one row."""
        rows, actions = trajectory.mask.shape
        rows_at_once, actions_at_once = self._microbatch_of(actions)
        for row in range(0, rows, rows_at_once):
            for action in range(0, actions, actions_at_once):
                yield Slice(slice(row, min(row + rows_at_once, rows)), slice(action, min(action + actions_at_once, actions)))

    def _microbatch_of(self, actions: int) -> tuple[int, int]:
        """The number of rows of a microbatch, and the number of actions per row."""
        return max(1, self.microbatch // actions), min(actions, self.microbatch)

    def _forward_rows(self, actions: int) -> int | None:
        """The number of rows of every forward pass whose velocity enters a ratio, in rollout and update; None means any number.

        In 16 bits, a velocity depends on the shape of the forward pass by more than a clip range of 1e-5, so that the ratio would
        not be 1 before the first update. fp32 needs no equal shapes.
        """
        if not self._in_16_bits or not self.sampling.equal_shapes:
            return None
        return min(math.prod(self._microbatch_of(actions)), self.sampling.chunk)

    def _velocity(
        self, module: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning, *, at_once: int | None
    ) -> Float[Tensor, "r ..."]:
        """The velocity of each row, in forward passes of ``at_once`` rows; the last pass is filled by repeating the last row."""
        if at_once is None:
            return self.model.velocity(module, x, sigma, conditioning)
        order = torch.arange(-(-len(x) // at_once) * at_once, device=x.device).clamp(max=len(x) - 1)
        parts = [self.model.velocity(module, x[rows], sigma[rows], conditioning.take(rows)) for rows in order.split(at_once)]
        return torch.cat(parts)[: len(x)]

    def row_slices(self, trajectory: DenoisingTrajectory) -> Iterator[slice]:
        """Slices of at most ``microbatch`` rows."""
        for row in range(0, len(trajectory), self.microbatch):
            yield slice(row, min(row + self.microbatch, len(trajectory)))

    def evaluate(self, trajectory: DenoisingTrajectory, part: Slice, needs: Needs) -> Evaluation:
        """Log-probabilities of the stored transitions under the current weights, and the KL to the reference if needed.

        If ``needs.log_ratio`` is "norm", ``log_ratio`` and ``scale`` are those of RatioNorm (GRPO-Guard, arXiv 2510.22319). For
        chains that an engine sampled, ``scale`` is the importance weight.
        """
        old_log_probs = trajectory.log_probs[part.rows, part.actions]
        shape = old_log_probs.shape
        index, x, sigma, sigma_next, group = self._states(trajectory, part)
        after = trajectory.latents[part.rows, part.actions.start + 1 : part.actions.stop + 1].flatten(0, 1)
        conditioning = trajectory.conditioning.take(group)

        at_once = self._forward_rows(trajectory.mask.shape[1])
        velocity = self._velocity(self.module, x, sigma, conditioning, at_once=at_once)
        transition = partial(self.sampling.transition.step, sigma_max=trajectory.sigmas[1], reduction=self.sampling.reduction)
        made = transition(x, velocity, sigma, sigma_next, next=after)
        # With reduction "sum", log p is a sum over 10^5 elements: in fp32 this difference is then exact to a few 0.01 only.
        log_ratio, scale = made.log_prob.view(shape) - old_log_probs, None
        divergence = None
        if needs.log_ratio == "norm" or needs.divergence:
            assert trajectory.means is not None, "the rollout stored no means: build the policy with keep_means"
            means = trajectory.means[part.rows, part.actions].flatten(0, 1)
        if needs.divergence:
            divergence = gaussian_kl(made.mean.detach(), means, made.step_std, reduction=self.sampling.reduction).view(shape)
        if needs.log_ratio == "norm":
            log_ratio = ratio_norm(after, made.mean, means, step_std=made.step_std, reduction=self.sampling.reduction).view(shape)
            scale = gradient_balance(sigma, sigma_next).view(shape)
        if trajectory.behaviour_log_probs is not None:
            assert self.sampling.engine is not None
            assert scale is None, "the recipe's checks refuse RatioNorm with an engine"
            if (cap := self.sampling.engine.truncate_at) is not None:
                behaviour = trajectory.behaviour_log_probs[part.rows, part.actions]
                scale = importance_weights(old_log_probs, behaviour, trajectory.mask[part.rows, part.actions], cap=cap)

        if needs.step_weights == "noise":
            weights = self.sampling.transition.noise_weights(trajectory.sigmas)[index].expand(shape)
            scale = weights if scale is None else scale * weights

        kl = None
        if needs.kl is not None:
            with torch.no_grad(), self.copies.using("reference"):
                reference_velocity = self._velocity(self.model.module, x, sigma, conditioning, at_once=at_once)
            if needs.kl == "velocity":
                kl = velocity_mse(velocity, reference_velocity).view(shape)
            else:
                reference = transition(x, reference_velocity, sigma, sigma_next, next=after)
                kl = gaussian_kl(made.mean, reference.mean, made.step_std, reduction=self.sampling.reduction).view(shape)
        values = self._values(trajectory, part) if needs.values else None
        log_probs = made.log_prob.view(shape)
        return Evaluation(log_probs, log_ratio, kl=kl, values=values, scale=scale, divergence=divergence)

    def _states(self, trajectory: DenoisingTrajectory, part: Slice) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The steps of the slice; and for each of its actions, row by row, the state before it, its two sigmas, and its task."""
        index = trajectory.first + torch.arange(part.actions.start, part.actions.stop, device=trajectory.latents.device)
        x = trajectory.latents[part.rows, part.actions].flatten(0, 1)
        rows = len(x) // len(index)
        group = trajectory.group[part.rows].repeat_interleave(len(index))
        return index, x, trajectory.sigmas[index].repeat(rows), trajectory.sigmas[index + 1].repeat(rows), group

    def _values(self, trajectory: DenoisingTrajectory, part: Slice) -> Float[Tensor, "r t"]:
        """The value head's prediction before each action of the slice."""
        assert self.head is not None, "values are asked of a policy with a value head"
        sigmas = trajectory.sigmas[trajectory.first : -1][part.actions]
        of_task = summary(trajectory.conditioning)[trajectory.group[part.rows]]
        return self.head(trajectory.latents[part.rows, part.actions], sigmas, of_task)

    def velocity(self, trajectory: DenoisingTrajectory, rows: slice, x: Tensor, sigma: Tensor, weights: Weights) -> Tensor:
        """The velocity at ``x`` and ``sigma`` for these rows; with gradient only for the current weights."""
        conditioning = trajectory.conditioning.take(trajectory.group[rows])
        if weights == "current":
            return self.model.velocity(self.module, x, sigma, conditioning)
        with torch.no_grad(), self.copies.using(weights):
            return self.model.velocity(self.model.module, x, sigma, conditioning)

    @torch.no_grad()
    def teacher_images(self, batch: Batch, *, weights: str, guidance_scale: float | None) -> list[Image | None]:
        """The image of each row by the deterministic chain of evaluations, under the teacher's weights and guidance."""
        teacher = copy(self)
        with self.copies.model_with(weights, self._plain) as model:
            teacher.model = self._guided(guidance_scale, model)
            made = teacher._denoise(batch, num_steps=self.eval_steps, actions=range(0), shared_noise=False)
        return [*self.model.decode(made.outputs, made.conditioning.take(made.group))]

    @torch.no_grad()
    def teacher_inputs(self, tasks: Sequence[Task], *, weights: str, guidance_scale: float | None) -> Conditioning:
        """The conditioning of the tasks, with the negative branch that this scale of guidance needs; the same for all weights."""
        return self._guided(guidance_scale, self._plain).encode(tasks)

    @property
    def _plain(self) -> DenoisingModel:
        return self.model.model if isinstance(self.model, Guided) else self.model

    def _guided(self, scale: float | None, plain: DenoisingModel) -> DenoisingModel:
        """The model ``plain`` at this scale of guidance; None means that of the policy."""
        guided = self.model.guidance_scale if isinstance(self.model, Guided) else 1.0
        scale = guided if scale is None else scale
        return Guided(plain, scale) if scale > 1 else plain

    @torch.no_grad()
    def teach(self, trajectory: DenoisingTrajectory, lessons: Sequence[Lesson]) -> Float[Tensor, "b t ..."]:
        """The velocity of each row's teacher in each state of its chain; NaN for a row without a teacher.

        All of them are computed before the policy's first one, so that a teacher in CPU memory comes to the device only once.
        """
        taught = torch.full_like(trajectory.latents[:, : trajectory.mask.shape[1]], torch.nan)
        for lesson in lessons:
            with self.copies.model_with(lesson.weights, self._plain) as plain:
                model = self._guided(lesson.guidance_scale, plain)
                for part in self.microbatches(trajectory):
                    index, x, sigma, _, group = self._states(trajectory, part)
                    places = lesson.places[group]
                    rows = (places >= 0).nonzero()[:, 0]
                    if len(rows):
                        velocity = model.velocity(plain.module, x[rows], sigma[rows], lesson.inputs.take(places[rows]))
                        taught[part.rows.start + rows // len(index), part.actions.start + rows % len(index)] = velocity
        return taught

    def divergence(
        self, trajectory: DenoisingTrajectory, part: Slice, taught: Float[Tensor, "b n ..."], *, forward: bool
    ) -> Float[Tensor, "r t"]:
        """The divergence of each step of the chains from the teacher's step in the same state, with gradient: the KL of the two
        Gaussians, reduced as log-probabilities are, or the mean squared distance of the velocities if steps are deterministic.

        Source: Flow-OPD (arXiv 2605.08063); DiffusionOPD, whose deterministic form weighs the distance by the step's length too.
        """
        shape = trajectory.log_probs[part.rows, part.actions].shape
        _, x, sigma, sigma_next, group = self._states(trajectory, part)
        theirs = taught[part.rows, part.actions].flatten(0, 1)
        velocity = self.model.velocity(self.module, x, sigma, trajectory.conditioning.take(group))
        if not self.sampling.transition.stochastic:
            return velocity_mse(velocity, theirs).view(shape)
        # Only the means are used: ``next`` is any state, so that no noise is drawn.
        step = partial(self.sampling.transition.step, sigma_max=trajectory.sigmas[1], reduction=self.sampling.reduction, next=x)
        made, target = step(x, velocity, sigma, sigma_next), step(x, theirs, sigma, sigma_next)
        return gaussian_kl(made.mean, target.mean, made.step_std, reduction=self.sampling.reduction).view(shape)

    def initial_noise(self, trajectory: DenoisingTrajectory, rows: slice) -> Float[Tensor, "r ..."]:
        """The noise that the deterministic chains of these rows started from, if the rollout kept it."""
        assert trajectory.first == 0, "the rollout keeps the state before step 0 (first_gradient_step)"
        return trajectory.latents[rows, 0]

    def images(self, trajectory: DenoisingTrajectory, rows: slice, *, predicted: bool) -> Float[Tensor, "r 3 h w"]:
        """The images of these rows, 0 to 1, with gradient in the trained weights (see ``ImageGradientPolicy``).

        The chain continues from the state before step ``trajectory.first`` with Euler steps, x' = x + (sigma' - sigma) v(x, sigma),
        as the rollout computed them. ``predicted``: a single step goes to sigma 0: x - sigma v(x, sigma), the clean image that the
        model predicts. The memory depends on the number of these steps and on the decoder, not on the length of the chain. Raises
        ValueError if the model cannot decode with gradient.

        Source: DRaFT-K (Clark et al. 2023, arXiv 2309.17400); ReFL's predicted image (Xu et al. 2023, arXiv 2304.05977).
        """
        if not isinstance(self.model, DecodesTensors):
            name = type(self.model).__name__
            raise ValueError(f"{name} has no decode_tensors, so no gradient reaches the policy from an image; use nft")
        assert trajectory.first < len(trajectory.sigmas) - 1, "the rollout keeps a state (first_gradient_step)"
        conditioning = trajectory.conditioning.take(trajectory.group[rows])
        x, sigmas = trajectory.latents[rows, 0], trajectory.sigmas[trajectory.first :]
        if predicted:
            sigmas = sigmas[[0, -1]]
        for sigma, sigma_next in pairwise(sigmas):
            velocity = self.model.velocity(self.module, x, sigma.expand(len(x)), conditioning)
            x = x + (sigma_next - sigma) * velocity
        return self.model.decode_tensors(x, conditioning)

    def follow_old(self, decay: float) -> None:
        """Update the old weights of DiffusionNFT (arXiv 2509.16117): old = decay * old + (1 - decay) * current."""
        self.copies.update_ema("old", decay)


def drop_references(conditioning: Conditioning, batch: Batch, *, fraction: float) -> Conditioning:
    """Replace the reference embedding of about ``fraction`` (0 to 1) of the batch's tasks by zeros.

    This trains the unconditional branch of guidance for the reference image. The draw is keyed by (seed, step, group), so that the
    rows of a group share one conditioning.

    Source: IP-Adapter (arXiv 2308.06721), which drops image conditions in training for classifier-free guidance.
    """
    if fraction == 0:
        return conditioning
    draws = [torch.rand((), generator=generator(batch.seed, "reference", batch.step, gid)) for gid in batch.group_ids]
    embeds = conditioning.tensors[Conditioning.REFERENCE]
    kept = (torch.stack(draws) >= fraction).to(embeds)
    return replace(conditioning, tensors={**conditioning.tensors, Conditioning.REFERENCE: embeds * kept[:, None]})
