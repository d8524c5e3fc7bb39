"""What a run records about completions: their texts, which are stored with the images, and metrics of completions and engines."""

from collections.abc import Sequence

import torch

from retouch.distributed.ranks import Ranks
from retouch.policies.autoregressive.mismatch import log_prob_difference
from retouch.policies.autoregressive.trajectory import AutoregressiveTrajectory
from retouch.run.step import Metrics
from retouch.types import Kind, Trajectory


def completion_texts(trajectory: Trajectory) -> Sequence[str | None]:
    """Return the text of each row, or None if the policy writes no text (it may generate an image token by token)."""
    if not isinstance(trajectory, AutoregressiveTrajectory):
        return [None] * len(trajectory)
    if not (trajectory.kind == Kind.TEXT_TOKEN).any():  # image tokens only
        return [None] * len(trajectory)
    return [completion.text for completion in trajectory.outputs]


def completion_metrics(trajectory: Trajectory, *, ranks: Ranks) -> Metrics:
    """Return the mean number of tokens per completion, including the end token, and the fraction of truncated completions.

    Metrics are over all ranks. If an engine sampled the actions and returned its own log-probabilities, they are compared with the
    policy's, in nats per action: ``engine/mismatch`` and ``engine/mismatch_max`` are the mean and the largest
    |log policy - log engine|; ``engine/kl`` is the mean of log engine - log policy, which estimates the KL divergence of the two.
    Denoising trajectories also get ``engine/deviation``: the root mean square distance between the engine's and the policy's step
    means, in standard deviations of a step.

    Source: the completion metrics of TRL's GRPOTrainer.
    """
    if not isinstance(trajectory, AutoregressiveTrajectory):
        return _mismatch(trajectory, ranks)
    cut_off = sum(completion.truncated for completion in trajectory.outputs)
    sums = torch.tensor([float(trajectory.lengths.sum()), float(cut_off), float(len(trajectory))])
    tokens, cut_off, rows = ranks.sum(sums).tolist()
    return {"completion/length": tokens / rows, "completion/cut_off_fraction": cut_off / rows, **_mismatch(trajectory, ranks)}


def _mismatch(trajectory: Trajectory, ranks: Ranks) -> Metrics:
    if trajectory.behaviour_log_probs is None:
        return {}
    error = log_prob_difference(trajectory.log_probs, trajectory.behaviour_log_probs, trajectory.mask).cpu().double()
    total, kl, count = ranks.sum(torch.stack([error.abs().sum(), -error.sum(), torch.ones_like(error).sum()])).tolist()
    largest = ranks.max(error.abs().max() if len(error) else error.sum()).item()
    count = max(count, 1.0)
    found = {"engine/mismatch": total / count, "engine/mismatch_max": largest, "engine/kl": kl / count}
    deviations: torch.Tensor | None = getattr(trajectory, "deviations", None)
    if deviations is not None:
        squares = ranks.sum(torch.tensor(deviations.double().sum().item())).item()
        found["engine/deviation"] = (squares / count) ** 0.5
    return found
