"""Deliberate bugs in the ledger: the storage, replay, distinction and summing of scores."""

from mutant import Mutant

_KEPT = "tests/rewards/ledger/test_kept_answers.py"
_JOURNAL = "tests/rewards/ledger/test_journal.py"
_LEDGER = "tests/training/test_ledger.py"
_AUDIT = "tests/audit/test_audit.py"
_AGREEMENT = "tests/core/test_agreement.py"

LEDGER = (
    # Stored answers
    Mutant(
        "what a canary was told is found again",
        "rewards/ledger/answers.py",
        "scores IS NOT NULL AND NOT fresh",
        "scores IS NOT NULL",
        f"{_KEPT}::test_canaries_go_past_the_memory_and_leave_it_alone",
    ),
    Mutant(
        "a canary is answered from memory",
        "rewards/ledger/caching.py",
        "if self.cache.bypassed:\n            return self._ask",
        "if False:\n            return self._ask",
        f"{_KEPT}::test_canaries_go_past_the_memory_and_leave_it_alone",
    ),
    Mutant(
        "a repeat has the first one's answer",
        "rewards/ledger/caching.py",
        "question.temperature, question.seed])",
        "question.temperature])",
        f"{_KEPT}::test_whatever_could_change_an_answer_is_asked_anew",
    ),
    Mutant(
        "one judge's answer is every judge's",
        "rewards/ledger/caching.py",
        "json_hash([judge, question.rubric,",
        "json_hash([question.rubric,",
        f"{_KEPT}::test_another_judge_is_asked_anew",
    ),
    Mutant(
        "what was written is no part of a sample",
        "rewards/ledger/hashing.py",
        "task.text, sample.completion, dict",
        "task.text, dict",
        f"{_KEPT}::test_another_text_or_picture_makes_another_sample",
    ),
    Mutant(
        "a picture is known by some of its pixels",
        "rewards/ledger/hashing.py",
        "image.tobytes()",
        "image.tobytes()[:-1]",
        f"{_JOURNAL}::test_a_pictures_name_knows_size_mode_and_every_pixel",
    ),
    Mutant(
        "a sample that misses a column is remembered",
        "rewards/ledger/caching.py",
        "scores=None if missing else scores,",
        "scores=scores,",
        f"{_KEPT}::test_a_sample_that_misses_a_column_is_sent_again",
    ),
    Mutant(
        "what is under way is asked for again",
        "rewards/ledger/single_flight.py",
        "if key not in found and key not in waiting]",
        "if key not in found]",
        f"{_KEPT}::test_what_is_under_way_for_one_thread_is_not_asked_for_another",
    ),
    Mutant(
        "a key that a judge repeats is written down",
        "rewards/ledger/answers.py",
        "words = credentials.redacted(words, secret)",
        "pass",
        f"{_KEPT}::test_a_key_of_the_environment_is_written_nowhere",
    ),
    # The journal
    Mutant(
        "a missing score is kept as 0",
        "rewards/ledger/database.py",
        'return "null"',
        'return "0.0"',
        f"{_JOURNAL}::test_what_the_judge_could_not_say_is_replayed_until_forgotten",
    ),
    Mutant(
        "another judge's scores are replayed",
        "rewards/ledger/journal.py",
        "BETWEEN ? AND ? AND judge = ?",
        "BETWEEN ? AND ? AND ? IS NOT NULL",
        f"{_JOURNAL}::test_another_judge_is_asked_anew",
    ),
    Mutant(
        "another picture's scores are replayed",
        "rewards/ledger/journal.py",
        "            hasher(sample.image),",
        '            "",',
        f"{_JOURNAL}::test_only_new_pictures_are_judged_and_they_replace_the_old",
    ),
    Mutant(
        "the filling of an evaluation counts",
        "rewards/ledger/journal.py",
        "values.setdefault(row[:4], (*row, self.judge, given, seconds, now))",
        "values[row[:4]] = (*row, self.judge, given, seconds, now)",
        f"{_JOURNAL}::test_of_a_place_that_is_filled_twice_the_first_counts",
    ),
    # The identity of the judge
    Mutant(
        "a run goes on with whatever judges now",
        "training/ledger.py",
        "if not self._new_judge:",
        "if False:",
        f"{_LEDGER}::test_a_changed_judge_stops_a_resume_unless_told_otherwise",
    ),
    Mutant(
        "a judge is compared with the run's first one",
        "training/ledger.py",
        "ORDER BY number DESC LIMIT 1",
        "ORDER BY number LIMIT 1",
        f"{_LEDGER}::test_a_changed_judge_stops_a_resume_unless_told_otherwise",
    ),
    Mutant(
        "a rank whose own judge is the same goes on alone",
        "training/ledger.py",
        "if not self._ranks.any(bool(changed)):",
        "if not changed:",
        f"{_LEDGER}::test_all_ranks_stop_where_one_has_another_judge",
    ),
    Mutant(
        "a new version of a reward is the same judge",
        "rewards/identity.py",
        '"version": getattr(made_by, "version", 1)',
        '"version": 1',
        "tests/training/test_ledger.py::test_a_reward_of_the_package_is_named_by_its_kind_version_and_arguments",
    ),
    Mutant(
        "a judge whose code was edited is the same",
        "rewards/identity.py",
        "hashlib.sha256(inspect.getsource(sys.modules[made_by.__module__]).encode()).hexdigest()[:16]",
        'hashlib.sha256(b"").hexdigest()[:16]',
        f"{_LEDGER}::test_code_that_changed_is_another_judge",
    ),
    # Queries of the ledger
    Mutant(
        "a cost that nobody knows is 0",
        "audit/overview.py",
        '"cost": sum(costs) if costs else None',
        '"cost": sum(costs)',
        f"{_AUDIT}::test_a_cost_that_nobody_knows_is_not_nothing",
    ),
    Mutant(
        "of two ranks' scores the earlier counts",
        "audit/ledger_view.py",
        "found[sample.place].at < sample.at",
        "found[sample.place].at > sample.at",
        f"{_AUDIT}::test_the_files_of_all_ranks_are_one_ledger_and_the_later_score_counts",
    ),
    Mutant(
        "judged again under another step",
        "audit/rescoring.py",
        'sample.step - 1 if sample.split == "train" else sample.step',
        "sample.step",
        f"{_AUDIT}::test_judged_again_by_the_same_judge_every_score_is_the_same",
    ),
    Mutant(
        "whatever picture lies there is judged again",
        "audit/images.py",
        "return None if path is None else read_image(path, sample.image)",
        'return None if path is None else Image.open(path).convert("RGB")',
        f"{_AUDIT}::test_a_picture_that_was_swapped_is_not_judged",
    ),
    Mutant(
        "what the second judge could not say is not asked again",
        "audit/rescoring.py",
        "journal.forget_missing(wanted, split=split, step=step)",
        "pass",
        f"{_AUDIT}::test_what_another_judge_could_not_say_is_asked_again",
    ),
    Mutant(
        "the greatest disagreements come last",
        "audit/comparison.py",
        "difference.argsort(descending=True, stable=True)",
        "difference.argsort(stable=True)",
        f"{_AUDIT}::test_the_worst_disagreements_come_first_with_their_pictures",
    ),
    Mutant(
        "scores are compared over all groups",
        "audit/comparison.py",
        "sample.place[:3]",
        "sample.place[:1]",
        f"{_AUDIT}::test_agreement_is_that_of_the_columns",
    ),
    Mutant(
        "pairs that both judges tie are taken off twice",
        "core/agreement.py",
        "- tied_a - tied_b + tied_both -",
        "- tied_a - tied_b -",
        f"{_AGREEMENT}::test_tau_b_is_its_definition_pair_by_pair",
    ),
)
