"""The prompt is extracted from an enhancer's completion, whatever text surrounds it."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retouch.core.answers import answer_in

PROMPT = "a red cat's hat, 35mm: soft light"
THOUGHTS = [
    "{}",
    '<think>first "x"\nEnhanced prompt: no</think>\n{}',
    "so <answer>no</answer></think>{}",
    "<THINKING>a</THINKING>{}",
]
TAGS = [
    "{}",
    "<answer>{}</answer>",
    "Well.\n<answer>\n{}\n</answer> Done.",
    "<answer>no</answer> <Answer>{}</Answer>",
    "<answer>{}",
]
LABELS = [
    "{}",
    "Enhanced prompt: {}",
    "**Enhanced Prompt:** {}",
    "Sure! Here is it.\n\n### Improved image prompt:\n{}",
    "Original prompt: a cat\nRewritten prompt: {}",
    "Sure! Here's the enhanced prompt for you: {}",
    "Here you go:\n{}",
    "Certainly! {}",
    "Answer: {}",
    "Final version：{}",
    "```\n{}\n```",
    "```text\nno\n```\n```text\n{}\n```",
]
QUOTES = ["{}", '"{}"', " “{}” ", "`{}`", "«{}»", '"“{}”"', "**{}**"]


@pytest.mark.parametrize(("thought", "tag"), list(itertools.product(THOUGHTS, TAGS)))
def test_thoughts_tags_labels_and_quotes_around_the_prompt_are_removed(thought, tag):
    for label, quote in itertools.product(LABELS, QUOTES):
        written = thought.format(tag.format(label.format(quote.format(PROMPT))))
        assert answer_in(written) == PROMPT, written


@pytest.mark.parametrize("around", ["**Enhanced prompt: {}**", '"Prompt: {}"', "`Prompt: “{}”`"])
def test_a_label_within_quotes_is_removed(around):
    assert answer_in(around.format(PROMPT)) == PROMPT


@pytest.mark.parametrize(
    "written",
    [
        "",
        " \n ",
        "...",
        "<think>a red cat",
        "<think>a</think>",
        "<think>a</think> <think>and a red cat",
        "<answer></answer>",
        "<answer> </answer> a red cat",
        "Enhanced prompt:",
        '""',
        "```\n\n```",
    ],
)
def test_completions_without_a_prompt_give_none(written):
    assert answer_in(written) is None


@pytest.mark.parametrize(
    "prompt",
    [
        'a sign that says "OPEN"',
        '"OPEN" beside "CLOSED"',
        "'tis the cat's",
        "a photograph of a sign: HELLO",
        "This is a poster that says: HELLO",
        "style: oil, lighting: soft",
        "response to a storm",
        "here be dragons",
        "surely a cat",
        "of course-grained sand",
        "a <b> in bold, 3 < 4",
        "紫色的兔子，柔和的光线",
    ],
)
def test_a_prompt_alone_stays_as_it_is(prompt):
    assert answer_in(prompt) == prompt


@pytest.mark.parametrize(
    "sign", ["<think>", "</think>", "<answer>", "</answer>", "```\n", "\n", "  ", "**", '"', "“", "new ", "here "]
)
def test_long_repetitions_cause_no_backtracking(sign):
    """A regular expression that backtracks would not finish here."""
    assert answer_in(sign * 100_000 + "x") in {None, "x", " ".join((sign * 100_000 + "x").split())}


def test_line_breaks_and_repeated_spaces_are_collapsed():
    assert answer_in(" a red  cat,\n soft light\t") == "a red cat, soft light"


@given(st.text(st.sampled_from('<>/think answer:"*`#\n\r\t’“” sure here prompt'), max_size=400))
def test_an_answer_is_one_line_with_a_letter_or_digit(written):
    answer = answer_in(written)
    if answer is not None:
        assert answer == " ".join(answer.split())
        assert any(sign.isalnum() for sign in answer)
