"""Clipped policy gradient on the ratio of new to acting probability, for tokens and denoising transitions alike."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from retouch.core.surrogates import cispo, clipped_surrogate, reinforce, sequence_log_ratio
from retouch.protocols import Policy
from retouch.types import Evaluation, Loss, Minibatch, Needs, Slice


@dataclass(frozen=True, kw_only=True)
class PolicyGradient:
    """GRPO and its kin: the surrogate of each action, weighted, plus the KL to the reference.

    ``surrogate``: ``clip`` (PPO; ``dual`` bounds the loss of bad actions), ``gspo`` (the same on the sequence's ratio, for which a
    microbatch must hold whole rows), ``cispo``, ``reinforce`` (no ratio). ``clip_low``, ``clip_high``: the ratio stays within
    [1 - low, 1 + high]; ``cispo`` may leave low None, ``reinforce`` reads neither. ``kl``: None, ``k3`` for tokens, ``closed`` or
    ``velocity`` for transitions. ``ratio_norm``: GRPO-Guard's ratio, for transitions. ``entropy``: measure that of tokens too.
    ValueError: a bound is missing.
    """

    surrogate: Literal["clip", "gspo", "cispo", "reinforce"] = "clip"
    clip_low: float | None = None
    clip_high: float | None = None
    dual: float | None = None
    kl: Literal["k3", "closed", "velocity"] | None = None
    kl_weight: float = 0.0
    ratio_norm: bool = False
    entropy: bool = False

    def __post_init__(self) -> None:
        low = self.clip_low is not None or self.surrogate in ("cispo", "reinforce")
        if not low or (self.clip_high is None and self.surrogate != "reinforce"):
            raise ValueError(
                f"surrogate {self.surrogate!r} with clip_low {self.clip_low}, clip_high {self.clip_high}: give the missing one"
            )

    @property
    def needs(self) -> Needs:
        """What it wants from an evaluation."""
        return Needs(kl=self.kl, entropy=self.entropy, log_ratio="norm" if self.ratio_norm else "plain")

    def losses(self, policy: Policy, minibatch: Minibatch) -> Iterator[Loss]:
        for part in policy.microbatches(minibatch.trajectory):
            yield self.loss(policy.evaluate(minibatch.trajectory, part, self.needs), minibatch, part)

    def loss(self, evaluation: Evaluation, minibatch: Minibatch, part: Slice) -> Loss:
        """The share of ``part``, from what the policy says of it."""
        mask = minibatch.trajectory.mask[part.rows, part.actions]
        weights = minibatch.weights[part.rows, part.actions]
        self._check_whole_rows(mask.shape[1], minibatch.trajectory.mask.shape[1])
        loss = self._surrogate(evaluation, minibatch.advantages[part.rows, part.actions], mask)
        if evaluation.scale is not None:
            loss = loss * evaluation.scale
        if evaluation.kl is not None:
            loss = loss + self.kl_weight * torch.where(mask, evaluation.kl, 0.0)
        value = (weights * loss).sum()
        return Loss(value, *self._metrics(evaluation, mask, weights, value))

    def after_step(self, policy: Any, step: int) -> None:
        """Nothing: the acting policy is the policy."""

    def _check_whole_rows(self, actions: int, of: int) -> None:
        if self.surrogate == "gspo" and actions < of:
            raise ValueError(f"gspo needs the ratio of all {of} actions of a row at once; raise microbatch to at least {of}")

    def _surrogate(self, evaluation: Evaluation, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        low, high = self.clip_low, self.clip_high
        if self.surrogate == "reinforce":
            return reinforce(evaluation.log_probs, advantages, mask=mask)
        assert high is not None
        if self.surrogate == "cispo":
            return cispo(evaluation.log_ratio, evaluation.log_probs, advantages, mask=mask, low=low, high=high)
        assert low is not None
        log_ratio = sequence_log_ratio(evaluation.log_ratio, mask) if self.surrogate == "gspo" else evaluation.log_ratio
        return clipped_surrogate(log_ratio, advantages, mask=mask, low=low, high=high, dual=self.dual)

    def _metrics(
        self, evaluation: Evaluation, mask: torch.Tensor, weights: torch.Tensor, value: torch.Tensor
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        log_ratio = torch.where(mask, evaluation.log_ratio.detach(), 0.0)
        ratio = log_ratio.exp()
        sums = {"policy/loss": value.detach(), "policy/approx_kl": (weights * 0.5 * log_ratio.square()).sum()}
        if self.clip_high is not None:
            clipped_ratio = sequence_log_ratio(log_ratio, mask).exp() if self.surrogate == "gspo" else ratio
            outside = (clipped_ratio > 1 + self.clip_high) | (
                clipped_ratio < 1 - (math.inf if self.clip_low is None else self.clip_low)
            )
            sums["policy/clip_fraction"] = (weights * outside).sum()
        if evaluation.kl is not None:
            sums["policy/kl"] = (weights * torch.where(mask, evaluation.kl.detach(), 0.0)).sum()
        if evaluation.entropy is not None:
            sums["policy/entropy"] = (weights * evaluation.entropy.detach()).sum()
        return sums, {"policy/ratio_max": (ratio - 1).abs().max()}
