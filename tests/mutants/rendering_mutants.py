"""Deliberate bugs in the renderers that read the completions of writers."""

from mutant import Mutant

READING = "tests/models/qwen_image/test_qwen_responses.py"
DRAWING = "tests/renderers/test_response_renderer.py"
PROMPTS = "tests/renderers/test_prompt_renderer.py"

RENDERING = (
    Mutant(
        "an empty response closes its turn",
        "models/qwen_image/responses.py",
        "[[*response, closing]] if len(response) else [[]]",
        "[[*response, closing]]",
        f"{READING}::test_an_empty_response_gives_the_pipelines_bits",
    ),
    Mutant(
        "a response leaves its turn open",
        "models/qwen_image/responses.py",
        "[[*response, closing]]",
        "[[*response]]",
        f"{READING}::test_a_response_stands_in_the_open_turn_as_it_was_sampled",
    ),
    Mutant(
        "the negative branch is read by the policy as it is now",
        "models/qwen_image/responses.py",
        "with self.encoder.published():",
        "if True:",
        f"{READING}::test_the_policys_encoder_moves_with_it_and_its_negative_does_not",
    ),
    Mutant(
        "the policy reads with its dropout on",
        "models/qwen_image/responses.py",
        "with self.encoder.reading(), evaluating(self.encoder.module):",
        "with self.encoder.reading(), torch.no_grad():",
        f"{DRAWING}::test_dropout_is_off_while_the_policy_reads",
    ),
    Mutant(
        "a token for a picture may stand in a response",
        "models/qwen_image/responses.py",
        "and k not in self._image_ids",
        "",
        f"{READING}::test_what_cannot_be_read",
    ),
    Mutant(
        "the encoder is spared rows that are not drawn",
        "renderers/responses.py",
        "by_length(range(len(tasks)), length",
        "by_length([row for row in range(len(tasks)) if responses[row]], length",
        f"{DRAWING}::test_ranks_call_the_encoder_equally_often",
    ),
    Mutant(
        "a sharded negative is remembered",
        "renderers/responses.py",
        "if self.sampler.guided and not self.sharded:",
        "if self.sampler.guided:",
        f"{DRAWING}::test_ranks_call_the_encoder_equally_often[4.0]",
    ),
    Mutant(
        "a group does not start alike",
        "renderers/sampling.py",
        'return [generator(seed, "noise", step, group) for seed, step, group, _ in keys]',
        'return [generator(seed, "noise", step, group, slot) for seed, step, group, slot in keys]',
        f"{DRAWING}::test_a_group_starts_alike_and_steps_do_not",
    ),
    Mutant(
        "a cut-off completion is always drawn",
        "renderers/prompts.py",
        'None if completion.truncated and config.cut_off == "fault" else _prompt_in(completion)',
        "_prompt_in(completion)",
        f"{PROMPTS}::test_cut_off_is_a_fault_where_the_recipe_says_so",
    ),
    Mutant(
        "the task's own prompt is drawn",
        "renderers/prompts.py",
        "enhanced[row] = replace(task, instruction=prompt, images=())",
        "enhanced[row] = replace(task, images=())",
        f"{PROMPTS}::test_the_pictures_are_the_pipelines",
    ),
    Mutant(
        "a thought without an end is an answer",
        "core/answers.py",
        "if _THINKS.search(text):",
        "if not text:",
        "tests/renderers/test_answers.py::test_where_there_is_none",
    ),
)
