"""Deliberate bugs in confidence intervals."""

from mutant import Mutant

_INTERVALS = "tests/core/test_measures.py"

INTERVALS = (
    Mutant(
        "intervals treat tasks of one source, or votes on one task, as independent",
        "core/intervals.py",
        "sums[member] += value - mean",
        "sums[len(sums)] += value - mean",
        f"{_INTERVALS}::test_intervals_of_shares_match_published_tables_and_hand_computations",
    ),
    Mutant(
        "the interval of a share uses 1.96 instead of Student's t quantile",
        "core/intervals.py",
        "z = t_quantile(_TAIL, groups - 1)",
        "z = 1.96",
        f"{_INTERVALS}::test_intervals_of_shares_match_published_tables_and_hand_computations",
    ),
    Mutant(
        "the interval of a mean uses 1.96 instead of Student's t quantile",
        "core/intervals.py",
        "return t_quantile(_TAIL, self.clusters - 1) * self.error",
        "return 1.96 * self.error",
        f"{_INTERVALS}::test_a_mean_of_independent_values_has_the_usual_t_interval",
    ),
    Mutant(
        "the bootstrap draws items of one source separately",
        "core/intervals.py",
        "members, _ = cluster_numbers(clusters)",
        "members, groups = list(range(len(values))), len(values)",
        f"{_INTERVALS}::test_intervals_of_clustered_means_have_95_percent_coverage",
    ),
    Mutant(
        "the variance of a mean lacks the correction groups / (groups - 1)",
        "core/intervals.py",
        "return mean, groups / (groups - 1) * math",
        "return mean, math",
        f"{_INTERVALS}::test_intervals_of_shares_match_published_tables_and_hand_computations",
    ),
    Mutant(
        "the held-out table forgets which tasks share a source image",
        "data/tasks.py",
        "        source=row.source,\n",
        "",
        "tests/data/sources/test_data_folder.py::test_rows_of_one_image_or_prompt_have_one_source",
    ),
)
