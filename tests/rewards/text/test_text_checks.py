"""Checks of a completion: the think format, and the five sub-scores of system C."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retouch.rewards.text.completions import PromptQuality, prompt_quality, think_format


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<think>a</think>b", 1),
        ("  <think>\nfirst\nsecond\n</think>\n\nanswer\n", 1),
        ("<think>a < b</think> c > d", 1),
        ("<think></think>b", 0),
        ("<think> \n</think>b", 0),
        ("<think>a</think>", 0),
        ("<think>a</think>  \n", 0),
        ("<think>a", 0),
        ("a</think>b", 0),
        ("a <think>b</think>c", 0),
        ("<think>a</think>b<think>c</think>d", 0),
        ("<think>a<think>b</think>c", 0),
        ("<think>a</think>b</think>c", 0),
        ("</think>a<think>b", 0),
        ("answer", 0),
        ("", 0),
    ],
)
def test_think_format_is_1_only_for_one_thought_before_an_answer(text, right):
    assert think_format(text) == right


def test_think_format_accepts_other_marks_and_rejects_invalid_ones():
    marks = {"opening": "<|start thinking|>", "closing": "<|end thinking|>"}
    assert think_format("<|start thinking|>a<|end thinking|>b", **marks) == 1
    assert think_format("<think>a</think>b", **marks) == 0
    for opening, closing in (("", "x"), ("x", ""), ("x", "x")):
        with pytest.raises(ValueError, match="marks"):
            think_format("a", opening=opening, closing=closing)


def test_the_example_of_system_c_gets_all_five_points():
    enhanced = (
        "a beautiful fluffy orange tabby cat sitting gracefully on a windowsill, soft natural lighting, professional pet "
        "photography, high quality, detailed fur texture, 4k resolution"
    )
    assert prompt_quality("a cat", enhanced) == PromptQuality(1, 1, 1, 1, 1)
    assert prompt_quality("a cat", enhanced).total == 5


def test_each_sub_score_matches_values_computed_by_hand():
    assert prompt_quality("red cat", "red cat") == PromptQuality(0, 1, 0, 0, 0)
    assert prompt_quality("red cat", "red dog").keywords == 0.5
    assert prompt_quality("the red cat", "a RED Cat").keywords == 1
    assert prompt_quality("the", "it").keywords == 0  # if all words are fillers, each of them counts
    assert prompt_quality("cat", "cat one two three").details == pytest.approx(3 / 5)
    assert prompt_quality("cat", "cat 4k").quality_words == 1
    assert prompt_quality("cat", "cat 14km").quality_words == 0
    assert prompt_quality("cat", "a b c d e").sentence == 1
    assert prompt_quality("cat", "").total == 0
    assert prompt_quality("", "cat").keywords == 1
    assert prompt_quality("보라색 토끼", "보라색 토끼 아름다운").keywords == 1


@given(st.text(max_size=60), st.text(max_size=60))
def test_sub_scores_of_any_texts_stay_in_range(original, enhanced):
    points = prompt_quality(original, enhanced)
    assert all(0 <= point <= 1 for point in (points.length, points.keywords, points.details, points.quality_words, points.sentence))
    assert 0 <= points.total <= 5
