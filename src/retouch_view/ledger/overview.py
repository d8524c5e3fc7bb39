"""A summary of a run's ledger: what was scored, by which judges, and the cost so far."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

from retouch.rewards.vlm.endpoint_settings import Prices
from retouch_view.ledger.images import RunImages
from retouch_view.ledger.ledger_view import LedgerSample, LedgerView

_CALLS_BY_JUDGE = """
SELECT judge, count(*) AS calls, sum(scores IS NULL) AS failed, sum(attempts) AS attempts, sum(fresh) AS fresh,
       sum(seconds) AS seconds, sum(input_tokens) AS input_tokens, sum(output_tokens) AS output_tokens,
       sum(cost) AS cost, sum(CASE WHEN cost IS NULL THEN input_tokens ELSE 0 END) AS unpriced_input,
       sum(CASE WHEN cost IS NULL THEN output_tokens ELSE 0 END) AS unpriced_output
FROM answers GROUP BY judge
"""


def overview(ledger: LedgerView, *, prices: Prices | None) -> dict[str, Any]:
    """The summary as JSON. ``prices``: for tokens without a known price during the run. ``cost``: None if no price is known."""
    calls = _calls_by_judge(ledger, prices)
    costs = [each["cost"] for each in calls if each["cost"] is not None]
    since = ledger.query("SELECT fingerprint, since, about FROM judges ORDER BY number")
    judges = {row["fingerprint"]: {**row, "about": json.loads(row["about"])} for row in since}
    return {
        "run": ledger.run.name,
        "judges": list(judges.values()),
        "samples": {split: _split_summary(ledger, split) for split in dict.fromkeys(sample.split for sample in ledger.samples)},
        "asked": calls,
        "cost": sum(costs) if costs else None,
    }


def _calls_by_judge(ledger: LedgerView, prices: Prices | None) -> list[dict[str, Any]]:
    """The number, tokens and cost of the calls to each judge, over all files."""
    totals: dict[str, Counter[str]] = {}
    priced: set[str] = set()
    for row in ledger.query(_CALLS_BY_JUDGE):
        judge = row.pop("judge")
        if row["cost"] is None:
            row["cost"] = 0.0
        else:
            priced.add(judge)
        totals.setdefault(judge, Counter()).update(row)
    listed = []
    for judge, total in totals.items():
        unpriced = {"input_tokens": total.pop("unpriced_input"), "output_tokens": total.pop("unpriced_output")}
        added = 0.0 if prices is None else prices.cost(**unpriced)
        known = judge in priced or (prices is not None and any(unpriced.values()))
        listed.append({"judge": judge, **total, "cost": total["cost"] + added if known else None})
    return listed


def _split_summary(ledger: LedgerView, split: str) -> dict[str, Any]:
    samples = [sample for sample in ledger.samples if sample.split == split]
    images = RunImages(ledger.run)
    with_image = [sample for sample in samples if images.path(sample) is not None]
    return {
        "samples": len(samples),
        "steps": [samples[0].step, samples[-1].step],
        "without_image": sum(not sample.image for sample in samples),
        "missing": _missing_scores(samples),
        "seconds": sum(sample.seconds for sample in samples),
        "stored_images": len(with_image),
        "steps_with_images": sorted({sample.step for sample in with_image}),
    }


def _missing_scores(samples: Sequence[LedgerSample]) -> dict[str, int]:
    """The number of missing scores of each column with missing scores."""
    counts: Counter[str] = Counter()
    for sample in samples:
        counts.update(name for name, value in sample.scores.items() if value != value)
    return dict(sorted(counts.items()))
