"""Deliberate bugs in the predictions, the training and the saved files of a value head."""

from mutant import Mutant

_GAE = "tests/core/test_gae.py"
_LOSSES = "tests/objectives/test_actor_critic.py"
_LOOP = "tests/training/test_value_head.py"

VALUES = (
    Mutant(
        "time passes where there is no choice",
        "core/gae.py",
        "next_advantage = torch.where(here, advantage, next_advantage)",
        "next_advantage = torch.where(here, advantage, gamma * lam * next_advantage)",
        f"{_GAE}::test_no_time_passes_where_there_is_no_choice",
    ),
    Mutant(
        "the reward comes with every action",
        "core/gae.py",
        "reward = reward.masked_fill(here, 0.0)",
        "reward = reward.masked_fill(here, 0.0) if k < 0 else reward",
        f"{_GAE}::test_with_gamma_and_lam_one_it_is_the_reward_less_the_value",
    ),
    Mutant(
        "a missing reward is a disappointment",
        "core/gae.py",
        "torch.where(here & valid, advantage, 0.0)",
        "torch.where(here, advantage, 0.0)",
        f"{_GAE}::test_equals_the_published_sum_over_the_rows_choices",
    ),
    Mutant(
        "the clip takes the smaller loss",
        "core/gae.py",
        "squares = torch.maximum(squares, ",
        "squares = torch.minimum(squares, ",
        f"{_GAE}::test_the_clip_takes_the_larger_of_two_losses",
    ),
    Mutant(
        "values of the state after an action",
        "policies/denoising/policy.py",
        "return self.head(trajectory.latents[part.rows, part.actions], sigmas, of_task)",
        "return self.head(trajectory.latents[part.rows, part.actions.start + 1 : part.actions.stop + 1], sigmas, of_task)",
        f"{_LOSSES}::test_values_are_of_the_state_before_each_action_and_of_nothing_later[sd3]",
    ),
    Mutant(
        "a slice's values at the first sigmas",
        "policies/denoising/policy.py",
        "sigmas = trajectory.sigmas[trajectory.first : -1][part.actions]",
        "sigmas = trajectory.sigmas[trajectory.first : -1][: part.actions.stop - part.actions.start]",
        f"{_LOSSES}::test_a_policy_with_a_head_keeps_the_contract[sd3]",
    ),
    Mutant(
        "padding counts in a summary",
        "policies/value_heads.py",
        "there = (rows != 0).any(2) if name in conditioning.padded else None",
        "there = None",
        f"{_LOSSES}::test_what_a_prompt_is_padded_with_changes_no_value",
    ),
    Mutant(
        "the value loss moves the writer unasked",
        "policies/value_heads.py",
        "seen = states.detach().float()",
        "seen = states.float()",
        f"{_LOSSES}::test_the_coefficient_lets_the_value_loss_into_the_writer_and_leaves_the_heads_own_gradient",
    ),
    Mutant(
        "missing rows teach the head",
        "objectives/actor_critic.py",
        "value = (minibatch.weights[part.rows, part.actions] * loss).sum()",
        "value = loss.mean()",
        f"{_LOSSES}::test_rows_without_a_weight_teach_the_head_nothing",
    ),
    Mutant(
        "the head learns advantages",
        "objectives/advantages.py",
        "returns = estimated + values",
        "returns = estimated",
        f"{_LOOP}::test_the_head_learns_the_mean_of_what_follows",
    ),
    Mutant(
        "each rank whitens by its own rows",
        "objectives/advantages.py",
        "estimated = whiten(every, counts > 0)[first : first + len(rewards)]",
        "estimated = whiten(estimated, counted)",
        f"{_LOOP}::test_ranks_learn_what_one_rank_learns[2]",
    ),
    Mutant(
        "the head's weights are not saved",
        "distributed/head_stepper.py",
        "return merged(self.policy.state(), weights, ",
        "return merged(self.policy.state(), ",
        f"{_LOOP}::test_a_run_saves_its_head_and_exports_none_of_it",
    ),
    Mutant(
        "the head steps as often as losses are multiplied",
        "distributed/head_stepper.py",
        "gradient.div_(self.loss_scale)",
        "gradient.div_(1)",
        f"{_LOOP}::test_what_losses_are_multiplied_by_is_taken_off_the_heads_gradient",
    ),
)
