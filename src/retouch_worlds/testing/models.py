"""The contracts of a flow-matching model adapter (independent rows, no effect of padding, a velocity of the right kind), and of a
renderer (one image per row, which depends on that row only)."""

import copy
from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from retouch.core.random import generator
from retouch.protocols import DenoisingModel, Renderer
from retouch.types import Conditioning, Task
from retouch_worlds.testing.assertions import call_twice, no_global_draws, require, require_close

ROUNDING = 1e-4
_SMALL_STEP = 1e-5  # of sigma: a hundredth of a training time step of 1 / 1000
_LARGEST_JUMP = 0.2  # largest change of the velocity over this step, as a share of its change from sigma 0.9 to 0.3
_LEAST_EXPLAINED = 0.25


def check_model(model: DenoisingModel, tasks: Sequence[Task], *, num_steps: int = 4, trained: bool = False) -> None:
    """Raises AssertionError if ``model`` violates the contract on ``tasks``: two or more, of one image size and unequal text
    lengths.

    - A conditioning has one row per task and no gradient, also for the negative branch. Tasks encoded one by one and
      concatenated, rows repeated by an index, and longer padding give the same velocity (up to 1e-4 of the largest value).
    - The velocity has the shape of x, is fp32 and finite, depends only on its own row and sigma, and has a gradient to ``module``.
    - The velocity is computed by the module that is passed, and changes with its weights. It changes with the instruction, and
      smoothly with sigma: if the time step is scaled twice, the velocity jumps.
    - ``trained``: whether the weights are trained and the tasks have targets. The velocity v at the noised target then explains
      noise - data: 1 - |v - (noise - data)|^2 / |noise - data|^2 is at least 0.25 at every tested sigma, which finds wrong signs
      and scales. This cannot be tested with random weights.
    - Noise: row i from generator i only, standard normal. Sigmas: num_steps + 1 decreasing values from about 1 to 0.
    - Guidance with scale 1 gives the positive velocity. Images are decoded one per row and encoded to the shape of x.

    Example::

        >>> retouch.testing.check_model(policy.model, batch.tasks)
    """
    require(len(tasks) >= 2, "give at least two tasks")
    with no_global_draws("encode"):
        conditioning, negative = model.encode(tasks), model.encode_negative(tasks)
    for name, each in (("encode", conditioning), ("encode_negative", negative)):
        for key, tensor in each.tensors.items():
            require(len(tensor) == len(tasks), f"{name}: {key!r} has {len(tensor)} rows for {len(tasks)} tasks")
            require(not tensor.requires_grad, f"{name}: {key!r} carries a gradient")
    x = _check_noise(model, conditioning)
    sigmas = model.sigmas(num_steps, conditioning)
    require(tuple(sigmas.shape) == (num_steps + 1,), f"{tuple(sigmas.shape)} sigmas for {num_steps} steps, not {num_steps + 1}")
    falling = bool((sigmas.diff() < 0).all())
    require(falling and 0.9 <= sigmas[0] <= 1 and sigmas[-1] == 0, f"sigmas {sigmas.tolist()} do not decrease from about 1 to 0")
    both = Conditioning.concat([replace(conditioning, negative=None), replace(negative, negative=None)])
    rows = len(next(iter(both.tensors.values())))
    require(rows == 2 * len(tasks), f"both branches of guidance together have {rows} rows for {len(tasks)} tasks")
    _check_velocity(model, tasks, conditioning, x)
    _check_dependence(model, tasks, conditioning, x)
    if trained:
        targets = [task.target for task in tasks]
        require(all(target is not None for target in targets), "with trained=True every task needs a target")
        clean = model.encode_images([target for target in targets if target is not None])
        require(clean.shape == x.shape, f"the targets are encoded to {tuple(clean.shape)}; the noise is {tuple(x.shape)}")
        for sigma in (0.9, 0.6, 0.3):
            with torch.no_grad():
                noised = (1 - sigma) * clean + sigma * x
                velocity = model.velocity(model.module, noised, torch.full((len(x),), sigma, device=x.device), conditioning)
            direction = x - clean
            explained = 1 - float((velocity - direction).square().sum() / direction.square().sum())
            require(
                explained >= _LEAST_EXPLAINED,
                f"at sigma {sigma} the velocity explains {explained:.2f} of noise - data, not {_LEAST_EXPLAINED} or more; "
                "check its sign, and the scales of the time step and of the latents",
            )
    _check_images(model, conditioning, x)


def _check_noise(model: DenoisingModel, conditioning: Conditioning) -> Tensor:
    rows = len(next(iter(conditioning.tensors.values())))
    with no_global_draws("initial_noise"):
        x = model.initial_noise(conditioning, [_generator(row) for row in range(rows)])
    require(len(x) == rows and x.dtype == torch.float32, f"initial_noise gives {tuple(x.shape)} in {x.dtype} for {rows} rows")
    last = model.initial_noise(conditioning.take(slice(rows - 1, rows)), [_generator(rows - 1)])
    require(torch.equal(last, x[-1:]), "the noise of a row depends on other rows' generators")
    count = x.numel()
    mean, variance = x.mean().item(), x.var().item()
    ok = abs(mean) < 6 / count**0.5 and abs(variance - 1) < 6 * (2 / count) ** 0.5
    require(ok, f"initial noise has mean {mean:.3f} and variance {variance:.3f} over {count} values, not 0 and 1")
    return x


def _generator(row: int) -> torch.Generator:
    return generator("retouch.testing", "noise", row)


def _check_velocity(model: DenoisingModel, tasks: Sequence[Task], conditioning: Conditioning, x: Tensor) -> None:
    rows = len(tasks)
    sigma = torch.linspace(0.9, 0.3, rows, device=x.device)

    def velocity(rows: slice | Tensor, conditioning: Conditioning) -> Tensor:
        with torch.no_grad():
            return model.velocity(model.module, x[rows], sigma[rows], conditioning)

    everything = slice(0, rows)
    whole = velocity(everything, conditioning)
    require(whole.shape == x.shape and whole.dtype == torch.float32, f"velocity gives {tuple(whole.shape)} in {whole.dtype}")
    require(bool(whole.isfinite().all()), f"{int((~whole.isfinite()).sum())} of {whole.numel()} velocities are not finite")
    joined = Conditioning.concat([model.encode([task]) for task in tasks])
    require_close(velocity(everything, joined), whole, limit=ROUNDING, what="velocity of tasks encoded one by one")
    order = torch.tensor([*reversed(range(rows)), 0], device=x.device)
    require_close(
        velocity(order, conditioning.take(order)), whole[order], limit=ROUNDING, what=f"velocity of rows {order.tolist()}"
    )
    for row in range(rows):
        alone = slice(row, row + 1)
        require_close(velocity(alone, conditioning.take(alone)), whole[alone], limit=ROUNDING, what=f"velocity of row {row} alone")
    longer = dict(conditioning.tensors)
    for name in conditioning.padded:
        longer[name] = torch.cat([longer[name], longer[name].new_zeros(len(longer[name]), 3, *longer[name].shape[2:])], dim=1)
    padded = velocity(everything, replace(conditioning, tensors=longer))
    require_close(padded, whole, limit=ROUNDING, what="velocity with three more places of padding")
    guided = model.combine(whole, whole.flip(0), 1.0)
    require_close(guided, whole, limit=ROUNDING, what="guidance at scale 1 and the positive velocity")
    trained = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
    if trained:
        loss = model.velocity(model.module, x, sigma, conditioning).square().mean()
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        finite = all(bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None)
        require(finite and any(gradient is not None for gradient in gradients), "velocity has no finite gradient to the module")


def _check_dependence(model: DenoisingModel, tasks: Sequence[Task], conditioning: Conditioning, x: Tensor) -> None:
    rows = len(x)

    def velocity(sigma: float, *, module: torch.nn.Module = model.module, inputs: Conditioning = conditioning) -> Tensor:
        with torch.no_grad():
            return model.velocity(module, x, torch.full((rows,), sigma, device=x.device), inputs)

    noisy = velocity(0.9)
    other = copy.deepcopy(model.module)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=noise).to(parameter))
    require(
        not torch.equal(velocity(0.9, module=other), noisy),
        "velocity ignores `module`: it must compute with the module it is given",
    )
    swapped = velocity(0.9, inputs=conditioning.take(torch.arange(rows, device=x.device).flip(0)))
    require(not torch.equal(swapped, noisy), "velocity does not change with the instruction and the source images")
    instructions = [task.instruction for task in tasks]
    require(len(set(instructions)) == rows, "every task needs an instruction of its own")
    # Only the instructions change, because a model that ignores them could still depend on the source images.
    swapped_text = model.encode([replace(task, instruction=text) for task, text in zip(tasks, reversed(instructions), strict=True)])
    require(not torch.equal(velocity(0.9, inputs=swapped_text), noisy), "velocity does not change with the instruction alone")
    range_ = (velocity(0.3) - noisy).double().norm()
    require(bool(range_ > 0), "velocity does not change with sigma")
    jump = float((velocity(0.9 - _SMALL_STEP) - noisy).double().norm() / range_)
    require(
        jump < _LARGEST_JUMP,
        f"velocity jumps with sigma: from 0.9 to {0.9 - _SMALL_STEP} it changes {jump:.2f} times as much as from 0.9 to 0.3; is "
        "the time step scaled twice?",
    )


def _check_images(model: DenoisingModel, conditioning: Conditioning, x: Tensor) -> None:
    with no_global_draws("decode"):
        images = model.decode(x, conditioning)
        of_one_task = model.decode(x, conditioning.take(slice(0, 1)))
    require(len(images) == len(x), f"decode gives {len(images)} images for {len(x)} rows")
    require(images == of_one_task, "decode reads rows of the conditioning, which are tasks and not rows of x; use what they share")
    kinds = {(image.mode, image.size) for image in images}
    require(
        len(kinds) == 1 and next(iter(kinds))[0] == "RGB",
        f"decode gives images of {sorted(kinds)}; all must be RGB and of one size",
    )
    with no_global_draws("encode_images"):
        clean = model.encode_images(images)
    require(clean.shape == x.shape and clean.dtype == torch.float32, f"encode_images gives {tuple(clean.shape)} in {clean.dtype}")
    require(bool(clean.isfinite().all()), "encode_images gives values that are not finite")
    require(not clean.requires_grad, "encode_images carries a gradient")


def check_renderer(renderer: Renderer, tasks: Sequence[Task], trajectory: Any) -> None:
    """Raises AssertionError if ``renderer`` violates the contract on the rows of ``trajectory``; ``tasks`` has one task per row.

    - It returns one RGB image or None per row, and the same on a second call, whatever the state of torch's global generator.
    - A row's image does not depend on the other rows (up to 1 level of 255, for rounding), and the outputs are not modified.
    - If the outputs are a floating-point tensor: a row that is not finite gives None, and the other rows their images.

    Example::

        >>> from retouch.renderers.base import LatentRenderer
        >>> rows = [batch.tasks[task] for task in batch.group]
        >>> retouch.testing.check_renderer(LatentRenderer(policy.model), rows, policy.rollout(batch))
    """
    require(
        len(tasks) == len(trajectory) >= 2, f"{len(tasks)} tasks for {len(trajectory)} rows; give one per row, and at least two"
    )
    outputs = trajectory.outputs
    before = outputs.clone() if isinstance(outputs, Tensor) else None
    images, again = call_twice(lambda: renderer(tasks, trajectory), "the renderer")
    require(len(images) == len(trajectory), f"{len(images)} images for {len(trajectory)} rows")
    if before is not None:
        require(torch.equal(before.nan_to_num(), outputs.nan_to_num()), "the renderer changed the trajectory's outputs")
    for row, image in enumerate(images):
        if image is not None:
            require(image.mode == "RGB", f"the image of row {row} has mode {image.mode}, not RGB")
        _require_same(image, again[row], levels=0, what=f"row {row} rendered again")
    for row in (0, len(images) - 1):
        alone = renderer([tasks[row]], trajectory.take(slice(row, row + 1)))
        _require_same(alone[0], images[row], levels=1, what=f"row {row} rendered alone")
    if before is not None and before.is_floating_point() and is_dataclass(trajectory):
        broken = before.clone()
        broken[0] = torch.nan
        drawn = renderer(tasks, replace(trajectory, outputs=broken))  # type: ignore[type-var]
        require(drawn[0] is None, "a row whose output is not finite was rendered; it is the policy's fault and must give None")
        for row in range(1, len(images)):
            _require_same(drawn[row], images[row], levels=1, what=f"row {row} in a batch with a row that cannot be rendered")


def _require_same(a: Image | None, b: Image | None, *, levels: int, what: str) -> None:
    require((a is None) == (b is None), f"{what}: an image in one case and None in the other")
    if a is not None and b is not None:
        require(a.size == b.size, f"{what}: sizes {a.size} and {b.size} differ")
        difference = int(np.abs(np.asarray(a).astype(int) - np.asarray(b).astype(int)).max())
        require(difference <= levels, f"{what}: images differ by {difference} levels of 255; the limit is {levels}")
