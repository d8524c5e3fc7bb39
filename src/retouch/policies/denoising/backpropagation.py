"""Images with gradient through the last steps of a denoising chain, for objectives that follow the gradient of a reward."""

from itertools import pairwise

from jaxtyping import Float
from torch import Tensor, nn

from retouch.policies.denoising.trajectory import DenoisingTrajectory
from retouch.protocols import DecodesTensors, DenoisingModel


def images_with_gradient(
    model: DenoisingModel, module: nn.Module, trajectory: DenoisingTrajectory, rows: slice, *, predicted: bool
) -> Float[Tensor, "r 3 h w"]:
    """The images of these rows, 0 to 1, with gradient in the trained weights of ``module``.

    The chain continues from the state before step ``trajectory.first`` with Euler steps, x' = x + (sigma' - sigma) v(x, sigma), as
    the rollout computed them. ``predicted``: a single step goes to sigma 0: x - sigma v(x, sigma), the clean image that the model
    predicts. The memory depends on the number of these steps and on the decoder, not on the length of the chain. Raises ValueError
    if the model cannot decode with gradient.

    Source: DRaFT-K (Clark et al. 2023, arXiv 2309.17400); ReFL's predicted image (Xu et al. 2023, arXiv 2304.05977).
    """
    if not isinstance(model, DecodesTensors):
        raise ValueError(f"{type(model).__name__} has no decode_tensors, so no gradient reaches the policy from an image; use nft")
    assert trajectory.first < len(trajectory.sigmas) - 1, "the rollout keeps a state (first_gradient_step)"
    conditioning = trajectory.conditioning.take(trajectory.group[rows])
    x, sigmas = trajectory.latents[rows, 0], trajectory.sigmas[trajectory.first :]
    if predicted:
        sigmas = sigmas[[0, -1]]
    for sigma, sigma_next in pairwise(sigmas):
        velocity = model.velocity(module, x, sigma.expand(len(x)), conditioning)
        x = x + (sigma_next - sigma) * velocity
    return model.decode_tensors(x, conditioning)
