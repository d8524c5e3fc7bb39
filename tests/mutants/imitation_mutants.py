"""Deliberate bugs in the choice of the samples that a run imitates and of the groups that it replaces."""

from mutant import Mutant

_WEIGHTS = "tests/core/test_imitation_weights.py"
_LOOP = "tests/training/test_imitation.py"
_REFILL = "tests/training/test_refill.py"

IMITATION = (
    Mutant(
        "the worst samples are kept",
        "core/advantages.py",
        "better = (together & (rewards > rewards[:, None]))",
        "better = (together & (rewards < rewards[:, None]))",
        f"{_WEIGHTS}::test_the_best_equal_a_loop_over_sorted_groups[1]",
    ),
    Mutant(
        "a missing score counts among the samples of a group",
        "core/advantages.py",
        "count = _group_sum(valid.float(), index, groups)[index]",
        "count = _group_sum(torch.ones_like(rewards), index, groups)[index]",
        f"{_LOOP}::test_the_gradient_is_that_of_flow_matching_on_the_best_images",
    ),
    Mutant(
        "weights grow with the temperature",
        "core/advantages.py",
        "eps=eps, clip=None) / temperature",
        "eps=eps, clip=None) * temperature",
        f"{_WEIGHTS}::test_exponential_weights_equal_a_loop_over_groups[0.3]",
    ),
    Mutant(
        "a step is compared group by group",
        "objectives/advantages.py",
        'compared = group if self.over == "group" else torch.zeros_like(group)',
        "compared = group",
        f"{_LOOP}::test_the_gradient_of_reward_weighted_regression",
    ),
    Mutant(
        "rows that are left out have the weights of those that stay",
        "training/loop.py",
        "        weights[there],\n        minibatch.epoch,",
        "        weights[: len(there)],\n        minibatch.epoch,",
        f"{_LOOP}::test_the_gradient_is_that_of_cross_entropy_of_the_best_completions",
    ),
    Mutant(
        "ranks evaluate as many rows as they happen to have",
        "training/loop.py",
        "count = max(1, int(ranks.max((~unused).sum().float())))",
        "count = max(1, int((~unused).sum()))",
        f"{_LOOP}::test_ranks_learn_what_one_rank_learns[best-2]",
    ),
    Mutant(
        "missing scores are equal",
        "core/advantages.py",
        "return ids[comparable & equal]",
        "return ids[equal]",
        f"{_REFILL}::test_missing_scores_are_not_equal",
    ),
    Mutant(
        "the scores of a replaced group stay",
        "training/refill.py",
        "joined.rewards[origin],",
        "judged.rewards,",
        f"{_REFILL}::test_a_group_of_equal_rewards_is_replaced_and_the_others_stay",
    ),
    Mutant(
        "every round has the noise of the first",
        "training/refill.py",
        "numbers = tuple(place + turn * groups for place in places)",
        "numbers = tuple(place + groups for place in places)",
        f"{_REFILL}::test_a_group_of_equal_rewards_is_replaced_and_the_others_stay",
    ),
    Mutant(
        "a step is refilled with its own tasks",
        "data/sampler.py",
        "others = [row for row in order if row not in own] or order",
        "others = order",
        f"{_REFILL}::test_further_tasks_are_not_those_of_the_step_and_come_once",
    ),
)
