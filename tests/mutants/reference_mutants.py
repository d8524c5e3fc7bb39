"""Deliberate bugs in IP-Adapters: the reference images, their encoding, and the files that are saved."""

from mutant import Mutant

ADAPTERS = "tests/models/ip_adapter/test_ip_adapter.py"
RUNS = "tests/models/ip_adapter/test_ip_adapter_runs.py"
SIGNS = "tests/rewards/playground/test_sign_judge.py"
WORDS = "tests/data/playground/test_words.py"

REFERENCES = (
    Mutant(
        "an empty sign has ink",
        "rewards/playground/sign_judge.py",
        "np.linalg.norm(own_ink - own_paper) >= CONTRAST",
        "np.linalg.norm(own_ink - own_paper) >= 0",
        f"{SIGNS}::test_flat_signs_have_the_scores_of_the_formula",
    ),
    Mutant(
        "the sign is looked at with all that hangs beside it",
        "rewards/playground/sign_judge.py",
        "_pixels(sample.image)[np.asarray(mask) > 127]",
        "_pixels(sample.image)[np.asarray(mask) >= 0]",
        f"{SIGNS}::test_the_right_picture_gets_all_and_other_styles_little",
    ),
    Mutant(
        "ink is the pixel that is nearest to the paper",
        "rewards/playground/sign_judge.py",
        "np.argsort(-away",
        "np.argsort(away",
        f"{SIGNS}::test_flat_signs_have_the_scores_of_the_formula",
    ),
    Mutant(
        "every sample is held against the first one's reference",
        "rewards/playground/sign_judge.py",
        "if id(sample.task) not in wanted:\n                wanted[id(sample.task)] = ",
        "if id(sample.task) not in wanted:\n                wanted[id(sample.task)] = next(iter(wanted.values()), None) or ",
        f"{SIGNS}::test_the_right_picture_gets_all_and_other_styles_little",
    ),
    Mutant(
        "apart from its style, the empty sign still has the paper that is asked for",
        "data/playground/words.py",
        'write(source, box, "", source_style)',
        'write(source, box, "", style)',
        f"{WORDS}::test_apart_changes_the_pictures_signs_and_nothing_else",
    ),
    Mutant(
        "the keys of a reference are not normed",
        "models/ip_adapter/attention.py",
        "self.heads[1:], eps=1e-5)",
        "self.heads[1:], eps=1e5)",
        f"{ADAPTERS}::test_what_a_block_finds_goes_through_its_output_projection",
    ),
    Mutant(
        "what is found is added past the output projection",
        "models/ip_adapter/attention.py",
        "        return attn.to_out[1](attn.to_out[0](image + found)), attn.to_add_out(text_output.contiguous())\n\n\nclass Qwen",
        "        return attn.to_out[1](attn.to_out[0](image)) + found, attn.to_add_out(text_output.contiguous())\n\n\nclass Qwen",
        f"{ADAPTERS}::test_what_a_block_finds_goes_through_its_output_projection",
    ),
    Mutant(
        "a new adapter of diffusers' form adds something",
        "models/ip_adapter/adapter.py",
        "nn.init.zeros_(processor.to_v_ip[0].weight)",
        "nn.init.ones_(processor.to_v_ip[0].weight)",
        f"{ADAPTERS}::test_a_new_one_changes_no_bit",
    ),
    Mutant(
        "sixteen tokens of any width are taken for what diffusers reads",
        "models/ip_adapter/adapter.py",
        "return settings.tokens == (16 if rows == _ROWS_OF_16_TOKENS else 4)",
        "return rows > 0 and settings.tokens in (4, 16)",
        f"{ADAPTERS}::test_sixteen_tokens_are_known_by_their_number_of_rows",
    ),
    Mutant(
        "blocks are written from the last to the first",
        "models/ip_adapter/files.py",
        "for k, processor in enumerate(found[1:]):",
        "for k, processor in enumerate(reversed(found[1:])):",
        f"{ADAPTERS}::test_blocks_are_numbered_in_order",
    ),
    Mutant(
        "guidance goes away from the same reference",
        "models/ip_adapter/reference_model.py",
        "torch.zeros(len(tasks), self.encoder.width)",
        "torch.ones(len(tasks), self.encoder.width)",
        f"{ADAPTERS}::test_the_reference_counts_and_none_is_an_error",
    ),
    Mutant(
        "CLIP's projection has another width than its embeddings",
        "models/ip_adapter/image_encoder.py",
        "projection_dim=width)",
        "projection_dim=width + 1)",
        f"{ADAPTERS}::test_of_two_towers_it_takes_the_one_that_sees",
    ),
    Mutant(
        "dropout of references hides all but its share",
        "policies/denoising/policy.py",
        "(torch.stack(draws) >= fraction)",
        "(torch.stack(draws) < fraction)",
        f"{RUNS}::test_dropout_takes_its_share_and_depends_on_step_and_group_alone",
    ),
    Mutant(
        "dropout of references is drawn by place and not by group",
        "policies/denoising/policy.py",
        "batch.step, gid)) for gid in batch.group_ids]",
        "batch.step, gid)) for gid, _ in enumerate(batch.group_ids)]",
        f"{RUNS}::test_dropout_takes_its_share_and_depends_on_step_and_group_alone",
    ),
    Mutant(
        "a row without a reference is taken",
        "data/requirements.py",
        "if required.reference and row.reference is None:",
        "if required.reference and row.reference is not None:",
        f"{RUNS}::test_a_row_without_a_reference_is_named",
    ),
)
