"""Deliberate bugs: each is a small change to the source that its test must notice."""

from bridging_mutants import BRIDGING
from combining_mutants import COMBINING
from consent_mutants import CONSENT
from engine_mutants import ENGINES
from flux2_mutants import FLUX2
from flux_mutants import FLUX
from gradient_mutants import GRADIENTS
from imitation_mutants import IMITATION
from judging_mutants import JUDGING
from ledger_mutants import LEDGER
from mutant import Mutant
from painting_mutants import PAINTING
from placement_mutants import PLACING
from qwen_image_2_mutants import QWEN_IMAGE_2
from reference_mutants import REFERENCES
from rendering_mutants import RENDERING
from serving_mutants import SERVING
from token_mutants import TOKENS
from value_mutants import VALUES
from voting_mutants import VOTING
from watching_mutants import WATCHING
from writing_mutants import WRITING
from z_image_mutants import Z_IMAGE

CONTRACT = "tests/policies/denoising/test_denoising.py::test_keeps_the_contract"

MUTANTS = (
    # Rollouts
    Mutant(
        "noise from the global generator",
        "policies/denoising/policy.py",
        'torch.randn(x.shape[1:], generator=generator(seed, "transition", step, gid, slot, action)) for gid, slot in keys',
        "torch.randn(x.shape[1:]) for gid, slot in keys",
        f"{CONTRACT}[sde-all-1.0]",
    ),
    Mutant(
        "noise keyed by place in the batch",
        "policies/denoising/policy.py",
        '[generator(seed, "noise", step, gid, slot) for gid, slot in keys]',
        '[generator(seed, "noise", step, place) for place, _ in enumerate(keys)]',
        f"{CONTRACT}[cps-window-1.0]",
    ),
    Mutant(
        "std proportional to dt",
        "core/transitions.py",
        "(drift * sigma * -2).sqrt()",
        "(drift * sigma * -2).sqrt() * (sigma - sigma_next).sqrt()",
        "tests/core/test_transitions.py::test_golden_vectors",
    ),
    Mutant(
        "groups known by their prompt",
        "policies/denoising/policy.py",
        "        conditioning = self.model.encode(batch.tasks)\n        group = torch.tensor(batch.group, device",
        "        conditioning = self.model.encode(batch.tasks)\n        words = [task.instruction for task in batch.tasks]\n"
        "        group = torch.tensor([words.index(words[k]) for k in batch.group], device",
        "tests/policies/denoising/test_denoising.py::test_tasks_with_the_same_words_stay_two_tasks",
    ),
    Mutant(
        "averaged weights act in training",
        "policies/denoising/policy.py",
        'self.copies.using("old") if self.acting == "old" else nullcontext()',
        'self.copies.using("average") if "average" in self.copies.copies else nullcontext()',
        "tests/policies/denoising/test_denoising.py::test_training_acts_and_learns_under_the_current_weights",
    ),
    Mutant(
        "NFT's pictures are not its old policy's",
        "policies/denoising/policy.py",
        'self.copies.using("old") if self.acting == "old" else nullcontext()',
        "nullcontext()",
        "tests/training/test_loop.py::test_nft_learns_from_pictures_of_the_old_policy_which_then_follows",
    ),
    Mutant(
        "averaged weights stay after sampling",
        "policies/weights.py",
        "parameter.data = current[name]",
        "parameter.data = parameter.data",
        "tests/policies/test_weight_copies.py::test_a_swap_restores_every_bit_and_the_graph",
    ),
    Mutant(
        "the last step is trained",
        "core/windows.py",
        "return num_steps - 1",
        "return num_steps",
        "tests/core/test_windows.py::test_all_steps_leaves_out_the_last",
    ),
    # Evaluation of log-probabilities
    Mutant(
        "wrong sigma when steps are cut",
        "policies/denoising/policy.py",
        "torch.arange(part.actions.start, part.actions.stop, device",
        "torch.arange(part.actions.stop - part.actions.start, device",
        f"{CONTRACT}[sde-all-1.0]",
    ),
    Mutant(
        "state off by one",
        "policies/denoising/policy.py",
        "x = trajectory.latents[part.rows, part.actions].flatten(0, 1)",
        "x = trajectory.latents[part.rows, part.actions.start + 1 : part.actions.stop + 1].flatten(0, 1)",
        f"{CONTRACT}[dance-window-1.0]",
    ),
    Mutant(
        "guidance in the rollout only",
        "models/common/wrappers.py",
        ".chunk(2)\n        return self.combine(positive, negative, self.guidance_scale)",
        ".chunk(2)\n        return positive if torch.is_grad_enabled() else self.combine(positive, negative, self.guidance_scale)",
        f"{CONTRACT}[sde-all-3.0]",
    ),
    Mutant(
        "no gradient through the negative branch",
        "models/common/wrappers.py",
        ".chunk(2)\n        return self.combine(positive, negative, self.guidance_scale)",
        ".chunk(2)\n        return self.combine(positive, negative.detach(), self.guidance_scale)",
        "tests/models/common/test_guidance.py::test_both_branches_have_gradient",
    ),
    Mutant(
        "mask rows swapped against their texts",
        "types.py",
        "{name: tensor[rows] for name, tensor in self.tensors.items()}",
        '{name: tensor[rows].flip(0) if name == "mask" else tensor[rows] for name, tensor in self.tensors.items()}',
        "tests/policies/denoising/test_denoising.py::test_models_and_their_renderer_keep_the_contract[1.0-edit]",
    ),
    Mutant(
        "chunks share the first one's conditioning",
        "policies/denoising/trajectory.py",
        "[part.group + offset for part, offset in zip(parts, offsets, strict=True)]",
        "[part.group for part in parts]",
        "tests/training/test_loop.py::test_chunks_change_nothing_but_rounding[4]",
    ),
    Mutant(
        "the reference moves with the policy",
        "policies/weights.py",
        "dtype, copy=True)",
        "dtype)",
        f"{CONTRACT}[sde-all-1.0]",
    ),
    Mutant(
        "the KL compares the policy to itself",
        "policies/denoising/policy.py",
        'with torch.no_grad(), self.copies.using("reference"):',
        "with torch.no_grad():",
        "tests/policies/denoising/test_denoising.py::test_kl_is_its_formula[closed-sde]",
    ),
    Mutant(
        "KL over the spread instead of the variance",
        "core/divergences.py",
        "variance = step_std.float().square()",
        "variance = step_std.float()",
        "tests/policies/denoising/test_denoising.py::test_the_closed_kl_is_the_mean_log_ratio_of_what_the_policy_does",
    ),
    # Judging and comparing
    Mutant(
        "stale actions count fully",
        "training/loop.py",
        "advantages = advantages * collected.importance[rows]",
        "pass",
        "tests/training/test_staleness.py::test_the_gradient_of_a_stale_step_is_that_of_the_formula",
    ),
    Mutant(
        "the queue of a resumed run is sampled with the newest weights",
        "training/staleness.py",
        "nullcontext() if acting == step else copies.using(names[acting % staleness])",
        "nullcontext()",
        "tests/session/test_resume.py::test_killed_at_three_places_while_rollouts_are_ahead_of_learning",
    ),
    Mutant(
        "a missing score counts as zero",
        "training/loop.py",
        "rewards = gathered[:, 0]\n",
        "rewards = gathered[:, 0].nan_to_num(0.0)\n",
        "tests/training/test_loop.py::test_a_missing_score_is_as_if_the_row_were_not_there",
    ),
    Mutant(
        "a missing row keeps its weight",
        "core/weights.py",
        "counts = (mask & valid[:, None]).float()",
        "counts = mask.float()",
        "tests/training/test_loop.py::test_a_missing_score_is_as_if_the_row_were_not_there",
    ),
    Mutant(
        "a fault of the policy goes missing",
        "rewards/scoring.py",
        "torch.full((len(samples),), fault, dtype=torch.float32)",
        "torch.full((len(samples),), torch.nan, dtype=torch.float32)",
        "tests/rewards/test_judging.py::test_three_outcomes",
    ),
    Mutant(
        "eps added after the division",
        "core/advantages.py",
        "advantages = advantages / (_std(centred, count, index, ddof)[index] + eps)",
        "advantages = advantages / _std(centred, count, index, ddof)[index].clamp(min=1e-12) + eps",
        "tests/core/test_advantages.py::test_equal_rewards_give_exactly_zero",
    ),
    Mutant(
        "advantages of rank 0 for every rank",
        "training/loop.py",
        "phase.order.view(run.ranks.world, -1)[run.ranks.rank]",
        "phase.order.view(run.ranks.world, -1)[0]",
        "tests/training/test_loop.py::test_ranks_share_one_gradient[grpo-3]",
    ),
    # Learning
    Mutant(
        "normaliser per microbatch",
        "objectives/policy_gradient.py",
        "value = (weights * loss).sum()",
        "value = (weights * loss).sum() / weights.sum()",
        "tests/training/test_loop.py::test_microbatches_do_not_change_the_gradient[1]",
    ),
    Mutant(
        "normaliser per rank",
        "training/loop.py",
        "total = run.ranks.sum(denominator(mask, valid, normalise=phase.normalise, max_length=phase.max_length))",
        "total = denominator(mask, valid, normalise=phase.normalise, max_length=phase.max_length) * run.ranks.world",
        "tests/training/test_loop.py::test_ranks_share_one_gradient[grpo-3]",
    ),
    Mutant(
        "gradients averaged over ranks",
        "distributed/stepper.py",
        "self.ranks.sum(torch.cat([gradient.flatten() for gradient in gradients]))",
        "self.ranks.sum(torch.cat([gradient.flatten() for gradient in gradients])) / self.ranks.world",
        "tests/training/test_loop.py::test_ranks_share_one_gradient[nft-2]",
    ),
    Mutant(
        "clip sides swapped",
        "core/surrogates.py",
        ".clamp(torch.where(negative, log_low, -math.inf), torch.where(negative, ceiling, log_high))",
        ".clamp(torch.where(negative, -math.inf, log_low), torch.where(negative, log_high, ceiling))",
        "tests/objectives/test_policy_gradient.py::test_the_loss_and_its_gradient_are_those_by_hand[0-clip]",
    ),
    Mutant(
        "action mask of other rows",
        "objectives/policy_gradient.py",
        "mask = minibatch.trajectory.mask[part.rows, part.actions]",
        "mask = minibatch.trajectory.mask[part.rows, part.actions].flip(0)",
        "tests/objectives/test_policy_gradient.py::test_the_loss_and_its_gradient_are_those_by_hand[0-clip]",
    ),
    Mutant(
        "a bonus for entropy is a penalty",
        "objectives/policy_gradient.py",
        "loss = loss - self.entropy_bonus",
        "loss = loss + self.entropy_bonus",
        "tests/objectives/test_policy_gradient.py::test_the_entropy_is_subtracted_with_its_weight[clip]",
    ),
    Mutant(
        "the old policy follows from the first step",
        "objectives/nft.py",
        "self.rate * max(step - self.flat, 0)",
        "self.rate * step",
        "tests/objectives/test_nft.py::test_the_schedules_of_the_old_policy_are_those_of_the_published_code",
    ),
    Mutant(
        "RatioNorm around the new mean",
        "policies/denoising/policy.py",
        "ratio_norm(after, made.mean, means, step_std",
        "ratio_norm(after, made.mean, made.mean, step_std",
        "tests/objectives/test_policy_gradient.py::test_ratio_norm_takes_its_ratio_and_scale_from_the_stored_means",
    ),
    Mutant(
        "NFT pushes good pictures away",
        "objectives/nft.py",
        "goodness = (used / (2 * self.advantage_clip) + 0.5)",
        "goodness = (0.5 - used / (2 * self.advantage_clip))",
        "tests/objectives/test_nft.py::test_a_good_picture_is_approached_and_a_bad_one_left",
    ),
    Mutant(
        "the rejected image of a pair is preferred",
        "objectives/dpo.py",
        "margin = improvement[0::2] - improvement[1::2]",
        "margin = improvement[1::2] - improvement[0::2]",
        "tests/objectives/test_dpo.py::test_the_loss_of_pairs_of_the_data_is_the_published_one[4]",
    ),
    Mutant(
        "the two images of a pair get noise of their own",
        "objectives/dpo.py",
        "of_group = replace(batch, slot=(0,) * len(batch))",
        "of_group = batch",
        "tests/objectives/test_dpo.py::test_the_loss_of_pairs_of_the_data_is_the_published_one[4]",
    ),
    Mutant(
        "the old policy follows backwards",
        "policies/weights.py",
        "(averages, weights, 1.0 - decay)",
        "(averages, weights, decay)",
        "tests/objectives/test_nft.py::test_the_old_policy_follows_at_the_decay_of_its_step",
    ),
    Mutant(
        "optimizer steps counted from 0 in every step",
        "training/loop.py",
        "taken = (step - phase.steps.start) * phase.epochs * phase.minibatches",
        "taken = 0",
        "tests/training/test_loop.py::test_a_phase_goes_on_where_it_stopped",
    ),
    Mutant(
        "the same points in every epoch",
        "objectives/flow_matching.py",
        "batch.group_ids[group], slot, epoch, draw)",
        "batch.group_ids[group], slot, draw)",
        "tests/objectives/test_nft.py::test_draws_are_averaged_and_new_in_every_epoch",
    ),
    Mutant(
        "sigma not shifted where it is drawn",
        "objectives/flow_matching.py",
        "sigma = (shift * sigma / (1 + (shift - 1) * sigma)).clamp(1e-4, 1.0)",
        "sigma = sigma.clamp(1e-4, 1.0)",
        "tests/objectives/test_supervised.py::test_sigma_is_drawn_as_named",
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
    *PAINTING,
    *PLACING,
    *LEDGER,
    *REFERENCES,
    *FLUX,
    *FLUX2,
    *GRADIENTS,
    *Z_IMAGE,
    *QWEN_IMAGE_2,
    *CONSENT,
    *VOTING,
)
