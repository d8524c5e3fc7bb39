"""PaddleOCR as the reader: a strict test double, and if installed, the package itself with the weights of RapidOCR's wheel."""

import ctypes
import functools
import shutil
import signal
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageDraw, ImageFont

import paddle_double
from retouch.distributed.ranks import Ranks
from retouch.recipe.recipe import load
from retouch.recipe.reward_arguments import parse_reward
from retouch.rewards.identity import describe
from retouch.rewards.text.ocr import OcrReward, PaddleReader, RapidReader, TextLine
from retouch.run import build as assembly
from retouch.types import Sample, Task
from retouch_plan.checks import check_reward as check_reward_of
from retouch_worlds.testing import check_reward

SECTION = {"kind": "ocr", "reader": {"kind": "paddleocr"}}


@pytest.fixture
def package(monkeypatch):
    return paddle_double.install(monkeypatch)


def barred(*bars: tuple[str, tuple[int, int]], size=(100, 60)) -> Image.Image:
    """An image with bars, each of a colour at its left upper corner."""
    image = Image.new("RGB", size, "white")
    height, width = paddle_double.SIZE
    for colour, (left, top) in bars:
        rgb = {"red": (255, 0, 0), "blue": (0, 0, 255), "green": (0, 200, 0)}[colour]
        ImageDraw.Draw(image).rectangle((left, top, left + width - 1, top + height - 1), fill=rgb)
    return image


def mask_of(*box: int, size=(100, 60)) -> Image.Image:
    mask = Image.new("L", size)
    ImageDraw.Draw(mask).rectangle(box, fill=255)
    return mask


def test_lines_have_boxes_and_lines_of_low_confidence_are_left_out(package):
    reader = PaddleReader(threads=3)
    image = barred(("blue", (10, 30)), ("red", (50, 5)), ("green", (5, 50)))
    assert reader(image) == [
        TextLine("red", 0.8, ((50, 5), (79, 5), (79, 12), (50, 12))),
        TextLine("blue", 0.9, ((10, 30), (39, 30), (39, 37), (10, 37))),
    ]
    assert reader(Image.new("RGB", (100, 60), "white")) == []
    assert [one.common for one in package] == [{"device": "cpu", "cpu_threads": 3}] * 2


def test_read_lines_keeps_the_order_of_crops_and_returns_no_text_for_tiny_ones(package):
    reader = PaddleReader()
    crops = [barred(("red", (0, 0)), size=(30, 8)), Image.new("RGB", (30, 3)), Image.new("L", (30, 8)), barred(("blue", (0, 0)))]
    assert reader.read_lines(crops) == [TextLine("red", 0.8), TextLine("", 0.0), TextLine("", 0.0), TextLine("blue", 0.9)]
    assert reader.read_lines(crops[1:2]) == [TextLine("", 0.0)]
    finding, reading = package
    assert (len(finding.asked), len(reading.asked)) == (0, 3)


@pytest.mark.parametrize("where", ["picture", "mask", "box"])
def test_ocr_reward_with_paddle_scores_the_lines_that_where_selects(package, where):
    """The rule of the mask, the comparison, and the score of a missing image belong to the reward, not to the reader."""
    reward = OcrReward(where=where).with_model(PaddleReader())
    image = barred(("red", (10, 10)), ("blue", (50, 40)))
    right = Task("t", "", text=" RED", mask=mask_of(5, 5, 45, 25))
    scores = reward([Sample(right, image), Sample(right, None), Sample(Task("u", "", text="Blue", mask=right.mask), image)])
    assert scores["correctness"].tolist() == pytest.approx(
        [3 / 7 if where == "picture" else 1.0, 0.0, {"picture": 4 / 7}.get(where, 0.0)]
    )
    assert scores["confidence"][0].item() == pytest.approx(0.85 if where == "picture" else 0.8)
    check_reward(reward, [Sample(right, image)] * 3)


def test_the_recipe_sets_the_recognition_model_which_is_part_of_the_identity(package):
    own = parse_reward(SECTION).build()
    named = parse_reward({**SECTION, "threads": 2, "reader": {"kind": "paddleocr", "model": "korean_PP-OCRv5_mobile_rec"}}).build()
    assert [one.model for one in package] == ["PP-OCRv6_medium_rec"] * 2 + ["korean_PP-OCRv5_mobile_rec"] * 2
    assert [one.common["cpu_threads"] for one in package] == [1, 1, 2, 2]
    told = [describe(reward)["own"] for reward in (own, named, OcrReward(line_width=160))]
    assert len(set(told)) == 3
    with pytest.raises(ValueError, match="'nonsense'"):
        parse_reward({**SECTION, "reader": {"kind": "paddleocr", "model": "nonsense"}}).build()
    with pytest.raises(ValueError, match="line_width is only for RapidOCR"):
        parse_reward({**SECTION, "line_width": 160}).build()


@pytest.mark.parametrize("missing", ["paddle", "paddleocr"])
def test_missing_packages_raise_with_the_install_command(package, monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ValueError, match=r"pip install 'retouch\[paddle\]'"):
        parse_reward(SECTION).build()


def test_a_missing_package_raises_before_weights_are_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "paddle", None)
    changes = ['reward.reader={"kind": "paddleocr"}', "reward.line_width=null"]
    recipe = load("recipes/playground/words-grpo.jsonnet", changes)
    monkeypatch.setattr(assembly, "assemble_policy", lambda *_: pytest.fail("loaded the models first"))
    with pytest.raises(ValueError, match=r"retouch\[paddle\]"):
        assembly.assemble(recipe, Ranks())
    (finding,) = check_reward_of(recipe, None, calls=[])
    assert (finding.subject, finding.status) == ("reward", "FAILED")
    assert "retouch[paddle]" in finding.text


def test_paddleocr_version_2_raises(package, monkeypatch):
    monkeypatch.delattr(sys.modules["paddleocr"], "TextRecognition")
    with pytest.raises(ValueError, match=r"cannot import name 'TextRecognition'.*retouch\[paddle\]"):
        PaddleReader()


def test_the_sigterm_handler_is_kept_when_paddle_is_loaded(package):
    """Paddle replaces the handler of SIGTERM; a run that is asked to stop would then end without a checkpoint."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    try:
        PaddleReader()
        system = ctypes.CDLL(None).signal
        system.restype = ctypes.c_void_p
        assert system(int(signal.SIGTERM), None) is not None
    finally:
        signal.signal(signal.SIGTERM, before)


def weights_from_wheel(folder: Path) -> Path:
    """The weights of PP-OCRv6's small models in RapidOCR's wheel, as folders that PaddleOCR reads."""
    import onnxruntime
    import rapidocr
    import yaml

    weights = Path(rapidocr.__file__).parent / "models"
    letters = onnxruntime.InferenceSession(weights / "PP-OCRv6_rec_small.onnx").get_modelmeta().custom_metadata_map["character"]
    decode = {"DecodeImage": {"channel_first": False, "img_mode": "BGR"}}
    normalize = {"NormalizeImage": {"mean": [0.5] * 3, "std": [0.5] * 3, "scale": 1 / 255, "order": "hwc"}}
    find = [decode, {"DetResizeForTest": {"resize_long": 960}}, normalize, {"ToCHWImage": None}]
    box = {"name": "DBPostProcess", "thresh": 0.3, "box_thresh": 0.6, "max_candidates": 1000, "unclip_ratio": 1.5}
    read = [decode, {"RecResizeImg": {"image_shape": [3, 48, 320]}}]
    decoded = {"name": "CTCLabelDecode", "character_dict": letters.splitlines()}
    for kind, before, after in (("det", find, box), ("rec", read, decoded)):
        own = folder / kind
        own.mkdir()
        shutil.copy(weights / f"PP-OCRv6_{kind}_small.onnx", own / "inference.onnx")
        described = {
            "Global": {"model_name": f"PP-OCRv6_small_{kind}"},
            "PreProcess": {"transform_ops": before},
            "PostProcess": after,
        }
        (own / "inference.yml").write_text(yaml.safe_dump(described))
    return folder


@pytest.mark.filterwarnings("ignore")  # Paddle warns when it is imported
def test_paddleocr_matches_rapidocr_with_the_same_weights(tmp_path, monkeypatch):
    paddleocr = pytest.importorskip("paddleocr")
    weights = weights_from_wheel(tmp_path)
    found = {"engine": "onnxruntime", "text_recognition_model_dir": str(weights / "rec")}
    found |= {"text_detection_model_name": "PP-OCRv6_small_det", "text_detection_model_dir": str(weights / "det")}
    monkeypatch.setattr(paddleocr, "PaddleOCR", functools.partial(paddleocr.PaddleOCR, **found))
    known = {"engine": "onnxruntime", "model_dir": str(weights / "rec")}
    monkeypatch.setattr(paddleocr, "TextRecognition", functools.partial(paddleocr.TextRecognition, **known))
    paddle, rapid = PaddleReader(model="PP-OCRv6_small_rec"), RapidReader()
    font = ImageFont.load_default(40)
    words = [Image.new("RGB", (60 + 27 * len(word), 80), (240, 240, 230)) for word in ("Retouch", "7-Up", "HELLO")]
    for word, image in zip(("Retouch", "7-Up", "HELLO"), words, strict=True):
        ImageDraw.Draw(image).text((20, 20), word, fill=(20, 30, 90), font=font)
        assert [line.text for line in paddle(image)] == [line.text for line in rapid(image)] == [word]
    both = Image.new("RGB", (400, 200), (240, 240, 230))
    for word, at in (("harbour", (20, 20)), ("Azir", (220, 130))):
        ImageDraw.Draw(both).text(at, word, fill=(20, 30, 90), font=font)
    task = Task("t", "", text="Azir", mask=mask_of(200, 120, 390, 190, size=both.size))
    assert OcrReward(where="mask").with_model(paddle)([Sample(task, both)])["correctness"].item() == 1.0
    ours, theirs = (reader.read_lines([*words, Image.new("RGB", (3, 3))]) for reader in (paddle, rapid))
    assert [line.text for line in ours] == [line.text for line in theirs] == ["Retouch", "7-Up", "HELLO", ""]
    assert [line.confidence for line in ours] == pytest.approx([line.confidence for line in theirs], abs=1e-4)
    assert paddle(Image.new("L", (24, 24), 77)) == []
