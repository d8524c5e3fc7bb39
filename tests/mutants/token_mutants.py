"""Deliberate bugs in stored image tokens, mixtures of data sets, the selection of trained tokens, and image-token models."""

from mutant import Mutant

DATA = "tests/data/sources/test_token_data.py"
LOOP = "tests/policies/autoregressive/test_autoregressive.py"
IMITATING = "tests/objectives/test_policy_gradient.py"
JANUS = "tests/models/janus/test_janus.py"

TOKENS = (
    Mutant(
        "the fractional part of a mixture coefficient is dropped",
        "retouch_models/image_tokens.py",
        "+ [part[place] for place in sorted(order[:more])]",
        "",
        f"{DATA}::test_mixing_depends_on_the_seed_and_a_wrong_number_of_coefficients_raises",
    ),
    Mutant(
        "mixture coefficients are multiplied in binary floating point",
        "retouch_models/image_tokens.py",
        "int(Fraction(str(coefficients[number])) * len(part))",
        "int((coefficients[number] % 1) * len(part)) + int(coefficients[number]) * len(part)",
        f"{DATA}::test_mixing_coefficients_give_full_copies_plus_a_random_fraction_of_each_list",
    ),
    Mutant(
        "a feature file may lie outside the folder of its data set",
        "retouch_models/image_tokens.py",
        "path = path_under(root, entry)",
        "path = root / entry",
        f"{DATA}::test_an_invalid_token_list_and_file_names_that_leave_the_data_set_raise",
    ),
    Mutant(
        "a pickled feature file is opened without data.trusted",
        "retouch_models/features.py",
        'elif path.suffix == ".pth" and trusted:',
        'elif path.suffix == ".pth":',
        f"{DATA}::test_feature_files_are_read_as_they_were_written_and_pth_files_only_if_they_are_trusted",
    ),
    Mutant(
        "a code equal to the size of the codebook is accepted",
        "retouch_models/image_tokens.py",
        "elif highest >= codes:",
        "elif highest > codes:",
        f"{DATA}::test_unusable_files_and_codes_raise_with_the_file_name_before_training",
    ),
    Mutant(
        "tokens of every kind are trained, not only the selected kinds",
        "run/step.py",
        "mask = mask & torch.isin(trajectory.kind.cpu(), torch.tensor(kinds))",
        "mask = mask.clone()",
        f"{LOOP}::test_only_tokens_of_the_selected_kind_get_loss_weights",
    ),
    Mutant(
        "each rank divides its loss by the number of its own tokens",
        "run/step.py",
        "over_ranks=run.ranks.sum)",
        "over_ranks=lambda count: run.ranks.world * count)",
        f"{LOOP}::test_two_ranks_with_unequal_lengths_get_the_gradient_of_one_rank",
    ),
    Mutant(
        "shards of different tokenization jobs are merged",
        "retouch_models/tokenizing.py",
        'if len({record["stamp"] for record in lists}) > 1:',
        "if not lists:",
        "tests/inference/test_tokenizing.py::test_shards_together_equal_the_output_of_one_process",
    ),
    Mutant(
        "rows are sorted by length, but their weights are not",
        "objectives/imitation.py",
        "minibatch.weights[order]",
        "minibatch.weights",
        f"{IMITATING}::test_ordering_rows_by_length_reduces_padding_and_keeps_the_gradient[True]",
    ),
    Mutant(
        "rows are not sorted by length before they share a forward pass",
        "objectives/imitation.py",
        "order = policy.order_by_length(minibatch.trajectory)",
        "order = slice(None)",
        f"{IMITATING}::test_ordering_rows_by_length_reduces_padding_and_keeps_the_gradient[True]",
    ),
    Mutant(
        "an image gets one code too many",
        "retouch_models/janus.py",
        "torch.where(positions < self._count,",
        "torch.where(positions <= self._count,",
        f"{JANUS}::test_greedy_image_tokens_match_transformers[0]",
    ),
    Mutant(
        "image codes are embedded as text tokens",
        "retouch_models/janus.py",
        "parts.generation_aligner(parts.generation_embeddings(ids.clamp(max=self.pad - 1)))",
        "module.get_input_embeddings()(ids)",
        f"{JANUS}::test_greedy_image_tokens_match_transformers[0]",
    ),
)
