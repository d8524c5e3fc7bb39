"""Deliberate bugs in the combination of a reward's columns into the reward that trains."""

from mutant import Mutant

_FORMULAS = "tests/rewards/combine/test_formulas.py"
_SEVERAL = "tests/rewards/combine/test_composite.py"
_SECTIONS = "tests/recipe/test_recipe_of_rewards.py"

COMBINING = (
    Mutant(
        "a product's range is that of its ends in order",
        "rewards/combine/formulas.py",
        "    return min(products), max(products)",
        "    return products[0], products[-1]",
        f"{_FORMULAS}::test_no_value_lies_outside_the_range",
    ),
    Mutant(
        "a difference's range is a sum's",
        "rewards/combine/formulas.py",
        "(low - b, high - a)",
        "(low - a, high - b)",
        f"{_FORMULAS}::test_no_value_lies_outside_the_range",
    ),
    Mutant(
        "what is below 0 has a root of 0",
        "rewards/combine/formulas.py",
        "            if low < -_ROUNDING * max(1.0, abs(high)):",
        "            if False:",
        f"{_FORMULAS}::test_a_formula_that_is_none_is_refused_with_its_place",
    ),
    Mutant(
        "a column that misses counts nothing in a minimum",
        "rewards/combine/formulas.py",
        "            return parts.amin(dim=0)",
        "            return parts.nan_to_num(nan=float('inf')).amin(dim=0)",
        f"{_FORMULAS}::test_what_misses_a_column_is_missing",
    ),
    Mutant(
        "a minus turns no effect round",
        "rewards/combine/formulas.py",
        'right if node.sign == "+" else _turned(right, -1)',
        "right",
        f"{_FORMULAS}::test_the_effect_of_a_column_is_the_sign_of_its_differences",
    ),
    Mutant(
        "a column of weight 0 can make a sample missing",
        "rewards/combine/combination.py",
        "    weights = {name: weight for name, weight in full.items() if weight != 0}",
        "    weights = full",
        f"{_FORMULAS}::test_a_weighted_sum_has_a_range_and_a_column_of_weight_0_is_only_logged",
    ),
    Mutant(
        "more of what is better small may pay",
        "rewards/combine/combination.py",
        "effect(node, name, ranges) != -1",
        "effect(node, name, ranges) == 1",
        f"{_FORMULAS}::test_more_of_what_is_better_small_never_pays",
    ),
    Mutant(
        "a fault scores the combination of the columns' worst",
        "rewards/judging.py",
        ".masked_fill(faults, self.combination.low)",
        "",
        f"{_SEVERAL}::test_a_fault_is_the_combinations_lowest_also_where_a_weight_is_negative",
    ),
    Mutant(
        "a diagnostic has a minimum for faults",
        "rewards/scoring.py",
        'float("nan") if column.diagnostic else column.worst',
        "column.worst",
        f"{_SEVERAL}::test_the_declared_worst_is_what_a_policys_own_fault_scores",
    ),
    Mutant(
        "every reward sees the policy's completion",
        "rewards/base.py",
        '    if getattr(reward, "reads_completions", False):\n',
        "    if True:\n",
        f"{_SEVERAL}::test_nobody_but_a_reward_of_text_is_shown_what_was_written",
    ),
    Mutant(
        "several rewards judge one after the other",
        "rewards/combine/composite.py",
        "max_workers=len(self.rewards)",
        "max_workers=1",
        f"{_SEVERAL}::test_rewards_judge_at_the_same_time",
    ),
    Mutant(
        "a key in a recipe is said again",
        "rewards/vlm/endpoint_settings.py",
        'raise ValueError("give the name of an environment variable',
        'raise ValueError(f"{name}: give the name of an environment variable',
        f"{_SECTIONS}::test_a_key_in_place_of_its_variables_name_is_refused_and_not_repeated",
    ),
    Mutant(
        "each reward opens a client of its own",
        "rewards/vlm/base.py",
        "        if name not in self._opened:",
        "        if True:",
        "tests/rewards/test_building.py::test_rewards_that_name_the_same_judge_share_its_connections",
    ),
)
