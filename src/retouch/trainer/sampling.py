"""``retouch.sample``: images with the log-probability of every denoising step, without a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from retouch.config.live import live_objects
from retouch.models.base import ImageModel
from retouch.policies.denoising.rollout import DenoisingRollout
from retouch.policies.denoising.transitions import ODETransition, SDETransition, Transition
from retouch.trainer.models import model_section, require_pair
from retouch.types import Batch, Task

if TYPE_CHECKING:
    import torch
    from jaxtyping import Float
    from PIL.Image import Image
    from torch import Tensor

    from retouch.policies.denoising.trajectory import DenoisingTrajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledGroups:
    """The result of ``sample``. Row ``i`` belongs to ``prompts[i // group_size]``.

    ``images``: one per row; None if the latents of the row were not finite. ``log_probs``: of each stochastic step, NaN if there is
    none.
    ``states``: the latents before each stochastic step and after the last one. ``sigmas``: the noise levels of the schedule, from
    1 to 0. ``trajectory``: what an objective trains on.
    """

    prompts: Sequence[str]
    group_size: int
    images: list[Image | None]
    trajectory: DenoisingTrajectory

    @property
    def log_probs(self) -> Float[Tensor, "b t"]:
        """The log-probability of each stochastic step under the policy that sampled it."""
        return self.trajectory.log_probs

    @property
    def states(self) -> Float[Tensor, "b t_plus_1 ..."]:
        """The latents before each stochastic step and after the last one, fp32."""
        return self.trajectory.latents

    @property
    def sigmas(self) -> Float[Tensor, " n_plus_1"]:
        """The noise levels of the whole schedule, from 1 to 0."""
        return self.trajectory.sigmas

    def __len__(self) -> int:
        return len(self.images)


def sample(
    pipe: Any,
    prompts: Sequence[str] | str,
    *,
    group_size: int = 8,
    sde: float | Transition | None = 0.7,
    num_steps: int = 10,
    guidance_scale: float = 1.0,
    images: Sequence[Image] | None = None,
    size: tuple[int, int] | int | None = None,
    seed: int = 0,
    batch: int = 8,
    device: torch.device | str | None = None,
    **rollout: Any,
) -> SampledGroups:
    """Sample ``group_size`` images of each prompt as a policy does in training, with the log-probability of every step.

    ``pipe``: a loaded diffusers pipeline, a folder, a Hugging Face id, or a section such as ``retouch.models.SD3(path=...)``. Its
    models are frozen; a loaded pipeline samples with its current weights, including its LoRA. ``sde``: the noise level of
    Flow-GRPO's stochastic step, another transition such as ``retouch.CPSTransition(noise_level=0.5)``, or None to sample
    deterministically. ``images``: the source image of each prompt, for editors. ``size``: (height, width) in px, or one number for
    squares. ``batch``: images sampled at once, at least one group. ``device``: by default the device of the pipeline. ``rollout``:
    other keys of ``rollout`` in a recipe: ``window``, ``reduction``, ``shared_noise``. The same ``seed`` makes the same images.

    Raises ValueError for a model of an unsupported family, and for wrong values.

    Source: denoising as a chain of actions, DDPO (arXiv 2305.13301) and Flow-GRPO (arXiv 2505.05470).

    Example::

        >>> samples = retouch.sample(pipe, ["a red circle", "blue"], group_size=2, num_steps=4, size=32)
        >>> len(samples.images), samples.log_probs.shape, samples.states.shape
        (4, torch.Size([4, 3]), torch.Size([4, 4, 16, 8, 8]))
    """
    import torch

    from retouch.distributed.ranks import scoring_device
    from retouch.models.common.parts import evaluating

    prompts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not prompts or group_size < 1:
        raise ValueError(
            f"{len(prompts)} prompts, group_size {group_size}: give at least one prompt, and a group_size of at least 1"
        )
    if images is not None and len(images) != len(prompts):
        raise ValueError(f"images: {len(images)} for {len(prompts)} prompts; give one source image for each")
    section, objects = model_section(pipe, size=require_pair(size), key="pipe")
    if not isinstance(section, ImageModel):
        raise ValueError("pipe: a language model makes no images; give a diffusers pipeline")
    transition = ODETransition() if sde is None else sde if isinstance(sde, Transition) else SDETransition(noise_level=float(sde))
    sampling = DenoisingRollout(num_steps=num_steps, transition=transition, guidance_scale=float(guidance_scale), **rollout)
    if problems := list(sampling.problems("rollout")):
        raise ValueError("\n".join(problems))
    with live_objects(objects):
        model = section.build(device=torch.device(device or getattr(pipe, "device", None) or scoring_device()))
    tasks = [Task(str(row), prompt, () if images is None else (images[row],)) for row, prompt in enumerate(prompts)]
    with evaluating(model.module):
        parts = list(_groups(model, sampling, tasks, group_size=group_size, seed=seed, at_once=max(1, batch // group_size)))
    made = [image for some, _ in parts for image in some]
    trajectories = [trajectory for _, trajectory in parts]
    return SampledGroups(prompts=prompts, group_size=group_size, images=made, trajectory=type(trajectories[0]).concat(trajectories))


def _groups(model: Any, sampling: DenoisingRollout, tasks: Sequence[Task], *, group_size: int, seed: int, at_once: int) -> Any:
    """Yield the images and the trajectory of ``at_once`` tasks at a time."""
    from retouch.models.common.wrappers import Guided
    from retouch.policies.denoising.policy import DenoisingPolicy
    from retouch.policies.weights import WeightCopies
    from retouch.renderers.decoders import LatentRenderer

    guided = Guided(model, sampling.guidance_scale) if sampling.guidance_scale > 1 else model
    copies = WeightCopies(model.module)
    policy = DenoisingPolicy(guided, sampling=sampling, eval_steps=sampling.num_steps, microbatch=1, copies=copies)
    for first in range(0, len(tasks), at_once):
        some = tuple(tasks[first : first + at_once])
        group = tuple(row for row in range(len(some)) for _ in range(group_size))
        batch = Batch(
            seed=seed,
            step=0,
            tasks=some,
            group_ids=tuple(range(first, first + len(some))),
            group=group,
            slot=tuple(range(group_size)) * len(some),
        )
        trajectory = policy.rollout(batch)
        yield LatentRenderer(model)([some[row] for row in group], trajectory), trajectory
