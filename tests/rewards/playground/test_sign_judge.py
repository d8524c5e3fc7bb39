"""The reward of signs: closed forms of its colours and distances, and its scores of right, wrong and autoencoded signs."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from retouch.protocols import Reward
from retouch.recipe.recipe import load
from retouch.types import Sample, Task
from retouch_worlds.data import WordData
from retouch_worlds.measuring import paper_and_ink
from retouch_worlds.playground import words
from retouch_worlds.playground.words import INKS, PAPERS, Style
from retouch_worlds.rewards import SignReward

JUDGE = SignReward()
TASKS = WordData(seed=5, count=120, split="test", style_from_reference=True).tasks()[:]


def scores(made):
    return JUDGE([Sample(task, image) for task, image in made])


def painted(task, word, ink, paper):
    """The task's image with this word, in these colours, on its sign."""
    picture = task.images[0].copy()
    words.write(picture, task.mask.getbbox(), word, Style(ink, paper, 11))
    return picture


def colours(task):
    """Ink and paper of the reference."""
    paper, ink = paper_and_ink(np.asarray(task.reference).reshape(-1, 3).astype(np.int64))
    pairs = ((INKS, ink), (PAPERS, paper))
    return [min(known, key=lambda colour: np.linalg.norm(np.subtract(colour, seen))) for known, seen in pairs]


def sign_colours(task):
    """Ink and paper of the sign that hangs in the image."""
    left, top, *_ = task.mask.getbbox()
    other = words.LINE - top
    whole = task.images[0].crop((0, other, words.WIDTH, other + words.LINE))
    papers = [colour for _, colour in sorted(whole.getcolors(), reverse=True) if colour in PAPERS]
    ink = min(INKS, key=lambda ink: min(np.linalg.norm(np.subtract(colour, ink)) for _, colour in whole.getcolors()))
    assert task.images[0].getpixel((left, top)) == papers[0]
    return ink, papers[0]


def flat_sign(paper, ink, inked=40):
    """A sign of 20 x 10 pixels: ``inked`` pixels have the colour of the ink, all others that of the paper."""
    pixels = np.full((200, 3), paper, dtype=np.uint8)
    pixels[:inked] = ink
    return Image.fromarray(pixels.reshape(10, 20, 3))


def sign_scores(paper, ink, inked=40):
    """The scores (style, paper, ink) of such a sign if the reference has paper (200, 200, 200) and ink (100, 0, 0)."""
    task = Task("t", "", mask=Image.new("L", (20, 10), 255), reference=flat_sign((200, 200, 200), (100, 0, 0)))
    return tuple(column.item() for column in scores([(task, flat_sign(paper, ink, inked))]).values())


def test_flat_signs_have_the_scores_of_the_formula():
    assert isinstance(JUDGE, Reward)
    assert sign_scores((200, 200, 200), (100, 0, 0)) == (1, 1, 1)
    assert sign_scores((216, 200, 200), (100, 0, 16)) == (1, 1, 1)
    assert sign_scores((200, 152, 200), (100, 0, 48)) == pytest.approx((0.5, 0.5, 0.5))
    assert sign_scores((200, 200, 120), (180, 0, 0)) == (0, 0, 0)
    # Distances are Euclidean: (28, 28, 28) is 48.5 away.
    assert sign_scores((228, 228, 228), (100, 0, 0))[1] == pytest.approx(1 - (28 * 3**0.5 - 16) / 64)
    # The ink is the mean of eight pixels, here with one of the paper. An ink that is 59 away from the paper counts as none.
    assert sign_scores((200, 200, 200), (100, 0, 0), inked=7)[2] == pytest.approx(1 - (np.linalg.norm([12.5, 25, 25]) - 16) / 64)
    assert sign_scores((200, 200, 200), (100, 0, 0), inked=0) == (0.5, 1, 0)
    assert sign_scores((120, 20, 0), (178, 10, 0))[2] == 0
    assert sign_scores((120, 20, 0), (60, 20, 0))[2] == pytest.approx(1 - (np.linalg.norm([40, 20, 0]) - 16) / 64)


@pytest.mark.parametrize("size", words.SIZES)
def test_paper_and_ink_are_recovered_for_every_style(size):
    for ink in INKS:
        for paper in PAPERS:
            for word in ("ODU", "BAPA", "UMETER"):
                sign = Image.new("RGB", (48, 16))
                words.write(sign, (0, 0, 48, 16), word, Style(ink, paper, size))
                seen_paper, seen_ink = paper_and_ink(np.asarray(sign).reshape(-1, 3).astype(np.int64))
                assert tuple(seen_paper) == paper
                assert np.linalg.norm(seen_ink - ink) < 25


def test_the_target_image_scores_high_and_other_styles_score_low():
    right = scores([(task, task.target) for task in TASKS])
    assert right["paper"].min() == 1
    assert right["ink"].min() >= 0.95
    # Right style, other word: this reward does not score the word.
    assert scores([(task, painted(task, "KAT", *colours(task))) for task in TASKS])["style"].min() >= 0.9
    # Wrong style: that of the other sign in the image.
    wrong = scores([(task, painted(task, task.text or "", *sign_colours(task))) for task in TASKS])["style"]
    assert wrong.mean() <= 0.2
    assert wrong.max() <= 0.7


def test_unusable_images_score_0_and_a_task_without_a_sign_raises():
    found = scores([(TASKS[0], None), (TASKS[0], TASKS[0].images[0].resize((32, 16))), (TASKS[1], TASKS[1].target)])
    assert found["style"].tolist()[:2] == [0, 0]
    assert found["style"][2] > 0.95
    for broken in (replace(TASKS[0], reference=None), replace(TASKS[0], mask=None)):
        with pytest.raises(ValueError, match="has no sign"):
            scores([(broken, TASKS[0].target)])


def test_recipes_accept_the_sign_reward_only_with_playground_words():
    reward = 'reward={"kind": "playground-signs", "combine": {"style": 1}}'
    recipe = load("recipes/playground/words-grpo.jsonnet", [reward, "data.style_from_reference=true", "eval.column=style"])
    assert isinstance(recipe.reward.build(), SignReward)
    with pytest.raises(ValueError, match="playground-signs scores only tasks of playground-words"):
        load("recipes/playground/grpo.jsonnet", [reward])
