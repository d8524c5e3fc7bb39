"""Deliberate bugs in the playground's text-to-image scenes: their tasks, their judge, and inference with writers."""

from mutant import Mutant

JUDGE = "tests/rewards/playground/test_scene_judge.py"
TASKS = "tests/data/playground/test_text_to_image.py"
USING = "tests/inference/test_writers.py"

TEXT_TO_IMAGE = (
    Mutant(
        "extra objects in a scene cost nothing",
        "retouch_worlds/measuring.py",
        "(wanted.sum(-1) + extra)",
        "wanted.sum(-1)",
        f"{JUDGE}::test_missing_wrong_and_extra_things_lower_alignment_by_the_formula",
    ),
    Mutant(
        "objects are compared with templates on the requested instead of the actual background",
        "retouch_worlds/measuring.py",
        "CELL_TEMPLATES[seen.backgrounds[:, None], requested]",
        "CELL_TEMPLATES[background[:, None], requested]",
        f"{JUDGE}::test_missing_wrong_and_extra_things_lower_alignment_by_the_formula",
    ),
    Mutant(
        "the request names only the objects of an incomplete completion",
        "retouch_worlds/data.py",
        "else request(scene.background, things, random)",
        "else request(scene.background, named, random)",
        f"{TASKS}::test_incomplete_completions_are_truncated_and_nothing_else_changes",
    ),
    Mutant(
        "completions of held-out scenes are incomplete",
        "retouch_worlds/data.py",
        'demonstration_faults = ("incomplete",)',
        "demonstration_faults = ()",
        "tests/recipe/test_recipe_of_writers.py::test_held_out_tasks_of_playground_scenes_have_no_incomplete_completions",
    ),
    Mutant(
        "a renderer that ignores completions still receives their text",
        "renderers/base.py",
        "ids=(), text=task.instruction, truncated=False",
        "ids=(), truncated=False",
        "tests/renderers/test_prompt_renderer.py::test_ignore_completions_passes_only_noise_keys_and_instructions_to_the_renderer",
    ),
    Mutant(
        "a sample that fell back to the instruction is not reported",
        "inference/sampling.py",
        "texts[row], row in failed)",
        "texts[row], False)",
        f"{USING}::test_faulty_completions_fall_back_to_the_instruction_and_are_counted",
    ),
    Mutant(
        "a writer is opened without the weight copies of its checkpoint",
        "inference/opening.py",
        "copies.snapshot(name)",
        "copies.snapshot('reference')",
        f"{USING}::test_open_writer_loads_the_trained_weights_of_a_run",
    ),
    Mutant(
        "all prompts of a list start from the same noise",
        "inference/sampling.py",
        "group_ids=tuple(ids[row] for row in rows)",
        "group_ids=(0,) * len(rows)",
        f"{USING}::test_equal_lines_of_a_list_start_from_different_noise",
    ),
)
