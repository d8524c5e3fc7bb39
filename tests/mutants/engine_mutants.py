"""Deliberate bugs in the rollout engines."""

from mutant import Mutant

ENGINE = "tests/policies/engines/test_vllm_engine.py"
PLUGIN = "tests/policies/engines/test_vllm_plugin.py"
FULL = "tests/policies/engines/test_vllm_engine.py"
MISMATCH = "tests/policies/autoregressive/test_autoregressive.py"

ENGINES = (
    Mutant(
        "the adapter is loaded only once",
        "retouch_serve/engines/client.py",
        "        if name != self.loaded:",
        "        if self.loaded is None:",
        f"{ENGINE}::test_every_update_is_loaded_before_the_next_rollout",
    ),
    Mutant(
        "the adapter's digest ignores the values of its weights",
        "retouch_serve/engines/client.py",
        "        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())\n",
        "",
        f"{ENGINE}::test_every_update_is_loaded_before_the_next_rollout",
    ),
    Mutant(
        "old adapters are not unloaded from the server",
        "retouch_serve/engines/client.py",
        "            self.unload(client, self.loaded)\n",
        "",
        f"{ENGINE}::test_every_update_is_loaded_before_the_next_rollout",
    ),
    Mutant(
        "requests do not name the adapter, so the base model generates",
        "retouch_serve/engines/vllm_wire.py",
        '"model": self.model,',
        '"model": None,',
        f"{ENGINE}::test_server_log_probs_match_the_policy[qwen2.5]",
    ),
    Mutant(
        "the prompt ids that the server read are compared only by length",
        "retouch_serve/engines/vllm_wire.py",
        "if tuple(response.prompt_token_ids) != request.ids:",
        "if len(response.prompt_token_ids) < len(request.ids) - 1:",
        f"{ENGINE}::test_invalid_responses_raise_without_a_retry[another prompt]",
    ),
    Mutant(
        "a response with a repeated completion index is accepted",
        "retouch_serve/engines/vllm_wire.py",
        "if len(response.choices) != request.count or choices.keys() != set(range(request.count)):",
        "if len(response.choices) != request.count:",
        f"{ENGINE}::test_invalid_responses_raise_without_a_retry[a completion twice]",
    ),
    Mutant(
        "banned tokens are not sent to the server",
        "retouch_serve/engines/vllm_wire.py",
        "{str(token): BAN for token in sorted(self.banned)}",
        "{}",
        f"{ENGINE}::test_forbidden_tokens_are_sent_as_logit_bias",
    ),
    Mutant(
        "request seeds are keyed by position in the batch, not by group",
        "retouch_serve/engines/vllm.py",
        'group_seed(batch, batch.group_ids[rows.task], "vllm") + rows.slot',
        'group_seed(batch, rows.task, "vllm") + rows.slot',
        f"{ENGINE}::test_rows_have_seeds_by_group_and_slot",
    ),
    Mutant(
        "all requests of a group use the seed of its first slot",
        "retouch_serve/engines/vllm.py",
        'batch.group_ids[rows.task], "vllm") + rows.slot',
        'batch.group_ids[rows.task], "vllm")',
        f"{ENGINE}::test_rows_have_seeds_by_group_and_slot",
    ),
    Mutant(
        "a rank does not report its engine fault to the other ranks",
        "retouch_serve/engines/client.py",
        "    if any_rank(fault is not None):",
        "    any_rank(False)\n    if fault is not None:",
        f"{ENGINE}::test_all_ranks_raise_if_one_rank_fails",
    ),
    Mutant(
        "a mismatch of NaN counts as agreement",
        "policies/autoregressive.py",
        "not mean <= limit",
        "mean > limit",
        f"{MISMATCH}::test_a_nan_mismatch_raises",
    ),
    Mutant(
        "the importance weights are inverted",
        "core/surrogates.py",
        "return (current - acting).masked_fill(~mask, 0.0).exp()",
        "return (acting - current).masked_fill(~mask, 0.0).exp()",
        f"{MISMATCH}::test_importance_weights_make_averages_over_engine_samples_unbiased",
    ),
    Mutant(
        "the ratio uses the engine's log-probabilities instead of the policy's",
        "policies/autoregressive.py",
        "return replace(trajectory, log_probs=log_probs, behaviour_log_probs=engine_log_probs)",
        "return replace(trajectory, behaviour_log_probs=engine_log_probs)",
        f"{MISMATCH}::test_importance_weights_scale_the_gradient_and_not_the_ratio",
    ),
    Mutant(
        "tokens of another engine are not importance-weighted",
        "policies/autoregressive.py",
        "entropy=entropy, scale=scale)",
        "entropy=entropy, scale=None)",
        f"{MISMATCH}::test_importance_weights_scale_the_gradient_and_not_the_ratio",
    ),
    Mutant(
        "a request without a grammar gets the grammar of the slot's previous request",
        "retouch_serve/engines/plugin.py",
        "            self._by_slot.pop(req_idx, None)\n",
        "",
        f"{PLUGIN}::test_requests_without_a_grammar_keep_their_logits_in_a_reused_slot",
    ),
    Mutant(
        "returned tokens are not checked against the grammar",
        "retouch_serve/engines/vllm.py",
        "            self._check(batch, prompts, generation)\n",
        "",
        f"{ENGINE}::test_image_tokens_raise_if_the_server_has_no_plugin",
    ),
    Mutant(
        "no column is read if all prompts are still being prefilled",
        "retouch_serve/engines/plugin.py",
        "after = max(first + 1, int(ctx.seq_lens_upper_bound_np[rows].max()))",
        "after = int(ctx.seq_lens_upper_bound_np[rows].max())",
        f"{PLUGIN}::test_the_form_begins_correctly_after_a_prompt_prefilled_in_chunks",
    ),
    Mutant(
        "raw log-probabilities are accepted as those of the sampling distribution",
        "retouch_serve/engines/vllm.py",
        "        if not found.processed:",
        "        if False:",
        f"{ENGINE}::test_a_server_that_is_set_up_wrongly_raises_with_the_option_to_set",
    ),
    Mutant(
        "every part of a split request uses the seed of the whole request",
        "retouch_serve/engines/vllm_wire.py",
        "seed=self.seed + start",
        "seed=self.seed",
        f"{ENGINE}::test_groups_larger_than_max_num_seqs_are_split_into_several_requests",
    ),
    Mutant(
        "images are sent to the server without the image processor's resize",
        "retouch_models/qwen_vl.py",
        "return [self.template.resized(image) for image in fitted]",
        "return list(fitted)",
        f"{ENGINE}::test_images_are_sent_at_their_final_size",
    ),
    Mutant(
        "the weight version in a response is not checked",
        "retouch_serve/engines/vllm_wire.py",
        "        if {span.version for span in choice.weight_versions} != {request.version}:",
        "        if False:",
        f"{FULL}::test_a_restarted_server_gets_all_weights_again",
    ),
    Mutant(
        "after a failed reload, the server still reports the previous version",
        "retouch_serve/engines/vllm.py",
        '            client.post(SET_VERSION, {"new_version": f"loading-{name}"})\n',
        "",
        f"{FULL}::test_a_failed_reload_raises_and_is_repeated_at_the_next_rollout",
    ),
    Mutant(
        "the prefix cache is not cleared after new weights are loaded",
        "retouch_serve/engines/vllm.py",
        'if json_object(client.post(RESET, {})).get("success") is not True:',
        "if False:",
        f"{FULL}::test_a_server_that_does_not_clear_its_prefix_cache_stops_the_run",
    ),
)
