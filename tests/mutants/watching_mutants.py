"""Deliberate bugs in the measurements that detect reward hacking, and in the checks of objects in images."""

from mutant import Mutant

_ALARMS = "tests/run/test_watching.py"
_WATCH = "tests/run/test_watching.py"
_CORPUS = "tests/judge/test_answers.py::test_corpus_answers_give_no_wrong_scores_and_95_percent_of_values_are_read"
_OBJECTS = "tests/rewards/scorers/test_detectors.py"

WATCHING = (
    Mutant(
        "the held-out score is compared with the first observation instead of the best",
        "run/watch.py",
        "best = max(observations, ",
        "best = max(observations[:1], ",
        f"{_ALARMS}::test_judge_alarm_compares_with_the_best_held_out_score",
    ),
    Mutant(
        "a drop of the held-out score raises an alarm even within the noise",
        "run/watch.py",
        "heldout.sigmas < -rule.sigmas",
        "heldout.mean < 0",
        f"{_ALARMS}::test_judge_alarm_is_raised_if_the_held_out_judge_falls_and_the_reward_does_not",
    ),
    Mutant(
        "canary changes of opposite sign cancel out",
        "run/watch.py",
        "(scores - start.canaries[name]).abs().double().nanmean().item()",
        "(scores - start.canaries[name]).double().nanmean().abs().item()",
        f"{_ALARMS}::test_canary_alarm_is_raised_if_the_judge_scores_the_same_images_differently",
    ),
    Mutant(
        "the watcher does not bypass the cache when it scores canaries",
        "run/watch.py",
        "with self._ledger.cache.bypass():",
        "if True:",
        f"{_WATCH}::test_canary_scores_are_never_taken_from_the_ledger",
    ),
    Mutant(
        "the state that raised an alarm is saved before the run is rolled back",
        "run/session.py",
        "        back_to = None\n",
        "        self._save(stepper)\n        back_to = None\n",
        f"{_WATCH}::test_roll_back_alarm_returns_the_run_to_an_earlier_checkpoint",
    ),
    Mutant(
        "on resume, a run is refused only if its alarms no longer apply",
        "run/hooks.py",
        "    if alarms:\n        raise",
        "    if not alarms:\n        raise",
        f"{_WATCH}::test_roll_back_alarm_returns_the_run_to_an_earlier_checkpoint",
    ),
    Mutant(
        "text that the task requests counts as unrequested",
        "retouch_rewards/ocr.py",
        "if not any(line in text for text in known[id(task)])",
        "if line",
        "tests/rewards/text/test_ocr.py::test_requested_text_is_not_detected",
    ),
    Mutant(
        "a relative position is satisfied by any pair of objects, not by every pair",
        "retouch_rewards/geneval.py",
        "others is not None and all(\n",
        "others is not None and any(\n",
        f"{_OBJECTS}::test_a_position_must_hold_for_every_pair_and_needs_its_target_object",
    ),
    Mutant(
        "an exclusion of n objects is satisfied by exactly n objects",
        "retouch_rewards/geneval.py",
        "sum(other.name == one.name for other in found) < one.count",
        "sum(other.name == one.name for other in found) <= one.count",
        f"{_OBJECTS}::test_include_needs_at_least_and_exclude_fewer_objects_than_the_count",
    ),
    Mutant(
        "a score is accepted although the judge revises it afterwards",
        "retouch_judge/wording.py",
        "if _REVISED.search(after) or",
        "if",
        _CORPUS,
    ),
    Mutant(
        "a score is accepted whatever sentences follow it",
        "retouch_judge/wording.py",
        "_SAYS_NOTHING.fullmatch(one) or",
        "True or",
        _CORPUS,
    ),
    Mutant(
        "a score is accepted although the judge says that it is on another scale",
        "retouch_judge/answers.py",
        " or is_elsewhere(words, scales.values())",
        "",
        _CORPUS,
    ),
    Mutant(
        "the edited image precedes the parts of a judge's prompt that a group shares",
        "retouch_judge/base.py",
        'return (*facts, "Source picture:", source_image(sample.task), "Edited picture:", judged_image(sample))',
        'return ("Edited picture:", judged_image(sample), *facts, "Source picture:", source_image(sample.task))',
        "tests/judge/test_prefixes.py::test_prompts_of_a_group_share_at_least_80_percent_of_their_tokens",
    ),
)
