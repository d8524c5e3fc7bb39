"""Deliberate bugs in the integration with TRL, the preallocated cache, and the handling of out-of-memory errors."""

from mutant import Mutant

BRIDGE = "tests/integrations/test_trl.py"
CACHE = "tests/models/qwen_vl/test_qwen_writer.py"
MEMORY = "tests/recipe/test_out_of_memory.py"

BRIDGING = (
    Mutant(
        "TRL receives 0 for a missing score",
        "integrations/trl.py",
        "[None if reward != reward else reward for",
        "[0.0 if reward != reward else reward for",
        f"{BRIDGE}::test_a_reward_is_a_value_the_minimum_for_faults_or_none_for_missing_scores",
    ),
    Mutant(
        "the stop token is part of the rendered completion",
        "integrations/trl.py",
        "tuple(ids[:-1] if ended else ids)",
        "tuple(ids)",
        f"{BRIDGE}::test_images_are_rendered_from_completion_ids_and_not_from_text",
    ),
    Mutant(
        "a completion is cut at its first stop token, even if it continues",
        "integrations/trl.py",
        "tokens = tuple(ids[:-1] if ended else ids)",
        "ends = [place for place, k in enumerate(ids) if k in self.writer.stop]\n"
        "            tokens = tuple(ids[: ends[0]] if ends else ids)",
        f"{BRIDGE}::test_only_one_final_end_token_is_removed_from_a_completion",
    ),
    Mutant(
        "the noise is the same in every step of TRL's trainer",
        "integrations/trl.py",
        "key = (self.seed, step, ",
        "key = (self.seed, 0, ",
        f"{BRIDGE}::test_noise_is_keyed_by_seed_step_and_task",
    ),
    Mutant(
        "task numbers come from hash(), which differs between TRL's ranks",
        "integrations/trl.py",
        'int.from_bytes(hashlib.sha256(task.id.encode()).digest()[:7], "big")',
        "abs(hash(task.id))",
        f"{BRIDGE}::test_noise_is_keyed_by_seed_step_and_task",
    ),
    Mutant(
        "each of TRL's ranks numbers its rows from 0",
        "integrations/trl.py",
        "ranks.rank * len(completion_ids) + row",
        "row",
        f"{BRIDGE}::test_two_ranks_share_group_keys_have_distinct_slots_and_raise_together",
    ),
    Mutant(
        "each of TRL's ranks decides alone whether too many scores are missing",
        "integrations/trl.py",
        "ranks.sum(torch.tensor([float(missing.sum()), float(len(missing))])).tolist()",
        "(float(missing.sum()), float(len(missing)))",
        f"{BRIDGE}::test_two_ranks_share_group_keys_have_distinct_slots_and_raise_together",
    ),
    Mutant(
        "the rows of a task do not share one task object",
        "integrations/trl.py",
        "tasks.append(known.setdefault(task.id, task))",
        "tasks.append(task)",
        f"{BRIDGE}::test_rows_of_a_group_share_one_task",
    ),
    Mutant(
        "TRL shows the writer source images at their original size",
        "integrations/trl.py",
        "image.resize(fit(image, self.area)[::-1], Resampling.LANCZOS) for",
        "image for",
        f"{BRIDGE}::test_the_processor_encodes_prompts_and_images_like_the_writer",
    ),
    Mutant(
        "token types are padded on the right, and token ids on the left",
        "integrations/trl.py",
        'tokenizer.padding_side = "left"',
        'tokenizer.padding_side = "right"',
        f"{BRIDGE}::test_the_processor_pads_on_the_left",
    ),
    Mutant(
        "the text of a prompt template is executed as Jinja",
        "integrations/trl.py",
        "{{{{ {literal(template.head)} }}}}",
        "{template.head}",
        f"{BRIDGE}::test_jinja_syntax_in_a_template_or_prompt_is_not_evaluated",
    ),
    Mutant(
        "the preallocated cache keeps its buffers after rows are selected",
        "retouch_models/causal.py",
        "        super().batch_select_indices(indices)\n        self._buffers = None",
        "        super().batch_select_indices(indices)",
        f"{CACHE}::test_selected_rows_do_not_share_memory",
    ),
    Mutant(
        "the preallocated cache is written in place although gradients are enabled",
        "retouch_models/causal.py",
        "if torch.is_grad_enabled() or length == 0:",
        "if length == 0:",
        f"{CACHE}::test_appending_with_gradients_enabled_keeps_earlier_gradients_correct",
    ),
    Mutant(
        "the clock does not record the current stage for out-of-memory errors",
        "run/metrics.py",
        "self.stage, events = stage, None",
        "events = None",
        f"{MEMORY}::test_the_clock_keeps_the_stage_that_raised",
    ),
    Mutant(
        "memory settings cannot be changed when a run is resumed",
        "recipe/derived_facts.py",
        ' or re.sub(r"^phases\\.\\d+\\.", "", key) in MEMORY_KEYS',
        "",
        f"{MEMORY}::test_a_run_that_ran_out_of_memory_resumes_with_the_suggested_changes",
    ),
)
