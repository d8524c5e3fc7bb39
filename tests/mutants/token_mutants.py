"""Deliberate bugs in stored image tokens, their mixtures, the choice of the tokens that train, and image-token models."""

from mutant import Mutant

DATA = "tests/data/sources/test_token_data.py"
LOOP = "tests/policies/autoregressive/test_writing_loop.py"
IMITATING = "tests/objectives/test_cross_entropy.py"
JANUS = "tests/models/janus/test_janus.py"

TOKENS = (
    Mutant(
        "a coefficient's rest is left out",
        "data/sources/tokens.py",
        "+ [part[place] for place in sorted(order[:more])]",
        "",
        f"{DATA}::test_another_seed_draws_others_and_wrong_coefficients_are_refused",
    ),
    Mutant(
        "coefficients are binary numbers",
        "data/sources/tokens.py",
        "int(Fraction(str(coefficients[number])) * len(part))",
        "int((coefficients[number] % 1) * len(part)) + int(coefficients[number]) * len(part)",
        f"{DATA}::test_coefficients_are_whole_copies_and_a_sample",
    ),
    Mutant(
        "features may lie outside the data set",
        "data/sources/tokens.py",
        "path = path_under(root, entry)",
        "path = root / entry",
        f"{DATA}::test_names_do_not_leave_the_data_set",
    ),
    Mutant(
        "what torch pickled is opened unasked",
        "data/sources/features.py",
        'elif path.suffix == ".pth" and trusted:',
        'elif path.suffix == ".pth":',
        f"{DATA}::test_the_sources_own_files_are_read_where_they_are_trusted",
    ),
    Mutant(
        "codes of another autoencoder train",
        "data/sources/tokens.py",
        "elif highest >= codes:",
        "elif highest > codes:",
        f"{DATA}::test_faults_are_found_by_file_before_anything_is_learnt",
    ),
    Mutant(
        "all tokens train whatever the recipe says",
        "training/loop.py",
        "mask = mask & torch.isin(trajectory.kind.cpu(), torch.tensor(kinds))",
        "mask = mask.clone()",
        f"{LOOP}::test_only_the_tokens_of_the_chosen_kind_train",
    ),
    Mutant(
        "each rank divides by its own tokens",
        "training/loop.py",
        "total = run.ranks.sum(denominator(mask, valid, normalise=phase.normalise, max_length=phase.max_length))",
        "total = run.ranks.world * denominator(mask, valid, normalise=phase.normalise, max_length=phase.max_length)",
        f"{LOOP}::test_two_ranks_of_very_different_lengths_share_one_gradient",
    ),
    Mutant(
        "a shard of another job is taken for one of this",
        "inference/tokenizing.py",
        'if len({told["stamp"] for told in lists}) > 1:',
        "if not lists:",
        "tests/inference/test_tokenizing.py::test_shards_make_what_one_process_makes",
    ),
    Mutant(
        "rows are sorted and their weights are not",
        "objectives/cross_entropy.py",
        "minibatch.weights[order]",
        "minibatch.weights",
        f"{IMITATING}::test_rows_of_similar_lengths_share_a_forward_and_the_gradient_stays[True]",
    ),
    Mutant(
        "rows of any length share a forward",
        "objectives/cross_entropy.py",
        "order = policy.order_by_length(minibatch.trajectory)",
        "order = slice(None)",
        f"{IMITATING}::test_rows_of_similar_lengths_share_a_forward_and_the_gradient_stays[True]",
    ),
    Mutant(
        "a code too many",
        "models/janus/model.py",
        "torch.where(positions < self._count,",
        "torch.where(positions <= self._count,",
        f"{JANUS}::test_the_likeliest_picture_is_transformers_own[0]",
    ),
    Mutant(
        "codes are read as words",
        "models/janus/model.py",
        "parts.generation_aligner(parts.generation_embeddings(ids.clamp(max=self.pad - 1)))",
        "module.get_input_embeddings()(ids)",
        f"{JANUS}::test_the_likeliest_picture_is_transformers_own[0]",
    ),
)
