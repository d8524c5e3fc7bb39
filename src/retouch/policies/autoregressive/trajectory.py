"""The trajectory of a policy that writes tokens: the sampled ids, and the sets of ids from which they were sampled."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor

from retouch.types import Prompts, Trajectory


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AutoregressiveTrajectory(Trajectory):
    """``ids``: without the prompt, ``pad`` after the end. ``lengths``: number of tokens of each row, including its end token.

    ``vocabulary``: the index of the grammar's vocabulary at each position. ``support``: the ids that top-k and top-p kept there,
    padded with -1. ``group``: for each row, the index of its task in ``prompts``. ``outputs``: one ``Completion`` per row.
    """

    ids: Int[Tensor, "b t"]
    lengths: Int[Tensor, " b"]
    vocabulary: Int[Tensor, "b t"]
    support: Int[Tensor, "b t w"] | None
    prompts: Prompts
    group: Int[Tensor, " b"]

    def take(self, rows: slice | Int[Tensor, " r"]) -> "AutoregressiveTrajectory":
        outputs = self.outputs[rows] if isinstance(rows, slice) else tuple(self.outputs[row] for row in rows.tolist())
        return replace(
            self,
            log_probs=self.log_probs[rows],
            mask=self.mask[rows],
            kind=self.kind[rows],
            outputs=outputs,
            ids=self.ids[rows],
            lengths=self.lengths[rows],
            vocabulary=self.vocabulary[rows],
            support=None if self.support is None else self.support[rows],
            group=self.group[rows],
            behaviour_log_probs=None if self.behaviour_log_probs is None else self.behaviour_log_probs[rows],
            values=None if self.values is None else self.values[rows],
        )

    @classmethod
    def concat(cls, parts: "Sequence[AutoregressiveTrajectory]") -> "AutoregressiveTrajectory":  # type: ignore[override]
        offsets, total = [], 0
        for part in parts:
            offsets.append(total)
            total += len(part.prompts)
        supports = [part.support for part in parts if part.support is not None]
        width = max((support.shape[2] for support in supports), default=0)
        behaviour = [part.behaviour_log_probs for part in parts if part.behaviour_log_probs is not None]
        values = [part.values for part in parts if part.values is not None]
        return cls(
            log_probs=torch.cat([part.log_probs for part in parts]),
            mask=torch.cat([part.mask for part in parts]),
            kind=torch.cat([part.kind for part in parts]),
            outputs=tuple(completion for part in parts for completion in part.outputs),
            ids=torch.cat([part.ids for part in parts]),
            lengths=torch.cat([part.lengths for part in parts]),
            vocabulary=torch.cat([part.vocabulary for part in parts]),
            support=torch.cat([_widen(support, width) for support in supports]) if supports else None,
            prompts=Prompts.concat([part.prompts for part in parts]),
            group=torch.cat([part.group + offset for part, offset in zip(parts, offsets, strict=True)]),
            behaviour_log_probs=torch.cat(behaviour) if behaviour else None,
            values=torch.cat(values) if values else None,
        )


def _widen(support: Int[Tensor, "b t w"], width: int) -> Int[Tensor, "b t width"]:
    """Pad the support with -1 to ``width`` ids."""
    return torch.cat([support, support.new_full((*support.shape[:2], width - support.shape[2]), -1)], dim=2)
