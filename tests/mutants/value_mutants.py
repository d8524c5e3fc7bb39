"""Deliberate bugs in the predictions, the training and the saved files of a value head."""

from mutant import Mutant

_GAE = "tests/core/test_advantages.py"
_LOSSES = "tests/objectives/test_policy_gradient.py"
_LOOP = "tests/training/test_value_head.py"

VALUES = (
    Mutant(
        "GAE discounts over actions that are masked out",
        "core/gae.py",
        "next_advantage = torch.where(here, advantage, next_advantage)",
        "next_advantage = torch.where(here, advantage, gamma * lam * next_advantage)",
        f"{_GAE}::test_masked_actions_do_not_change_gae_or_discounted_returns",
    ),
    Mutant(
        "GAE adds the reward at every action instead of only at the last one",
        "core/gae.py",
        "reward = reward.masked_fill(here, 0.0)",
        "reward = reward.masked_fill(here, 0.0) if k < 0 else reward",
        f"{_GAE}::test_gae_equals_the_published_sum_over_the_unmasked_actions",
    ),
    Mutant(
        "GAE treats a missing reward as 0",
        "core/gae.py",
        "torch.where(here & valid, advantage, 0.0)",
        "torch.where(here, advantage, 0.0)",
        f"{_GAE}::test_gae_equals_the_published_sum_over_the_unmasked_actions",
    ),
    Mutant(
        "value clipping takes the smaller of the two losses",
        "core/gae.py",
        "squares = torch.maximum(squares, ",
        "squares = torch.minimum(squares, ",
        f"{_GAE}::test_value_loss_is_half_the_squared_error_or_with_a_clip_the_larger_of_two",
    ),
    Mutant(
        "the value head receives the state after an action instead of before it",
        "policies/denoising.py",
        "return self.head(trajectory.latents[part.rows, part.actions], sigmas, of_task)",
        "return self.head(trajectory.latents[part.rows, part.actions.start + 1 : part.actions.stop + 1], sigmas, of_task)",
        f"{_LOSSES}::test_values_depend_only_on_the_state_before_each_action[sd3]",
    ),
    Mutant(
        "the value head receives the first sigmas for every slice of actions",
        "policies/denoising.py",
        "sigmas = trajectory.sigmas[trajectory.first : -1][part.actions]",
        "sigmas = trajectory.sigmas[trajectory.first : -1][: part.actions.stop - part.actions.start]",
        f"{_LOSSES}::test_policy_with_a_value_head_passes_the_contract_checks[sd3]",
    ),
    Mutant(
        "padding counts in the value head's summary of the conditioning",
        "policies/value_heads.py",
        "there = (rows != 0).any(2) if name in conditioning.padded else None",
        "there = None",
        f"{_LOSSES}::test_prompt_padding_does_not_change_the_input_of_the_value_head",
    ),
    Mutant(
        "the value loss trains the policy whatever its coefficient is",
        "policies/value_heads.py",
        "seen = states.detach().float()",
        "seen = states.float()",
        f"{_LOSSES}::test_coefficient_scales_the_value_gradient_of_the_writer_but_not_of_the_head",
    ),
    Mutant(
        "the value loss ignores the loss weights of its rows",
        "objectives/policy_gradient.py",
        "value_loss = (weights * error).sum()",
        "value_loss = error.mean()",
        f"{_LOSSES}::test_rows_with_zero_weight_do_not_affect_the_value_head_gradient",
    ),
    Mutant(
        "the value head is trained on advantages instead of returns",
        "objectives/advantages.py",
        "returns = estimated + values",
        "returns = estimated",
        f"{_LOOP}::test_value_head_converges_to_the_expected_return",
    ),
    Mutant(
        "each rank whitens its advantages over its own rows",
        "objectives/advantages.py",
        "estimated = whiten(every, counts > 0)[first : first + len(rewards)]",
        "estimated = whiten(estimated, counted)",
        f"{_LOOP}::test_training_with_a_value_head_on_several_ranks_matches_one_rank[2]",
    ),
    Mutant(
        "the value head's weights are not saved",
        "distributed/optimizer.py",
        "{**self.weights, **self.second.state()}.items()",
        "self.second.state().items()",
        f"{_LOOP}::test_run_saves_its_value_head_in_checkpoints_and_does_not_export_it",
    ),
    Mutant(
        "the value head's gradient is not divided by the loss scale",
        "distributed/optimizer.py",
        "gradient.div_(self.loss_scale)",
        "gradient.div_(1)",
        f"{_LOOP}::test_loss_scale_is_removed_from_the_value_head_gradient",
    ),
)
