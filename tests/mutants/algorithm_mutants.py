"""Deliberate bugs in DPPO, GDPO, DGPO, CRD, the hinge on the velocity's norm, and editing in turns."""

from mutant import Mutant

_POLICY = "tests/objectives/test_policy_gradient.py"
_DPPO = f"{_POLICY}::test_dppo_leaves_out_transitions_whose_means_have_moved_far_with_the_advantage[mean]"

_FLOW = "tests/objectives/test_flow_matching.py"
_CRD = f"{_FLOW}::test_crd_matches_a_hand_written_loss_of_whole_groups_for_every_microbatch[3]"
_DGPO = f"{_FLOW}::test_dgpo_matches_a_hand_written_loss_of_whole_groups_for_every_microbatch[3]"

_TURNS = "tests/run/test_turns.py::test_"

ALGORITHMS = (
    Mutant(
        "turns: the reward of the whole episode is not discounted with the turns before the last",
        "core/advantages.py",
        "discount * returns[:, turn] if discount",
        "discount * (returns[:, turn] - after) + after if discount",
        f"{_TURNS}the_return_of_a_turn_has_its_own_reward_the_later_ones_and_that_of_the_whole_episode",
    ),
    Mutant(
        "turns: every turn edits the source image of the task",
        "run/turns.py",
        "sources = [source if image is None else image",
        "sources = [source",
        f"{_TURNS}each_turn_edits_the_image_of_the_turn_before_and_is_compared_with_the_same_turn_of_its_task",
    ),
    Mutant(
        "turns: a task keeps the tokens of the image before its edit",
        "types.py",
        "if key != Codes.SOURCE}",
        "}",
        f"{_TURNS}the_turn_after_one_without_an_image_edits_the_same_source_and_the_whole_has_the_image_of_its_last_turn",
    ),
    Mutant(
        "turns: a turn that a task does not have trains",
        "run/turns.py",
        "trajectory.mask & there.to(trajectory.mask.device)[:, None]",
        "trajectory.mask",
        f"{_TURNS}each_turn_edits_the_image_of_the_turn_before_and_is_compared_with_the_same_turn_of_its_task",
    ),
    Mutant("dppo leaves out every action that has moved far", "core/surrogates.py", "left_out = moved & (", "left_out = (", _DPPO),
    Mutant(
        "dppo measures no KL of transitions",
        "policies/denoising.py",
        "gaussian_kl(made.mean.detach(), means,",
        "gaussian_kl(made.mean.detach(), made.mean.detach(),",
        _DPPO,
    ),
    Mutant(
        "dppo measures the KL of tokens without the other tokens",
        "core/surrogates.py",
        "return log_p.exp() * (log_p - log_q) + torch.xlogy(other_p, other_p) - torch.xlogy(other_p, other_q)",
        "return log_p.exp() * (log_p - log_q)",
        f"{_POLICY}::test_loss_and_gradient_match_hand_written_surrogates[0-dppo]",
    ),
    Mutant(
        "a row of GDPO without one score is in the means of the other columns",
        "core/advantages.py",
        "group_relative(column.masked_fill(missing, math.nan), group, ddof=1",
        "group_relative(column, group, ddof=1",
        "tests/core/test_advantages.py::test_decoupled_advantages_equal_a_loop_over_columns_and_groups",
    ),
    Mutant(
        "GDPO adds the columns without their weights",
        "core/advantages.py",
        "[weight * column for weight, column in",
        "[column for weight, column in",
        "tests/training/test_collecting.py::"
        "test_gdpo_normalises_the_columns_of_all_ranks_and_gives_a_row_with_a_missing_score_the_advantage_0[1]",
    ),
    Mutant(
        "the norm guard also penalises short velocities",
        "objectives/nft.py",
        "(ratio - 1 - self.norm_guard.margin).clamp_min(0.0)",
        "(ratio - 1 - self.norm_guard.margin).abs()",
        f"{_FLOW}::test_norm_guard_adds_a_hinge_on_the_norm_of_the_velocity[0.0-NFT]",
    ),
    Mutant(
        "DGPO prefers the bad images of a group",
        "objectives/dpo.py",
        "-(-margin).sigmoid() * pull",
        "(-margin).sigmoid() * pull",
        _DGPO,
    ),
    Mutant(
        "DGPO counts images without a score in the mean of their group",
        "objectives/dpo.py",
        "(weights > 0).to(weights.dtype)",
        "(weights >= 0).to(weights.dtype)",
        _DGPO,
    ),
    Mutant(
        "CRD compares implicit rewards without their mean over the group",
        "objectives/dpo.py",
        "self.beta * (gains - (share * gains).sum())",
        "self.beta * gains",
        _CRD,
    ),
    Mutant(
        "CRD measures implicit rewards against the reference, not the old policy",
        "objectives/dpo.py",
        'for which in ("current", "old"))',
        'for which in ("current", "reference"))',
        _CRD,
    ),
)
