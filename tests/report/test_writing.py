"""Completions are shown next to their images; prompts also with their length and quality."""

import json

import pytest
from PIL import Image

from fake_run import write_new_run
from html_check import read
from retouch.records.folder import SampleRecord
from retouch.types import Sample, Task
from retouch_rewards.completions import prompt_quality
from retouch_view.report.page import write_report

INSTRUCTION = "a scarlet disc at twelve"
BEFORE = "<answer>red circle</answer>"
AFTER = "Sure! Here is the prompt: red circle top middle, high quality"


def run_of(root, *, renderer):
    """A run with one held-out task before and after, and one training group."""
    folder = write_new_run(root)
    kept = json.loads(folder.recipe.read_text())
    kept["recipe"] |= {} if renderer is None else {"renderer": {"kind": renderer}}
    folder.recipe.write_text(json.dumps(kept))
    sample = Sample(Task(id="t", instruction=INSTRUCTION), Image.new("RGB", (24, 24)))
    for step, text in ((0, BEFORE), (9, AFTER)):
        shown = SampleRecord(sample=sample, group=0, slot=0, scores={"overall": 4.0}, reward=4.0, text=text)
        folder.write_samples(step, "heldout", [shown])
    members = [
        SampleRecord(sample=sample, group=0, slot=slot, scores={}, reward=float(slot), advantage=0.0, text=text)
        for slot, text in enumerate(["red circle", "<think>it never ends"])
    ]
    folder.write_samples(9, "group", members)
    return folder


def page_of(folder):
    return read(write_report(folder.root).read_text(encoding="utf-8"))


@pytest.fixture
def prompts(tmp_path):
    return page_of(run_of(tmp_path / "run", renderer="prompt"))


def test_original_and_enhanced_prompts_are_shown_with_length_quality_and_reward(prompts):
    words = prompts.words
    assert words.count(INSTRUCTION) == 2
    assert BEFORE in words
    assert AFTER in words
    assert words.count("4") >= 2
    first, last = (
        f"5 → {count} words, prompt quality {prompt_quality(INSTRUCTION, prompt).total:.1f} of 5"
        for count, prompt in ((2, "red circle"), (6, "red circle top middle, high quality"))
    )
    assert words.count(first) == 2  # before, and the group's first sample
    assert words.count(last) == 1


def test_completions_without_a_prompt_are_marked(prompts):
    assert prompts.words.count("contains no prompt") == 1


@pytest.mark.parametrize("renderer", ["response", None])
def test_completions_that_are_not_prompts_are_shown_without_prompt_quality(renderer, tmp_path):
    words = page_of(run_of(tmp_path / "run", renderer=renderer)).words
    assert AFTER in words
    assert not any("prompt quality" in told or "no prompt" in told for told in words)
