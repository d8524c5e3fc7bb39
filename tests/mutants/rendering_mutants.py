"""Deliberate bugs in the renderers that make images from completions."""

from mutant import Mutant

READING = "tests/models/qwen_image/test_qwen_image.py"
DRAWING = "tests/renderers/test_response_renderer.py"
PROMPTS = "tests/renderers/test_prompt_renderer.py"
TEXT_TO_IMAGE = "tests/run/test_writer_and_image_model.py"

RENDERING = (
    Mutant(
        "a closing token is appended to an empty response",
        "retouch_models/qwen_image/responses.py",
        "[[*response, self._closing]] if len(response) else [[]]",
        "[[*response, self._closing]]",
        f"{READING}::test_empty_response_gives_embeddings_bitwise_equal_to_the_pipeline",
    ),
    Mutant(
        "no closing token is appended to a response",
        "retouch_models/qwen_image/responses.py",
        "[[*response, self._closing]]",
        "[[*response]]",
        f"{READING}::test_response_ids_are_appended_to_the_prompt_without_retokenisation",
    ),
    Mutant(
        "the negative branch is encoded with the policy's current weights",
        "retouch_models/qwen_image/responses.py",
        "with self.encoder.published():",
        "if True:",
        f"{READING}::test_encoding_uses_current_policy_weights_and_the_negative_does_not",
    ),
    Mutant(
        "dropout is active while the policy encodes responses",
        "retouch_models/qwen_image/responses.py",
        "with self.encoder.reading(), evaluating(self.encoder.module):",
        "with self.encoder.reading(), torch.no_grad():",
        f"{DRAWING}::test_dropout_is_off_while_the_policy_reads",
    ),
    Mutant(
        "image tokens are accepted in a response",
        "retouch_models/qwen_image/responses.py",
        "and k not in self._image_ids",
        "",
        f"{READING}::test_accepts_rejects_long_responses_and_invalid_tokens",
    ),
    Mutant(
        "the encoder skips rows that have no usable response",
        "retouch_models/responses.py",
        "by_length(range(len(tasks)), length",
        "by_length([row for row in range(len(tasks)) if responses[row]], length",
        f"{DRAWING}::test_ranks_call_the_encoder_equally_often",
    ),
    Mutant(
        "the negative branch of a sharded encoder is cached",
        "retouch_models/responses.py",
        "if self.sampler.guided and not self.sharded:",
        "if self.sampler.guided:",
        f"{DRAWING}::test_ranks_call_the_encoder_equally_often[4.0]",
    ),
    Mutant(
        "shared noise differs between the rows of a group",
        "renderers/base.py",
        'return [generator(seed, "noise", step, group) for seed, step, group, _ in keys]',
        'return [generator(seed, "noise", step, group, slot) for seed, step, group, slot in keys]',
        f"{DRAWING}::test_noise_is_shared_within_a_group_and_differs_between_groups_and_steps",
    ),
    Mutant(
        "a truncated completion is rendered although cut_off is fault",
        "renderers/prompts.py",
        'elif completion.truncated and self.cut_off == "fault":',
        "elif False:",
        f"{PROMPTS}::test_cut_off_completions_are_rendered_with_draw_and_none_with_fault",
    ),
    Mutant(
        "the image is made from the task's own prompt",
        "renderers/prompts.py",
        "return replace(task, instruction=prompt, images=images) if prompt",
        "return replace(task, images=images) if prompt",
        f"{PROMPTS}::test_images_match_those_of_the_diffusers_pipeline",
    ),
    Mutant(
        "all tasks of an editor share the negative branch of the first one",
        "renderers/prompts.py",
        "negative=model.encode_negative(tasks))",
        "negative=model.encode_negative(tasks[:1] * len(tasks)))",
        f"{PROMPTS}::test_an_editor_edits_the_source_image_of_the_task_as_the_prompt_says",
    ),
    Mutant(
        "an unclosed thought in a completion is used as its answer",
        "core/answers.py",
        "if _THINKS.search(text):",
        "if not text:",
        "tests/renderers/test_prompt_renderer.py::test_completions_without_a_prompt_give_none",
    ),
    Mutant(
        "the image model trains on an image of another prompt than the completion's",
        "run/painting.py",
        "made.mask & usable[:, None]",
        "made.mask",
        f"{TEXT_TO_IMAGE}::test_the_text_to_image_is_not_blamed_for_a_completion_without_a_prompt",
    ),
    Mutant(
        "the image model's noise is keyed by the row of a chunk",
        "run/painting.py",
        "group_ids=tuple(batch.group_ids[k] for k in batch.group),  # these",
        "group_ids=tuple(range(len(batch))),  # these",
        f"{TEXT_TO_IMAGE}::test_the_text_to_image_is_not_blamed_for_a_completion_without_a_prompt",
    ),
    Mutant(
        "the writer trains when it is the image model's turn",
        "run/step.py",
        "        if phase.trains(step):",
        "        if True:",
        f"{TEXT_TO_IMAGE}::test_in_turn_only_the_one_whose_turn_it_is_changes",
    ),
    Mutant(
        "the image model does not resume from the checkpoint",
        "run/checkpoint.py",
        'for own, start in ((copies, ""), (painted, TEXT_TO_IMAGE)):',
        'for own, start in ((copies, ""),):',
        f"{TEXT_TO_IMAGE}::test_it_resumes_to_the_same_bits",
    ),
)
