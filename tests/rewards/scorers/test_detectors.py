"""Object detectors against the post-processing of transformers, and GenEval's rules on the boxes that they find."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from transformers import OwlViTImageProcessorPil

import tiny_detectors
import tiny_towers
from pictures import picture
from retouch.types import Sample, Task
from retouch_rewards.geneval import COLOURS, DIRECTIONS, ClipColours, GenEvalReward, directions, met, requirements
from retouch_rewards.networks import Detection, load_detector, suppress_overlaps
from retouch_worlds.testing import check_reward

NAMES = ["dog", "red car", "cup"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("detectors")
    for kind in ("owlvit", "owlv2"):
        tiny_detectors.owl(root / kind, kind=kind)
    tiny_detectors.grounding_dino(root / "dino")
    tiny_towers.clip(root / "clip", longest=48)
    return root


@pytest.mark.parametrize("kind", ["owlvit", "owlv2"])
@pytest.mark.parametrize("size", [(32, 32), (40, 20), (20, 40)])
def test_owl_detections_match_the_post_processing_of_transformers(folder, kind, size):
    detector, image = load_detector(folder / kind), picture(1, size)
    found = detector(image, NAMES)
    # By hand: the image (for OWLv2 padded to a square on the right or below), the queries, and the processor's post-processing.
    seen = image
    if kind == "owlv2":
        seen = Image.new("RGB", (max(size), max(size)))
        seen.paste(image)
    pixels = detector.processor(images=[seen], return_tensors="pt")["pixel_values"]
    tokens = detector.tokenizer(
        [f"a photo of a {name}" for name in NAMES], padding="max_length", max_length=24, truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        outputs = detector.model(pixel_values=pixels, input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])
    read = OwlViTImageProcessorPil().post_process_object_detection(outputs, threshold=0.0, target_sizes=[seen.size[::-1]])[0]
    assert len(found) == 16
    order = read["scores"].argsort(descending=True, stable=True)
    assert [one.name for one in found] == [NAMES[label] for label in read["labels"][order].tolist()]
    torch.testing.assert_close(torch.tensor([one.confidence for one in found]), read["scores"][order])
    torch.testing.assert_close(torch.tensor([one.box for one in found]), read["boxes"][order])
    assert len({one.name for one in found}) > 1, "a detector that always says the same would prove nothing"


def test_grounding_dino_gives_each_name_its_own_tokens(folder):
    detector, image = load_detector(folder / "dino"), picture(3, (50, 40))
    found = detector(image, ["Dog", "cup"])
    letters = detector.tokenizer.convert_ids_to_tokens
    vocabulary = detector.tokenizer.get_vocab()
    ids = [vocabulary[token] for token in ("<cls>", *"dog", ".", *"cup", ".", "<sep>")]
    seen = detector.processor(images=[image], return_tensors="pt")
    with torch.no_grad():
        outputs = detector.model(input_ids=torch.tensor([ids]), pixel_values=seen["pixel_values"], pixel_mask=seen["pixel_mask"])
    assert letters(ids[1:4]) == list("dog")
    logits = outputs.logits[0]
    by_name = torch.stack([logits[:, 1:4].amax(1), logits[:, 5:8].amax(1)], dim=1)
    confidence, label = by_name.sigmoid().max(dim=1)
    order = confidence.argsort(descending=True, stable=True)
    assert [one.name for one in found] == [["Dog", "cup"][k] for k in label[order].tolist()]
    torch.testing.assert_close(torch.tensor([one.confidence for one in found]), confidence[order])
    centre, extent = outputs.pred_boxes[0][order].split(2, dim=1)
    corners = torch.cat([centre - extent / 2, centre + extent / 2], dim=1) * torch.tensor([50.0, 40, 50, 40])
    torch.testing.assert_close(torch.tensor([one.box for one in found]), corners)


def test_boxes_that_overlap_a_more_confident_one_of_the_same_name_are_removed():
    left, shifted, right = (0.0, 0.0, 10.0, 10.0), (2.0, 0.0, 12.0, 10.0), (20.0, 0.0, 30.0, 10.0)
    boxes = (("dog", 0.6, shifted), ("dog", 0.9, left), ("cat", 0.5, left), ("dog", 0.35, right))
    found = [Detection(*box) for box in boxes]
    assert suppress_overlaps(found, above=0.3) == [found[1], found[3], found[2]]
    assert suppress_overlaps(found, above=0.3, overlap=0.7) == [found[1], found[0], found[3], found[2]]  # their IoU is 8/12
    assert suppress_overlaps(found, above=0.4) == [found[1], found[2]]
    assert suppress_overlaps(found, above=0.3, most=1) == [found[1], found[2]]
    assert suppress_overlaps([], above=0.3) == []


WHITE = Image.new("RGB", (100, 100), "white")
LEFT, RIGHT, UP, DOWN = (0.0, 40.0, 20.0, 60.0), (80.0, 40.0, 100.0, 60.0), (40.0, 0.0, 60.0, 20.0), (40.0, 80.0, 60.0, 100.0)


def is_satisfied(meta, *found, colours=None):
    wanted = requirements(Task("t", "", meta=meta))
    surest_first = sorted((Detection(*one) for one in found), key=lambda one: -one.confidence)
    namer = None if colours is None else lambda image, boxes, name: [colours[box] for box in boxes]
    return met(wanted, surest_first, WHITE, namer)


def include(*wanted, **more):
    return {"include": list(wanted), **more}


def test_include_needs_at_least_and_exclude_fewer_objects_than_the_count():
    dog = {"class": "dog", "count": 1}
    assert is_satisfied(include(dog), ("cat", 0.9, LEFT)) == [False]
    assert is_satisfied(include(dog, {"class": "cat", "count": 1}), ("dog", 0.9, LEFT)) == [True, False]
    assert is_satisfied(include(dog)) == [False]
    three = {"include": [{"class": "dog", "count": 3}], "exclude": [{"class": "dog", "count": 4}], "tag": "counting"}
    dogs = [("dog", 0.9, LEFT), ("dog", 0.8, RIGHT), ("dog", 0.7, UP), ("dog", 0.6, DOWN)]
    assert is_satisfied(three, *dogs[:2]) == [False, True]
    assert is_satisfied(three, *dogs[:3]) == [True, True]
    assert is_satisfied(three, *dogs) == [True, False]


def test_colours_are_checked_only_for_the_most_confident_objects():
    red = include({"class": "car", "count": 1, "color": "red"})
    colours = {LEFT: "red", RIGHT: "blue"}
    assert is_satisfied(red, ("car", 0.9, LEFT), ("car", 0.5, RIGHT), colours=colours) == [True]
    assert is_satisfied(red, ("car", 0.5, LEFT), ("car", 0.9, RIGHT), colours=colours) == [False]
    two = include({"class": "car", "count": 2, "color": "red"})
    assert is_satisfied(two, ("car", 0.9, LEFT), ("car", 0.5, RIGHT), colours=colours) == [False]
    assert is_satisfied(two, ("car", 0.9, LEFT), ("car", 0.5, RIGHT), colours={LEFT: "red", RIGHT: "red"}) == [True]


def test_a_position_must_hold_for_every_pair_and_needs_its_target_object():
    meta = include({"class": "dog", "count": 1}, {"class": "tie", "count": 1, "position": ["right of", 0]})
    assert is_satisfied(meta, ("dog", 0.9, LEFT), ("tie", 0.9, RIGHT)) == [True, True]
    assert is_satisfied(meta, ("dog", 0.9, RIGHT), ("tie", 0.9, LEFT)) == [True, False]
    assert is_satisfied(meta, ("tie", 0.9, RIGHT)) == [False, False]
    two = include({"class": "dog", "count": 2}, {"class": "tie", "count": 1, "position": ["right of", 0]})
    assert is_satisfied(two, ("dog", 0.9, LEFT), ("dog", 0.8, UP), ("tie", 0.9, RIGHT)) == [True, True]
    assert is_satisfied(two, ("dog", 0.9, LEFT), ("dog", 0.8, RIGHT), ("tie", 0.9, UP)) == [True, False]


corners = st.tuples(*[st.floats(0, 100)] * 2, *[st.floats(1, 60)] * 2)
boxes = corners.map(lambda box: (box[0], box[1], box[0] + box[2], box[1] + box[3]))


@given(boxes, boxes)
def test_directions_between_boxes_match_values_computed_by_hand_and_mirror_each_other(a, b):
    assert directions(LEFT, RIGHT) == {"left of"}
    assert directions(UP, DOWN) == {"above"}
    assert directions((0, 0, 10, 10), (60, 60, 70, 70)) == {"left of", "above"}
    assert directions(LEFT, LEFT) == set()
    # The offset 4 is not more than a tenth of the sizes 20 + 20, so there is no direction.
    assert directions((0, 0, 20, 20), (4, 0, 24, 20)) == set()
    # Offset 7: 7 - 4 = 3 is less than half of 7. Offset 9: 9 - 4 = 5 is more than half of 9.
    assert directions((0, 0, 20, 20), (7, 0, 27, 20)) == set()
    assert directions((0, 0, 20, 20), (9, 0, 29, 20)) == {"left of"}
    opposite = dict(zip(DIRECTIONS, ("right of", "left of", "below", "above"), strict=True))
    seen = directions(a, b)
    assert {opposite[direction] for direction in directions(b, a)} == seen
    turned = {"left of": "above", "above": "left of", "right of": "below", "below": "right of"}
    swap = [(box[1], box[0], box[3], box[2]) for box in (a, b)]
    assert {turned[direction] for direction in directions(*swap)} == seen
    assert not {"left of", "right of"} <= seen
    assert not {"above", "below"} <= seen


@pytest.mark.parametrize(
    ("meta", "told"),
    [
        ({}, "no requirements"),
        ({"include": []}, "no requirements"),
        ({"include": [{"count": 1}]}, "include.0.class"),
        ({"include": [{"class": "dog", "count": 0}]}, "include.0.count"),
        ({"include": [{"class": "dog", "colour": "red"}]}, "include.0.colour"),
        ({"include": [{"class": "dog", "color": "reddish"}]}, "GenEval's colours are red"),
        ({"include": [{"class": "dog", "position": ["left of", 0]}]}, "earlier requirement"),
        ({"include": [{"class": "dog"}, {"class": "cat", "position": ["beside", 0]}]}, "left of, right of"),
        ({"exclude": [{"class": "dog"}]}, "exclude.0.count"),
    ],
)
def test_invalid_requirements_raise_with_the_key_or_the_cause(meta, told):
    with pytest.raises(ValueError, match=told):
        requirements(Task("t", "", meta=meta))


def requests():
    meta = [
        include({"class": "dog", "count": 1}),
        include({"class": "dog", "count": 2, "color": "red"}, {"class": "cup", "position": ["left of", 0]}),
        {"include": [{"class": "cup", "count": 3}], "exclude": [{"class": "cup", "count": 4}], "tag": "counting"},
    ]
    return [
        Sample(Task(f"t{k}", "a dog", meta=given), Image.effect_noise((40 + k, 30), 90 + k).convert("RGB"))
        for k, given in enumerate(meta)
    ]


def test_geneval_reward_passes_the_contract_checks_and_refuses_unusable_weights(folder, monkeypatch):
    detector, clip = folder / "owlv2", folder / "clip"
    reward = GenEvalReward(detector=detector, clip=clip, threshold=0.2, counting_threshold=0.2)
    check_reward(reward, requests())
    scores = reward([*requests(), Sample(requests()[0].task, None)])
    assert scores["correct"][-1] == scores["met"][-1] == 0
    assert (scores["met"] >= scores["correct"]).all()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for call, says in (
        (lambda: GenEvalReward(detector=detector)(requests()), "set `clip`"),
        (lambda: GenEvalReward(detector=detector, threshold=1.5), "threshold"),
        (lambda: load_detector(clip), "owlvit, owlv2 or grounding-dino"),
        (lambda: load_detector("no-such-owner/no-such-model"), "hf download"),
    ):
        with pytest.raises(ValueError, match=says):
            call()


def test_the_colour_is_the_one_with_the_nearest_mean_prompt_embedding(folder):
    """The colour with the nearest vector; a colour's vector is the mean over three prompts, as in zero-shot classification."""
    namer = ClipColours(folder / "clip")
    image = Image.effect_noise((60, 40), 100).convert("RGB")
    boxes = [(0.0, 0.0, 30.0, 40.0), (20.0, 5.0, 60.0, 35.0), (-5.0, 38.0, 3.0, 90.0)]
    towers = namer._encoder
    best = []
    for left, top, right, bottom in [(0, 0, 30, 40), (20, 5, 60, 35), (0, 38, 3, 40)]:
        (seen,) = towers.images([image.crop((left, top, right, bottom))])
        similarity = {}
        for colour in COLOURS:
            texts = [f"a photo of a {colour} cup", f"a photo of a {colour}-colored cup", f"a photo of a {colour} object"]
            mean = towers.texts(texts).vectors.mean(dim=0)
            similarity[colour] = float(mean @ seen) / math.sqrt(float(mean @ mean))
        best.append(max(similarity, key=similarity.get))
    assert namer(image, boxes, "cup") == best
