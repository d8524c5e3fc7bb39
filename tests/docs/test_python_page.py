"""The Python code of README and docs/python.md runs, on a tiny Stable Diffusion 3."""

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from PIL import Image, ImageStat

import retouch
import tiny_pipelines

ROOT = Path(__file__).parents[2]
TINY = {
    "steps": 2, "size": (32, 32), "rollout": {"num_steps": 3, "transition": {"kind": "sde", "noise_level": 0.7}},
    "tasks_per_step": 2, "group_size": 2, "device": "cpu", "trackers": (),
}  # fmt: skip


def blocks(page, heading):
    text = (ROOT / page).read_text(encoding="utf-8")
    if heading:
        text = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Trainers take the page's arguments, but make small images in few steps."""
    real = retouch.Trainer.__init__

    def small(self, **given):
        if isinstance(given["model"], str):
            given["model"] = tiny_pipelines.sd3()
        real(self, **{**given, **TINY})

    monkeypatch.setattr(retouch.Trainer, "__init__", small)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("tiny")
def test_the_code_of_the_readme_runs(tmp_path):
    (block,) = blocks("README.md", "From Python")
    exec(block, {})
    assert (tmp_path / "lora" / "pytorch_lora_weights.safetensors").is_file()


@pytest.mark.usefixtures("tiny")
def test_the_code_of_the_python_page_runs(tmp_path, monkeypatch):
    dataset = [{"prompt": "a red circle" if number % 2 else "blue"} for number in range(8)]
    script = ModuleType("script_of_the_page")
    monkeypatch.setitem(sys.modules, script.__name__, script)
    names = vars(script)
    names |= {"retouch": retouch, "ImageStat": ImageStat, "pipe": tiny_pipelines.sd3(), "dataset": dataset}
    arguments, function, scoring, own, pairs, use, sampling, loading, serving = blocks("docs/python.md", "")
    names["images"] = [Image.new("RGB", (8, 8), "red")]
    grey = [Image.new("RGB", (32, 32), (level, level, level)) for level in range(32)]
    names["pairs"] = [{"prompt": f"{n}", "chosen": grey[31 - n], "rejected": grey[n]} for n in range(16)]
    for block in (function, scoring, arguments, own, pairs):
        exec(block, names)
    assert names["summary"].steps == 2
    assert names["own"].train().steps == 2
    assert names["from_pairs"].train().steps == 2
    made = names["trainer"].recipe
    names["trainer"] = retouch.Trainer(
        model=tiny_pipelines.sd3(), reward_funcs=names["brightness"], train_dataset=dataset,
        peft_config=retouch.Lora(rank=4, alpha=4),
    )  # fmt: skip
    assert made.name == "from-python"
    exec(use, names)
    names["torch"] = torch
    for block in (sampling, loading, serving):
        exec(block, names)
    assert names["loss"].shape == (8, 3)
    assert len(names["best"]) == 8
    assert names["served"] == pytest.approx([0.298], abs=0.01)
    assert (tmp_path / "before-and-after.png").is_file()
    assert (tmp_path / "lora" / "adapter_model.safetensors").is_file()
