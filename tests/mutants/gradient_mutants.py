"""Deliberate bugs in the objectives that follow the gradient of a reward, and in the weights of denoising steps."""

from mutant import Mutant

_TESTS = "tests/objectives/test_reward_gradient.py"

GRADIENTS = (
    Mutant(
        "the reward is lowered",
        "objectives/reward_gradient.py",
        "value = -(weights * used).sum()",
        "value = (weights * used).sum()",
        f"{_TESTS}::test_a_step_brings_images_nearer_to_their_targets[draft]",
    ),
    Mutant(
        "the state between two steps with gradient is a constant",
        "policies/denoising/backpropagation.py",
        "velocity = model.velocity(module, x, sigma.expand(len(x)), conditioning)",
        "x = x.detach()\n        velocity = model.velocity(module, x, sigma.expand(len(x)), conditioning)",
        f"{_TESTS}::test_the_gradient_in_fp64[False]",
    ),
    Mutant(
        "the predicted image is one Euler step away",
        "policies/denoising/backpropagation.py",
        "sigmas = sigmas[[0, -1]]",
        "sigmas = sigmas[:2]",
        f"{_TESTS}::test_refl_scores_the_clean_image_that_the_model_predicts",
    ),
    Mutant(
        "the state is kept one step late",
        "objectives/reward_gradient.py",
        "return num_steps - self.steps",
        "return min(num_steps - self.steps + 1, num_steps - 1)",
        f"{_TESTS}::test_the_gradient_is_that_of_the_whole_chain_with_a_constant_beginning[3-sd3]",
    ),
    Mutant(
        "ranks draw steps of their own",
        "objectives/reward_gradient.py",
        'generator=generator(seed, "refl", step)',
        "generator=None",
        f"{_TESTS}::test_refl_draws_one_step_for_all_ranks_and_another_in_the_next_training_step",
    ),
    Mutant(
        "weights by noise change the size of the loss",
        "policies/denoising/transitions.py",
        "return made.step_std / made.step_std.mean()",
        "return made.step_std",
        "tests/objectives/test_policy_gradient.py::test_weights_by_noise_multiply_the_loss_of_each_step[branch]",
    ),
    Mutant(
        "several differentiated rewards are added without their weights",
        "rewards/combine/gradients.py",
        "scores = [weight * rewards[name]",
        "scores = [rewards[name]",
        "tests/objectives/test_reward_gradient.py::test_several_rewards_are_their_weighted_sum_with_its_gradient",
    ),
    Mutant(
        "tensors are cropped at the corner",
        "rewards/scorers/dual_encoder.py",
        "images = images[..., top : top + crop[0], left : left + crop[1]]",
        "images = images[..., : crop[0], : crop[1]]",
        "tests/rewards/scorers/test_gradients.py::test_the_preprocessing_differs_by_two_levels_at_most[clip-True]",
    ),
)
