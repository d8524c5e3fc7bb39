"""Deliberate bugs in the playground's text-to-image scenes (paintings): their tasks, their judge, and inference with them."""

from mutant import Mutant

JUDGE = "tests/rewards/playground/test_painting_judge.py"
TASKS = "tests/data/playground/test_paintings.py"
USING = "tests/inference/test_using_writers.py"

PAINTING = (
    Mutant(
        "things too many cost nothing",
        "rewards/playground/painting_judge.py",
        "(wanted.sum(-1) + extra)",
        "wanted.sum(-1)",
        f"{JUDGE}::test_what_is_missing_wrong_or_too_much_costs_what_it_should",
    ),
    Mutant(
        "a thing is looked for on the background that was asked for",
        "rewards/playground/painting_judge.py",
        "CELL_TEMPLATES[seen.backgrounds[:, None], requested]",
        "CELL_TEMPLATES[background[:, None], requested]",
        f"{JUDGE}::test_what_is_missing_wrong_or_too_much_costs_what_it_should",
    ),
    Mutant(
        "incomplete completions are drawn in the request's stead",
        "data/playground/paintings.py",
        "else request(scene.background, things, random)",
        "else request(scene.background, named, random)",
        f"{TASKS}::test_lazy_completions_stop_early_and_change_nothing_else",
    ),
    Mutant(
        "held-out completions are incomplete",
        "data/playground/paintings.py",
        'demonstration_faults = ("incomplete",)',
        "demonstration_faults = ()",
        "tests/recipe/test_recipe_of_writers.py::test_held_out_paintings_bring_whole_completions",
    ),
    Mutant(
        "a blind renderer hears what was written",
        "renderers/wrappers.py",
        "ids=(), text=task.instruction, truncated=False",
        "ids=(), truncated=False",
        "tests/renderers/test_blind.py::test_only_the_keys_of_the_noise_and_the_tasks_own_words_come_through",
    ),
    Mutant(
        "falling back is not told",
        "inference/sampling.py",
        "texts[row], row in failed)",
        "texts[row], False)",
        f"{USING}::test_what_cannot_be_drawn_falls_back_to_the_instruction_and_is_counted",
    ),
    Mutant(
        "a writer opens without its average",
        "inference/opening.py",
        "copies.snapshot(name)",
        "copies.snapshot('reference')",
        f"{USING}::test_a_trained_writer_is_opened_with_what_it_has_learnt",
    ),
    Mutant(
        "all lines of a list start from one noise",
        "inference/sampling.py",
        "group_ids=tuple(ids[row] for row in rows)",
        "group_ids=(0,) * len(rows)",
        f"{USING}::test_lines_of_a_list_start_from_noise_of_their_own",
    ),
)
