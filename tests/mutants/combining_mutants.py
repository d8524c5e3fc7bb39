"""Deliberate bugs in the combination of a reward's columns into the reward that trains."""

from mutant import Mutant

_FORMULAS = "tests/rewards/combine/test_formulas.py"
_SEVERAL = "tests/rewards/combine/test_composite.py"
_SECTIONS = "tests/recipe/test_recipe_of_rewards.py"

COMBINING = (
    Mutant(
        "the range of a product ignores that bounds can be negative",
        "rewards/combination.py",
        "    return min(products), max(products)",
        "    return products[0], products[-1]",
        f"{_FORMULAS}::test_values_of_a_formula_lie_inside_its_computed_range",
    ),
    Mutant(
        "the range of a difference is computed as for a sum",
        "rewards/combination.py",
        "(low - b, high - a)",
        "(low - a, high - b)",
        f"{_FORMULAS}::test_values_of_a_formula_lie_inside_its_computed_range",
    ),
    Mutant(
        "a root of a value that may be negative is accepted",
        "rewards/combination.py",
        "            if low < -_ROUNDING * max(1.0, abs(high)):",
        "            if False:",
        f"{_FORMULAS}::test_invalid_formulas_raise_with_the_position_or_the_cause",
    ),
    Mutant(
        "a missing column is ignored in min()",
        "rewards/combination.py",
        "            return parts.amin(dim=0)",
        "            return parts.nan_to_num(nan=float('inf')).amin(dim=0)",
        f"{_FORMULAS}::test_a_formula_is_missing_where_any_of_its_columns_is_missing",
    ),
    Mutant(
        "the right operand of a minus keeps the sign of its effect",
        "rewards/combination.py",
        'right if node.sign == "+" else _turned(right, -1)',
        "right",
        f"{_FORMULAS}::test_the_effect_of_a_column_is_the_sign_of_its_differences",
    ),
    Mutant(
        "a missing score in a column of weight 0 makes the reward missing",
        "rewards/combination.py",
        "    weights = {name: weight for name, weight in full.items() if weight != 0}",
        "    weights = full",
        f"{_FORMULAS}::test_a_weighted_sum_has_a_range_and_a_column_of_weight_0_is_only_logged",
    ),
    Mutant(
        "a reward that rises with a column where lower is better is accepted",
        "rewards/combination.py",
        "effect(node, name, ranges) != -1",
        "effect(node, name, ranges) == 1",
        f"{_FORMULAS}::test_only_a_reward_that_falls_with_a_lower_is_better_column_is_accepted",
    ),
    Mutant(
        "a policy's own fault gets the reward of the worst columns, not the lowest reward",
        "rewards/judging.py",
        ".masked_fill(faults, self.combination.low)",
        "",
        f"{_SEVERAL}::test_a_policys_own_fault_gets_the_worst_columns_and_the_lowest_reward_even_with_a_negative_weight",
    ),
    Mutant(
        "a policy's own fault gets the worst value of a diagnostic instead of NaN",
        "rewards/scoring.py",
        'float("nan") if column.diagnostic else column.worst',
        "column.worst",
        f"{_SEVERAL}::test_a_policys_own_fault_gets_the_worst_columns_and_the_lowest_reward_even_with_a_negative_weight",
    ),
    Mutant(
        "every reward receives the policy's completion",
        "rewards/base.py",
        '    if getattr(reward, "reads_completions", False):\n',
        "    if True:\n",
        f"{_SEVERAL}::test_completions_are_passed_only_to_rewards_that_read_them",
    ),
    Mutant(
        "several rewards score one after the other",
        "rewards/judging.py",
        "max_workers=len(self.rewards)",
        "max_workers=1",
        f"{_SEVERAL}::test_rewards_run_concurrently",
    ),
    Mutant(
        "the API key is repeated in the error message",
        "retouch_judge/models.py",
        'raise ValueError("give the name of an environment variable',
        'raise ValueError(f"{name}: give the name of an environment variable',
        f"{_SECTIONS}::test_an_api_key_or_an_address_with_credentials_is_rejected_and_not_in_the_error",
    ),
    Mutant(
        "each reward opens its own client of the same judge",
        "rewards/base.py",
        "        if name not in self._opened:",
        "        if True:",
        "tests/rewards/test_building.py::test_rewards_that_name_the_same_judge_share_its_connections",
    ),
)
