"""Preflight: a trial step before training, which shows whether the policy can learn. It calls no judge and restores every bit.

The ratio must be 1 before the step and not 1 after it. Gradients must be finite and non-zero. Trained weights must change; frozen
weights and weight copies must not. The gradient must pass correctly through each kind of frozen layer. A KL penalty must have a
gradient once the policy differs from the reference.

Each rank keeps the original values of its shards in CPU memory, so the undo needs no device memory.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retouch.core.surrogates import sequence_log_ratio
from retouch.distributed.optimizer import JointStepper, local_shard
from retouch.models.parts import bits_hash
from retouch.models.quantized import compute_dtype, gradient_limit, input_gradient_error
from retouch.objectives.base import Objective
from retouch.run.checkpoint import restore_rng, rng_state
from retouch.run.step import Phase, Run, ScoredRollout, accumulate, make_minibatch
from retouch.types import Kind, Minibatch, Needs, Task

TRANSITION_LIMIT = 1e-6
TOKEN_LIMIT = 1e-5
HALF_PRECISION_LIMIT = 1e-2
CLIP_SHARE = 0.1
"""The largest |ratio - 1| of a model in 16 bits before the first update, as a share of the clip range."""
ROWS = 8
"""Rows of a trial step."""
_UNMOVED = (
    "the ratio is still exactly 1 after a step: no trained weight has an effect on the log-probabilities, or the policy is certain "
    "of its samples of these tasks; see the norm of the trial gradient"
)


@dataclass(frozen=True)
class Check:
    """The result of one check: the measured ``value``, and the ``limit`` that it was compared with, if there is one."""

    name: str
    ok: bool
    value: float | None
    limit: float | None
    text: str


class PreflightFailed(ValueError):
    """The trial step shows that this run could not learn, or would learn something wrong."""


def preflight(run: Run, phase: Phase, *, step: int, rows: int) -> list[Check]:
    """Try one step on up to ``rows`` rows of training step ``step``, then restore everything. All ranks must call it."""
    trained = {name: p for name, p in run.policy.module.named_parameters() if p.requires_grad}
    before = {name: _copy_in_cpu_memory(p) for name, p in trained.items()}
    frozen, undo, random = _hashes(run), run.stepper.snapshot(), rng_state()
    if not phase.objective.uses_advantages:
        phase = replace(phase, objective=phase.objective.for_trial())
    try:
        minibatch = _trial_minibatch(run, phase, step, rows)
        checks = [*_frozen_gradient(run), *as_pipeline(run.policy, phase.batch(step).tasks[0])]
        try:
            checks += _take_step(run, phase, step, minibatch, before)
        except RuntimeError:
            require_passed(checks)  # layers without a gradient raise an error that does not name them
            raise
        changed = sum(not torch.equal(old, new) for old, new in zip(frozen, _hashes(run), strict=True))
        return [*checks, Check("frozen", changed == 0, changed, 0, f"the step changed {changed} of {len(frozen)} frozen tensors")]
    finally:
        with torch.no_grad():
            for name, parameter in trained.items():
                local_shard(parameter).copy_(before[name])
        undo()
        restore_rng(random)


def as_pipeline(policy: Any, task: Task) -> Iterator[Check]:
    """Compare the chain of a model that runs a diffusers pipeline with the pipeline's own, and its steps in another order."""
    compare = getattr(getattr(policy, "model", None), "compare", None)
    if compare is None:
        return
    in_16_bits = compute_dtype(policy.module).itemsize == 2
    chain, order = compare(task, policy.sampling.num_steps)
    limit = 0.2 if in_16_bits else 1e-4  # in 16 bits, the pipeline rounds its state after every step
    text = f"the chain differs from the pipeline's own by {chain:.1e} of its largest value; the limit is {limit:.0e}"
    yield Check("pipeline_chain", chain <= limit, chain, limit, text)
    limit = 1e-2 if in_16_bits else 1e-5
    text = (
        f"velocities in another order of steps differ by {order:.1e} of the largest; the limit is {limit:.0e}. A pipeline that "
        "keeps something from step to step, such as guidance with momentum, cannot be trained; set another guidance"
    )
    yield Check("pipeline_order", order <= limit, order, limit, text)


def trial_steps(
    phases: Sequence[range], build: Callable[[int], tuple[Run, Phase]], *, done: int, named: bool = True
) -> Iterator[Check]:
    """Yield the checks of each phase that is not finished after ``done`` steps, so a fault in a later phase is found at the start.

    ``phases``: the steps of each phase. ``build``: builds the phase with the given index. ``named``: whether the text of a check
    begins with the name of its phase.
    """
    for index, steps in enumerate(phases):
        if done >= steps.stop or not steps:
            continue
        run, phase = build(index)
        step = max(done, steps.start)
        where = f"phase {phase.name}: " if named else ""
        tried = [(where, run, phase)]
        if run.painting is not None:
            tried.append((f"{where}text_to_image: ", run.painting.run, run.painting.phase))
        for start, each, own in tried:
            for check in preflight(each, own, step=step, rows=min(ROWS, len(phase.batch(step)))):
                yield replace(check, text=f"{start}{check.text}")


def require_passed(checks: list[Check]) -> None:
    """Raise PreflightFailed, with all failed checks, if one failed."""
    failed = [check for check in checks if not check.ok]
    if failed:
        raise PreflightFailed("the trial step failed:\n" + "\n".join(f"  {check.name}: {check.text}" for check in failed))


def _trial_minibatch(run: Run, phase: Phase, step: int, rows: int) -> Minibatch:
    """Return a few rows with advantages of both signs.

    The rows come from as many tasks as possible, because a policy may have almost no entropy on one task. An objective that learns
    from pairs gets pairs of rows of the same task.
    """
    batch = phase.batch(step)
    stride = 1 if phase.objective.compares_groups else len(batch) // rows
    batch = batch.take(slice(0, stride * rows, stride))
    act = partial(phase.objective.demonstrate, run.policy) if phase.advantage is None else run.policy.rollout
    parts = [act(batch.take(slice(first, first + run.chunk))) for first in range(0, len(batch), run.chunk)]
    trajectory = type(parts[0]).concat(parts)
    signs = torch.ones(len(batch))
    signs[1::2] = -1.0
    advantages = signs[:, None].expand(trajectory.mask.shape)
    valid = torch.ones(len(batch), dtype=torch.bool)
    collected = ScoredRollout(batch, trajectory, advantages, valid, {}, returns=advantages)
    return make_minibatch(run, phase, collected, slice(0, len(batch)), epoch=0)


def _take_step(run: Run, phase: Phase, step: int, minibatch: Minibatch, before: dict[str, Tensor]) -> Iterator[Check]:
    objective, per_row = phase.objective, phase.objective.one_ratio_per_row
    if objective.has_ratio:
        deviation, limit = _max_ratio_deviation(run, minibatch, per_row=per_row), _ratio_limit(run, objective, minibatch)
        text = f"the largest |ratio - 1| before the step is {deviation:.1e}; the limit is {limit:.0e}"
        yield Check("ratio_before", deviation <= limit, deviation, limit, f"{text}{_advice(run, deviation, limit)}")
    accumulate(run, phase.objective, minibatch)
    norm = run.stepper.step(max(phase.learning_rate(step), phase.learning_rate(phase.steps.stop - 1), 1e-6))
    text = f"the norm of the trial gradient is {norm:.2e}" if norm > 0 else "the trial gradient is exactly 0"
    yield Check("gradient", norm > 0, norm, None, text)
    # The trained tensors that changed on at least one rank, compared one tensor at a time in CPU memory.
    trained = (p for name, p in run.policy.module.named_parameters() if name in before)
    pairs = zip(before.values(), trained, strict=True)
    changed = torch.tensor([float(not torch.equal(old, local_shard(p).cpu())) for old, p in pairs])
    moved = int(run.ranks.max(changed).sum())
    others = "" if moved == len(before) else "; the others had no gradient in it, or one below the precision of their weights"
    yield Check("moved", moved > 0, moved, None, f"the trial step changed {moved} of {len(before)} trained tensors{others}")
    if objective.has_ratio:
        deviation = _max_ratio_deviation(run, minibatch, per_row=per_row)
        text = f"the largest |ratio - 1| after the step is {deviation:.1e}" if deviation > 0 else _UNMOVED
        yield Check("ratio_after", deviation > 0, deviation, None, text)
    if objective.kl_kind is not None:
        part = next(iter(run.policy.microbatches(minibatch.trajectory)))
        evaluation = run.policy.evaluate(minibatch.trajectory, part, Needs(kl=objective.kl_kind))
        assert evaluation.kl is not None
        stepper = run.stepper.policy if isinstance(run.stepper, JointStepper) else run.stepper
        measure: Callable[[Tensor], float] | None = getattr(stepper, "gradient_norm", None)
        if measure is not None:  # of FSDP2: ``torch.autograd.grad`` cannot return the gradients of sharded weights
            size = measure(evaluation.kl.mean())
        else:
            parameters = [p for p in run.policy.module.parameters() if p.requires_grad]
            gradients = torch.autograd.grad(evaluation.kl.mean(), parameters, allow_unused=True)
            size = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients if gradient is not None))
        text = f"the norm of the KL's gradient is {size:.2e}" if size > 0 else "the KL has no gradient"
        yield Check("kl_gradient", size > 0, size, None, text)


def _frozen_gradient(run: Run) -> Iterator[Check]:
    """Check that the gradient passes correctly through each kind of frozen linear layer: one layer of each class is tried."""
    kinds: dict[Any, Any] = {}
    for layer in run.policy.module.modules():
        weight = layer._parameters.get("weight")
        # A shard is not the weight with which the layer computes, and an adapter's own layers train.
        if hasattr(layer, "in_features") and weight is not None and not weight.requires_grad and not hasattr(weight, "device_mesh"):
            kinds.setdefault((type(layer), type(weight)), layer)
    if not kinds:
        return
    dtype = compute_dtype(run.policy.module)
    errors = {layer: input_gradient_error(layer, dtype) for layer in kinds.values()}
    worst = max(errors, key=lambda layer: errors[layer])
    limit, name = gradient_limit(dtype), type(worst).__name__
    text = f"the gradient through the frozen layers is off by at most {errors[worst]:.1e} ({name}); the limit is {limit:.0e}"
    advice = (
        f": {type(worst).__module__} computes no correct gradient for the input of this layer, so most trained weights would learn "
        "something wrong; load the model without this quantisation, and set policy.base.quantize if its weights must be smaller"
    )
    ok = errors[worst] <= limit
    yield Check("frozen_gradient", ok, errors[worst], limit, text if ok else text + advice)


def _copy_in_cpu_memory(parameter: Tensor) -> Tensor:
    """Return a copy of this rank's shard in CPU memory."""
    return local_shard(parameter).to("cpu", copy=True)


def _max_ratio_deviation(run: Run, minibatch: Minibatch, *, per_row: bool) -> float:
    """Return the largest |ratio - 1| over all actions and ranks. ``per_row``: all actions of a row share its mean log-ratio.

    It is evaluated with gradient, as in an update: a kernel of quantised weights may round differently without gradient.
    """
    largest = torch.zeros(())
    for part in run.policy.microbatches(minibatch.trajectory):
        evaluated = run.policy.evaluate(minibatch.trajectory, part, Needs()).log_ratio.detach()
        mask = minibatch.trajectory.mask[part.rows, part.actions]
        log_ratio = sequence_log_ratio(evaluated, mask) if per_row else evaluated
        ratio = torch.where(mask, log_ratio, 0.0).exp()
        largest = torch.maximum(largest, (ratio - 1).abs().max().cpu())
    return run.ranks.max(largest).item()


def _ratio_limit(run: Run, objective: Objective, minibatch: Minibatch) -> float:
    if all(parameter.dtype == torch.float32 for parameter in run.policy.module.parameters() if parameter.is_floating_point()):
        transitions = bool((minibatch.trajectory.kind == Kind.TRANSITION).all())
        return TRANSITION_LIMIT if transitions and run.policy.sampling.reduction == "mean" else TOKEN_LIMIT
    return min([HALF_PRECISION_LIMIT, *(CLIP_SHARE * bound for bound in objective.clip_bounds)])


def _advice(run: Run, deviation: float, limit: float) -> str:
    if deviation <= limit:
        return ""
    policy = run.policy
    if not getattr(policy.sampling, "equal_shapes", True):
        return "; in 16 bits it depends on the shapes of forward passes: set rollout.equal_shapes to true"
    if policy.sampling.is_autoregressive and run.chunk % policy.microbatch:
        return "; in 16 bits it depends on the rows of a forward pass: set rollout.chunk to a multiple of microbatch"
    return ""


def _hashes(run: Run) -> list[Tensor]:
    """Return a hash of every tensor that a step must not change: frozen parameters, buffers and weight copies."""
    module = run.policy.module
    frozen: list[Tensor] = [p for p in module.parameters() if not p.requires_grad] + list(module.buffers())
    copies = [tensor for copy in run.policy.copies.copies.values() for tensor in copy.values()]
    return [bits_hash(local_shard(tensor)) for tensor in frozen + copies]
