"""Compare two columns of a ledger: how well they agree, and on which samples they differ most."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from retouch.core import agreement
from retouch_view.ledger.images import RunImages
from retouch_view.ledger.ledger_view import LedgerSample


@dataclass(frozen=True, slots=True, eq=False)
class ColumnComparison:
    """The ``n`` samples with scores in both columns. ``a``, ``b``: the scores, (n,), float64. ``missing``: number of samples with a
    missing score in one of the columns."""

    columns: tuple[str, str]
    samples: Sequence[LedgerSample]
    a: torch.Tensor
    b: torch.Tensor
    missing: int

    @classmethod
    def of(cls, samples: Sequence[LedgerSample], columns: tuple[str, str]) -> "ColumnComparison":
        """Compare two columns of these samples. Raises ValueError if no sample has one of the columns, or no sample has scores in
        both."""
        known = list(dict.fromkeys(name for sample in samples for name in sample.scores))
        for name in columns:
            if name not in known:
                raise ValueError(f"no column {name!r} in these samples; the columns are {', '.join(known) or 'none'}")
        asked = [sample for sample in samples if all(name in sample.scores for name in columns)]
        values = torch.tensor([[sample.scores[name] for name in columns] for sample in asked], dtype=torch.float64).view(-1, 2)
        whole = ~values.isnan().any(dim=1)
        if not whole.any():
            raise ValueError(f"no sample has both {columns[0]} and {columns[1]}")
        kept = [sample for sample, both in zip(asked, whole.tolist(), strict=True) if both]
        return cls(columns, kept, values[whole, 0], values[whole, 1], int((~whole).sum()))

    def agreement(self) -> dict[str, Any]:
        """Rank correlations as JSON. ``within_groups``: the share of the pairs within a group, without ties, that both columns
        order in the same way."""
        groups: dict[tuple[str, int, int], int] = {}
        group = torch.tensor([groups.setdefault(sample.place[:3], len(groups)) for sample in self.samples])
        share, pairs = agreement.pairwise_agreement(self.a, self.b, group)
        return {
            "columns": list(self.columns),
            "samples": len(self.samples),
            "missing": self.missing,
            "spearman": agreement.spearman(self.a, self.b),
            "kendall": agreement.kendall(self.a, self.b),
            "within_groups": {"same_order": share, "pairs": pairs},
            "means": [self.a.mean().item(), self.b.mean().item()],
        }

    def worst(self, images: RunImages, *, top: int) -> list[dict[str, Any]]:
        """The ``top`` samples with the largest difference of ranks in the two columns, as JSON. Ranks are used because scales may
        differ.

        ``rank_difference``: the difference of the ranks, from 0 to 1 (first in one column, last in the other).
        """
        ranks = agreement.ranks(self.a), agreement.ranks(self.b)
        difference = (ranks[0] - ranks[1]).abs() / max(len(self.samples) - 1, 1)
        order = difference.argsort(descending=True, stable=True)[:top].tolist()
        return [self._row(images, row, difference[row].item()) for row in order]

    def _row(self, images: RunImages, row: int, difference: float) -> dict[str, Any]:
        sample, path = self.samples[row], images.path(self.samples[row])
        return {
            "split": sample.split,
            "step": sample.step,
            "group": sample.group,
            "slot": sample.slot,
            "task": sample.task,
            "rank_difference": difference,
            self.columns[0]: self.a[row].item(),
            self.columns[1]: self.b[row].item(),
            "sha256": sample.image,
            "file": None if path is None else str(path),
        }
