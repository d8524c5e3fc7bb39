"""Every example runs to its end with ``--tiny``, and is short."""

import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import retouch
from slow_params import slow_except
from warm_python import python

EXAMPLES = Path(__file__).parents[2] / "examples"
SERVED = ("reward_server.py", "train_with_reward_server.py")
HELPERS = ("tiny.py", "one_file_flow_grpo.py", "train_grpo_trl.py", "trl_script.py", "trl_script_with_retouch.py")
SCRIPTS = sorted(file.name for file in EXAMPLES.glob("*.py") if file.name not in (*SERVED, *HELPERS))


def run_tiny(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> Path:
    """Run the script in ``folder``; returns the folder of its run."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(sys, "argv", [name, *words, "--tiny"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    (run,) = (folder / "runs").iterdir()
    return run


@pytest.mark.parametrize("name", slow_except(["custom_objective.py", "emu3_sft_then_rl.py", "prompt_enhancer.py"], SCRIPTS))
def test_an_example_runs_to_its_end(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_tiny(name, tmp_path, monkeypatch)
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 2
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 2
    if ".save_pretrained" in (EXAMPLES / name).read_text():
        assert list(run.glob("*/export.json"))


def test_a_run_uses_the_example_reward_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [python(), str(EXAMPLES / "reward_server.py"), "--tiny", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            run = run_tiny("train_with_reward_server.py", tmp_path, monkeypatch, address)
        finally:
            server.terminate()
    assert "reward/pickscore" in json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.mark.parametrize("name", [*SCRIPTS, *SERVED])
def test_an_example_is_short_and_says_how_to_run_it(name: str) -> None:
    text = (EXAMPLES / name).read_text()
    assert len(text.splitlines()) <= 60
    assert f"examples/{name}" in text
    assert "--tiny" in text
    assert re.search(rf"^\| \[?`{name}`", (EXAMPLES / "README.md").read_text(), re.MULTILINE)


PUBLISHED = {
    "stabilityai/stable-diffusion-3.5-medium": {"_class_name": "StableDiffusion3Pipeline"},
    "black-forest-labs/FLUX.1-Fill-dev": {"_class_name": "FluxFillPipeline"},
    "Qwen/Qwen-Image-Edit": {"_class_name": "QwenImageEditPipeline"},
    "Qwen/Qwen2.5-VL-7B-Instruct": {"model_type": "qwen2_5_vl"},
}


@pytest.mark.parametrize("name", [*SCRIPTS, "train_with_reward_server.py"])
def test_the_arguments_of_the_full_size_are_valid(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe is made and checked; nothing is loaded."""
    from datasets import Dataset

    made: list[retouch.Trainer] = []

    def config(path: str, file: str, *, key: str) -> dict[str, str] | None:
        config = PUBLISHED[path]
        return config if ("_class_name" in config) == (file == "model_index.json") else None

    def stop(trainer: retouch.Trainer, **options: object) -> None:
        made.append(trainer)
        raise SystemExit

    row = {"prompt": "a fox", "chosen": b"1", "rejected": b"2"}
    monkeypatch.setattr("retouch.trainer.arguments._json", config)
    monkeypatch.setattr("datasets.load_dataset", lambda *words, **options: Dataset.from_list([row] * 20))
    monkeypatch.setattr(retouch.Trainer, "train", stop)
    monkeypatch.setattr(retouch.Trainer, "__iter__", stop)
    (tmp_path / "photos").mkdir()
    lines = [json.dumps({"file_name": f"{row}.png", "instruction": "x"}) for row in range(20)]
    (tmp_path / "photos" / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    words = [option for option in ("--photos", "--data") if option in (EXAMPLES / name).read_text()]
    monkeypatch.setattr(sys, "argv", [name, *words, *([str(tmp_path / "photos")] if words else [])])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    assert made[0].recipe.learning_rate > 0
