"""A user of a TRL writer script brings Complex-Edit, a judge's key, an accelerate file for ZeRO-2, and types one command."""

import importlib.util
import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

import suite_rows
import tiny_models
import tiny_pipelines
from judge_double import KEY, Double
from retouch.cli import main
from retouch_models.qwen_image.model import EDIT, QwenImageEdit

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_grpo_trl.py"
LEVELS = [{"reasoning": "", "compound_instruction": f"{level} edits: make it red"} for level in range(1, 9)]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Complex-Edit's layout with 8 photographs, a random Qwen2.5-VL and a random Qwen-Image-Edit."""
    root: Path = tmp_path_factory.mktemp("writer")
    steps = [{"name": "ADD", "instruction": f"step {level}"} for level in range(1, 9)]
    rows = [
        {
            "image": suite_rows.stored(number),
            "edit": {"sequence": steps, "original_sequence": steps, "reasoning": "", "compound": LEVELS},
        }
        for number in range(8)
    ]
    suite_rows.parquet(root / "Complex-Edit" / "data" / "test_real-00000-of-00001.parquet", rows)
    tokenizer = tiny_models.qwen_tokenizer()
    # The official template begins with 64 tokens. To a tokenizer of bytes it has 256 more, so one token stands for 257 of them.
    tokenizer.add_tokens([EDIT[25:282]])
    encoder = tiny_models.qwen_text_encoder(tokenizer)
    tiny_pipelines.qwen_image().save_pretrained(root / "editor")
    for model, words, images in (("editor/text_encoder", "editor/tokenizer", "editor/processor"), ("writer", "writer", "writer")):
        encoder.save_pretrained(root / model)
        tokenizer.save_pretrained(root / words)
        tiny_models.qwen_image_processor().save_pretrained(root / images)
    return root


def test_the_published_recipe_trains_for_two_steps_and_its_ledger_has_each_answer(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    # The pipeline's own rule would resize each source image to 1024 x 1024.
    monkeypatch.setattr(QwenImageEdit, "SOURCE_AREA", 32 * 32)
    monkeypatch.setattr(QwenImageEdit, "CONDITION_AREA", 32 * 32)
    with Double() as judge:
        paths = {
            "policy.model.path": world / "writer",
            "renderer.model.path": world / "editor",
            "data.path": world / "Complex-Edit",
            "reward.judge.base_url": judge.url,
        }
        sizes = "steps=2 passes=null rollout.max_new_tokens=8 renderer.num_steps=2 renderer.guidance_scale=1 renderer.cut_off=draw"
        sizes += " eval.tasks=1 eval.batch=1 ranks=1 sharding=null device=cpu data.allow_test_sets=true data.held_out=1"
        changes = [*(f"{key}={value}" for key, value in paths.items()), *shlex.split(sizes)]
        command = ["train", "qwen-image-edit/writer-grpo-published", *(word for change in changes for word in ("--set", change))]
        assert main(command) == 0
    assert judge.refused == []
    with sqlite3.connect(tmp_path / "runs" / "writer-grpo-published" / "ledger.sqlite") as ledger:
        samples = ledger.execute("SELECT picture, scores FROM samples WHERE split = 'train'").fetchall()
        answers = ledger.execute("SELECT picture, seed, scores FROM answers").fetchall()
    assert len(samples) == 2 * 16
    for picture, scores in samples:
        for name, mean in json.loads(scores).items():
            given = {seed: json.loads(found)[name] for image, seed, found in answers if image == picture and name in found}
            assert sorted(given) == [0, 1, 2]
            assert mean == pytest.approx(sum(given.values()) / 3, abs=1e-6)


@pytest.mark.slow  # DeepSpeed compiles its collectives of the CPU
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed (extra `deepspeed`)")
def test_the_line_for_8_gpus_runs_under_accelerate_with_zero_2(tmp_path: Path) -> None:
    """The line of the script's docstring, with two ranks on the CPU, the playground's models and tasks, and two steps."""
    (line,) = re.findall(r"accelerate launch(?:.*\\\n)*.*", SCRIPT.read_text(encoding="utf-8"))
    words = shlex.split(line.replace("\\\n", ""))
    changes = {
        **dict.fromkeys(("--model_name_or_path", "--editor", "--photos", "--judge")),
        **{
            "--num_processes": "2",
            "--output_dir": str(tmp_path),
            "--num_steps": "1",
            "--dtype": "float32",
            "--num_generations": "4",
        },
    }
    for name, value in changes.items():
        at = words.index(name)
        words[at : at + 2] = [] if value is None else [name, value]
    words[words.index("--bf16") : words.index("--bf16") + 1] = ["--bf16", "false"]
    words += shlex.split("--use_cpu true --max_steps 2 --max_completion_length 24 --report_to none --eval_tasks 2 --eval_steps 2")
    environment = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'eval_reward/overall':" in done.stdout
    assert (tmp_path / "adapter_model.safetensors").is_file()
