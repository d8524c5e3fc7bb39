"""Deliberate bugs in the bridge to TRL, the preallocated cache, and the messages about a full device."""

from mutant import Mutant

BRIDGE = "tests/integrations/test_trl.py"
CACHE = "tests/models/causal/test_preallocated_cache.py"
MEMORY = "tests/recipe/test_out_of_memory.py"

BRIDGING = (
    Mutant(
        "TRL is given 0 for a score that is missing",
        "integrations/trl.py",
        "[None if reward != reward else reward for",
        "[0.0 if reward != reward else reward for",
        f"{BRIDGE}::test_three_outcomes",
    ),
    Mutant(
        "the token that ended a completion is drawn as well",
        "integrations/trl.py",
        "tuple(ids[:-1] if ended else ids)",
        "tuple(ids)",
        f"{BRIDGE}::test_pictures_are_made_of_the_ids_and_not_of_the_text",
    ),
    Mutant(
        "a completion ends at the first token that could end one",
        "integrations/trl.py",
        "tokens = tuple(ids[:-1] if ended else ids)",
        "ends = [place for place, k in enumerate(ids) if k in self.writer.stop]\n"
        "        tokens = tuple(ids[: ends[0]] if ends else ids)",
        f"{BRIDGE}::test_only_the_last_end_is_one",
    ),
    Mutant(
        "noise is the same at every step of TRL's",
        "integrations/trl.py",
        "key=(self.seed, step, ",
        "key=(self.seed, 0, ",
        f"{BRIDGE}::test_noise_is_keyed_by_seed_step_and_task",
    ),
    Mutant(
        "Python's own hash numbers a task of TRL's",
        "integrations/trl.py",
        'int.from_bytes(hashlib.sha256(task.encode()).digest()[:7], "big")',
        "abs(hash(task))",
        f"{BRIDGE}::test_two_ranks_agree",
    ),
    Mutant(
        "ranks of TRL's number their rows alike",
        "integrations/trl.py",
        "first = ranks.rank * len(tasks)",
        "first = 0",
        f"{BRIDGE}::test_two_ranks_agree",
    ),
    Mutant(
        "a rank of TRL's decides alone that too many are missing",
        "integrations/trl.py",
        "ranks.sum(torch.tensor([float(missing.sum()), float(len(missing))])).tolist()",
        "(float(missing.sum()), float(len(missing)))",
        f"{BRIDGE}::test_two_ranks_agree",
    ),
    Mutant(
        "rows of a group have each a task of its own",
        "integrations/trl.py",
        "[known.setdefault(task.id, task) for task in tasks]",
        "tasks",
        f"{BRIDGE}::test_rows_of_a_group_share_one_task",
    ),
    Mutant(
        "TRL shows the writer pictures at their own size",
        "integrations/trl_prompts.py",
        "image.resize(fit(image, self.area)[::-1], Resampling.LANCZOS) for",
        "image for",
        f"{BRIDGE}::test_trl_lets_the_writer_read_what_the_editor_reads",
    ),
    Mutant(
        "types of tokens are padded on another side than ids",
        "integrations/trl_prompts.py",
        'tokenizer.padding_side = "left"',
        'tokenizer.padding_side = "right"',
        f"{BRIDGE}::test_what_is_padded_is_padded_on_the_left",
    ),
    Mutant(
        "a template is Jinja and not a text",
        "integrations/trl_prompts.py",
        "{{{{ {_literal(template.head)} }}}}",
        "{template.head}",
        f"{BRIDGE}::test_a_text_that_looks_like_jinja_stays_a_text",
    ),
    Mutant(
        "room for tokens outlives the rows that it was made for",
        "models/causal/preallocated_cache.py",
        "        super().batch_select_indices(indices)\n        self._buffers = None",
        "        super().batch_select_indices(indices)",
        f"{CACHE}::test_rows_that_were_selected_are_their_own",
    ),
    Mutant(
        "a gradient meets what was overwritten",
        "models/causal/preallocated_cache.py",
        "if torch.is_grad_enabled() or length == 0:",
        "if length == 0:",
        f"{CACHE}::test_with_gradient_it_is_transformers",
    ),
    Mutant(
        "a full device is named by the stage before",
        "training/clock.py",
        "self.stage, ended = stage, self._begin(stage)",
        "ended = self._begin(stage)",
        f"{MEMORY}::test_a_stage_that_ended_in_an_error_is_known",
    ),
    Mutant(
        "a run cannot go on with less at once",
        "recipe/derived/differences.py",
        ' or re.sub(r"^phases\\.\\d+\\.", "", key) in MEMORY_KEYS',
        "",
        f"{MEMORY}::test_the_run_goes_on_as_it_says",
    ),
)
