"""`retouch sample` for runs whose images are resized, and for policies that generate image tokens."""

from pathlib import Path

import pytest
from PIL import Image

from retouch.cli import main
from retouch.inference import sampling
from retouch.inference.opening import read_target
from retouch.recipe.recipe import load
from retouch.records.folder import RunFolder
from small_runs import photos_recipe


def test_fault_8_images_are_resized_as_in_training(tmp_path: Path) -> None:
    Image.new("RGB", (466, 426), (90, 120, 30)).save(tmp_path / "photo.png")
    file = photos_recipe(tmp_path, tmp_path)
    words = ["--instruction", "make it warmer", "--image", str(tmp_path / "photo.png"), "--out", str(tmp_path / "out.png")]
    assert main(["sample", str(file), *words]) == 0
    with Image.open(tmp_path / "out.png") as made:
        assert made.size == (24, 24)


def test_fault_8_a_photograph_is_resized_to_the_size_of_generated_training_images(tmp_path: Path) -> None:
    Image.new("RGB", (466, 426), (90, 120, 30)).save(tmp_path / "photo.png")
    words = ["--instruction", "remove the circle", "--image", str(tmp_path / "photo.png"), "--out", str(tmp_path / "out.png")]
    assert main(["sample", "quickstart", *words]) == 0
    with Image.open(tmp_path / "out.png") as made:
        assert made.size == (24, 24)


def test_fault_8_sampling_image_tokens_prints_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (24, 24), (90, 120, 30)).save(tmp_path / "scene.png")
    words = [
        "--instruction",
        "make the red circle blue",
        "--image",
        str(tmp_path / "scene.png"),
        "--out",
        str(tmp_path / "out.png"),
    ]
    capsys.readouterr()
    assert main(["sample", "emu3/sft_sc__rl_sc-playground", *words]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "made from the instruction" not in printed.err
    with Image.open(tmp_path / "out.png") as made:
        assert made.size == (24, 24)


def test_sampling_takes_changes_of_the_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Image.new("RGB", (24, 24), (90, 120, 30)).save(tmp_path / "scene.png")
    (tmp_path / "list.txt").write_text("a red circle\n")
    words = ["--instruction", "remove the circle", "--image", str(tmp_path / "scene.png")]
    pixels = {}
    for steps in (None, 2):
        out = tmp_path / f"{steps}.png"
        change = [] if steps is None else ["--set", f"eval.num_steps={steps}"]
        assert main(["sample", "quickstart", *words, "--out", str(out), *change]) == 0
        with Image.open(out) as made:
            pixels[steps] = made.tobytes()
    assert pixels[None] != pixels[2]
    capsys.readouterr()
    for given in (words, ["--instructions", str(tmp_path / "list.txt")]):
        assert main(["sample", "quickstart", *given, "--out", str(tmp_path / "more.png"), "--set", "no_such=1"]) == 2
        assert "no_such" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["eval"], ["sample", "--instruction", "remove the circle", "--out", "out.png"]])
def test_a_run_is_opened_by_its_name_in_the_folder_runs(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("ph", "quickstart"):
        RunFolder(Path("runs", name)).write_recipe(load("quickstart").document())
    assert read_target("ph")[1] == RunFolder(Path("runs/ph"))
    assert read_target("quickstart")[1] is None  # a recipe of the same name is opened instead
    Image.new("RGB", (24, 24)).save("in.png")
    image = ["--image", "in.png"] if command[0] == "sample" else []
    assert main([command[0], "ph", *command[1:], *image]) == 2
    assert "runs/ph has no checkpoint yet" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([command[0], "--help"])
    assert "name of a run in the folder runs" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(ValueError, match="no-such: no such file, and no packaged recipe has this name"):
        read_target("no-such")


@pytest.mark.parametrize(
    ("recipe", "given", "says"),
    [
        ("qwen-image-edit/flow-grpo", [], "this model edits an image; give one with --image"),
        ("qwen-image-edit/flow-grpo", ["image", "mask"], "--mask: this model reads no mask; leave it out"),
        ("qwen-image-edit/flow-grpo", ["image", "reference"], "--reference: only an IP-Adapter reads a reference image"),
        ("sd3/ocr-grpo", ["image"], "--image: this model makes images from text alone; leave it out"),
        ("sd3/ocr-grpo", ["mask"], "--mask: this model reads no mask; leave it out"),
    ],
)
def test_images_that_the_model_does_not_take_are_refused_before_it_is_loaded(
    recipe: str, given: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (16, 16), "white").save(tmp_path / "a.png")
    words = [word for option in given for word in (f"--{option}", str(tmp_path / "a.png"))]
    assert main(["sample", recipe, "--instruction", "x", "--out", str(tmp_path / "out.png"), *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("folder", r"folder: this is a folder; give the name of a file, for example .*image\.png"),
        ("image", r"image: not the ending of an image file; use for example image\.png"),
        ("image.xyz", r"image\.xyz: not the ending of an image file"),
        ("file/image.png", r"file is a file, not a folder"),
    ],
)
def test_an_output_that_cannot_be_written_raises_before_the_policy_is_opened(
    out: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(sampling, "_samples", lambda *given: pytest.fail("the policy was opened"))
    with pytest.raises(ValueError, match=message):
        sampling.sample_target("x", instruction="blue", image=None, mask=None, out=tmp_path / out, seed=0)
