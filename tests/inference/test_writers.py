"""Using a policy: a writer from Python, and `retouch sample` for single instructions and for lists."""

import json
from pathlib import Path

import pytest
from PIL import Image

import retouch
import tiny_models
import tiny_writer_runs
from retouch.cli import main
from retouch.data.images import load_image
from retouch.inference import sampling
from retouch.inference.opening import read_target
from retouch.recipe.recipe import load, parse
from retouch.records.folder import RunFolder
from retouch.run.session import run
from small_runs import photos_recipe

PROMPTS = ["a red cat", "a very long prompt with many words about a blue dog at night", "x", "two cats", "the sea"]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speaker")
    tiny_writer_runs.save_language_model(folder)
    return folder


@pytest.fixture
def enhancer(tmp_path, speaker):
    """The recipe of a prompt writer; completions that are cut off are rendered."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    return save(
        tmp_path,
        tiny_writer_runs.recipe(
            tmp_path, speaker,
            policy__model={"kind": "qwen", "path": str(speaker), "dtype": "float32", "system": "Write a prompt."},
            policy__ema={"decay": 0.5},
            renderer={
                **{"kind": "prompt", "model": {"kind": "import", "class": "tiny_writer_runs:TinySD3"}, "num_steps": 2},
                "cut_off": "draw",
            },
            data={"kind": "prompts", "path": str(tmp_path / "prompts.txt"), "held_out": 2},
            reward={"kind": "share", "combine": {"share": 1}, "max_missing": 0.9}, eval={"tasks": 2, "batch": 2},
        ),
    )  # fmt: skip


def save(folder, document):
    path = folder / "recipe.json"
    path.write_text(json.dumps(document))
    return path


def test_a_batch_of_prompts_gives_the_same_completions_as_single_prompts(enhancer):
    write = retouch.open_writer(str(enhancer))
    many = write.many(PROMPTS)
    assert many == [write(prompt) for prompt in PROMPTS]
    assert many == write.many(PROMPTS)
    assert len({reply.text for reply in many}) > 1
    assert write.many([]) == []


def test_open_writer_loads_the_trained_weights_of_a_run(enhancer):
    recipe = parse(json.loads(enhancer.read_text()) | {"steps": 1, "learning_rate": 0.3})
    assert run(recipe, fresh=False) == 0
    trained, before = (retouch.open_writer(str(place)) for place in (recipe.folder, enhancer))
    lines = RunFolder(recipe.folder).read_samples(1)
    held_out = {line["instruction"]: line["text"] for line in lines if line["set"] == "heldout"}
    assert {prompt: trained(prompt).text for prompt in held_out} == held_out
    assert [before(prompt).text for prompt in PROMPTS] != [trained(prompt).text for prompt in PROMPTS]


def test_a_batch_with_images_gives_the_same_completions_as_single_calls(tmp_path, writer):
    write = retouch.open_writer(str(save(tmp_path, tiny_writer_runs.recipe(tmp_path, writer))))
    seen = [[tiny_models.image(k, 24, 24)] for k in range(3)]
    assert write.many(["make it red"] * 3, seen) == [write("make it red", images) for images in seen]
    with pytest.raises(ValueError, match="3 instructions, but images for 1"):
        write.many(["a"] * 3, seen[:1])
    with pytest.raises(ValueError, match="generates no text"):
        retouch.open_writer("recipes/quickstart.jsonnet")


def lines_of(folder):
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def test_sampling_a_prompt_list_matches_single_prompts(enhancer, tmp_path, capsys):
    (tmp_path / "list.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    arguments = ["sample", str(enhancer), "--instructions", str(tmp_path / "list.txt"), "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    assert "5 images" in capsys.readouterr().out
    lines = lines_of(tmp_path / "out")
    assert [line["instruction"] for line in lines] == PROMPTS
    write = retouch.open_writer(str(enhancer))
    for line, prompt in zip(lines, PROMPTS, strict=True):
        assert line["text"] == write(prompt).text
        assert load_image(tmp_path / "out" / line["image"]).size == (32, 32)
    alone = ["sample", str(enhancer), "--instruction", PROMPTS[0], "--out", str(tmp_path / "one.png")]
    assert main(alone) == 0
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "out" / lines[0]["image"]).read_bytes()
    assert main(arguments) == 2
    assert "already" in capsys.readouterr().err


def test_equal_lines_of_a_list_start_from_different_noise(enhancer, tmp_path):
    (tmp_path / "list.txt").write_text("a red cat\na red cat\n", encoding="utf-8")
    assert main(["sample", str(enhancer), "--instructions", str(tmp_path / "list.txt"), "--out", str(tmp_path / "out")]) == 0
    first, second = lines_of(tmp_path / "out")
    assert first["text"] == second["text"]
    assert (tmp_path / "out" / first["image"]).read_bytes() != (tmp_path / "out" / second["image"]).read_bytes()


def test_faulty_completions_fall_back_to_the_instruction_and_are_counted(enhancer, tmp_path, capsys):
    document = json.loads(enhancer.read_text())
    document["renderer"]["cut_off"] = "fault"  # and everything is cut off at five tokens
    strict = save(tmp_path, document)
    (tmp_path / "list.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    assert main(["sample", str(strict), "--instructions", str(tmp_path / "list.txt"), "--out", str(tmp_path / "out")]) == 0
    lines = lines_of(tmp_path / "out")
    fallen = [line for line in lines if line["fell_back"]]
    cut_off = [reply.truncated for reply in retouch.open_writer(str(strict)).many(PROMPTS)]
    assert [line["fell_back"] for line in lines] == cut_off
    assert any(cut_off)
    assert f"{len(fallen)} of 5 images were made from the instruction itself" in capsys.readouterr().err


def test_a_list_with_source_images_gives_images_of_their_sizes(tmp_path, writer):
    recipe = save(tmp_path, tiny_writer_runs.recipe(tmp_path, writer))
    rows = []
    for number, side in enumerate((24, 24, 48)):
        tiny_models.image(number, side, side).save(tmp_path / f"{number}.png")
        rows.append({"instruction": f"make it red {number}", "image": f"{number}.png"})
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["sample", str(recipe), "--instructions", str(tmp_path / "list.jsonl"), "--out", str(tmp_path / "out")]) == 0
    sizes = [load_image(tmp_path / "out" / line["image"]).size for line in lines_of(tmp_path / "out")]
    assert sizes == [(24, 24), (24, 24), (48, 48)]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("list.jsonl", '{"instruction": "a"}\n{"instruction": ""}', "list.jsonl:2"),
        ("list.jsonl", '{"instruction": "a", "image": "none.png"}', "no such file"), ("list.jsonl", "not json", "not JSON"),
        ("list.txt", "\n\n", "no rows"), ("list.csv.gz", "a", "metadata is read from"),
    ],
)  # fmt: skip
def test_an_invalid_list_is_an_error_before_the_recipe_is_loaded(name, text, said, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    arguments = ["sample", "no-such-recipe", "--instructions", str(tmp_path / name), "--out", str(tmp_path / "out")]
    assert main(arguments) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("generated", [False, True])
def test_fault_8_a_photograph_is_resized_to_the_size_of_the_training_images(generated, tmp_path):
    Image.new("RGB", (466, 426), (90, 120, 30)).save(tmp_path / "photo.png")
    words = ["--instruction", "make it warmer", "--image", str(tmp_path / "photo.png"), "--out", str(tmp_path / "out.png")]
    assert main(["sample", "quickstart" if generated else str(photos_recipe(tmp_path, tmp_path)), *words]) == 0
    with Image.open(tmp_path / "out.png") as made:
        assert made.size == (24, 24)


def test_fault_8_sampling_image_tokens_prints_no_text(tmp_path, capsys):
    Image.new("RGB", (24, 24), (90, 120, 30)).save(tmp_path / "scene.png")
    words = ["--instruction", "make it blue", "--image", str(tmp_path / "scene.png"), "--out", str(tmp_path / "out.png")]
    capsys.readouterr()
    assert main(["sample", "emu3/sft_sc__rl_sc-playground", *words]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "made from the instruction" not in printed.err
    with Image.open(tmp_path / "out.png") as made:
        assert made.size == (24, 24)


def test_sampling_takes_changes_of_the_recipe(tmp_path, capsys):
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


def test_a_run_is_opened_by_its_name_in_the_folder_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("ph", "quickstart"):
        RunFolder(Path("runs", name)).write_recipe(load("quickstart").document())
    assert read_target("ph")[1] == RunFolder(Path("runs/ph"))
    assert read_target("quickstart")[1] is None  # a recipe of the same name is opened instead
    Image.new("RGB", (24, 24)).save("in.png")
    for words in (["eval", "ph"], ["sample", "ph", "--instruction", "remove it", "--image", "in.png", "--out", "out.png"]):
        assert main(words) == 2
        assert "runs/ph has no checkpoint yet" in capsys.readouterr().err
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
def test_images_that_the_model_does_not_take_are_refused_before_it_is_loaded(recipe, given, says, tmp_path, capsys):
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
def test_an_output_that_cannot_be_written_raises_before_the_policy_is_opened(out, message, tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.setattr(sampling, "open_policy", lambda *given: pytest.fail("the policy was opened"))
    with pytest.raises(ValueError, match=message):
        sampling.sample_target("x", instruction="blue", image=None, mask=None, out=tmp_path / out, seed=0)
