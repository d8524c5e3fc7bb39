"""Deliberate bugs in the rollout engines."""

from mutant import Mutant

ENGINE = "tests/policies/engines/test_vllm_engine.py"
PLUGIN = "tests/policies/engines/test_vllm_plugin.py"
FULL = "tests/policies/engines/test_full_weights.py"
MISMATCH = "tests/policies/autoregressive/test_mismatch.py"

ENGINES = (
    Mutant(
        "the adapter is loaded once",
        "policies/engines/publishing.py",
        "        if name != self._loaded:",
        "        if self._loaded is None:",
        f"{ENGINE}::test_every_update_is_loaded_before_the_next_rollout",
    ),
    Mutant(
        "adapters are called by their names alone",
        "policies/engines/publishing.py",
        "        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())\n",
        "",
        f"{ENGINE}::test_every_update_is_loaded_before_the_next_rollout",
    ),
    Mutant(
        "old adapters stay",
        "policies/engines/publishing.py",
        "                self.unload(client, self._loaded)\n",
        "",
        f"{ENGINE}::test_every_update_is_loaded_before_the_next_rollout",
    ),
    Mutant(
        "the base writes",
        "policies/engines/wire.py",
        '"model": self.weights.model,',
        '"model": None,',
        f"{ENGINE}::test_the_server_writes_from_the_policys_distribution[qwen2.5]",
    ),
    Mutant(
        "what the server read is not compared",
        "policies/engines/wire.py",
        "if tuple(response.prompt_token_ids) != request.ids:",
        "if len(response.prompt_token_ids) < len(request.ids) - 1:",
        f"{ENGINE}::test_an_answer_that_is_wrong_somewhere_is_not_believed[another prompt]",
    ),
    Mutant(
        "completions in any order",
        "policies/engines/wire.py",
        "if len(response.choices) != request.count or choices.keys() != set(range(request.count)):",
        "if len(response.choices) != request.count:",
        f"{ENGINE}::test_an_answer_that_is_wrong_somewhere_is_not_believed[a completion twice]",
    ),
    Mutant(
        "no tokens are banned",
        "policies/engines/wire.py",
        "{str(token): BAN for token in sorted(self.banned)}",
        "{}",
        f"{ENGINE}::test_forbidden_tokens_are_told_to_the_server",
    ),
    Mutant(
        "seeds by place in the batch",
        "policies/engines/vllm_decoding.py",
        'group_seed(batch, batch.group_ids[rows.task], "vllm") + rows.slot',
        'group_seed(batch, rows.task, "vllm") + rows.slot',
        f"{ENGINE}::test_rows_have_seeds_by_group_and_slot",
    ),
    Mutant(
        "the first slot's seed for all requests of a group",
        "policies/engines/vllm_decoding.py",
        'batch.group_ids[rows.task], "vllm") + rows.slot',
        'batch.group_ids[rows.task], "vllm")',
        f"{ENGINE}::test_rows_have_seeds_by_group_and_slot",
    ),
    Mutant(
        "a rank fails alone",
        "policies/engines/vllm_decoding.py",
        "        if self._any_rank(fault is not None):",
        "        self._any_rank(False)\n        if fault is not None:",
        f"{ENGINE}::test_ranks_fail_together",
    ),
    Mutant(
        "no number is agreement",
        "policies/autoregressive/mismatch.py",
        "not mean <= limit",
        "mean > limit",
        f"{MISMATCH}::test_no_number_is_no_agreement",
    ),
    Mutant(
        "theirs over ours",
        "core/surrogates.py",
        "return (current - acting).masked_fill(~mask, 0.0).exp()",
        "return (acting - current).masked_fill(~mask, 0.0).exp()",
        f"{MISMATCH}::test_the_weights_make_an_average_under_theirs_one_under_ours",
    ),
    Mutant(
        "the engine's numbers become the ratio's",
        "policies/autoregressive/policy.py",
        "return replace(trajectory, log_probs=log_probs, behaviour_log_probs=engine_log_probs)",
        "return replace(trajectory, behaviour_log_probs=engine_log_probs)",
        f"{MISMATCH}::test_the_gradient_is_weighted_and_the_ratio_is_not",
    ),
    Mutant(
        "tokens of another engine weigh as much as our own",
        "policies/autoregressive/policy.py",
        "entropy=entropy, scale=scale)",
        "entropy=entropy, scale=None)",
        f"{MISMATCH}::test_the_gradient_is_weighted_and_the_ratio_is_not",
    ),
    Mutant(
        "what the last request in a slot told holds for the next",
        "policies/engines/plugin.py",
        "            self._by_slot.pop(req_idx, None)\n",
        "",
        f"{PLUGIN}::test_requests_without_a_grammar_are_left_as_they_are_also_in_a_slot_that_had_one",
    ),
    Mutant(
        "the grammar is not held against what comes back",
        "policies/engines/vllm_decoding.py",
        "            self._check(batch, prompts, generation)\n",
        "",
        f"{ENGINE}::test_a_server_without_the_plug_in_is_not_believed",
    ),
    Mutant(
        "a step of nothing but parts of prompts has no column",
        "policies/engines/plugin.py",
        "after = max(first + 1, int(ctx.seq_lens_upper_bound_np[rows].max()))",
        "after = int(ctx.seq_lens_upper_bound_np[rows].max())",
        f"{PLUGIN}::test_a_step_of_nothing_but_the_beginnings_of_prompts",
    ),
    Mutant(
        "raw log-probabilities are taken for those of sampling",
        "policies/engines/vllm_decoding.py",
        "        if not found.processed:",
        "        if False:",
        f"{ENGINE}::test_raw_log_probabilities_are_noticed_at_temperature_1",
    ),
    Mutant(
        "a part of a group begins with the group's seed",
        "policies/engines/wire.py",
        "seed=self.seed + start",
        "seed=self.seed",
        f"{ENGINE}::test_more_rows_than_the_server_takes_at_once_come_in_several_requests",
    ),
    Mutant(
        "images are sent as they are",
        "models/qwen_vl/model.py",
        "return [self.template.resized(image) for image in fitted]",
        "return list(fitted)",
        f"{ENGINE}::test_images_are_sent_at_their_final_size",
    ),
    Mutant(
        "the version of the weights is not compared",
        "policies/engines/wire.py",
        "    if {span.version for span in choice.weight_versions} != {version}:",
        "    if False:",
        f"{FULL}::test_a_restarted_server_gets_the_weights_again",
    ),
    Mutant(
        "a reload that failed keeps the version before",
        "policies/engines/full_weights.py",
        '            client.post(SET_VERSION, {"new_version": f"loading-{name}"})\n',
        "",
        f"{FULL}::test_a_reload_that_fails_leaves_no_version_that_is_asked_for",
    ),
    Mutant(
        "the prefix cache keeps what other weights computed",
        "policies/engines/full_weights.py",
        'if _field(client.post(RESET, {}), "success") is not True:',
        "if False:",
        f"{FULL}::test_a_prefix_cache_of_old_weights_stops_the_run",
    ),
)
