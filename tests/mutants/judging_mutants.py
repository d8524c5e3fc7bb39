"""Deliberate bugs in judges and in rewards without a judge."""

from mutant import Mutant

_READS = "tests/judge/test_answers.py"
_ASKS = "tests/judge/test_chat_client.py"
_JUDGES = "tests/judge/test_judges.py"
_FORMS = "tests/judge/test_answers.py"

JUDGING = (
    Mutant(
        "a score outside its scale is clamped",
        "retouch_judge/wording.py",
        "            return None\n        return None if self.whole",
        "            value = min(max(value, self.low), self.high)\n        return None if self.whole",
        f"{_READS}::test_corpus_answers_give_no_wrong_scores_and_95_percent_of_values_are_read",
    ),
    Mutant(
        "text that a judge quotes is read as its own judgement",
        "retouch_judge/wording.py",
        'parts += [text[place:start], "".join("\\n" if sign == "\\n" else "\\x00" for sign in text[start:end])]',
        "parts += [text[place:start], text[start + 1 : end - 1]]",
        f"{_READS}::test_corpus_answers_give_no_wrong_scores_and_95_percent_of_values_are_read",
    ),
    Mutant(
        "a judge's unclosed thought is read as its answer",
        "retouch_judge/wording.py",
        "return None if opened else",
        "return",
        f"{_READS}::test_corpus_answers_give_no_wrong_scores_and_95_percent_of_values_are_read",
    ),
    Mutant(
        "a truncated answer of a judge is used",
        "retouch_judge/questions.py",
        'if reply.refused or reply.finished != "stop":\n            return None\n        return read_scores',
        "if reply.refused:\n            return None\n        return read_scores",
        f"{_FORMS}::test_refused_or_truncated_replies_give_no_score",
    ),
    Mutant(
        "a word is scored although the allowed words have too little probability",
        "retouch_judge/questions.py",
        "if everything > 1.01 or mass < self.min_mass:",
        "if everything > 1.01 or mass == 0:",
        f"{_FORMS}::test_invalid_distributions_over_allowed_words_give_no_score",
    ),
    Mutant(
        "missing repeats are left out of the mean",
        "retouch_judge/base.py",
        "self.scores[name].mean()",
        "self.scores[name].nanmean()",
        f"{_ASKS}::test_one_failed_repeat_makes_only_that_aspect_of_that_sample_missing",
    ),
    Mutant(
        "an unusable answer of a judge is accepted without a retry",
        "retouch_judge/chat_client.py",
        "return _Fault(cause, text=text, input_tokens=counted.input, output_tokens=counted.output)",
        "return Answer(text=text)",
        f"{_ASKS}::test_a_transient_fault_is_retried_and_the_score_is_correct",
    ),
    Mutant(
        "a judge's answer is kept without removing the API key",
        "retouch_judge/chat_client.py",
        "text = redacted(received.reply.text)",
        "text = received.reply.text",
        f"{_ASKS}::test_the_key_is_in_no_log_error_or_answer",
    ),
    Mutant(
        "the edited image comes before the source image in a judge's prompt",
        "retouch_judge/base.py",
        '(*facts, "Source picture:", source_image(sample.task), "Edited picture:", judged_image(sample))',
        '("Edited picture:", judged_image(sample), *facts, "Source picture:", source_image(sample.task))',
        "tests/judge/test_prefixes.py::test_prompts_of_a_group_share_at_least_80_percent_of_their_tokens",
    ),
    Mutant(
        "VIEScore takes the mean of its scores instead of the minimum",
        "retouch_judge/rewards.py",
        "torch.stack(given).amin(dim=0)",
        "torch.stack(given).mean(dim=0)",
        f"{_JUDGES}::test_viescore_is_the_square_root_of_the_product_of_the_minima",
    ),
    Mutant(
        "the win rate uses only one of the two orders of a pair",
        "retouch_judge/rewards.py",
        'better = (1 - float(forth.mean("second")) + float(back.mean("second"))) / 2',
        'better = 1 - float(forth.mean("second"))',
        f"{_JUDGES}::test_win_rate_compares_samples_of_a_task_in_both_orders",
    ),
    Mutant(
        "superfluous text in an image is not penalised",
        "retouch_rewards/ocr.py",
        "    longest = max(len(wanted), len(found))",
        "    found = wanted if wanted in found else found\n    longest = max(len(wanted), len(found))",
        "tests/rewards/text/test_ocr.py::test_correctness_compares_all_recognised_text",
    ),
    Mutant(
        "the text reader receives pixels in RGB order instead of BGR",
        "retouch_rewards/ocr.py",
        'np.asarray(image.convert("RGB"))[:, :, ::-1]',
        'np.asarray(image.convert("RGB"))',
        "tests/rewards/text/test_ocr.py::test_lines_have_boxes_and_lines_of_low_confidence_are_left_out",
    ),
    Mutant(
        "images too small to read shift the lines of the other images",
        "retouch_rewards/ocr.py",
        'return [next(rest) if is_large(image) else TextLine("", 0.0) for image in images]',
        'return [*rest, *(TextLine("", 0.0) for image in images if not is_large(image))]',
        "tests/rewards/text/test_ocr.py::test_read_lines_keeps_the_order_of_crops_and_returns_no_text_for_tiny_ones",
    ),
    Mutant(
        "Python's SIGTERM handler is not restored after PaddleOCR is imported",
        "retouch_rewards/ocr.py",
        "        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))",
        "        pass",
        "tests/rewards/text/test_ocr.py::test_the_sigterm_handler_is_kept_when_paddle_is_loaded",
    ),
    Mutant(
        "the mask marks the region to preserve instead of the region to edit",
        "retouch_rewards/networks.py",
        'return 1 - torch.from_numpy(np.array(mask.convert("L").resize(size, Resampling.BOX))).to(dtype) / 255',
        'return torch.from_numpy(np.array(mask.convert("L").resize(size, Resampling.BOX))).to(dtype) / 255',
        "tests/rewards/scorers/test_encoders.py::test_preservation_weighs_only_features_outside_the_mask",
    ),
)
