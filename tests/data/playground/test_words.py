"""Tasks of the word world: splits with disjoint words, deterministic by seed, and read correctly by the real OCR model."""

import hashlib
import itertools
from typing import get_args

import numpy as np
import pytest
from PIL import ImageChops

from retouch.types import Sample, SplitName
from retouch_models.triplets import PROMPT as TRIPLETS_PROMPT
from retouch_rewards.ocr import OcrReward
from retouch_worlds.data import PROMPT, WordData
from retouch_worlds.playground import words
from retouch_worlds.playground.words import CELL, CONSONANTS, LETTERS, LINE, VOWELS, split_of_word

SPLITS = get_args(SplitName)


def tasks(split="train", count=200, seed=0, **more):
    return WordData(**{"seed": seed, "count": count, "split": split, **more}).tasks()[:]


def test_the_splits_share_no_word_and_all_have_all_letters():
    found = {split: {task.text for task in tasks(split, 600)} for split in SPLITS}
    assert not found["train"] & found["validation"]
    assert not found["train"] & found["test"]
    assert not found["validation"] & found["test"]
    assert all(split_of_word(word) == split for split, these in found.items() for word in these)
    for these in found.values():
        assert set("".join(these)) == set(LETTERS)
        assert {len(word) for word in these} == {3, 4, 5, 6}
    every = {"".join(word) for word in itertools.product(CONSONANTS, VOWELS, CONSONANTS)}
    assert 0.75 < sum(split_of_word(word) == "train" for word in every) / len(every) < 0.85


def test_tasks_have_the_same_digest_as_when_the_shipped_models_were_made():
    digest = hashlib.sha256()
    for more in ({}, {"wrong_letters": 0.5}, {"wrong_letters": 0.5, "style_from_reference": True}):
        for task in tasks(count=12, **more):
            digest.update(task.id.encode() + task.text.encode() + task.target.tobytes() + task.images[0].tobytes())
    assert digest.hexdigest()[:16] == "ffa1c7b9e00b980d"


def test_instruction_images_mask_and_reference_of_a_task_are_consistent():
    assert PROMPT == TRIPLETS_PROMPT
    for task in tasks(count=60):
        assert task.instruction == f"The text is '{task.text}'."
        assert task.images[0].size == task.target.size == task.mask.size == (64, 32)
        assert set(np.unique(np.asarray(task.mask))) == {0, 255}
        left, top, right, bottom = task.mask.getbbox()
        assert (right - left, bottom - top) == (6 * CELL, LINE)
        # Source and target differ only inside the mask, and the source has no letters there.
        changed = ImageChops.difference(task.images[0], task.target).getbbox()
        assert left <= changed[0] < changed[2] <= right
        assert top <= changed[1] < changed[3] <= bottom
        assert len(task.images[0].crop((left, top, right, bottom)).getcolors()) == 1
        # The reference has the same paper colour.
        paper = task.target.getpixel((right - 1, top))
        assert paper in {colour for _, colour in task.reference.getcolors()}
    assert len({task.mask.getbbox() for task in tasks(count=60)}) == 2


def test_wrong_letters_change_only_the_target():
    right, wrong = tasks(count=300), tasks(count=300, wrong_letters=0.5)
    for a, b in zip(right, wrong, strict=True):
        assert (a.id, a.text, a.instruction, a.mask.tobytes()) == (b.id, b.text, b.instruction, b.mask.tobytes())
        assert a.images[0].tobytes() == b.images[0].tobytes()
        assert a.reference.tobytes() == b.reference.tobytes()
    assert sum(a.target.tobytes() != b.target.tobytes() for a, b in zip(right, wrong, strict=True)) / 300 > 0.85
    with pytest.raises(ValueError, match="wrong_letters"):
        tasks(wrong_letters=1.5)
    with pytest.raises(ValueError, match="split"):
        tasks("other")
    with pytest.raises(IndexError):
        WordData(seed=0, count=3, split="test").tasks()[3]


def test_style_from_reference_removes_the_targets_colours_from_the_source_image():
    shared, apart = tasks(count=200), tasks(count=200, style_from_reference=True)
    for a, b in zip(shared, apart, strict=True):
        assert (a.id, a.text, a.instruction, a.mask.tobytes()) == (b.id, b.text, b.instruction, b.mask.tobytes())
        assert a.reference.tobytes() == b.reference.tobytes()
        box = a.mask.getbbox()
        assert a.target.crop(box).tobytes() == b.target.crop(box).tobytes()
        # The source image has no pixel in the requested colours of paper and ink.
        asked = {colour for _, colour in b.reference.getcolors()} & {*words.PAPERS, *words.INKS}
        assert any(colour in words.PAPERS for colour in asked)
        assert not asked & {colour for _, colour in b.images[0].getcolors()}
        assert asked & {colour for _, colour in a.images[0].getcolors()}
        # Source and target differ only inside the box.
        left, top, right, bottom = ImageChops.difference(b.images[0], b.target).getbbox()
        assert box[0] <= left < right <= box[2]
        assert box[1] <= top < bottom <= box[3]
    papers = {task.images[0].getpixel(task.mask.getbbox()[:2]) for task in apart}
    assert papers == set(words.PAPERS)


@pytest.mark.slow
def test_the_ocr_model_reads_correct_targets_correctly():
    read = OcrReward(where="box", line_width=160)
    scores = read([Sample(task, task.target) for task in tasks("test", 60)])["correctness"]
    assert scores.mean() >= 0.99
    assert (scores == 1).float().mean() >= 0.97
