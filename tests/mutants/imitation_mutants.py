"""Deliberate bugs in imitation: the weights of the samples, and the refill that replaces groups of equal rewards."""

from mutant import Mutant

_WEIGHTS = "tests/core/test_advantages.py"
_LOOP = "tests/training/test_collecting.py"
_REFILL = "tests/training/test_collecting.py"

IMITATION = (
    Mutant(
        "the worst samples are kept",
        "core/advantages.py",
        "better = (together & (rewards > rewards[:, None]))",
        "better = (together & (rewards < rewards[:, None]))",
        f"{_WEIGHTS}::test_best_of_group_equals_a_loop_over_sorted_groups[1]",
    ),
    Mutant(
        "missing scores count towards the number of samples in a group",
        "core/advantages.py",
        "count = _group_sum(valid.float(), index, groups)[index]",
        "count = _group_sum(torch.ones_like(rewards), index, groups)[index]",
        f"{_LOOP}::test_best_advantage_gradient_equals_flow_matching_on_the_best_images",
    ),
    Mutant(
        "scores are multiplied by the temperature instead of divided",
        "core/advantages.py",
        "eps=eps, clip=None) / temperature",
        "eps=eps, clip=None) * temperature",
        f"{_WEIGHTS}::test_exponential_weights_equal_a_loop_over_groups[0.3]",
    ),
    Mutant(
        "rewards are always compared within groups, never over the whole step",
        "objectives/advantages.py",
        'compared = group if self.over == "group" else group * 0',
        "compared = group",
        f"{_LOOP}::test_gradient_of_reward_weighted_regression_matches_a_hand_written_sum",
    ),
    Mutant(
        "the remaining rows get the loss weights of the first rows",
        "run/step.py",
        "        weights[there],\n        minibatch.epoch,",
        "        weights[: len(there)],\n        minibatch.epoch,",
        f"{_LOOP}::test_best_advantage_gradient_equals_cross_entropy_of_the_best_completions",
    ),
    Mutant(
        "each rank evaluates only as many rows as it has with nonzero weight",
        "run/step.py",
        "count = max(1, int(ranks.max((~unused).sum().float())))",
        "count = max(1, int((~unused).sum()))",
        f"{_LOOP}::test_gradient_and_metrics_on_several_ranks_match_one_rank[best-2]",
    ),
    Mutant(
        "a group with fewer than two scores counts as a group of equal rewards",
        "core/advantages.py",
        "return ids[comparable & equal]",
        "return ids[equal]",
        f"{_REFILL}::test_missing_scores_do_not_count_as_equal_rewards",
    ),
    Mutant(
        "a replaced group keeps its old rewards",
        "run/collecting.py",
        "joined.rewards[origin],",
        "judged.rewards,",
        f"{_REFILL}::test_a_group_of_equal_rewards_is_replaced_and_the_others_stay",
    ),
    Mutant(
        "every refill round uses the noise of the first round",
        "run/collecting.py",
        "group_ids=tuple(place + turn * groups for place in places)",
        "group_ids=tuple(place + groups for place in places)",
        f"{_REFILL}::test_a_group_of_equal_rewards_is_replaced_and_the_others_stay",
    ),
    Mutant(
        "a step is refilled with its own tasks",
        "data/tasks.py",
        "others = [row for row in order if row not in own] or order",
        "others = order",
        f"{_REFILL}::test_further_tasks_differ_from_those_of_the_step_and_do_not_repeat",
    ),
)
