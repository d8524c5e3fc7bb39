"""Two columns of a ledger side by side: how far they agree, and on which samples they do not."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from retouch.audit.images import Shown
from retouch.audit.opening import Scored
from retouch.core import agreement


@dataclass(frozen=True, slots=True, eq=False)
class Compared:
    """Samples that both columns score, with the scores (n,) of either. ``missing``: how many of the others one of them misses."""

    columns: tuple[str, str]
    samples: Sequence[Scored]
    a: torch.Tensor
    b: torch.Tensor
    missing: int

    @classmethod
    def of(cls, samples: Sequence[Scored], columns: tuple[str, str]) -> "Compared":
        """ValueError: a column that no sample has, or no sample that has both."""
        known = list(dict.fromkeys(name for sample in samples for name in sample.scores))
        for name in columns:
            if name not in known:
                raise ValueError(f"no column {name!r} among these samples; there are {', '.join(known) or 'none'}")
        asked = [sample for sample in samples if all(name in sample.scores for name in columns)]
        values = torch.tensor([[sample.scores[name] for name in columns] for sample in asked], dtype=torch.float64).view(-1, 2)
        whole = ~values.isnan().any(dim=1)
        if not whole.any():
            raise ValueError(f"no sample has both {columns[0]} and {columns[1]}")
        kept = [sample for sample, both in zip(asked, whole.tolist(), strict=True) if both]
        return cls(columns, kept, values[whole, 0], values[whole, 1], int((~whole).sum()))

    def agreement(self) -> dict[str, Any]:
        """As JSON. ``within_groups``: of the pairs of one group that neither ties, the share that both order alike."""
        groups: dict[tuple[str, int, int], int] = {}
        group = torch.tensor([groups.setdefault(sample.place[:3], len(groups)) for sample in self.samples])
        share, pairs = agreement.pairwise_agreement(self.a, self.b, group)
        return {
            "columns": list(self.columns),
            "samples": len(self.samples),
            "missing": self.missing,
            "spearman": agreement.spearman(self.a, self.b),
            "kendall": agreement.kendall(self.a, self.b),
            "within_groups": {"alike": share, "pairs": pairs},
            "means": [self.a.mean().item(), self.b.mean().item()],
        }

    def worst(self, shown: Shown, *, top: int) -> list[dict[str, Any]]:
        """The samples that stand furthest apart in the two orders, as JSON. Ranks are compared, since scales need not be alike;
        ``apart`` is 1 where one column has a sample first and the other last."""
        ranks = agreement.ranks(self.a), agreement.ranks(self.b)
        apart = (ranks[0] - ranks[1]).abs() / max(len(self.samples) - 1, 1)
        order = apart.argsort(descending=True, stable=True)[:top].tolist()
        return [self._row(shown, row, apart[row].item()) for row in order]

    def _row(self, shown: Shown, row: int, apart: float) -> dict[str, Any]:
        sample, path = self.samples[row], shown.path(self.samples[row])
        return {
            "split": sample.split,
            "step": sample.step,
            "group": sample.group,
            "slot": sample.slot,
            "task": sample.task,
            "apart": apart,
            self.columns[0]: self.a[row].item(),
            self.columns[1]: self.b[row].item(),
            "picture": sample.picture,
            "file": None if path is None else str(path),
        }
