"""Deliberate bugs in on-policy distillation."""

from mutant import Mutant

_TESTS = "tests/objectives/test_distillation.py"
_CHAIN = f"{_TESTS}::test_deterministic_chains_match_the_velocity_of_a_teacher_that_edits_step_by_step[edit]"

DISTILLATION = (
    Mutant(
        "the teacher has the current weights",
        "policies/denoising.py",
        "with self.copies.model_with(lesson.weights, self._plain) as plain:",
        "with nullcontext(self._plain) as plain:",
        _CHAIN,
    ),
    Mutant(
        "the teacher edits the source again, not the image of the edit before",
        "objectives/distillation.py",
        "asked[row] = asked[row].of_image(image)",
        "pass",
        _CHAIN,
    ),
    Mutant(
        "the teacher sees the inputs of another task",
        "policies/denoising.py",
        "lesson.inputs.take(places[rows])",
        "lesson.inputs.take(places[rows] * 0)",
        _CHAIN,
    ),
    Mutant(
        "the teacher has the guidance of the policy",
        "policies/denoising.py",
        "model = self._guided(lesson.guidance_scale, plain)\n",
        "model = self.model\n",
        f"{_TESTS}::test_stochastic_chains_match_the_gaussian_step_of_a_guided_teacher[cps]",
    ),
    Mutant(
        "the targets of the tasks are imitated, not the images of the teacher",
        "objectives/imitation.py",
        "task.with_target(image or found[0])",
        "task",
        f"{_TESTS}::test_the_images_of_a_teacher_are_imitated_and_a_task_without_one_learns_nothing",
    ),
    Mutant(
        "a task without an image of its teacher learns its source",
        "objectives/imitation.py",
        "trajectory.mask & made[:, None]",
        "trajectory.mask",
        f"{_TESTS}::test_the_images_of_a_teacher_are_imitated_and_a_task_without_one_learns_nothing",
    ),
    Mutant(
        "a larger teacher is the policy itself",
        "policies/weights.py",
        "            yield model\n",
        "            yield own\n",
        f"{_TESTS}::test_a_larger_model_teaches_with_its_own_denoiser_and_resumes_to_the_same_bits",
    ),
    Mutant(
        "a larger teacher reads the images with the policy's vision tower",
        "policies/autoregressive.py",
        "prompts: Prompts = model.encode(tasks)",
        "prompts: Prompts = self.model.encode(tasks)",
        f"{_TESTS}::test_tokens_match_the_kl_to_a_teacher_with_a_better_prompt[forward-True]",
    ),
    Mutant(
        "another image tokenizer is not noticed",
        "models/offloading.py",
        "for ids in allowed], frozen_hashes(others)",
        "for ids in allowed], None",
        f"{_TESTS}::test_a_larger_model_of_image_tokens_teaches_and_resumes_to_the_same_bits",
    ),
    Mutant(
        "an action learns the velocity of another step",
        "policies/denoising.py",
        "part.actions.start + rows % len(index)] = velocity",
        "part.actions.start] = velocity",
        _CHAIN,
    ),
    Mutant(
        "another autoencoder is not noticed",
        "models/offloading.py",
        'for file in sorted(folder.glob("*/config.json")):\n        part',
        'for file in sorted(folder.glob("transformer/config.json")):\n        part',
        f"{_TESTS}::test_a_model_that_cannot_teach_the_policy_is_refused",
    ),
    Mutant(
        "a row without a teacher of its own learns from the first one",
        "objectives/distillation.py",
        "if theirs == name]",
        "]",
        f"{_TESTS}::test_each_task_learns_from_the_teacher_that_its_tag_names",
    ),
    Mutant(
        "the teacher of tokens reads the policy's prompt",
        "policies/autoregressive.py",
        "theirs = replace(trajectory.take(chosen + part.rows.start), prompts=lesson.inputs, group=places[chosen])",
        "theirs = trajectory.take(chosen + part.rows.start)",
        f"{_TESTS}::test_tokens_match_the_kl_to_a_teacher_with_a_better_prompt[forward-False]",
    ),
    Mutant(
        "a teacher keeps the weights of this run",
        "run/checkpoint.py",
        'copies.load({**copies.state(), **{f"{copy}/{name}": tensor for name, tensor in found.items()}})',
        "pass",
        f"{_TESTS}::test_a_student_comes_closer_to_a_teacher_from_another_run_and_resumes_to_the_same_bits",
    ),
)
