"""Reading text in images: the score's arithmetic, and RapidOCR itself on rendered words and on real images."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw, ImageFont

from retouch.protocols import Reward
from retouch.rewards.text.ocr import OcrReward, RapidReader, TextLine, comparable, edit_distance, similarity
from retouch.types import Sample, Task
from retouch_worlds.testing import check_reward


def text_image(text: str, size: int = 40) -> Image.Image:
    image = Image.new("RGB", (60 + size * len(text) * 2 // 3, 2 * size), (240, 240, 230))
    ImageDraw.Draw(image).text((20, size // 2), text, fill=(20, 30, 90), font=ImageFont.load_default(size))
    return image


def ocr_of(*lines: TextLine):
    return OcrReward().with_model(lambda image: list(lines))


def score(reward: OcrReward, text: str) -> tuple[float, float]:
    scores = reward([Sample(Task("t", "", text=text), Image.new("RGB", (8, 8)))])
    return scores["correctness"].item(), scores["confidence"].item()


@pytest.fixture(scope="module")
def reader():
    return RapidReader()


def by_definition(a: str, b: str) -> int:
    if not a or not b:
        return len(a) + len(b)
    same = by_definition(a[1:], b[1:]) + (a[0] != b[0])
    return min(same, by_definition(a[1:], b) + 1, by_definition(a, b[1:]) + 1)


@given(st.text("abc", max_size=5), st.text("abc", max_size=5))
def test_edit_distance_is_the_levenshtein_distance(a, b):
    assert edit_distance(a, b) == by_definition(a, b)


def test_text_is_compared_without_case_spaces_or_unicode_variants():
    assert comparable(" Straße\n ＡＢＣ ﬁne") == "strasseabcfine"
    assert similarity("", " ") == 1


def test_correctness_compares_all_recognised_text():
    sure = 0.9
    assert score(ocr_of(TextLine("Hello", sure), TextLine("World", 0.7)), "hello world") == pytest.approx((1, 0.8))
    assert score(ocr_of(TextLine("Hallo", sure)), "hello")[0] == pytest.approx(0.8)
    assert score(ocr_of(TextLine("hello hello hello", sure)), "hello")[0] == pytest.approx(1 / 3)  # repeated text lowers the score
    correctness, confidence = score(ocr_of(), "hello")
    assert correctness == 0
    assert np.isnan(confidence)


def test_no_image_scores_0_and_a_task_without_text_raises():
    reward = ocr_of(TextLine("a", 1.0))
    assert reward([Sample(Task("t", "", text="a"), None)])["correctness"].tolist() == [0]
    for text in (None, "", " \n"):
        with pytest.raises(ValueError, match=r"task\.text"):
            reward([Sample(Task("t", "", text=text), None)])


def test_ocr_reward_passes_the_contract_checks():
    reward = OcrReward().with_model(lambda image: [TextLine(f"{np.asarray(image).mean():.1f}", 0.5)])
    assert isinstance(reward, Reward)
    check_reward(reward, [Sample(Task(word, "", text="184.7"), text_image(word, 12)) for word in ("open", "Retouch", "17")])


@pytest.mark.parametrize("size", [(1, 1), (160, 2), (24, 24)])
def test_rapidocr_finds_no_text_in_blank_images(reader, size):
    assert reader(Image.new("L", size, 77)) == []


@pytest.mark.parametrize("word", ["Retouch", "HELLO", "open 24"])
def test_rapidocr_reads_a_rendered_word(reader, word):
    right, wrong = Task("r", "", text=word), Task("w", "", text="zzz")
    scores = OcrReward().with_model(reader)([Sample(right, text_image(word)), Sample(wrong, text_image(word))])
    assert scores["correctness"][0] == 1
    assert scores["correctness"][1] < 0.2
    assert (scores["confidence"] > 0.8).all()


def image_of(*lines: tuple[str, tuple[int, int]], size=(400, 200)) -> Image.Image:
    image = Image.new("RGB", size, (240, 240, 230))
    for text, at in lines:
        ImageDraw.Draw(image).text(at, text, fill=(20, 30, 90), font=ImageFont.load_default(36))
    return image


def mask_of(*boxes: tuple[int, int, int, int], size=(400, 200)) -> Image.Image:
    mask = Image.new("L", size)
    for box in boxes:
        ImageDraw.Draw(mask).rectangle(box, fill=255)
    return mask


def square(left: int, top: int, side: int = 10) -> tuple[tuple[float, float], ...]:
    right, bottom = left + side - 1, top + side - 1
    return (left, top), (right, top), (right, bottom), (left, bottom)


@pytest.mark.parametrize(("left", "counts"), [(0, True), (14, True), (15, True), (16, False), (30, False)])
def test_a_line_counts_where_half_of_it_lies_in_the_mask(left, counts):
    mask = mask_of((0, 0, 19, 99), size=(100, 100))
    task = Task("t", "", text="yes", mask=mask)
    reward = OcrReward(where="mask").with_model(lambda image: [TextLine("yes", 1.0, square(left, 40))])
    assert reward([Sample(task, Image.new("RGB", (100, 100)))])["correctness"].item() == float(counts)


def test_text_outside_the_mask_is_ignored_and_extra_text_inside_lowers_the_score(reader):
    image = image_of(("harbour", (20, 20)), ("Azir", (220, 130)))
    task = Task("t", "", text="Azir", mask=mask_of((200, 120, 390, 190)))
    everything, masked = (
        OcrReward(where=where).with_model(reader)([Sample(task, image)])["correctness"].item() for where in ("picture", "mask")
    )
    assert masked == 1.0
    assert everything < 0.5
    both = Task("t", "", text="Azir", mask=mask_of((0, 0, 399, 199)))
    assert OcrReward(where="mask").with_model(reader)([Sample(both, image)])["correctness"].item() == pytest.approx(everything)


def test_where_box_reads_the_text_in_the_box_of_the_mask(reader):
    texts = ("Azir", "rock", "7-Up")
    box = (200, 120, 330, 185)
    samples = [
        Sample(Task(text, "", text=text, mask=mask_of(box)), image_of(("harbour", (20, 20)), (text, (214, 128)))) for text in texts
    ]
    samples.insert(1, Sample(samples[0].task, None))
    scores = OcrReward(where="box").with_model(reader)(samples)
    assert scores["correctness"].tolist() == [1.0, 0.0, 1.0, 1.0]
    assert scores["confidence"].isnan().tolist() == [False, True, False, False]


def test_a_box_smaller_than_one_image_pixel_is_cropped_to_one_pixel():
    class RecordsSizes:
        def __init__(self):
            self.seen = []

        def __call__(self, image):
            raise AssertionError("only lines are read")

        def read_lines(self, images):
            self.seen += [image.size for image in images]
            return [TextLine("", 0.0, square(0, 0)) for _ in images]

    reader = RecordsSizes()
    marked = [mask_of((401, 203, 401, 203), size=(800, 400)), mask_of((100, 40, 299, 79), size=(800, 400))]
    samples = [Sample(Task(str(k), "", text="a", mask=mask), Image.new("RGB", (100, 50))) for k, mask in enumerate(marked)]
    OcrReward(where="box").with_model(reader)(samples)
    assert reader.seen == [(1, 1), (26, 5)]


def test_where_without_a_mask_or_a_line_reader_raises():
    image = Image.new("RGB", (100, 100))
    for mask in (None, Image.new("L", (100, 100))):
        with pytest.raises(ValueError, match="'t' has no mask"):
            OcrReward(where="mask").with_model(lambda image: [])([Sample(Task("t", "", text="a", mask=mask), image)])
    with pytest.raises(ValueError, match="no read_lines"):
        OcrReward(where="box").with_model(lambda image: [])
    with pytest.raises(ValueError, match="'picture', 'mask' or 'box'"):
        OcrReward(where="masks")
