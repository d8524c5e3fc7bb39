"""What a run can store about a training sample besides its image: the tokens of its completion, and its denoising states."""

from dataclasses import replace

import torch
from PIL.Image import Image

from retouch.policies.autoregressive.trajectory import AutoregressiveTrajectory
from retouch.policies.denoising.trajectory import DenoisingTrajectory
from retouch.protocols import AutoregressiveModel, DenoisingModel
from retouch.renderers.decoders import LatentRenderer
from retouch.training.loop import ScoredRollout
from retouch.types import Kind, Trajectory


class SampleDetails:
    """Reads only stored tensors, so nothing is sampled again. ``model``: the model that is trained."""

    def __init__(self, model: DenoisingModel | AutoregressiveModel, *, tokens: bool, states: bool) -> None:
        self._decode = model.decode if tokens and not isinstance(model, DenoisingModel) else None
        self._renderer = LatentRenderer(model) if states and isinstance(model, DenoisingModel) else None

    def tokens(self, trajectory: Trajectory, row: int) -> list[tuple[str, float]] | None:
        """Return the text tokens that the policy sampled in a row, with log-probabilities in nats; None if it sampled no text.

        Tokens that the grammar forced are left out, because the policy did not choose them.
        """
        if self._decode is None or not isinstance(trajectory, AutoregressiveTrajectory):
            return None
        chosen = trajectory.mask[row].cpu() & (trajectory.kind[row].cpu() == Kind.TEXT_TOKEN)
        if not chosen.any():
            return None
        ids, log_probs = (each[row].cpu()[chosen].tolist() for each in (trajectory.ids, trajectory.log_probs))
        return [(self._decode([token]), value) for token, value in zip(ids, log_probs, strict=True)]

    @torch.no_grad()
    def states(self, collected: ScoredRollout, row: int) -> list[Image]:
        """Return an image of each state of the row, before each action and after the last one, including its remaining noise.

        Empty for a policy that does not denoise.
        """
        trajectory = collected.trajectory
        if self._renderer is None or not isinstance(trajectory, DenoisingTrajectory):
            return []
        task = collected.batch.tasks[collected.batch.group[row]]
        single = trajectory.take(slice(row, row + 1))
        latents = (single.latents[:, place] for place in range(single.latents.shape[1]))
        found = (self._renderer([task], replace(single, outputs=each))[0] for each in latents)
        return [image for image in found if image is not None]
