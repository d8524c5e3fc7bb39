"""Win rates within a group (Pref-GRPO, arXiv 2508.20751): the judge compares the images of one task in pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import ClassVar, Literal

from retouch.rewards.facts import RunFacts, whole_group_problems
from retouch.rewards.judges.base import JudgeReward
from retouch.rewards.judges.rubrics import NAN, Prompt, Verdict, judged_image, quoted, rubric
from retouch.rewards.vlm.forms import WordForm
from retouch.types import Column, Sample, Scores

_FORM = WordForm("second", {"first": 0.0, "second": 1.0})


class WinRateReward(JudgeReward):
    """Win rate of an image among the images of its task (Pref-GRPO, arXiv 2508.20751).

    Column ``win_rate``, 0 to 1: the mean probability that an image is better than each other image of its group. The judge sees
    every pair in both orders, and the probability is the mean of both answers, which removes the judge's position bias. A group
    consists of the samples with the same ``task.id`` in one call, so each call must contain whole groups. The score is missing if
    the sample is alone in its group, or if one of its pairs has no answer.

    Example::

        >>> judge = {"kind": "endpoint", "model": "my-vlm", "base_url": "http://127.0.0.1:8000/v1"}
        >>> list(retouch.rewards.WinRate(judge=judge).columns)
        ['win_rate']
    """

    kind: Literal["win_rate"] = "win_rate"

    columns: ClassVar[Mapping[str, Column]] = {"win_rate": Column(0.0, 1.0)}
    rubrics: ClassVar[tuple[str, ...]] = ("pair",)
    questions: ClassVar[tuple[tuple[str, int], ...]] = (("pair", 3),)
    one_token: ClassVar[bool] = True
    compares_groups: ClassVar[bool] = True

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        """Return the column, (b,), float32. A group of k samples needs k (k - 1) questions, times the repeats."""
        import torch

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

    def problems(self, path: str, prefix: str, run: RunFacts) -> Iterator[str]:
        """Yield a message if evaluation, which has one image per task, uses the column, and if a chunk splits groups."""
        yield from super().problems(path, prefix, run)
        yield from whole_group_problems(run, column=f"{prefix}win_rate", reward="win_rate")


def _first_is_better(forth: Verdict, back: Verdict) -> float:
    return (1 - float(forth.mean("second")) + float(back.mean("second"))) / 2


def _prompt(first: Sample, second: Sample) -> Prompt:
    task = first.task
    source = ("Source picture:", task.images[0]) if task.images else ()
    images = ("First picture:", judged_image(first), "Second picture:", judged_image(second))
    return Prompt(rubric("pair"), (quoted("Instruction", task.instruction), *source, *images), _FORM)
