"""Deliberate bugs in the ledger: storing and reusing scores, telling judges apart, and summaries of scores."""

from mutant import Mutant

_KEPT = "tests/judge/test_stored_answers.py"
_JOURNAL = "tests/rewards/ledger/test_journal.py"
_LEDGER = "tests/training/test_ledger.py"
_AUDIT = "tests/audit/test_audit.py"
_AGREEMENT = "tests/core/test_measures.py"

LEDGER = (
    # Stored answers
    Mutant(
        "an answer that was requested with the cache bypassed is reused",
        "retouch_judge/cache.py",
        "scores IS NOT NULL AND NOT fresh",
        "scores IS NOT NULL",
        f"{_KEPT}::test_bypassed_questions_are_always_asked_and_their_answers_are_not_reused",
    ),
    Mutant(
        "the client answers from the cache although the cache is bypassed",
        "retouch_judge/cache.py",
        "if self.cache.bypassed:\n            return self._ask",
        "if False:\n            return self._ask",
        f"{_KEPT}::test_bypassed_questions_are_always_asked_and_their_answers_are_not_reused",
    ),
    Mutant(
        "the cache key of a judge's answer ignores the seed",
        "retouch_judge/cache.py",
        "question.temperature, question.seed])",
        "question.temperature])",
        f"{_KEPT}::test_questions_that_differ_in_any_input_are_asked_separately",
    ),
    Mutant(
        "the cache key of a judge's answer ignores the judge",
        "retouch_judge/cache.py",
        "json_hash([judge, question.rubric,",
        "json_hash([question.rubric,",
        f"{_KEPT}::test_the_same_question_is_asked_once_also_after_a_restart",
    ),
    Mutant(
        "the hash of a sample ignores the completion",
        "rewards/ledger/database.py",
        "task.text, sample.completion, dict",
        "task.text, dict",
        f"{_KEPT}::test_samples_that_differ_in_any_field_or_reward_are_scored_separately",
    ),
    Mutant(
        "the hash of an image ignores its last byte",
        "rewards/ledger/database.py",
        "image.tobytes()",
        "image.tobytes()[:-1]",
        f"{_JOURNAL}::test_images_are_stored_by_hash_and_damaged_files_read_as_none",
    ),
    Mutant(
        "the scores of a sample with a missing column are cached",
        "retouch_judge/cache.py",
        "scores=None if missing else row,",
        "scores=row,",
        f"{_KEPT}::test_a_sample_with_a_missing_score_is_scored_again_and_its_requests_are_recorded",
    ),
    Mutant(
        "a key that another thread is already requesting is requested again",
        "retouch_judge/cache.py",
        "if key not in found and key not in waiting]",
        "if key not in found]",
        f"{_KEPT}::test_a_question_in_progress_is_not_asked_by_another_thread",
    ),
    Mutant(
        "an API key that a judge repeats is written to the ledger",
        "retouch_judge/cache.py",
        "return encode_text(redacted(words))",
        "return encode_text(words)",
        f"{_KEPT}::test_api_keys_of_the_environment_are_not_stored",
    ),
    # The journal
    Mutant(
        "a missing score is stored as 0",
        "rewards/ledger/database.py",
        'name: "null" if',
        'name: "0.0" if',
        f"{_JOURNAL}::test_missing_scores_are_replayed_until_forget_missing_is_called",
    ),
    Mutant(
        "stored scores of another judge are reused",
        "rewards/ledger/journal.py",
        "BETWEEN ? AND ? AND judge = ?",
        "BETWEEN ? AND ? AND ? IS NOT NULL",
        f"{_JOURNAL}::test_only_changed_images_are_scored_and_they_replace_the_stored_rows",
    ),
    Mutant(
        "stored scores of another image are reused",
        "rewards/ledger/journal.py",
        "            hasher(sample.image),",
        '            "",',
        f"{_JOURNAL}::test_only_changed_images_are_scored_and_they_replace_the_stored_rows",
    ),
    Mutant(
        "repeated rows of an evaluation overwrite the first scores",
        "rewards/ledger/journal.py",
        "values.setdefault(row[:4], (*row, self.judge, given, seconds, now))",
        "values[row[:4]] = (*row, self.judge, given, seconds, now)",
        f"{_JOURNAL}::test_the_first_score_is_replayed_if_a_batch_contains_a_row_twice",
    ),
    # The identity of the judge
    Mutant(
        "a run resumes with a changed judge without --new-judge",
        "run/ledger.py",
        "if not self._new_judge:",
        "if False:",
        f"{_LEDGER}::test_resume_with_a_changed_judge_raises_unless_new_judge_is_set",
    ),
    Mutant(
        "the judge is compared with the run's first judge instead of its latest",
        "run/ledger.py",
        "ORDER BY number DESC LIMIT 1",
        "ORDER BY number LIMIT 1",
        f"{_LEDGER}::test_resume_with_a_changed_judge_raises_unless_new_judge_is_set",
    ),
    Mutant(
        "a rank continues if its own judge is unchanged and another rank's is not",
        "run/ledger.py",
        "if not self._ranks.any(bool(changed)):",
        "if not changed:",
        f"{_LEDGER}::test_rank_raises_if_the_judge_changed_on_another_rank",
    ),
    Mutant(
        "the description of a built-in reward ignores its version",
        "rewards/identity.py",
        '"version": getattr(made_by, "version", 1)',
        '"version": 1',
        "tests/training/test_ledger.py::test_packaged_reward_is_identified_by_its_version_and_arguments",
    ),
    Mutant(
        "the description of a custom reward ignores its source code",
        "rewards/identity.py",
        "text = inspect.getsource(sys.modules[made_by.__module__])",
        "text = path",
        f"{_LEDGER}::test_user_reward_with_changed_source_code_is_rejected",
    ),
    # Queries of the ledger
    Mutant(
        "an unknown cost is reported as 0",
        "retouch_view/ledger.py",
        '"cost": sum(costs) if costs else None',
        '"cost": sum(costs)',
        f"{_AUDIT}::test_cost_adds_recorded_costs_and_uses_given_prices_for_the_other_calls",
    ),
    Mutant(
        "of two ranks' scores for one position, the earlier is used",
        "retouch_view/ledger.py",
        "found[sample.place].at < sample.at",
        "found[sample.place].at > sample.at",
        f"{_AUDIT}::test_ledger_files_of_all_ranks_are_merged_and_later_scores_replace_earlier_ones",
    ),
    Mutant(
        "training samples are rescored under the wrong step",
        "retouch_view/rescoring.py",
        'sample.step - 1 if sample.split == "train" else sample.step',
        "sample.step",
        f"{_AUDIT}::test_rescore_with_the_same_judge_gives_the_same_scores",
    ),
    Mutant(
        "an image file that was replaced is rescored",
        "retouch_view/ledger.py",
        "return None if path is None else read_image(path, sample.image)",
        'return None if path is None else Image.open(path).convert("RGB")',
        f"{_AUDIT}::test_neither_an_image_with_the_wrong_content_nor_a_run_whose_data_have_changed_is_rescored",
    ),
    Mutant(
        "missing scores of the second judge are not requested again",
        "retouch_view/rescoring.py",
        "journal.forget_missing(wanted, split=split, step=step)",
        "pass",
        f"{_AUDIT}::test_rescore_scores_samples_with_missing_scores_again_and_whole_groups_if_the_reward_compares_them",
    ),
    Mutant(
        "the comparison lists the smallest disagreements first",
        "retouch_view/ledger.py",
        "difference.argsort(descending=True, stable=True)",
        "difference.argsort(stable=True)",
        f"{_AUDIT}::test_worst_sorts_samples_by_rank_difference_and_names_their_images",
    ),
    Mutant(
        "the agreement within groups compares samples of different groups",
        "retouch_view/ledger.py",
        "sample.place[:3]",
        "sample.place[:1]",
        f"{_AUDIT}::test_agree_reports_the_rank_correlations_of_the_two_columns",
    ),
    Mutant(
        "Kendall's tau subtracts pairs that both judges tie twice",
        "retouch_rewards/measures.py",
        "- tied_a - tied_b + tied_both -",
        "- tied_a - tied_b -",
        f"{_AGREEMENT}::test_rank_correlations_equal_their_definitions",
    ),
)
