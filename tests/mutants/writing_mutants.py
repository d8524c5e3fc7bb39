"""Deliberate bugs in autoregressive policies: decoding, log-probabilities, vision features and gradient checkpointing."""

from mutant import Mutant

CONTRACT = "tests/policies/autoregressive/test_autoregressive.py::test_autoregressive_policy_passes_the_contract_checks"
DECODING = "tests/policies/autoregressive/test_decoding.py"
WRITER = "tests/models/qwen_vl/test_qwen_writer.py"

WRITING = (
    # Rollouts
    Mutant(
        "sampled tokens are keyed by position in the batch, not by group and slot",
        "policies/decoding.py",
        '[generator(batch.seed, "token", batch.step, group, slot) for group, slot in keys]',
        '[generator(batch.seed, "token", batch.step, place) for place, _ in enumerate(keys)]',
        f"{DECODING}::test_a_completion_depends_on_its_row_key_and_not_on_the_batch",
    ),
    Mutant(
        "the remaining rows get wrong row numbers when ended rows are dropped",
        "policies/decoding.py",
        "rows.prompts.take(stay), rows.numbers[stay], rows.mask[stay]",
        "rows.prompts.take(stay), rows.numbers[: len(stay)], rows.mask[stay]",
        f"{DECODING}::test_a_completion_depends_on_its_row_key_and_not_on_the_batch",
    ),
    Mutant(
        "the positions of new tokens are one too high",
        "policies/decoding.py",
        "self._extend(rows, ids[:, places], rows.starts[:, None] + places, is",
        "self._extend(rows, ids[:, places], rows.starts[:, None] + places + 1, is",
        f"{DECODING}::test_greedy_decoding_equals_transformers_generate[qwen3-vl]",
    ),
    Mutant(
        "a graph that was captured for a full room is replayed in the next one",
        "policies/decoding.py",
        "self.model.static_cache(rows.cache, stay, room=room), None",
        "self.model.static_cache(rows.cache, stay, room=room), rows.graph",
        f"{DECODING}::test_a_captured_decoding_step_gives_the_same_bits[qwen2.5-vl-all]",
    ),
    Mutant(
        "a captured decoding step reads the positions of the token for which it was captured",
        "policies/decoding.py",
        "zip(rows.graph, (ids, positions), strict=False)",
        "zip(rows.graph, (ids,), strict=False)",
        f"{DECODING}::test_a_captured_decoding_step_gives_the_same_bits[qwen2.5-vl-all]",
    ),
    Mutant(
        "rotary positions continue from the number of prompt tokens",
        "types.py",
        "return self.positions.masked_fill(~self.mask[..., None], 0).amax((1, 2)) + 1",
        "return self.mask.sum(1)",
        f"{DECODING}::test_greedy_decoding_equals_transformers_generate[qwen2.5-vl]",
    ),
    Mutant(
        "a token of probability 0 can be sampled",
        "core/tokens.py",
        "right=True)",
        "right=False)",
        "tests/core/test_surrogates.py::test_ids_with_probability_0_are_never_sampled",
    ),
    Mutant(
        "vision tokens can be generated",
        "retouch_models/causal.py",
        '"vision" in token or ',
        "",
        f"{WRITER}::test_grammar_excludes_image_and_video_placeholder_tokens",
    ),
    # Evaluation of log-probabilities
    Mutant(
        "the temperature is left out of the evaluation",
        "policies/autoregressive.py",
        "temperature=self.sampling.temperature,\n",
        "temperature=1.0,\n",
        "tests/policies/autoregressive/test_autoregressive.py::test_the_ratio_is_one_before_a_step",
    ),
    Mutant(
        "the evaluation ignores which tokens top-k and top-p kept",
        "policies/autoregressive.py",
        "support=None if trajectory.support is None else trajectory.support[part.rows, columns][sampled]",
        "support=None",
        "tests/policies/autoregressive/test_autoregressive.py::test_the_ratio_is_one_before_a_step",
    ),
    Mutant(
        "forced tokens count as actions",
        "policies/autoregressive.py",
        "mask = real & (forced < 0)",
        "mask = real",
        "tests/policies/autoregressive/test_autoregressive.py::test_policy_passes_the_contract_checks_with_forced_tokens_and_two_vocabularies",
    ),
    Mutant(
        "the grammar's first vocabulary is used at every position",
        "policies/decoding.py",
        "grammar.vocabularies if len(grammar.vocabularies) == 1 else grammar.vocabularies[vocabulary]",
        "grammar.vocabularies[:1]",
        f"{DECODING}::test_a_grammar_forces_and_restricts",
    ),
    Mutant(
        "truncated completions are trained although mask_truncated is set",
        "policies/autoregressive.py",
        "mask = mask & ~truncated[:, None]",
        "mask = mask & (mask | ~truncated[:, None])",
        "tests/policies/autoregressive/test_autoregressive.py::test_truncated_completions_are_masked_if_mask_truncated_is_set",
    ),
    Mutant(
        "the first token's gradient does not reach the shared prompt",
        "policies/autoregressive.py",
        "states = torch.cat([first[index, None], rest], dim=1)[:, :end]",
        "states = torch.cat([first[index, None].detach(), rest], dim=1)[:, :end]",
        "tests/policies/autoregressive/test_autoregressive.py::test_a_shared_prompt_gives_the_same_gradient",
    ),
    Mutant(
        "the KL compares the autoregressive policy with itself",
        "policies/autoregressive.py",
        'with torch.no_grad(), self.copies.using("reference"):',
        "with torch.no_grad():",
        f"{CONTRACT}[qwen2.5]",
    ),
    Mutant(
        "the logits of all tokens are computed at once",
        "policies/decoding.py",
        "for start in range(0, len(ids), chunk):\n        part = slice(start, start + chunk)",
        "for start in range(0, len(ids), len(ids)):\n        part = slice(None)",
        "tests/policies/autoregressive/test_autoregressive.py::test_the_update_allocates_the_logits_of_one_chunk_at_most",
    ),
    Mutant(
        "log-probabilities from 16-bit decoding with a cache count as exact",
        "policies/decoding.py",
        "compute_dtype(self.model.module) == torch.float32 if",
        "compute_dtype(self.model.module).is_floating_point if",
        "tests/policies/autoregressive/test_autoregressive.py::test_log_probs_of_bf16_models_come_from_the_evaluation_in_fp32",
    ),
    # Vision features and gradient checkpointing
    Mutant(
        "the vision features of deeper layers are assigned in reverse order",
        "retouch_models/qwen_vl.py",
        'tuple(tensor for name, tensor in joined.items() if name.startswith("deep_"))',
        'tuple(joined[name] for name in reversed(joined) if name.startswith("deep_"))',
        f"{WRITER}::test_frozen_vision_tower_runs_only_when_prompts_are_encoded",
    ),
    Mutant(
        "gradient checkpointing enables dropout",
        "retouch_models/causal.py",
        "layer.gradient_checkpointing = layer.training = True",
        "layer.train().gradient_checkpointing = True",
        "tests/policies/autoregressive/test_autoregressive.py::test_gradient_checkpointing_saves_memory_and_keeps_the_gradient",
    ),
)
