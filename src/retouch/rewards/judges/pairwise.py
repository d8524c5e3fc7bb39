"""Win rates within a group (Pref-GRPO, arXiv 2508.20751): pictures made for one task are compared in pairs."""

from collections.abc import Mapping, Sequence
from itertools import combinations

import torch

from retouch.rewards.judges.answers.forms import WordForm
from retouch.rewards.judges.panel import NAN, OfPanel, Prompt, Verdict
from retouch.rewards.judges.rubrics import made, quoted, rubric
from retouch.types import Column, Sample, Scores

_FORM = WordForm("second", {"first": 0.0, "second": 1.0})


class WinRateReward(OfPanel):
    """Column ``win_rate``, 0 to 1: the mean probability of a picture to be better than each of the others made for its task.

    Every pair is asked both ways round, and its probability is the mean of the two, which takes out a judge's liking for a place.
    A group is what one call has of one ``task.id``: give whole groups (the chunk a multiple of the group size, groups within a
    rank). A sample alone in its group, or in a pair that could not be judged, is NaN.
    """

    columns: Mapping[str, Column] = {"win_rate": Column(0.0, 1.0)}

    rubrics = ("pair",)

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """The column as (b,), float32. k samples of a task cost k (k - 1) questions and their repeats."""
        groups: dict[str, list[int]] = {}
        for row, sample in enumerate(samples):
            groups.setdefault(sample.task.id, []).append(row)
        pairs = [pair for rows in groups.values() for pair in combinations(rows, 2)]
        ordered = [order for pair in pairs for order in (pair, pair[::-1])]
        verdicts = self.panel.judge([_prompt(samples[first], samples[second]) for first, second in ordered])
        wins: list[list[float]] = [[] for _ in samples]
        for (one, other), forth, back in zip(pairs, verdicts[::2], verdicts[1::2], strict=True):
            better = _first_is_better(forth, back)
            wins[one].append(better)
            wins[other].append(1 - better)
        return {"win_rate": torch.tensor([sum(won) / len(won) if won else NAN for won in wins])}


def _first_is_better(forth: Verdict, back: Verdict) -> float:
    return (1 - float(forth.mean("second")) + float(back.mean("second"))) / 2


def _prompt(first: Sample, second: Sample) -> Prompt:
    task = first.task
    source = ("Source picture:", task.images[0]) if task.images else ()
    parts = (quoted("Instruction", task.instruction), *source, "First picture:", made(first), "Second picture:", made(second))
    return Prompt(rubric("pair"), parts, _FORM)
