"""A small policy, built from the same classes as in a run, with which an objective can be checked."""

from typing import Any

import torch
from torch import nn

from retouch.policies.denoising.policy import DenoisingPolicy
from retouch.policies.denoising.rollout import DenoisingRollout
from retouch.policies.denoising.transitions import CPSTransition
from retouch.policies.weights import WeightCopies
from retouch.types import Batch
from retouch_worlds.data.tasks import PlaygroundData
from retouch_worlds.models.family import PlaygroundModel


def playground_policy(rollout: DenoisingRollout | None = None, *, microbatch: int = 3) -> tuple[Any, Batch]:
    """The playground's editor as a policy, and a batch of two tasks with three samples each; all on the CPU, in seconds.

    ``rollout``: how the policy samples; None uses 3 steps of the transition ``cps``. The attention of the last transformer block is
    trainable. The policy keeps copies of its weights as ``reference`` and ``old``.

    Example::

        >>> policy, batch = retouch.testing.playground_policy()
        >>> len(batch.tasks), len(batch)
        (2, 6)
    """
    model = PlaygroundModel().build(device=torch.device("cpu"))
    module: nn.Module = model.module
    module.requires_grad_(False).eval()
    last = list(module.transformer_blocks)[-1]  # type: ignore[arg-type]
    last.attn.requires_grad_(True)
    copies = WeightCopies(module)
    for name in ("reference", "old"):
        copies.snapshot(name)
    sampling = DenoisingRollout(num_steps=3, transition=CPSTransition(noise_level=0.7)) if rollout is None else rollout
    policy = DenoisingPolicy(model, sampling=sampling, eval_steps=3, microbatch=microbatch, copies=copies)
    tasks = tuple(PlaygroundData(count=2, complexity={1: 1.0}).tasks(in_turn=True)[:])
    group, slot = (0, 0, 0, 1, 1, 1), (0, 1, 2, 0, 1, 2)
    return policy, Batch(seed=0, step=0, tasks=tasks, group_ids=(0, 1), group=group, slot=slot)
