"""The parser of judges' answers: a corpus labelled by hand, and random texts."""

import json
import math
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retouch_judge.answers import LONGEST, read_scores
from retouch_judge.wording import Scale

CORPUS = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
KINDS = {
    *("plain", "bold", "fractions", "json", "fenced", "truncated", "refusals", "injections", "off the scale", "several numbers"),
    *("ranges", "decimal commas", "languages", "thoughts", "tags", "nonsense", "two names"),
    *("thousands", "two fractions", "other digits", "percentages", "TeX", "negative", "scientific", "tool calls", "nested JSON"),
    *("delimiters", "trailing commas", "JSON after a colon"),
    *("repeated keys", "cut streams", "second thoughts", "not the judge's", "blind", "other keys", "not a score", "honest"),
    *("traps", "seldom"),  # texts made to mislead the parser; rare forms, which it need not read
}
FORMS = [
    {"score": Scale(0, 10)},
    {"score": Scale(1, 5, whole=True)},
    {"alignment": Scale(0, 1), "quality": Scale(0, 1)},
]
PIECES = [
    *(
        "Score",
        "score",
        "**",
        "Final ",
        "Rating",
        ":",
        "=",
        " is ",
        "/10",
        "/5",
        " out of 10",
        "7",
        "10",
        "0",
        "8.5",
        "7,5",
        "-",
        "–",
        "..",
        "\n",
    ),
    *(
        '{"score": ',
        "}",
        "[",
        "]",
        ",",
        '"',
        "'",
        "`",
        "```json\n",
        "```",
        "<think>",
        "</think>",
        "<score>",
        "</score>",
        "“",
        "”",
        "«",
        "评分",
        "：",
        "½",
    ),
    *(
        "alignment",
        "quality",
        "reads",
        "Actually",
        "I cannot",
        "NaN",
        "null",
        "1e999",
        "\x00",
        "\ud800",
        "\u202e",
        "🙂",
        "٧",
        " ",
        "\t",
        ">",
        "#",
        "1. ",
    ),
    *("\\boxed{", "$", "%", "1,000", "1e1", "７", "½", "<tool_call>", '"arguments": ', '"max_score": 20', "(source image)", "not "),
    *("||V^=^V||", ",}", ",]", "My answer: ", "Evaluation:"),
]


def asked(row):
    """The scales and the label of a row of the corpus."""
    whole = row.get("whole", False)
    scales = {name: Scale(*bounds, whole) for name, bounds in row.get("scales", {"score": row.get("scale")}).items()}
    label = {"score": row["want"]} if "scale" in row and row["want"] is not None else row["want"]
    return scales, label


def check(found, scales):
    """Check that the result is None, or one number on its scale for each name."""
    if found is None:
        return
    assert set(found) == set(scales)
    for name, value in found.items():
        assert math.isfinite(value)
        assert scales[name].low <= value <= scales[name].high
        assert not scales[name].whole or value == int(value)


def test_corpus_answers_give_no_wrong_scores_and_95_percent_of_values_are_read():
    outcomes = Counter()
    wrong = []
    for row in CORPUS:
        scales, label = asked(row)
        found = read_scores(row["text"], scales)
        right = found == label
        outcomes["right" if right else "abstained" if found is None else "wrong"] += 1
        outcomes["valued and read"] += right and label is not None and row["kind"] != "seldom"
        if not right and found is not None:
            wrong.append((row["text"], label, found))
    assert wrong == []
    assert len(CORPUS) >= 1800
    assert {row["kind"] for row in CORPUS} == KINDS
    valued = sum(row["want"] is not None and row["kind"] != "seldom" for row in CORPUS)
    assert valued >= 250
    assert outcomes["valued and read"] >= 0.95 * valued, outcomes  # abstaining from everything would be easy


TWO = {"success": Scale(0, 10), "restraint": Scale(0, 10)}


@pytest.mark.parametrize(
    "more",
    [
        *('"final_success": 2, "final_restraint": 1', '"revised_success": 2', '"Actual success": "2"', '"source_success": 2'),
        *('"score": [2, 1]', '"final": {"success": 2, "restraint": 1}', '"correctedRestraint": 20'),
    ],
)
def test_json_with_two_different_scores_of_a_name_gives_no_score(more):
    assert read_scores(f'{{"success": 8, "restraint": 9, {more}}}', TWO) is None


@pytest.mark.parametrize(
    "more",
    [
        *('"overall": 4', '"score": [8, 9]', '"final": {"success": 8, "restraint": 9}', '"final_success": 8'),
        *('"success_verdict": true', '"final_success": "as above"', '"success_reason": 2'),
    ],
)
def test_json_with_other_keys_that_contradict_no_score_is_read(more):
    assert read_scores(f'{{"success": 8, "restraint": 9, {more}}}', TWO) == {"success": 8, "restraint": 9}


def test_scores_are_never_clamped_or_rescaled():
    assert read_scores("11", {"score": Scale(0, 10)}) is None
    assert read_scores("7/10", {"score": Scale(0, 5)}) is None
    assert read_scores("7/10", {"score": Scale(0, 100)}) is None
    assert read_scores("3.5", {"score": Scale(0, 5, whole=True)}) is None
    assert read_scores("Score: -0.5", {"score": Scale(-1, 1)}) is None  # a sign before a figure may be a dash
    assert read_scores('{"score": -0.5}', {"score": Scale(-1, 1)}) == {"score": -0.5}


def test_scores_inside_think_tags_are_ignored():
    assert read_scores("<think>Score: 9</think>", {"score": Scale(0, 10)}) is None
    assert read_scores("<think>Score: 9</think>\nScore: 2", {"score": Scale(0, 10)}) == {"score": 2}


def test_too_long_or_too_deeply_nested_answers_give_no_score():
    assert read_scores("a. " * LONGEST + "Score: 7", {"score": Scale(0, 10)}) is None
    for text in (
        "[" * 15000,
        '{"a":' * 3000,
        "9" * 15000,
        '{"score": ' + "9" * 15000 + "}",
        " " * LONGEST,
        "Score: 7\n" * 2000,
        "*" * LONGEST,
    ):
        assert read_scores(text, {"score": Scale(0, 10)}) is None


@given(st.text(max_size=80), st.sampled_from(FORMS))
@settings(max_examples=300)
def test_any_text_gives_valid_scores_or_none(text, scales):
    check(read_scores(text, scales), scales)


@given(st.lists(st.sampled_from(PIECES), max_size=14).map("".join), st.sampled_from(FORMS))
@settings(max_examples=500)
def test_any_combination_of_answer_pieces_gives_valid_scores_or_none(text, scales):
    check(read_scores(text, scales), scales)


@given(st.floats(0, 10).map(lambda value: round(value, 2)))
@settings(max_examples=50)
def test_the_score_of_a_json_answer_is_read_exactly(value):
    assert read_scores(json.dumps({"reasoning": 'a "9" of 10: {"score": 3}', "score": value}), {"score": Scale(0, 10)}) == {
        "score": value
    }


@pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_fuzzed_texts_give_valid_scores_or_none(count):
    draw = random.Random(20)
    texts = [row["text"] for row in CORPUS]
    for _ in range(count):
        kind = draw.randrange(3)
        if kind == 0:
            text = "".join(draw.choices(PIECES, k=draw.randrange(20)))
        elif kind == 1:
            text = "".join(
                chr(draw.choice((draw.randrange(128), draw.randrange(0x3000), draw.randrange(0x110000))))
                for _ in range(draw.randrange(60))
            )
        else:
            text = draw.choice(texts)
            for _ in range(draw.randrange(1, 4)):
                place = draw.randrange(len(text) + 1)
                text = text[:place] + draw.choice(PIECES) + text[place + draw.randrange(3) :]
        scales = draw.choice(FORMS)
        check(read_scores(text, scales), scales)


@pytest.mark.parametrize(
    ("low", "high", "whole"), [(1, 1, False), (2, 1, False), (0, float("inf"), False), (float("nan"), 1, False), (0, 2.5, True)]
)
def test_an_invalid_scale_raises(low, high, whole):
    with pytest.raises(ValueError, match="scale"):
        Scale(low, high, whole)
