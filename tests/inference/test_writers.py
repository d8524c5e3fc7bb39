"""Using a policy: a writer from Python, and `retouch sample` for lists of instructions."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import retouch
import tiny_models
import tiny_writer_runs
from retouch import cli
from retouch.data.images import load_image
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.run.session import run

PROMPTS = ["a red cat", "a very long prompt with many words about a blue dog at night", "x", "two cats", "the sea"]
Start = Callable[..., Path]


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speaker")
    tiny_writer_runs.save_language_model(folder)
    return folder


@pytest.fixture
def enhancer(tmp_path: Path, speaker: Path) -> Path:
    """The recipe of a prompt writer; completions that are cut off are rendered."""
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    return save(
        tmp_path,
        tiny_writer_runs.recipe(
            tmp_path,
            speaker,
            policy__model={"kind": "qwen", "path": str(speaker), "dtype": "float32", "system": "Write a prompt."},
            policy__ema={"decay": 0.5},
            renderer={
                **{"kind": "prompt", "model": {"kind": "import", "class": "tiny_writer_runs:TinySD3"}, "num_steps": 2},
                "cut_off": "draw",
            },
            data={"kind": "prompts", "path": str(tmp_path / "prompts.txt"), "held_out": 2},
            reward={"kind": "share", "combine": {"share": 1}, "max_missing": 0.9},
            eval={"tasks": 2, "batch": 2},
        ),
    )


def save(folder: Path, document: dict[str, Any]) -> Path:
    path = folder / "recipe.json"
    path.write_text(json.dumps(document))
    return path


def test_a_batch_of_prompts_gives_the_same_completions_as_single_prompts(enhancer: Path) -> None:
    write = retouch.open_writer(str(enhancer))
    many = write.many(PROMPTS)
    assert many == [write(prompt) for prompt in PROMPTS]
    assert many == write.many(PROMPTS)
    assert len({reply.text for reply in many}) > 1
    assert write.many([]) == []


def test_open_writer_loads_the_trained_weights_of_a_run(enhancer: Path) -> None:
    recipe = parse(json.loads(enhancer.read_text()) | {"steps": 1, "learning_rate": 0.3})
    assert run(recipe, fresh=False) == 0
    trained, before = (retouch.open_writer(str(place)) for place in (recipe.folder, enhancer))
    lines = RunFolder(recipe.folder).read_samples(1)
    held_out = {line["instruction"]: line["text"] for line in lines if line["set"] == "heldout"}
    assert {prompt: trained(prompt).text for prompt in held_out} == held_out
    assert [before(prompt).text for prompt in PROMPTS] != [trained(prompt).text for prompt in PROMPTS]


def test_a_batch_with_images_gives_the_same_completions_as_single_calls(tmp_path: Path, writer: Path) -> None:
    write = retouch.open_writer(str(save(tmp_path, tiny_writer_runs.recipe(tmp_path, writer))))
    seen = [[tiny_models.image(k, 24, 24)] for k in range(3)]
    alone = [write("make it red", images) for images in seen]
    assert write.many(["make it red"] * 3, seen) == alone
    with pytest.raises(ValueError, match="3 instructions, but images for 1"):
        write.many(["a"] * 3, seen[:1])


def test_open_writer_raises_for_a_policy_that_generates_no_text() -> None:
    with pytest.raises(ValueError, match="generates no text"):
        retouch.open_writer("recipes/quickstart.jsonnet")


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def test_sampling_a_prompt_list_matches_single_prompts(enhancer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "list.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    arguments = ["sample", str(enhancer), "--instructions", str(tmp_path / "list.txt"), "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 0
    assert "5 images" in capsys.readouterr().out
    lines = lines_of(tmp_path / "out")
    assert [line["instruction"] for line in lines] == PROMPTS
    write = retouch.open_writer(str(enhancer))
    for line, prompt in zip(lines, PROMPTS, strict=True):
        assert line["text"] == write(prompt).text
        assert load_image(tmp_path / "out" / line["image"]).size == (32, 32)
    alone = ["sample", str(enhancer), "--instruction", PROMPTS[0], "--out", str(tmp_path / "one.png")]
    assert cli.main(alone) == 0
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "out" / lines[0]["image"]).read_bytes()
    assert cli.main(arguments) == 2
    assert "already" in capsys.readouterr().err


def test_equal_lines_of_a_list_start_from_different_noise(enhancer: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").write_text("a red cat\na red cat\n", encoding="utf-8")
    assert cli.main(["sample", str(enhancer), "--instructions", str(tmp_path / "list.txt"), "--out", str(tmp_path / "out")]) == 0
    first, second = lines_of(tmp_path / "out")
    assert first["text"] == second["text"]
    assert (tmp_path / "out" / first["image"]).read_bytes() != (tmp_path / "out" / second["image"]).read_bytes()


def test_faulty_completions_fall_back_to_the_instruction_and_are_counted(
    enhancer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = json.loads(enhancer.read_text())
    document["renderer"]["cut_off"] = "fault"  # and everything is cut off at five tokens
    strict = save(tmp_path, document)
    (tmp_path / "list.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    assert cli.main(["sample", str(strict), "--instructions", str(tmp_path / "list.txt"), "--out", str(tmp_path / "out")]) == 0
    lines = lines_of(tmp_path / "out")
    fallen = [line for line in lines if line["fell_back"]]
    cut_off = [reply.truncated for reply in retouch.open_writer(str(strict)).many(PROMPTS)]
    assert [line["fell_back"] for line in lines] == cut_off
    assert any(cut_off)
    assert f"{len(fallen)} of 5 images were made from the instruction itself" in capsys.readouterr().err


def test_a_list_with_source_images_gives_images_of_their_sizes(tmp_path: Path, writer: Path) -> None:
    recipe = save(tmp_path, tiny_writer_runs.recipe(tmp_path, writer))
    rows = []
    for number, side in enumerate((24, 24, 48)):
        tiny_models.image(number, side, side).save(tmp_path / f"{number}.png")
        rows.append({"instruction": f"make it red {number}", "image": f"{number}.png"})
    (tmp_path / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = ["sample", str(recipe), "--instructions", str(tmp_path / "list.jsonl"), "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 0
    sizes = [load_image(tmp_path / "out" / line["image"]).size for line in lines_of(tmp_path / "out")]
    assert sizes == [(24, 24), (24, 24), (48, 48)]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("list.jsonl", '{"instruction": "a"}\n{"instruction": ""}', "list.jsonl:2"),
        ("list.jsonl", '{"instruction": "a", "image": "none.png"}', "no such file"),
        ("list.jsonl", "not json", "not JSON"),
        ("list.txt", "\n\n", "no rows"),
        ("list.csv.gz", "a", "metadata is read from"),
    ],
)
def test_an_invalid_list_is_an_error_before_the_recipe_is_loaded(
    name: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(text)
    arguments = ["sample", "no-such-recipe", "--instructions", str(tmp_path / name), "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_image_argument_together_with_a_list_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sample", "x", "--instructions", "list.txt", "--image", "in.png", "--out", str(tmp_path / "out")]
    assert cli.main(arguments) == 2
    assert "need --instruction" in capsys.readouterr().err
