"""Deliberate bugs in the measurements that detect reward hacking, and in the checks of objects in images."""

from mutant import Mutant

_ALARMS = "tests/watch/test_alarms.py"
_WATCH = "tests/watch/test_watching.py"
_CORPUS = "tests/rewards/vlm/answers/test_reading.py::test_the_corpus"
_OBJECTS = "tests/rewards/scorers/test_geneval.py"

WATCHING = (
    Mutant(
        "a held-out judge's fall counts from the start alone",
        "watch/alarms.py",
        "best = max(observations, ",
        "best = max(observations[:1], ",
        f"{_ALARMS}::test_a_fall_counts_from_where_the_held_out_judge_was_content_most",
    ),
    Mutant(
        "a fall within the noise is an alarm",
        "watch/alarms.py",
        "heldout.sigmas < -rule.sigmas",
        "heldout.mean < 0",
        f"{_ALARMS}::test_judges_that_part_ways",
    ),
    Mutant(
        "canaries are compared in the mean",
        "watch/alarms.py",
        "(scores - start.canaries[name]).abs().double().nanmean().item()",
        "(scores - start.canaries[name]).double().nanmean().abs().item()",
        f"{_ALARMS}::test_a_judge_that_changes_is_seen_in_the_canaries",
    ),
    Mutant(
        "canaries are answered from memory",
        "watch/watcher.py",
        "with self._ledger.cache.bypass():",
        "if True:",
        f"{_WATCH}::test_canaries_are_never_answered_from_memory",
    ),
    Mutant(
        "the state that raised an alarm is saved and gone back to",
        "session/training_session.py",
        "        back_to = None\n",
        "        self._save(stepper)\n        back_to = None\n",
        f"{_WATCH}::test_roll_back_ends_at_the_checkpoint_from_before",
    ),
    Mutant(
        "an ended run goes on whatever the rules say",
        "watch/alarm_stop.py",
        "    if alarms:\n        raise",
        "    if not alarms:\n        raise",
        f"{_WATCH}::test_roll_back_ends_at_the_checkpoint_from_before",
    ),
    Mutant(
        "text that was asked for raises an alarm",
        "rewards/text/painted_text.py",
        "if not any(line in text for text in known[id(task)])",
        "if line",
        "tests/rewards/text/test_painted_text.py::test_what_was_asked_for_is_no_alarm",
    ),
    Mutant(
        "a position holds where one pair has it",
        "rewards/scorers/geneval.py",
        "others is not None and all(direction",
        "others is not None and any(direction",
        f"{_OBJECTS}::test_a_position_is_that_of_every_pair_and_needs_its_target",
    ),
    Mutant(
        "objects that are too many satisfy an exclusion",
        "rewards/scorers/geneval.py",
        "sum(other.name == one.name for other in found) < one.count",
        "sum(other.name == one.name for other in found) <= one.count",
        f"{_OBJECTS}::test_counts_are_met_from_below_by_include_and_from_above_by_exclude",
    ),
    Mutant(
        "a second thought after a score takes nothing back",
        "rewards/vlm/answers/retractions.py",
        "if _REVISED.search(after) or",
        "if",
        _CORPUS,
    ),
    Mutant(
        "anything may follow a score",
        "rewards/vlm/answers/retractions.py",
        "_SAYS_NOTHING.fullmatch(one) or",
        "True or",
        _CORPUS,
    ),
    Mutant(
        "another scale than the one asked for is taken for it",
        "rewards/vlm/answers/scores.py",
        " or is_elsewhere(words, scales.values())",
        "",
        _CORPUS,
    ),
    Mutant(
        "the judged picture stands before what a group shares",
        "rewards/judges/rubrics.py",
        'return (*facts, "Source picture:", source_image(sample.task), "Edited picture:", judged_image(sample))',
        'return ("Edited picture:", judged_image(sample), *facts, "Source picture:", source_image(sample.task))',
        "tests/rewards/judges/test_prefixes.py::test_a_group_shares_four_tokens_of_five",
    ),
)
