"""Deliberate bugs in the statistics of votes."""

from mutant import Mutant

_STATISTICS = "tests/votes/test_vote_statistics.py"

VOTING = (
    Mutant(
        "a tie counts as a loss",
        "retouch_view/votes/log.py",
        'return {"left": 1.0, "right": 0.0}.get(self.choice, 0.5)',
        'return {"left": 1.0, "right": 0.0}.get(self.choice, 0.0)',
        f"{_STATISTICS}::test_win_rates_count_ties_as_one_half",
    ),
    Mutant(
        "the gradient of the Bradley-Terry fit ignores the prior",
        "retouch_view/votes/reward.py",
        "gradient = design.T @ (won - expected) - prior * found",
        "gradient = design.T @ (won - expected)",
        f"{_STATISTICS}::test_strengths_match_hand_computation",
    ),
    Mutant(
        "the left image counts twice in the Bradley-Terry design matrix",
        "retouch_view/votes/reward.py",
        "design[rows, [first for first, _, _ in points]] += 1",
        "design[rows, [first for first, _, _ in points]] += 2",
        f"{_STATISTICS}::test_strengths_match_hand_computation",
    ),
    Mutant(
        "the intervals of strengths treat votes on one task as independent",
        "retouch_view/votes/statistics.py",
        "np.add.at(sums, [at[vote.task] for vote in used], gradients)",
        "sums = gradients",
        f"{_STATISTICS}::test_strength_intervals_have_95_percent_coverage",
    ),
    Mutant(
        "isotonic regression pools blocks without their weights",
        "retouch_view/votes/commands.py",
        "last[0] = (last[0] * last[1] + mean * weight) / (last[1] + weight)",
        "last[0] = (last[0] + mean) / 2",
        f"{_STATISTICS}::test_isotonic_regression_matches_hand_computation",
    ),
    Mutant(
        "the bootstrap of the calibration splits the votes of a task",
        "retouch_view/votes/commands.py",
        "members = np.array([number[vote.task] for vote in used for _ in range(2)])",
        "members = np.arange(2 * len(used)) % len(tasks)",
        f"{_STATISTICS}::test_repeated_votes_of_a_task_do_not_change_the_calibration",
    ),
)
