"""Deliberate bugs in judges and in rewards without a judge."""

from mutant import Mutant

_READS = "tests/rewards/vlm/answers/test_reading.py"
_ASKS = "tests/rewards/vlm/test_vlm_client.py"
_JUDGES = "tests/rewards/judges/test_judges.py"
_FORMS = "tests/rewards/vlm/answers/test_forms.py"

JUDGING = (
    Mutant(
        "a score off its scale is clamped",
        "rewards/vlm/answers/scales.py",
        "            return None\n        return None if self.whole",
        "            value = min(max(value, self.low), self.high)\n        return None if self.whole",
        f"{_READS}::test_the_corpus",
    ),
    Mutant(
        "what a judge quotes is its own",
        "rewards/vlm/answers/visible_text.py",
        'parts += [text[place:start], "".join("\\n" if sign == "\\n" else "\\x00" for sign in text[start:end])]',
        "parts += [text[place:start], text[start + 1 : end - 1]]",
        f"{_READS}::test_the_corpus",
    ),
    Mutant(
        "a thought that does not end is an answer",
        "rewards/vlm/answers/visible_text.py",
        "return None if opened else",
        "return",
        f"{_READS}::test_the_corpus",
    ),
    Mutant(
        "an answer that was cut off is read",
        "rewards/vlm/forms.py",
        'if reply.refused or reply.finished != "stop":\n            return None\n        return read_scores',
        "if reply.refused:\n            return None\n        return read_scores",
        f"{_FORMS}::test_a_refusal_is_no_score",
    ),
    Mutant(
        "a word counts whatever else was likely",
        "rewards/vlm/forms.py",
        "if everything > 1.01 or mass < self.min_mass:",
        "if everything > 1.01 or mass == 0:",
        f"{_FORMS}::test_no_distribution_over_legal_words_is_no_score",
    ),
    Mutant(
        "missing repeats are left out of the mean",
        "rewards/judges/panel.py",
        "self.scores[name].mean()",
        "self.scores[name].nanmean()",
        f"{_ASKS}::test_one_lost_repeat_of_one_aspect_misses_that_sample_alone",
    ),
    Mutant(
        "an unusable answer is kept as it is",
        "rewards/vlm/chat_client.py",
        'return _Fault("refusal" if received.reply.refused else "unusable answer", text=text, **tokens)',
        "return Answer(text=text)",
        f"{_ASKS}::test_ten_in_a_hundred_faults_end_with_the_clean_values",
    ),
    Mutant(
        "the judge's words are kept with the key in them",
        "rewards/vlm/chat_client.py",
        "text = credentials.redacted(received.reply.text, self._key)",
        "text = received.reply.text",
        f"{_ASKS}::test_a_judge_that_repeats_the_key_is_not_quoted",
    ),
    Mutant(
        "the judged picture comes before the source",
        "rewards/judges/rubrics.py",
        '(*facts, "Source picture:", source_image(sample.task), "Edited picture:", judged_image(sample))',
        '("Edited picture:", judged_image(sample), *facts, "Source picture:", source_image(sample.task))',
        f"{_JUDGES}::test_a_group_shares_all_of_a_prompt_but_its_last_picture",
    ),
    Mutant(
        "VIEScore takes the mean of its two numbers",
        "rewards/judges/viescore.py",
        "torch.stack(given).amin(dim=0)",
        "torch.stack(given).mean(dim=0)",
        f"{_JUDGES}::test_viescore_is_the_root_of_the_product_of_the_least",
    ),
    Mutant(
        "a pair is asked one way round",
        "rewards/judges/win_rate.py",
        'return (1 - float(forth.mean("second")) + float(back.mean("second"))) / 2',
        'return 1 - float(forth.mean("second"))',
        f"{_JUDGES}::test_win_rate_compares_within_a_task_and_forgets_the_place",
    ),
    Mutant(
        "superfluous text is free",
        "rewards/text/ocr.py",
        "    longest = max(len(wanted), len(found))",
        "    found = wanted if wanted in found else found\n    longest = max(len(wanted), len(found))",
        "tests/rewards/text/test_ocr.py::test_correctness_is_of_all_that_was_read",
    ),
    Mutant(
        "a reader is shown red for blue",
        "rewards/text/readers.py",
        'np.asarray(image.convert("RGB"))[:, :, ::-1]',
        'np.asarray(image.convert("RGB"))',
        "tests/rewards/text/test_paddle_reader.py::test_lines_come_with_their_places_and_unsure_ones_not_at_all",
    ),
    Mutant(
        "a line that is too small to read moves the others up",
        "rewards/text/readers.py",
        'return [next(rest) if is_large(image) else TextLine("", 0.0) for image in images]',
        'return [*rest, *(TextLine("", 0.0) for image in images if not is_large(image))]',
        "tests/rewards/text/test_paddle_reader.py::test_lines_of_known_boxes_keep_their_rows_where_some_are_too_small",
    ),
    Mutant(
        "a package takes the signal that asks a run for its last checkpoint",
        "rewards/text/paddle_reader.py",
        "        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))",
        "        pass",
        "tests/rewards/text/test_paddle_reader.py::test_who_listens_for_the_end_of_the_process_goes_on_listening",
    ),
    Mutant(
        "the mask says what to keep",
        "rewards/scorers/dino.py",
        "return 1 - torch.from_numpy(np.asarray(small).astype(np.float64)).flatten() / 255",
        "return torch.from_numpy(np.asarray(small).astype(np.float64)).flatten() / 255",
        "tests/rewards/scorers/test_encoders.py::test_preservation_looks_only_where_nothing_was_to_change",
    ),
)
