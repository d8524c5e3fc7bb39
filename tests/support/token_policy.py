"""A tiny autoregressive policy: a table of logits by position and previous token. The first token is forced; rows end early."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from retouch.core.random import generator
from retouch.core.surrogates import bernoulli_kl, k3
from retouch.policies.weights import WeightCopies
from retouch.types import Evaluation, Kind, Slice, Trajectory

LENGTH, VOCABULARY_SIZE, STOP = 5, 6, 0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TokenTrajectory(Trajectory):
    """``outputs``: (b, t) tokens; the end of a row is filled with ``STOP``."""

    def take(self, rows):
        parts = {name: getattr(self, name)[rows] for name in ("log_probs", "mask", "kind", "outputs")}
        return replace(self, **parts)

    @classmethod
    def concat(cls, parts):
        names = ("log_probs", "mask", "kind", "outputs")
        return cls(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


class TokenPolicy:
    """Implements ``retouch.protocols.Policy``, with the k3 KL and the entropy."""

    def __init__(self, microbatch=2, key=0):
        self.module = nn.Module()
        self.module.table = nn.Parameter(torch.randn(LENGTH, VOCABULARY_SIZE, VOCABULARY_SIZE, generator=generator("table", key)))
        self.copies = WeightCopies(self.module)
        self.copies.snapshot("reference")
        self.microbatch = microbatch

    def _log_probs(self, tokens):
        """Return the log-probabilities (b, t) of the tokens, each given the previous token."""
        return self._logits(tokens).log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1)

    def _logits(self, tokens):
        before = torch.cat([torch.full_like(tokens[:, :1], STOP), tokens[:, :-1]], dim=1)
        return self.module.table[torch.arange(LENGTH), before]

    @torch.no_grad()
    def rollout(self, batch):
        tokens = torch.full((len(batch), LENGTH), STOP)
        mask = torch.zeros(len(batch), LENGTH, dtype=torch.bool)
        for row, (group, slot) in enumerate(zip(batch.group, batch.slot, strict=True)):
            random = generator(batch.seed, "token", batch.step, batch.group_ids[group], slot)
            tokens[row, 0] = 1 + batch.group_ids[group] % (VOCABULARY_SIZE - 1)
            for place in range(1, LENGTH):
                chances = self.module.table[place, tokens[row, place - 1]].softmax(-1)
                tokens[row, place] = torch.multinomial(chances, 1, generator=random).item()
                mask[row, place] = True
                if tokens[row, place] == STOP:
                    break
        kind = torch.full_like(tokens, Kind.TEXT_TOKEN)
        return TokenTrajectory(log_probs=self._log_probs(tokens), mask=mask, kind=kind, outputs=tokens)

    sample = rollout

    def microbatches(self, trajectory) -> Iterator[Slice]:
        for row in range(0, len(trajectory), self.microbatch):
            yield Slice(slice(row, min(row + self.microbatch, len(trajectory))), slice(0, LENGTH))

    def evaluate(self, trajectory, part, needs):
        tokens = trajectory.outputs[part.rows]
        log_probs = self._log_probs(tokens)[:, part.actions]
        kl = None
        if needs.kl is not None:
            with torch.no_grad(), self.copies.using("reference"):
                reference = self._log_probs(tokens)[:, part.actions]
            kl = k3(log_probs, reference)
        entropy = None
        if needs.entropy:
            entropy = torch.distributions.Categorical(logits=self._logits(tokens)[:, part.actions]).entropy()
        acted = trajectory.log_probs[part.rows, part.actions]
        divergence = bernoulli_kl(acted, log_probs, mask=trajectory.mask[part.rows, part.actions]) if needs.divergence else None
        return Evaluation(log_probs=log_probs, log_ratio=log_probs - acted, kl=kl, entropy=entropy, divergence=divergence)
