"""Whether the worlds rank the algorithms alike: each algorithm's place in each world, and rank correlations of pairs of worlds."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy import ndarray

from retouch.core.intervals import Interval, bootstrap_interval

RESAMPLES = 1000
FEWEST = 5
"""Pairs of worlds with fewer algorithms in common have no rank correlation. Neither have pairs in which one world has less than
half of the algorithms of the other, such as a world of denoising policies and one of token policies."""
Scores = Mapping[str, float]
"""The share of the gap of each algorithm in a world, by name of the algorithm."""


def rank_correlation(first: ndarray, second: ndarray) -> float:
    """Spearman's rank correlation of two arrays of n scores, -1 to 1; equal scores get their mean rank. NaN if all are equal."""
    ranks = [_mean_ranks(first), _mean_ranks(second)]
    if any(np.ptp(each) == 0 for each in ranks):
        return float("nan")
    return float(np.corrcoef(*ranks)[0, 1])


def _mean_ranks(scores: ndarray) -> ndarray:
    _, position, counts = np.unique(scores, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[position]


def agreement(first: Scores, second: Scores) -> tuple[float, Interval | None] | None:
    """The rank correlation of two worlds with a 95 % interval from a bootstrap that draws algorithms; None if there are too few."""
    names = [name for name in first if name in second]
    if len(names) < max(FEWEST, len(first) / 2, len(second) / 2):
        return None
    pairs = np.array([(first[name], second[name]) for name in names])
    drawn = np.random.default_rng(0)
    samples = (pairs[drawn.integers(len(pairs), size=len(pairs))] for _ in range(RESAMPLES))
    estimates = np.array([rank_correlation(*sample.T) for sample in samples])
    return rank_correlation(*pairs.T), bootstrap_interval(estimates, clusters=len(pairs))


def section(worlds: Sequence[tuple[str, Scores]]) -> Iterator[str]:
    """The tables of the page, from the title and the scores of each world; nothing if no two worlds can be compared."""
    found = [(one, other, agreement(first, second)) for (one, first), (other, second) in combinations(worlds, 2)]
    known = [(one, other, result) for one, other, result in found if result is not None]
    if not known:
        return
    yield "## Do the worlds agree?\n"
    yield (
        "The place of each algorithm in each world, by share of the gap, and Spearman's rank correlation of two worlds over the "
        "algorithms that both have: 1 is the same order, 0 is no relation. The intervals are from a bootstrap that draws "
        "algorithms. The noise of the few runs of each algorithm makes the correlations smaller.\n"
    )
    yield "| worlds | rank correlation |\n| --- | --- |"
    for one, other, (value, interval) in known:
        shown = "" if interval is None else f" ({interval.low:.2f} to {interval.high:.2f})"
        yield f"| {one}; {other} | {value:.2f}{shown} |"
    compared = {title for one, other, _ in known for title in (one, other)}
    worlds = [(title, scores) for title, scores in worlds if title in compared]
    titles = [title for title, _ in worlds]
    yield f"\n| algorithm | {' | '.join(titles)} |\n| --- |{' --- |' * len(titles)}"
    places = [_places(scores) for _, scores in worlds]
    names = list(dict.fromkeys(name for each in places for name in each))
    for name in sorted(names, key=lambda name: np.mean([each[name] for each in places if name in each])):
        yield f"| {name} | {' | '.join(str(each.get(name, '-')) for each in places)} |"
    alike: list[set[str]] = []  # worlds whose algorithms are the same ones: those of denoising policies, and those of tokens
    for one, other, _ in known:
        together = [each for each in alike if each & {one, other}]
        alike = [each for each in alike if each not in together] + [{one, other}.union(*together)]
    for group in alike:
        of_group = [each for title, each in zip(titles, places, strict=True) if title in group]
        where = "these worlds" if len(alike) == 1 else f'the {len(of_group)} worlds like "{min(group, key=len)}"'
        for third, chosen in (("first", lambda place, n: 3 * place <= n), ("last", lambda place, n: 3 * place > 2 * n)):
            always = [name for name in names if all(name in each and chosen(each[name], len(each)) for each in of_group)]
            yield f"\nIn the {third} third of each of {where}: {'; '.join(always) or 'none'}."
    yield ""


def _places(scores: Scores) -> dict[str, int]:
    """The place of each algorithm, 1 for the highest score."""
    ordered = sorted(scores, key=lambda name: -scores[name])
    return {name: place for place, name in enumerate(ordered, start=1)}
