"""Deliberate bugs in the objectives that differentiate a reward (DRaFT, ReFL), and in the loss weights of denoising steps."""

from mutant import Mutant

_TESTS = "tests/objectives/test_reward_gradient.py"

GRADIENTS = (
    Mutant(
        "the loss has the wrong sign, so the reward falls",
        "objectives/reward_gradient.py",
        "value = -(weights * used).sum()",
        "value = (weights * used).sum()",
        f"{_TESTS}::test_draft_gradient_equals_backpropagation_through_the_last_steps_of_the_chain[3-sd3]",
    ),
    Mutant(
        "the gradient is cut between denoising steps",
        "policies/denoising.py",
        "velocity = self.model.velocity(self.module, x, sigma.expand(len(x)), conditioning)",
        "x = x.detach()\n            velocity = self.model.velocity(self.module, x, sigma.expand(len(x)), conditioning)",
        f"{_TESTS}::test_image_gradient_passes_gradcheck_in_fp64[False]",
    ),
    Mutant(
        "the predicted image is one Euler step away instead of at sigma 0",
        "policies/denoising.py",
        "sigmas = sigmas[[0, -1]]",
        "sigmas = sigmas[:2]",
        f"{_TESTS}::test_refl_scores_the_clean_image_that_the_model_predicts",
    ),
    Mutant(
        "the first state with gradient is kept one step too late",
        "objectives/reward_gradient.py",
        "return num_steps - self.steps",
        "return min(num_steps - self.steps + 1, num_steps - 1)",
        f"{_TESTS}::test_draft_gradient_equals_backpropagation_through_the_last_steps_of_the_chain[3-sd3]",
    ),
    Mutant(
        "each rank draws its own gradient step",
        "objectives/reward_gradient.py",
        'generator=generator(seed, "refl", step)',
        "generator=None",
        f"{_TESTS}::test_refl_draws_its_gradient_step_deterministically_from_seed_and_training_step",
    ),
    Mutant(
        "noise weights of denoising steps do not have a mean of 1",
        "policies/rollout.py",
        "return made.step_std / made.step_std.mean()",
        "return made.step_std",
        "tests/objectives/test_policy_gradient.py::test_noise_step_weights_multiply_the_loss_of_each_denoising_step[branch]",
    ),
    Mutant(
        "differentiable rewards are added without their weights",
        "rewards/combination.py",
        "scores = [weight * rewards[name]",
        "scores = [rewards[name]",
        "tests/objectives/test_reward_gradient.py::test_several_rewards_give_their_weighted_sum_and_pass_gradcheck",
    ),
    Mutant(
        "image tensors are cropped at the corner instead of the center",
        "retouch_rewards/networks.py",
        "images = images[..., top : top + crop[0], left : left + crop[1]]",
        "images = images[..., : crop[0], : crop[1]]",
        "tests/rewards/scorers/test_encoders.py::test_tensor_preprocessing_differs_from_the_processor_by_at_most_two_levels[clip-True]",
    ),
)
