"""Clipped policy gradient on the ratio of new to acting probability, for tokens and denoising transitions alike."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

from retouch.core.surrogates import cispo, clipped, reinforce, sequence_log_ratio
from retouch.types import Evaluation, Loss, Minibatch, Needs, Policy


@dataclass(frozen=True, kw_only=True)
class PolicyGradient:
    """GRPO and its kin: the surrogate of each action, weighted, plus the KL to the reference.

    ``surrogate``: ``clip`` (PPO; ``dual`` bounds the loss of bad actions), ``gspo`` (the same on the sequence's ratio), ``cispo``,
    ``reinforce`` (no ratio). ``clip_low``, ``clip_high``: the ratio stays within [1 - low, 1 + high]. ``kl``: None, ``k3`` for
    tokens, ``closed`` or ``velocity`` for transitions. ``ratio_norm``: GRPO-Guard's ratio, for transitions.
    """

    surrogate: Literal["clip", "gspo", "cispo", "reinforce"] = "clip"
    clip_low: float
    clip_high: float
    dual: float | None = None
    kl: Literal["k3", "closed", "velocity"] | None = None
    kl_weight: float = 0.0
    ratio_norm: bool = False

    def losses(self, policy: Policy, minibatch: Minibatch) -> Iterator[Loss]:
        needs = Needs(kl=self.kl, log_ratio="norm" if self.ratio_norm else "plain")
        for part in policy.microbatches(minibatch.trajectory):
            mask = minibatch.trajectory.mask[part.rows, part.actions]
            weights = minibatch.weights[part.rows, part.actions]
            evaluation = policy.evaluate(minibatch.trajectory, part, needs)
            loss = self._surrogate(evaluation, minibatch.advantages[part.rows, part.actions], mask)
            if evaluation.scale is not None:
                loss = loss * evaluation.scale
            if evaluation.kl is not None:
                loss = loss + self.kl_weight * torch.where(mask, evaluation.kl, 0.0)
            value = (weights * loss).sum()
            yield Loss(value, *self._metrics(evaluation, mask, weights, value))

    def after_step(self, policy: Any, step: int) -> None:
        """Nothing: the acting policy is the policy."""

    def _surrogate(self, evaluation: Evaluation, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        log_ratio = evaluation.log_ratio
        match self.surrogate:
            case "clip":
                return clipped(log_ratio, advantages, mask=mask, low=self.clip_low, high=self.clip_high, dual=self.dual)
            case "gspo":
                sequence = sequence_log_ratio(log_ratio, mask)
                return clipped(sequence, advantages, mask=mask, low=self.clip_low, high=self.clip_high, dual=self.dual)
            case "cispo":
                return cispo(log_ratio, evaluation.log_probs, advantages, mask=mask, low=self.clip_low, high=self.clip_high)
            case "reinforce":
                return reinforce(evaluation.log_probs, advantages, mask=mask)

    def _metrics(self, evaluation: Evaluation, mask: torch.Tensor, weights: torch.Tensor, value: torch.Tensor) -> tuple[dict, dict]:
        log_ratio = torch.where(mask, evaluation.log_ratio.detach(), 0.0)
        ratio = log_ratio.exp()
        outside = (ratio < 1 - self.clip_low) | (ratio > 1 + self.clip_high)
        sums = {
            "policy/loss": value.detach(),
            "policy/clip_fraction": (weights * outside).sum(),
            "policy/approx_kl": (weights * 0.5 * log_ratio.square()).sum(),
        }
        if evaluation.kl is not None:
            sums["policy/kl"] = (weights * evaluation.kl.detach()).sum()
        return sums, {"policy/ratio_max": (ratio - 1).abs().max()}
