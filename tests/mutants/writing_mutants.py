"""Deliberate bugs in the policies that write."""

from mutant import Mutant

CONTRACT = "tests/policies/autoregressive/test_autoregressive.py::test_keeps_the_contract"
DECODING = "tests/policies/autoregressive/test_decoding.py"
WRITER = "tests/models/qwen_vl/test_qwen_writer.py"

WRITING = (
    # Rollouts
    Mutant(
        "tokens keyed by place in the batch",
        "policies/autoregressive/decoding.py",
        '[generator(batch.seed, "token", batch.step, group, slot) for group, slot in keys]',
        '[generator(batch.seed, "token", batch.step, place) for place, _ in enumerate(keys)]',
        f"{DECODING}::test_a_row_is_its_key_wherever_it_is_written",
    ),
    Mutant(
        "rows that have ended are dropped without their numbers",
        "policies/autoregressive/decoding.py",
        "rows.numbers, rows.mask, rows.states = rows.numbers[stay], rows.mask[stay], rows.states[stay]",
        "rows.numbers, rows.mask, rows.states = rows.numbers[: len(stay)], rows.mask[stay], rows.states[stay]",
        f"{DECODING}::test_a_row_is_its_key_wherever_it_is_written",
    ),
    Mutant(
        "new tokens stand a place too far",
        "policies/autoregressive/decoding.py",
        "positions=rows.starts[:, None] + places",
        "positions=rows.starts[:, None] + places + 1",
        f"{DECODING}::test_greedy_is_generate[qwen3-vl]",
    ),
    Mutant(
        "rotary positions go on from the number of tokens",
        "types.py",
        "return self.positions.masked_fill(~self.mask[..., None], 0).amax((1, 2)) + 1",
        "return self.mask.sum(1)",
        f"{DECODING}::test_greedy_is_generate[qwen2.5-vl]",
    ),
    Mutant(
        "an id of probability 0 can be drawn",
        "core/tokens.py",
        "right=True)",
        "right=False)",
        "tests/core/test_tokens.py::test_what_cannot_be_drawn_is_never_drawn",
    ),
    Mutant(
        "vision tokens may be written",
        "models/causal/text_grammar.py",
        '"vision" in token or ',
        "",
        f"{WRITER}::test_what_stands_for_pictures_is_never_written",
    ),
    # Evaluation of log-probabilities
    Mutant(
        "the temperature is left out of the evaluation",
        "policies/autoregressive/policy.py",
        "temperature=self.sampling.temperature,\n",
        "temperature=1.0,\n",
        "tests/policies/autoregressive/test_autoregressive.py::test_the_ratio_is_one_before_a_step",
    ),
    Mutant(
        "what top-p kept is forgotten",
        "policies/autoregressive/policy.py",
        "support=None if trajectory.support is None else trajectory.support[part.rows, columns][sampled]",
        "support=None",
        "tests/policies/autoregressive/test_autoregressive.py::test_the_ratio_is_one_before_a_step",
    ),
    Mutant(
        "forced tokens count as choices",
        "policies/autoregressive/policy.py",
        "mask = real & (forced < 0)",
        "mask = real",
        "tests/policies/autoregressive/test_autoregressive.py::test_keeps_the_contract_with_forced_tokens_and_two_vocabularies",
    ),
    Mutant(
        "one vocabulary for every place",
        "policies/autoregressive/log_probs.py",
        "grammar.vocabularies if len(grammar.vocabularies) == 1 else grammar.vocabularies[vocabulary]",
        "grammar.vocabularies[:1]",
        f"{DECODING}::test_a_grammar_forces_and_restricts",
    ),
    Mutant(
        "completions without end always teach",
        "policies/autoregressive/policy.py",
        "mask = mask & ~truncated[:, None]",
        "mask = mask & (mask | ~truncated[:, None])",
        "tests/policies/autoregressive/test_autoregressive.py::test_what_was_cut_off_teaches_nothing_where_that_is_wanted",
    ),
    Mutant(
        "the prompt is shared without its gradient",
        "policies/autoregressive/policy.py",
        "return torch.cat([first[index, None], rest], dim=1)[:, :end]",
        "return torch.cat([first[index, None].detach(), rest], dim=1)[:, :end]",
        "tests/policies/autoregressive/test_autoregressive.py::test_a_shared_prompt_gives_the_same_gradient",
    ),
    Mutant(
        "the KL follows the policy",
        "policies/autoregressive/policy.py",
        'with torch.no_grad(), self.copies.using("reference"):',
        "with torch.no_grad():",
        f"{CONTRACT}[qwen2.5]",
    ),
    Mutant(
        "all logits at once",
        "policies/autoregressive/log_probs.py",
        "for start in range(0, len(ids), chunk):\n        part = slice(start, start + chunk)",
        "for start in range(0, len(ids), len(ids)):\n        part = slice(None)",
        "tests/policies/autoregressive/test_log_probs.py::test_the_update_never_holds_all_logits",
    ),
    Mutant(
        "16 bits as they come from the cache",
        "policies/autoregressive/decoding.py",
        "self.model.module.parameters()).dtype == torch.float32 if",
        "self.model.module.parameters()).is_floating_point() if",
        "tests/policies/autoregressive/test_autoregressive.py::test_sixteen_bits_are_measured_in_the_shape_of_the_update",
    ),
    # Reading
    Mutant(
        "the second layer's features go to the first",
        "models/qwen_vl/vision.py",
        'tuple(tensor for name, tensor in joined.items() if name.startswith("deep_"))',
        'tuple(joined[name] for name in reversed(joined) if name.startswith("deep_"))',
        f"{WRITER}::test_a_tower_that_does_not_train_is_asked_once_a_task",
    ),
    Mutant(
        "checkpointing switches on dropout",
        "models/common/recompute.py",
        "layer.gradient_checkpointing = layer.training = True",
        "layer.train().gradient_checkpointing = True",
        "tests/policies/autoregressive/test_autoregressive.py::test_gradient_checkpointing_changes_memory_alone",
    ),
)
