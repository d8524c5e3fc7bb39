"""The contract of a diffusers pipeline that trains by its own ``__call__``."""

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig
from PIL.Image import Image
from torch import nn

from retouch.core.random import generator
from retouch.models.any_pipeline.model import AnyPipeline
from retouch.models.lora import add_lora, attention_layers, own_layers, remove_lora
from retouch.models.quantized import compute_dtype
from retouch.policies.denoising import DenoisingPolicy
from retouch.policies.rollout import DenoisingRollout, RandomWindow, SDETransition
from retouch.policies.weights import WeightCopies
from retouch.run.preflight import HALF_PRECISION_LIMIT, TRANSITION_LIMIT, as_pipeline
from retouch.types import Batch, Needs, Task
from retouch_worlds.testing.assertions import require

_LINES = {
    "chain": ("chain against the pipeline's own", ".1e"),
    "order": ("velocities in another order", ".1e"),
    "ratio": ("largest |ratio - 1|", ".1e"),
    "gradient": ("LoRA tensors with a gradient", ".0%"),
    "targets": ("target images have latents", ""),
    "rows": ("rows of a forward pass", ""),
    "milliseconds": ("ms a velocity beside the denoiser", ".2f"),
}
_LEAST_TRAINED = 0.5
"""The smallest share of LoRA tensors with a gradient; the last block of some models does not use its text stream."""


def check_pipeline(
    pipe: DiffusionPipeline,
    *,
    images: Sequence[Image] = (),
    mask: Image | None = None,
    call: Mapping[str, Any] | None = None,
    num_steps: int = 10,
) -> None:
    """Print how a pipeline trains, and raise AssertionError if it cannot train correctly.

    Afterwards the denoiser is as before, and the other parts are frozen.

    - A deterministic chain of ``num_steps`` steps is the chain of the pipeline's own call, and velocities in another order of steps
      are the same: the checks ``pipeline_chain`` and ``pipeline_order`` at the start of a run.
    - SDE transitions have the same log-probabilities in a rollout and in an update with gradient, where the rows of a forward pass
      are at different steps: |ratio - 1| is at most 1e-6, and 0.01 in 16 bits.
    - At least half of the LoRA tensors on the attention layers get a finite gradient that is not 0.

    It also prints whether target images have latents (for supervised learning and DPO on pairs), whether a forward pass may have
    rows at different steps, and the milliseconds of a velocity that are not spent in the denoiser, on the host.

    ``images``, ``mask``: the inputs of an editor or an inpainting model. ``call``: other arguments of the pipeline's ``__call__``,
    such as ``height`` or ``guidance_scale``. Raises ValueError for a pipeline that Retouch refuses, with the reason.

    Example::

        >>> retouch.testing.check_pipeline(make_pipe(), call={"guidance_scale": 4.5})
        StableDiffusion3Pipeline, 10 steps
          chain against the pipeline's own    ...
    """
    task = Task(id="check", instruction="a red cube", images=tuple(images), mask=mask)
    found = pipeline_facts(pipe, task, call=call or {}, num_steps=num_steps)
    print(f"{type(pipe).__name__}, {num_steps} steps")
    for name, (title, form) in _LINES.items():
        if name in found:
            print(f"  {title:<34}  {found[name]:{form}}")
    faults = "".join(f"\n  {each}" for each in found["faults"])
    require(not faults, f"{type(pipe).__name__} cannot be trained:{faults}")


def pipeline_facts(pipe: DiffusionPipeline, task: Task, *, call: Mapping[str, Any], num_steps: int) -> dict[str, Any]:
    """What ``check_pipeline`` prints: ``chain``, ``order`` and ``ratio`` (differences), ``gradient`` (a share), ``targets`` ("yes"
    or why target images have no latents), ``rows`` (of a forward pass), ``milliseconds``, and ``faults``. A pipeline whose chain or
    order is wrong has only these two and ``faults``."""
    model = AnyPipeline(pipe, call=dict(call))
    if own_layers(model.module, key="the pipeline"):
        raise ValueError("the pipeline has a LoRA of an earlier run; load it again, because the check adds and removes one")
    required = {parameter: parameter.requires_grad for parameter in model.module.parameters()}
    sampling = DenoisingRollout(num_steps=num_steps, transition=SDETransition(noise_level=0.7), window=RandomWindow(size=2))
    policy = DenoisingPolicy(model, sampling=sampling, eval_steps=num_steps, microbatch=4, copies=WeightCopies(model.module))
    checks = {check.name: check for check in as_pipeline(policy, task)}
    found: dict[str, Any] = {name.removeprefix("pipeline_"): check.value for name, check in checks.items()}
    found["faults"] = faults = [check.text for check in checks.values() if not check.ok]
    if faults:  # the rollout may then raise an error that says less
        return found
    found["targets"], found["milliseconds"] = _targets(model, task), _milliseconds(model, task, num_steps)
    found["rows"] = "one at a time" if model.alone else "at different steps" if model.row_times else "all at one step"
    layers = list(attention_layers(model.module))
    # With its usual start, B = 0, a LoRA would have no effect, and A no gradient.
    add_lora(model.module, LoraConfig(r=4, target_modules=layers, init_lora_weights=False), init_from=None, seed=0)
    try:
        found["ratio"], found["gradient"] = _ratio_and_gradient(policy, task)
    finally:
        remove_lora(model.module, key="the pipeline")
        for parameter, flag in required.items():
            parameter.requires_grad_(flag)
    limit = HALF_PRECISION_LIMIT if compute_dtype(model.module).itemsize == 2 else TRANSITION_LIMIT
    if not found["ratio"] <= limit:
        faults.append(f"the largest |ratio - 1| before a step is {found['ratio']:.1e}; the limit is {limit:.0e}")
    if not found["gradient"] >= _LEAST_TRAINED:
        faults.append(f"{found['gradient']:.0%} of the LoRA tensors on {', '.join(layers)} have a finite gradient that is not 0")
    return found


def _ratio_and_gradient(policy: DenoisingPolicy, task: Task) -> tuple[float, float]:
    """The largest |ratio - 1| of two rows with two transitions each, and the share of trained tensors with a gradient."""
    trajectory = policy.rollout(Batch(seed=0, step=0, tasks=(task,), group_ids=(0,), group=(0, 0), slot=(0, 1)))
    largest = 0.0
    for part in policy.microbatches(trajectory):
        evaluation = policy.evaluate(trajectory, part, Needs())
        evaluation.log_probs.sum().backward()
        largest = max(largest, float((evaluation.log_ratio.detach().exp() - 1).abs().max()))
    gradients = [parameter.grad for parameter in policy.module.parameters() if parameter.requires_grad]
    trained = [bool(each.any() and each.isfinite().all()) for each in gradients if each is not None]
    return largest, sum(trained) / len(gradients)


def _targets(model: AnyPipeline, task: Task) -> str:
    """Why target images have no latents, or "yes"."""
    conditioning = model.encode([task])
    noise = model.initial_noise(conditioning, [generator("check_pipeline")])
    image = model.decode(noise, conditioning)[0]
    try:
        model.encode_images([image])
    except (AttributeError, RuntimeError, ValueError) as error:  # what follows the loop of a pipeline has many forms
        return str(error).removeprefix("model: ")
    return "yes"


@torch.no_grad()
def _milliseconds(model: AnyPipeline, task: Task, num_steps: int) -> float:
    """The median time of a velocity without the forward passes of the denoiser that it makes, on the host."""
    conditioning, inside = model.encode([task]), [0.0]

    def enter(module: nn.Module, args: Any) -> None:
        inside[0] -= time.perf_counter()

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        inside[0] += time.perf_counter()

    handles = [model.module.register_forward_pre_hook(enter), model.module.register_forward_hook(leave)]
    times = []
    try:
        sigmas = model.sigmas(num_steps, conditioning)
        x = model.initial_noise(conditioning, [generator("check_pipeline")])
        for sigma in sigmas[:-1].to(x.device).split(1):
            inside[0], started = 0.0, time.perf_counter()
            velocity = model.velocity(model.module, x, sigma, conditioning)
            times.append(1000 * (time.perf_counter() - started - inside[0]))
            velocity.sum().item()  # waits for the device
    finally:
        for handle in handles:
            handle.remove()
    return median(times[1:])  # the first encodes the prompt
