"""Deliberate bugs in the statistics of votes."""

from mutant import Mutant

_STATISTICS = "tests/votes/test_vote_statistics.py"

VOTING = (
    Mutant(
        "a tie is a defeat",
        "rewards/votes/log.py",
        'return {"left": 1.0, "right": 0.0}.get(self.choice, 0.5)',
        'return {"left": 1.0, "right": 0.0}.get(self.choice, 0.0)',
        f"{_STATISTICS}::test_win_rates_count_ties_as_one_half",
    ),
    Mutant(
        "the strengths of one vote have no prior",
        "rewards/votes/bradley_terry.py",
        "gradient = design.T @ (won - expected) - prior * found",
        "gradient = design.T @ (won - expected)",
        f"{_STATISTICS}::test_strengths_by_hand",
    ),
    Mutant(
        "the first side counts twice",
        "rewards/votes/bradley_terry.py",
        "design[rows, [first for first, _, _ in points]] += 1",
        "design[rows, [first for first, _, _ in points]] += 2",
        f"{_STATISTICS}::test_strengths_by_hand",
    ),
    Mutant(
        "votes on one task are independent in the table of arms",
        "rewards/votes/bradley_terry.py",
        "np.add.at(sums, [at[vote.task] for vote in used], gradients)",
        "sums = gradients",
        f"{_STATISTICS}::test_intervals_of_strengths_cover",
    ),
    Mutant(
        "votes on one task are independent in a win rate",
        "votes/shares.py",
        "sums[cluster] += value - mean",
        "sums[f'{cluster} {len(sums)}'] += value - mean",
        f"{_STATISTICS}::test_the_interval_of_clusters_that_agree_within_themselves_by_hand",
    ),
    Mutant(
        "few tasks have the quantile of many",
        "votes/shares.py",
        "t = t_quantile(0.975, groups - 1)",
        "t = 1.96",
        f"{_STATISTICS}::test_the_interval_of_independent_values_by_hand",
    ),
    Mutant(
        "the variance of few tasks is too small",
        "votes/shares.py",
        "variance = groups / (groups - 1) * ",
        "variance = ",
        f"{_STATISTICS}::test_the_interval_of_independent_values_by_hand",
    ),
    Mutant(
        "pooled scores forget their weights",
        "rewards/votes/calibration.py",
        "last[0] = (last[0] * last[1] + mean * weight) / (last[1] + weight)",
        "last[0] = (last[0] + mean) / 2",
        f"{_STATISTICS}::test_isotonic_regression_by_hand",
    ),
    Mutant(
        "the bootstrap of the map draws votes",
        "rewards/votes/calibration.py",
        "members = np.array([number[vote.task] for vote in used for _ in range(2)])",
        "members = np.arange(2 * len(used)) % len(tasks)",
        f"{_STATISTICS}::test_votes_that_only_repeat_others_of_their_task_tell_nothing_new",
    ),
)
