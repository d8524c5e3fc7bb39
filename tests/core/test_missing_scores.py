"""Faults that become missing scores: the advantages stay close to those of a run without faults."""

import torch

from retouch.core.advantages import group_relative
from retouch.core.random import generator


def test_advantages_with_5_percent_missing_scores_keep_their_direction() -> None:
    draw = generator("missing scores")
    rewards = 0.7 + 0.1 * torch.randn(4000 * 8, generator=draw)
    group = torch.arange(4000).repeat_interleave(8)
    fault = torch.rand(rewards.shape, generator=draw) < 0.05

    def advantages(rewards: torch.Tensor) -> torch.Tensor:
        return group_relative(rewards, group, baseline="mean", scale="group", ddof=0, eps=1e-4, clip=None)

    true = advantages(rewards)
    missing = advantages(torch.where(fault, torch.nan, rewards))
    zero = advantages(torch.where(fault, 0.0, rewards))
    assert torch.cosine_similarity(missing, true, dim=0) >= 0.96
    assert torch.cosine_similarity(zero, true, dim=0) < 0.8  # with a score of 0 for every fault, they do not
    assert (missing[fault] == 0).all()
