"""Deliberate bugs: each is a small change to the source that its test must notice."""

from algorithm_mutants import ALGORITHMS
from bridging_mutants import BRIDGING
from combining_mutants import COMBINING
from consent_mutants import CONSENT
from distillation_mutants import DISTILLATION
from engine_mutants import ENGINES
from flux2_mutants import FLUX2
from flux_mutants import FLUX
from gradient_mutants import GRADIENTS
from imitation_mutants import IMITATION
from interval_mutants import INTERVALS
from judging_mutants import JUDGING
from ledger_mutants import LEDGER
from mutant import Mutant
from placement_mutants import PLACING
from qwen_image_2_mutants import QWEN_IMAGE_2
from reference_mutants import REFERENCES
from rendering_mutants import RENDERING
from serving_mutants import SERVING
from text_to_image_mutants import TEXT_TO_IMAGE
from token_mutants import TOKENS
from value_mutants import VALUES
from voting_mutants import VOTING
from watching_mutants import WATCHING
from writing_mutants import WRITING
from z_image_mutants import Z_IMAGE

CONTRACT = "tests/policies/denoising/test_denoising.py::test_denoising_policy_passes_the_contract_checks"

MUTANTS = (
    # Rollouts
    Mutant(
        "transition noise is drawn from the global generator",
        "policies/denoising.py",
        "[torch.randn(x.shape[1:], generator=each) for each in keyed]",
        "[torch.randn(x.shape[1:]) for each in keyed]",
        f"{CONTRACT}[sde-all-1.0]",
    ),
    Mutant(
        "initial noise is keyed by position in the batch, not by group and slot",
        "policies/denoising.py",
        '[generator(batch.seed, "noise", batch.step, *key) for key in of_noise]',
        '[generator(batch.seed, "noise", batch.step, place) for place, _ in enumerate(of_noise)]',
        f"{CONTRACT}[cps-window-1.0]",
    ),
    Mutant(
        "the standard deviation is proportional to dt instead of sqrt(dt)",
        "core/transitions.py",
        "(drift * sigma * -2).sqrt()",
        "(drift * sigma * -2).sqrt() * (sigma - sigma_next).sqrt()",
        "tests/core/test_transitions.py::test_golden_vectors",
    ),
    Mutant(
        "groups are identified by the text of their prompt",
        "policies/denoising.py",
        "group = torch.tensor(batch.group, device=compute_device(self.model.module))\n        sigmas",
        "words = [task.instruction for task in batch.tasks]\n        group = torch.tensor([words.index(words[k]) for k in "
        "batch.group], device=compute_device(self.model.module))\n        sigmas",
        "tests/policies/denoising/test_denoising.py::test_tasks_with_the_same_instruction_stay_separate_groups",
    ),
    Mutant(
        "training rollouts are sampled with the averaged weights",
        "policies/denoising.py",
        'self.copies.using("old") if self.acting == "old" else nullcontext()',
        'self.copies.using("average") if "average" in self.copies.copies else nullcontext()',
        "tests/policies/denoising/test_denoising.py::test_rollout_and_evaluation_use_the_current_weights",
    ),
    Mutant(
        "NFT samples with the current policy instead of the old policy",
        "policies/denoising.py",
        'self.copies.using("old") if self.acting == "old" else nullcontext()',
        "nullcontext()",
        "tests/training/test_loop.py::test_nft_samples_with_the_old_weights_and_updates_them_after_each_step",
    ),
    Mutant(
        "the current weights are not restored after a weight copy was used",
        "policies/weights.py",
        "parameter.data = current[name]",
        "parameter.data = parameter.data",
        "tests/policies/test_weight_copies.py::test_using_a_copy_restores_the_weights_bitwise_and_keeps_the_graph",
    ),
    Mutant(
        "the last denoising step is trained",
        "core/windows.py",
        "return num_steps - 1",
        "return num_steps",
        "tests/core/test_transitions.py::test_all_steps_leaves_out_the_last",
    ),
    # Evaluation of log-probabilities
    Mutant(
        "a slice of later steps is evaluated with the sigmas of the first steps",
        "policies/denoising.py",
        "torch.arange(part.actions.start, part.actions.stop, device",
        "torch.arange(part.actions.stop - part.actions.start, device",
        f"{CONTRACT}[sde-all-1.0]",
    ),
    Mutant(
        "an action is evaluated on the latent after it instead of before it",
        "policies/denoising.py",
        "x = trajectory.latents[part.rows, part.actions].flatten(0, 1)",
        "x = trajectory.latents[part.rows, part.actions.start + 1 : part.actions.stop + 1].flatten(0, 1)",
        f"{CONTRACT}[dance-window-1.0]",
    ),
    Mutant(
        "guidance is applied in the rollout but not in the loss",
        "models/pipeline.py",
        ".chunk(2)\n        return self.combine(positive, negative, self.guidance_scale)",
        ".chunk(2)\n        return positive if torch.is_grad_enabled() else self.combine(positive, negative, self.guidance_scale)",
        f"{CONTRACT}[sde-all-3.0]",
    ),
    Mutant(
        "the negative branch of guidance receives no gradient",
        "models/pipeline.py",
        ".chunk(2)\n        return self.combine(positive, negative, self.guidance_scale)",
        ".chunk(2)\n        return self.combine(positive, negative.detach(), self.guidance_scale)",
        "tests/models/test_families.py::test_both_branches_of_guidance_have_gradient",
    ),
    Mutant(
        "the rows of a conditioning's mask are reversed",
        "types.py",
        "{name: tensor[rows] for name, tensor in self.tensors.items()}",
        '{name: tensor[rows].flip(0) if name == "mask" else tensor[rows] for name, tensor in self.tensors.items()}',
        "tests/policies/denoising/test_denoising.py::test_models_and_the_latent_renderer_pass_the_contract_checks[1.0-edit]",
    ),
    Mutant(
        "all chunks use the conditioning of the first chunk",
        "policies/denoising.py",
        "groups.append(part.group + tasks)",
        "groups.append(part.group)",
        "tests/training/test_loop.py::test_chunks_change_nothing_but_rounding[4]",
    ),
    Mutant(
        "the reference weights share memory with the trained weights",
        "policies/weights.py",
        "dtype, copy=True)",
        "dtype)",
        f"{CONTRACT}[sde-all-1.0]",
    ),
    Mutant(
        "the KL compares the denoising policy with itself",
        "policies/denoising.py",
        'with torch.no_grad(), self.copies.using("reference"):',
        "with torch.no_grad():",
        "tests/policies/denoising/test_denoising.py::test_kl_equals_its_formula[closed-sde]",
    ),
    Mutant(
        "the KL divides by the standard deviation instead of the variance",
        "core/surrogates.py",
        "variance = step_std.float().square()",
        "variance = step_std.float()",
        "tests/policies/denoising/test_denoising.py::test_closed_form_kl_equals_the_mean_log_ratio_of_sampled_actions",
    ),
    # Rewards and advantages
    Mutant(
        "actions sampled with stale weights are not importance-weighted",
        "run/step.py",
        "advantages = advantages * collected.importance[rows]",
        "pass",
        "tests/training/test_collecting.py::test_gradient_of_a_stale_step_matches_the_truncated_importance_sampling_formula",
    ),
    Mutant(
        "after a resume, queued rollouts are sampled with the newest weights",
        "run/collecting.py",
        "nullcontext() if acting == step else copies.using(names[acting % staleness])",
        "nullcontext()",
        "tests/run/test_resume.py::test_run_with_staleness_killed_at_three_places_resumes_bitwise",
    ),
    Mutant(
        "a missing score counts as zero",
        "run/step.py",
        "rewards, group = gathered[kept, 1],",
        "rewards, group = gathered[kept, 1].nan_to_num(0.0),",
        "tests/training/test_loop.py::test_gradient_with_a_missing_score_equals_the_gradient_without_that_row",
    ),
    Mutant(
        "a row with a missing score keeps its loss weight",
        "core/surrogates.py",
        "weights = (mask & valid[:, None]).float()",
        "weights = mask.float()",
        "tests/training/test_loop.py::test_gradient_with_a_missing_score_equals_the_gradient_without_that_row",
    ),
    Mutant(
        "a policy's own fault becomes a missing score",
        "rewards/scoring.py",
        "torch.full((len(samples),), fault, dtype=torch.float64)",
        "torch.full((len(samples),), torch.nan, dtype=torch.float64)",
        "tests/rewards/test_judging.py::test_a_fault_gets_the_worst_values_and_a_nan_column_makes_the_reward_missing",
    ),
    Mutant(
        "eps is added after the division by the standard deviation",
        "core/advantages.py",
        "advantages = advantages / (_std(centred, count, index, ddof)[index] + eps)",
        "advantages = advantages / _std(centred, count, index, ddof)[index].clamp(min=1e-12) + eps",
        "tests/core/test_advantages.py::test_equal_rewards_give_exactly_zero",
    ),
    Mutant(
        "every rank gets the advantages of rank 0",
        "run/step.py",
        "phase.order.view(run.ranks.world, -1)[run.ranks.rank]",
        "phase.order.view(run.ranks.world, -1)[0]",
        "tests/training/test_loop.py::test_gradient_on_several_ranks_matches_one_rank[grpo-3]",
    ),
    # Losses and updates
    Mutant(
        "the loss is normalised in each microbatch",
        "objectives/policy_gradient.py",
        "value = (weights * loss).sum()",
        "value = (weights * loss).sum() / weights.sum()",
        "tests/training/test_loop.py::test_microbatches_do_not_change_the_gradient[1]",
    ),
    Mutant(
        "the loss is normalised over the rows of one rank",
        "run/step.py",
        "over_ranks=run.ranks.sum)",
        "over_ranks=lambda count: count * run.ranks.world)",
        "tests/training/test_loop.py::test_gradient_on_several_ranks_matches_one_rank[grpo-3]",
    ),
    Mutant(
        "gradients are averaged over ranks instead of summed",
        "distributed/optimizer.py",
        "self.ranks.sum(torch.cat([gradient.flatten() for gradient in gradients]))",
        "self.ranks.sum(torch.cat([gradient.flatten() for gradient in gradients])) / self.ranks.world",
        "tests/training/test_loop.py::test_gradient_on_several_ranks_matches_one_rank[nft-2]",
    ),
    Mutant(
        "the clip bounds of positive and negative advantages are swapped",
        "core/surrogates.py",
        ".clamp(torch.where(negative, log_low, -math.inf), torch.where(negative, ceiling, log_high))",
        ".clamp(torch.where(negative, -math.inf, log_low), torch.where(negative, log_high, ceiling))",
        "tests/objectives/test_policy_gradient.py::test_loss_and_gradient_match_hand_written_surrogates[0-clip]",
    ),
    Mutant(
        "the rows of the action mask are reversed",
        "objectives/policy_gradient.py",
        "            # The forward pass: log p",
        "            mask = mask.flip(0)\n            # The forward pass: log p",
        "tests/objectives/test_policy_gradient.py::test_loss_and_gradient_match_hand_written_surrogates[0-clip]",
    ),
    Mutant(
        "the entropy bonus is added to the loss instead of subtracted",
        "objectives/policy_gradient.py",
        "loss = loss - self.entropy_bonus",
        "loss = loss + self.entropy_bonus",
        "tests/objectives/test_policy_gradient.py::test_the_entropy_is_subtracted_with_its_weight[clip]",
    ),
    Mutant(
        "NFT's decay grows from the first step instead of after the flat steps",
        "objectives/nft.py",
        "self.rate * max(step - self.flat, 0)",
        "self.rate * step",
        "tests/objectives/test_flow_matching.py::test_decay_schedules_of_the_old_policy_match_the_published_code",
    ),
    Mutant(
        "RatioNorm is computed from the new mean instead of the stored mean",
        "policies/denoising.py",
        "ratio_norm(after, made.mean, means, step_std",
        "ratio_norm(after, made.mean, made.mean, step_std",
        "tests/objectives/test_policy_gradient.py::test_ratio_norm_takes_its_ratio_and_scale_from_the_stored_means",
    ),
    Mutant(
        "NFT moves away from good images",
        "objectives/nft.py",
        "(advantages / (2 * self.advantage_clip) + 0.5).clamp",
        "(0.5 - advantages / (2 * self.advantage_clip)).clamp",
        "tests/objectives/test_flow_matching.py::test_nft_loss_matches_the_hand_written_formula",
    ),
    Mutant(
        "the rejected image of a pair is preferred",
        "objectives/dpo.py",
        "margin = improvement[0::2] - improvement[1::2]",
        "margin = improvement[1::2] - improvement[0::2]",
        "tests/objectives/test_flow_matching.py::test_loss_and_gradient_of_data_pairs_match_the_published_formula[4]",
    ),
    Mutant(
        "the two images of a pair get different noise",
        "objectives/dpo.py",
        "of_group = replace(batch, slot=(0,) * len(batch))",
        "of_group = batch",
        "tests/objectives/test_flow_matching.py::test_loss_and_gradient_of_data_pairs_match_the_published_formula[4]",
    ),
    Mutant(
        "the moving average swaps the weights of its old and new values",
        "policies/weights.py",
        "(averages, weights, 1.0 - decay)",
        "(averages, weights, decay)",
        "tests/training/test_loop.py::test_nft_samples_with_the_old_weights_and_updates_them_after_each_step",
    ),
    Mutant(
        "the count of optimizer steps restarts at 0 in every training step",
        "run/step.py",
        "taken = sum(map(phase.trains, range(phase.steps.start, step))) * phase.epochs * phase.minibatches",
        "taken = 0",
        "tests/training/test_loop.py::test_resumed_phase_continues_its_step_and_optimizer_step_counts",
    ),
    Mutant(
        "every epoch draws the same noise and sigmas",
        "objectives/nft.py",
        "batch.group_ids[group], slot, epoch, draw)",
        "batch.group_ids[group], slot, draw)",
        "tests/objectives/test_flow_matching.py::test_noise_draws_are_averaged_and_differ_between_epochs",
    ),
    Mutant(
        "a drawn sigma is not shifted",
        "objectives/nft.py",
        "sigma = (self.shift * sigma / (1 + (self.shift - 1) * sigma)).clamp(1e-4, 1.0)",
        "sigma = sigma.clamp(1e-4, 1.0)",
        "tests/objectives/test_flow_matching.py::test_loss_and_gradient_are_those_of_a_hand_written_regression",
    ),
    *TOKENS,
    *VALUES,
    *WATCHING,
    *WRITING,
    *BRIDGING,
    *ENGINES,
    *SERVING,
    *COMBINING,
    *IMITATION,
    *JUDGING,
    *RENDERING,
    *TEXT_TO_IMAGE,
    *PLACING,
    *LEDGER,
    *REFERENCES,
    *FLUX,
    *FLUX2,
    *ALGORITHMS,
    *DISTILLATION,
    *GRADIENTS,
    *Z_IMAGE,
    *QWEN_IMAGE_2,
    *CONSENT,
    *VOTING,
    *INTERVALS,
)
