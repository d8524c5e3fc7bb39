"""Forms of answers: the expected value of a word, and what makes a reply unusable."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retouch_judge.chat_client import parse_reply
from retouch_judge.questions import ChoiceForm, JudgeReply, ScoresForm, WordForm
from retouch_judge.wording import Scale

VOTE = ChoiceForm("yes", {"no": 0.0, "yes": 1.0})
YES = WordForm("yes", {"no": 0.0, "yes": 1.0})
DIGITS = WordForm("digit", {str(digit): digit / 5 for digit in range(6)})


def reply(**mass: float) -> JudgeReply:
    return JudgeReply("", "length", first={word: math.log(share) for word, share in mass.items()})


def test_the_yes_score_is_its_share_of_the_probability_of_allowed_words():
    found = YES.read(reply(yes=0.6, no=0.2, maybe=0.15))
    assert found == {"yes": pytest.approx(0.75)}


def test_probabilities_of_spellings_of_a_word_are_summed():
    first = {" Yes": math.log(0.3), "yes": math.log(0.3), "NO": math.log(0.2), "▁no": math.log(0.1)}
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


@pytest.mark.parametrize(
    ("values", "mass"), [({"yes": 1.0}, 0.5), ({"yes": 1.0, " YES": 0.0}, 0.5), ({"yes": 1.0, "no": 0.0}, 0.0)]
)
def test_invalid_words_or_min_mass_raise(values, mass):
    with pytest.raises(ValueError, match=r"words|min_mass"):
        WordForm("x", values, mass)


@pytest.mark.parametrize("text", ["yes", "Yes", " YES.\n", '{"answer": "yes"}', '{ "answer" : "Yes" }'])
def test_a_choice_is_read_if_the_answer_is_only_the_word(text):
    assert VOTE.read(JudgeReply(text, "stop")) == {"yes": 1.0}


@pytest.mark.parametrize(
    "text",
    [
        *("", "maybe", "yes and no", "yes, it was", "no no", "y", "yesno", '"yes"', "- yes", "yes..", "1", "true"),
        *('{"answer": "maybe"}', '{"answer": 1}', '{"answer": ["yes"]}', '{"answer": "yes"', '{"answer": "yes", "x": 1}'),
        *('{"yes": 1}', "{}", '{"answer": "no", "answer": "yes"}', '{"answer": "yes"} {}'),
    ],
)
def test_other_answers_to_a_choice_give_no_score(text):
    assert VOTE.read(JudgeReply(text, "stop")) is None


def test_truncated_or_refused_choice_answers_give_no_score():
    assert VOTE.read(JudgeReply("yes", "length")) is None
    assert VOTE.read(JudgeReply("yes", "stop", refused=True)) is None


def test_a_choice_form_lists_its_words_in_choices_and_schema():
    assert VOTE.choices() == ("no", "yes")
    assert VOTE.schema()["properties"] == {"answer": {"type": "string", "enum": ["no", "yes"]}}
    assert YES.choices() == ScoresForm({"score": Scale(0, 10)}).choices() == ()
    with pytest.raises(ValueError, match="differ in their letters"):
        ChoiceForm("x", {"yes": 1.0, "YES": 0.0})
