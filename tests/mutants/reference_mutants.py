"""Deliberate bugs in IP-Adapters: the reference images, their encoding, and the files that are saved."""

from mutant import Mutant

ADAPTERS = "tests/models/ip_adapter/test_ip_adapter.py"
RUNS = "tests/models/ip_adapter/test_ip_adapter_runs.py"
SIGNS = "tests/rewards/playground/test_sign_judge.py"
WORDS = "tests/data/playground/test_words.py"

REFERENCES = (
    Mutant(
        "a sign without text counts as having ink",
        "retouch_worlds/measuring.py",
        "np.linalg.norm(own_ink - own_paper) >= CONTRAST",
        "np.linalg.norm(own_ink - own_paper) >= 0",
        f"{SIGNS}::test_flat_signs_have_the_scores_of_the_formula",
    ),
    Mutant(
        "the style of a sign is measured on the whole image",
        "retouch_worlds/measuring.py",
        "_pixels(sample.image)[np.asarray(mask) > 127]",
        "_pixels(sample.image)[np.asarray(mask) >= 0]",
        f"{SIGNS}::test_the_target_image_scores_high_and_other_styles_score_low",
    ),
    Mutant(
        "the ink colour is taken from the pixels nearest to the paper colour",
        "retouch_worlds/measuring.py",
        "np.argsort(-away",
        "np.argsort(away",
        f"{SIGNS}::test_flat_signs_have_the_scores_of_the_formula",
    ),
    Mutant(
        "every sample is compared with the reference of the first sample",
        "retouch_worlds/measuring.py",
        "if id(sample.task) not in wanted:\n            wanted[id(sample.task)] = ",
        "if id(sample.task) not in wanted:\n            wanted[id(sample.task)] = next(iter(wanted.values()), None) or ",
        f"{SIGNS}::test_the_target_image_scores_high_and_other_styles_score_low",
    ),
    Mutant(
        "the empty sign of the source already has the requested style",
        "retouch_worlds/data.py",
        'write(source, box, "", source_style)',
        'write(source, box, "", style)',
        f"{WORDS}::test_style_from_reference_removes_the_targets_colours_from_the_source_image",
    ),
    Mutant(
        "the keys of a reference are normalised with an eps of 1e5 instead of 1e-5",
        "models/ip_adapter.py",
        "self.heads[1:], eps=1e-5)",
        "self.heads[1:], eps=1e5)",
        f"{ADAPTERS}::test_reference_attention_of_a_block_matches_its_formula",
    ),
    Mutant(
        "the attention to a reference is added after the output projection",
        "models/ip_adapter.py",
        "        return attn.to_out[1](attn.to_out[0](image + found)), attn.to_add_out(text_output.contiguous())\n\n\nclass Qwen",
        "        return attn.to_out[1](attn.to_out[0](image)) + found, attn.to_add_out(text_output.contiguous())\n\n\nclass Qwen",
        f"{ADAPTERS}::test_reference_attention_of_a_block_matches_its_formula",
    ),
    Mutant(
        "a new adapter in diffusers' format changes the output",
        "models/ip_adapter.py",
        "nn.init.zeros_(processor.to_v_ip[0].weight)",
        "nn.init.ones_(processor.to_v_ip[0].weight)",
        f"{ADAPTERS}::test_untrained_adapter_leaves_the_velocity_bitwise_unchanged",
    ),
    Mutant(
        "an adapter of 16 tokens counts as loadable by diffusers, whatever its width",
        "models/ip_adapter.py",
        "return settings.tokens == (16 if rows == _ROWS_OF_16_TOKENS else 4)",
        "return rows > 0 and settings.tokens in (4, 16)",
        f"{ADAPTERS}::test_adapter_with_16_tokens_is_loadable_by_diffusers_at_full_width",
    ),
    Mutant(
        "the blocks of an adapter are saved in reverse order",
        "models/ip_adapter.py",
        "for k, processor in enumerate(found[1:]):",
        "for k, processor in enumerate(reversed(found[1:])):",
        f"{ADAPTERS}::test_adapter_file_numbers_double_blocks_before_single_blocks",
    ),
    Mutant(
        "the negative branch gets a reference embedding of ones instead of zeros",
        "models/ip_adapter.py",
        "torch.zeros(len(tasks), self.encoder.width)",
        "torch.ones(len(tasks), self.encoder.width)",
        f"{ADAPTERS}::test_velocity_depends_on_the_reference_and_a_missing_one_raises",
    ),
    Mutant(
        "the projection width of the CLIP image encoder is one too large",
        "models/ip_adapter.py",
        "projection_dim=width)",
        "projection_dim=width + 1)",
        f"{ADAPTERS}::test_vision_tower_of_a_two_tower_model_is_used",
    ),
    Mutant(
        "reference dropout keeps the fraction that it should drop",
        "policies/denoising.py",
        "(torch.stack(draws) >= fraction)",
        "(torch.stack(draws) < fraction)",
        f"{RUNS}::test_reference_dropout_has_its_rate_and_does_not_depend_on_other_groups",
    ),
    Mutant(
        "reference dropout is keyed by position in the batch, not by group",
        "policies/denoising.py",
        "batch.step, gid)) for gid in batch.group_ids]",
        "batch.step, gid)) for gid, _ in enumerate(batch.group_ids)]",
        f"{RUNS}::test_reference_dropout_has_its_rate_and_does_not_depend_on_other_groups",
    ),
    Mutant(
        "a row without a reference image is accepted",
        "data/rows.py",
        "if self.reference and not reference:",
        "if self.reference and reference:",
        f"{RUNS}::test_row_without_a_reference_raises_with_its_line",
    ),
)
