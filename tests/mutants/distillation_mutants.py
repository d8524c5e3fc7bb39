"""Deliberate bugs in on-policy distillation."""

from mutant import Mutant

_TESTS = "tests/objectives/test_distillation.py"
_CHAIN = f"{_TESTS}::test_deterministic_chains_match_the_velocity_of_a_teacher_that_edits_step_by_step[edit]"

DISTILLATION = (
    Mutant(
        "the teacher has the current weights",
        "policies/denoising.py",
        "with torch.no_grad(), self.copies.using(lesson.weights):\n                    taught[rows] = model.velocity",
        "with torch.no_grad():\n                    taught[rows] = model.velocity",
        _CHAIN,
    ),
    Mutant(
        "the teacher edits the source again, not the image of the edit before",
        "objectives/distillation.py",
        "asked[row] = replace(asked[row], images=(image, *asked[row].images[1:]))",
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
        "model, inputs = self._guided(lesson.guidance_scale), lesson",
        "model, inputs = self.model, lesson",
        f"{_TESTS}::test_stochastic_chains_match_the_gaussian_step_of_a_guided_teacher[cps]",
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
        f"{_TESTS}::test_tokens_match_the_kl_to_a_teacher_with_a_better_prompt[forward]",
    ),
    Mutant(
        "a teacher keeps the weights of this run",
        "run/checkpoint.py",
        'copies.load({**copies.state(), **{f"{copy}/{name}": tensor for name, tensor in found.items()}})',
        "pass",
        f"{_TESTS}::test_a_student_comes_closer_to_a_teacher_from_another_run_and_resumes_to_the_same_bits",
    ),
)
