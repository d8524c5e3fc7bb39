"""Object detectors of transformers: the detections of this package compared with the post-processing of transformers."""

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import OwlViTImageProcessorPil

import tiny_detectors
import tiny_towers
from retouch.rewards.scorers.dual_encoder import Detection, load_detector, suppress_overlaps

NAMES = ["dog", "red car", "cup"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("detectors")
    for kind in ("owlvit", "owlv2"):
        tiny_detectors.owl(root / kind, kind=kind)
    tiny_detectors.grounding_dino(root / "dino")
    return root


def picture(seed, size):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


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
    found = [
        Detection("dog", 0.6, shifted),
        Detection("dog", 0.9, left),
        Detection("cat", 0.5, left),
        Detection("dog", 0.35, right),
    ]
    assert suppress_overlaps(found, above=0.3) == [found[1], found[3], found[2]]
    assert suppress_overlaps(found, above=0.3, overlap=0.7) == [found[1], found[0], found[3], found[2]]  # their IoU is 8/12
    assert suppress_overlaps(found, above=0.4) == [found[1], found[2]]
    assert suppress_overlaps(found, above=0.3, most=1) == [found[1], found[2]]
    assert suppress_overlaps([], above=0.3) == []


def test_unsupported_or_absent_detector_weights_raise(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="owlvit, owlv2 or grounding-dino"):
        load_detector(tiny_towers.clip(tmp_path / "clip"))
    with pytest.raises(ValueError, match="hf download"):
        load_detector("no-such-owner/no-such-model")
