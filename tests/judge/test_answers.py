"""The parser of judges' answers: a corpus labelled by hand, random and hostile texts, and the forms of answers."""

import itertools
import json
import math
import random
import re
import time
from collections import Counter
from pathlib import Path
from re import _constants, _parser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retouch_judge import answers, wording
from retouch_judge.answers import LONGEST, read_scores
from retouch_judge.chat_client import parse_reply
from retouch_judge.questions import ChoiceForm, JudgeReply, ScoresForm, WordForm
from retouch_judge.wording import Scale, bounded, compiled, squeezed

CORPUS = [json.loads(line) for line in (Path(__file__).parent / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
KINDS = {
    *("plain", "bold", "fractions", "json", "fenced", "truncated", "refusals", "injections", "off the scale", "several numbers"),
    *("ranges", "decimal commas", "languages", "thoughts", "tags", "nonsense", "two names"),
    *("thousands", "two fractions", "other digits", "percentages", "TeX", "negative", "scientific", "tool calls", "nested JSON"),
    *("delimiters", "trailing commas", "JSON after a colon"),
    *("repeated keys", "cut streams", "second thoughts", "not the judge's", "blind", "other keys", "not a score", "honest"),
    *("traps", "seldom"),  # texts made to mislead the parser; rare forms, which it need not read
}
FORMS = [{"score": Scale(0, 10)}, {"score": Scale(1, 5, whole=True)}, {"alignment": Scale(0, 1), "quality": Scale(0, 1)}]
PARTS = [
    *(
        *("Score", "score", "**", "Final ", "Rating", ":", "=", " is ", "/10", "/5", " out of 10", "7", "10", "0", "8.5"),
        *("7,5", "-", "–", "..", "\n"),
    ),
    *(
        *('{"score": ', "}", "[", "]", ",", '"', "'", "`", "```json\n", "```", "<think>", "</think>", "<score>", "</score>"),
        *("“", "”", "«", "评分", "：", "½"),
    ),
    *(
        *("alignment", "quality", "reads", "Actually", "I cannot", "NaN", "null", "1e999", "\x00", "\ud800", "\u202e", "🙂"),
        *("٧", " ", "\t", ">", "#", "1. "),
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


EDITS = {"success": Scale(0, 10), "restraint": Scale(0, 10)}


CONTRADICTING = (
    *('"final_success": 2, "final_restraint": 1', '"revised_success": 2', '"Actual success": "2"', '"source_success": 2'),
    *('"score": [2, 1]', '"final": {"success": 2, "restraint": 1}', '"correctedRestraint": 20'),
)
AGREEING = (
    *('"overall": 4', '"score": [8, 9]', '"final": {"success": 8, "restraint": 9}', '"final_success": 8'),
    *('"success_verdict": true', '"final_success": "as above"', '"success_reason": 2'),
)


@pytest.mark.parametrize("more", [*CONTRADICTING, *AGREEING])
def test_json_with_other_keys_is_read_unless_they_contradict_a_score(more):
    expected = {"success": 8, "restraint": 9} if more in AGREEING else None
    assert read_scores(f'{{"success": 8, "restraint": 9, {more}}}', EDITS) == expected


def test_scores_are_never_clamped_or_rescaled():
    assert read_scores("11", {"score": Scale(0, 10)}) is None
    assert read_scores("7/10", {"score": Scale(0, 5)}) is None
    assert read_scores("7/10", {"score": Scale(0, 100)}) is None
    assert read_scores("3.5", {"score": Scale(0, 5, whole=True)}) is None
    assert read_scores("Score: -0.5", {"score": Scale(-1, 1)}) is None  # a sign before a figure may be a dash
    assert read_scores('{"score": -0.5}', {"score": Scale(-1, 1)}) == {"score": -0.5}
    # Too long or too deeply nested:
    for text in (
        *("a. " * LONGEST + "Score: 7", "[" * 15000, '{"a":' * 3000, "9" * 15000, '{"score": ' + "9" * 15000 + "}"),
        *(" " * LONGEST, "Score: 7\n" * 2000, "*" * LONGEST),
    ):
        assert read_scores(text, {"score": Scale(0, 10)}) is None


@pytest.mark.parametrize(
    ("make", "says"),
    [
        *((lambda scale=scale: Scale(*scale), "scale") for scale in ((1, 1), (2, 1), (0, math.inf), (math.nan, 1), (0, 2.5, True))),
        (lambda: WordForm("x", {"yes": 1.0}, 0.5), "words"),
        (lambda: WordForm("x", {"yes": 1.0, " YES": 0.0}, 0.5), "words"),
        (lambda: WordForm("x", {"yes": 1.0, "no": 0.0}, 0.0), "min_mass"),
        (lambda: ChoiceForm("x", {"yes": 1.0, "YES": 0.0}), "differ in their letters"),
    ],
)
def test_an_invalid_scale_or_form_raises(make, says):
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_fuzzed_texts_give_valid_scores_or_none(count):
    draw = random.Random(20)
    texts = [row["text"] for row in CORPUS]
    for _ in range(count):
        kind = draw.randrange(3)
        if kind == 0:
            text = "".join(draw.choices(PARTS, k=draw.randrange(20)))
        elif kind == 1:
            limits = [(128, 0x3000, 0x110000)[draw.randrange(3)] for _ in range(draw.randrange(60))]
            text = "".join(chr(draw.randrange(limit)) for limit in limits)
        else:
            text = draw.choice(texts)
            for _ in range(draw.randrange(1, 4)):
                place = draw.randrange(len(text) + 1)
                text = text[:place] + draw.choice(PARTS) + text[place + draw.randrange(3) :]
        scales = draw.choice(FORMS)
        found = read_scores(text, scales)
        assert found is None or found.keys() == scales.keys()
        for name, value in (found or {}).items():
            assert scales[name].low <= value <= scales[name].high
            assert not scales[name].whole or value == int(value)


VOTE = ChoiceForm("yes", {"no": 0.0, "yes": 1.0})
YES = WordForm("yes", {"no": 0.0, "yes": 1.0})
DIGITS = WordForm("digit", {str(digit): digit / 5 for digit in range(6)})


def test_the_yes_score_is_its_share_of_the_probability_of_allowed_words_in_any_spelling():
    first = {" Yes": math.log(0.3), "yes": math.log(0.3), "NO": math.log(0.2), "▁no": math.log(0.1), "maybe": math.log(0.05)}
    assert YES.read(JudgeReply("", "length", first=first)) == {"yes": pytest.approx(0.6 / 0.9)}


@pytest.mark.parametrize("log_prob", [-9999.0, -800.0, -1.0])
def test_probabilities_of_a_token_that_a_server_lists_twice_are_added(log_prob):
    tokens = [{"token": "yes", "logprob": -0.7}, *[{"token": "\ufffd", "logprob": log_prob}] * 2]  # vLLM reports -9999 for -inf
    place = {"token": "yes", "logprob": -0.7, "top_logprobs": tokens}
    choice = {"message": {"content": "yes"}, "finish_reason": "stop", "logprobs": {"content": [place]}}
    received = parse_reply(json.dumps({"choices": [choice]}))
    assert received.reply.first == {"yes": -0.7, "\ufffd": pytest.approx(log_prob + math.log(2), abs=1e-9)}


@given(st.lists(st.floats(0.01, 1), min_size=6, max_size=6))
def test_the_digit_score_is_the_expected_value_of_the_digits(weights):
    total = sum(weights)
    found = DIGITS.read(JudgeReply("", "length", first={str(k): math.log(weight / total) for k, weight in enumerate(weights)}))
    assert found["digit"] == pytest.approx(sum(k * weight for k, weight in enumerate(weights)) / total / 5)


@pytest.mark.parametrize(
    "first",
    [
        {},
        {"The": math.log(0.9), "5": math.log(0.05)},  # about to say something else
        {"5": math.log(0.49)},
        {"5": 0.5},  # no log-probability
        {"5": float("nan")},
        {"5": float("inf")},
        {"5": math.log(0.9), "4": math.log(0.9)},  # no distribution
        {"5": -math.inf, "4": -math.inf},
    ],
)
def test_invalid_distributions_over_allowed_words_give_no_score(first):
    assert DIGITS.read(JudgeReply("5", "length", first=first)) is None


def test_refused_or_truncated_replies_give_no_score():
    assert YES.read(JudgeReply("yes", "stop", refused=True, first={"yes": 0.0})) is None
    form = ScoresForm({"score": Scale(0, 10)})
    assert form.read(JudgeReply('{"score": 7}', "stop")) == {"score": 7.0}
    assert form.read(JudgeReply('{"score": 7}', "stop", refused=True)) is None
    assert form.read(JudgeReply('{"score": 7}', "length")) is None
    assert form.read(JudgeReply('{"score": 7}', "")) is None


def test_the_schema_starts_with_reasoning_and_allows_only_the_scores():
    form = ScoresForm({"a": Scale(0, 1), "b": Scale(0, 10, whole=True)})
    schema = form.schema()
    assert list(schema["properties"]) == schema["required"] == ["reasoning", "a", "b"]
    assert schema["properties"]["a"] == {"type": "number", "minimum": 0, "maximum": 1}
    assert schema["properties"]["b"]["type"] == "integer"
    assert schema["additionalProperties"] is False
    assert "reasoning" not in ScoresForm({"a": Scale(0, 1)}, reasoning=False).schema()["properties"]
    assert VOTE.choices() == ("no", "yes")
    assert VOTE.schema()["properties"] == {"answer": {"type": "string", "enum": ["no", "yes"]}}
    assert YES.choices() == form.choices() == ()


CHOSEN = ("yes", "Yes", " YES.\n", '{"answer": "yes"}', '{ "answer" : "Yes" }')
UNCLEAR = (
    *("", "maybe", "yes and no", "yes, it was", "no no", "y", "yesno", '"yes"', "- yes", "yes..", "1", "true"),
    *('{"answer": "maybe"}', '{"answer": 1}', '{"answer": ["yes"]}', '{"answer": "yes"', '{"answer": "yes", "x": 1}'),
    *('{"yes": 1}', "{}", '{"answer": "no", "answer": "yes"}', '{"answer": "yes"} {}'),
)


@pytest.mark.parametrize("text", [*CHOSEN, *UNCLEAR])
def test_a_choice_is_read_only_if_the_answer_is_only_the_word(text):
    assert VOTE.read(JudgeReply(text, "stop")) == ({"yes": 1.0} if text in CHOSEN else None)


ONE = {"score": Scale(0, 10)}
TWO = {"instruction_following": Scale(0, 10), "quality": Scale(0, 10)}
SIZE = 4_800  # characters; four times as many are just below the longest text that is read
SLOWEST = 1.0  # seconds of CPU time for the longest text
GROWTH = 9.0  # of the time, for four times the length: 4 is linear, 16 is quadratic
MEASURABLE = 0.1  # seconds

PIECES: list[str] = json.loads((Path(__file__).parent / "pieces.json").read_text(encoding="utf-8"))


def seconds(text):
    """CPU time to read the text, the least of two."""
    times = []
    for scales in (ONE, TWO):
        began = time.process_time()
        read_scores(text, scales)
        times.append(time.process_time() - began)
    return max(times)


def shapes():
    """(before, what is repeated, after): every piece alone, between others, and in random pairs and triples."""
    draw = random.Random(0)
    around = [("score", ""), ("<", "Score: 7"), ("The edit is good. ", "x")]
    made = [(before, piece, after) for piece, (before, after) in itertools.product(PIECES, around)]
    for count in (2, 3):
        made += [(draw.choice(PIECES), "".join(draw.choices(PIECES, k=count)), draw.choice(PIECES)) for _ in range(40)]
    return made


def text_of(shape, size):
    before, piece, after = shape
    text = before + piece * (size // len(piece)) + after
    assert len(text) <= LONGEST
    return text


SHAPES = shapes()


@pytest.mark.parametrize("part", [pytest.param(part, marks=pytest.mark.slow) for part in range(4)])
def test_reading_time_grows_at_most_linearly_with_the_length(part):
    slow, grown = [], []
    for shape in SHAPES[part::4]:
        long = seconds(text_of(shape, 4 * SIZE))
        if long > SLOWEST and min(seconds(text_of(shape, 4 * SIZE)) for _ in range(2)) > SLOWEST:
            slow.append((shape, round(long, 2)))
        elif long > MEASURABLE:
            ratio = min(seconds(text_of(shape, 4 * SIZE)) / max(seconds(text_of(shape, SIZE)), 1e-9) for _ in range(3))
            if ratio > GROWTH:
                grown.append((shape, round(long, 3), round(ratio, 1)))
    assert (slow, grown) == ([], [])


def unbounded(parsed):
    """Whether a parsed pattern repeats anything without a limit."""
    for code, argument in parsed:
        inner = []
        if code in (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT):
            if argument[1] is _constants.MAXREPEAT:
                return True
            inner = [argument[2]]
        elif code is _constants.SUBPATTERN:
            inner = [argument[3]]
        elif code is _constants.BRANCH:
            inner = argument[1]
        elif code in (_constants.ASSERT, _constants.ASSERT_NOT):
            inner = [argument[1]]
        if any(map(unbounded, inner)):
            return True
    return False


def recording(function, used):
    """The function of ``re``, which also adds its pattern to ``used``."""

    def recorded(pattern, *arguments, **options):
        used.add(pattern.pattern if isinstance(pattern, re.Pattern) else pattern)
        return function(pattern, *arguments, **options)

    return recorded


def test_regular_expressions_of_the_parser_have_no_unbounded_repeats(monkeypatch):
    """Patterns of the modules, and patterns that are compiled while an answer is read."""
    used: set[str] = set()
    for module in (answers, wording):
        used |= {value.pattern for value in vars(module).values() if isinstance(value, re.Pattern)}
    for name in ("compile", "search", "match", "fullmatch", "sub", "split", "finditer", "findall"):
        monkeypatch.setattr(re, name, recording(getattr(re, name), used))
    compiled.cache_clear()
    for text in (
        *("Score: 7", "<score>7</score>", "**Score:** 7/10. Fine.", '{"score": 7}', "Quality: 7\nInstruction following: 8"),
        *("7",),
    ):
        read_scores(text, ONE)
        read_scores(text, TWO)
    assert len(used) > 30
    allowed = {r"\s{33,}"}  # runs of spaces, each of which is matched once
    assert [pattern for pattern in used - allowed if unbounded(_parser.parse(pattern))] == []
    assert bounded(r"a*b+?[*+]\*\+c{2,}") == r"a{0,500}b{1,500}?[*+]\*\+c{2,500}"
    assert squeezed("a" + " " * 32 + "b" + " " * 33 + "c\n" + " " * 40 + "d" + "\n" * 40 + "e") == "a" + " " * 32 + "b c\nd\n\ne"
