"""A script for TRL's GRPOTrainer becomes one for Retouch by changing at most ten lines; the page shows both, and both run."""

import ast
import difflib
import re
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import retouch
import tiny_writers

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = {"trl": EXAMPLES / "trl_script.py", "retouch": EXAMPLES / "trl_script_with_retouch.py"}


def code(file: Path) -> list[str]:
    """The lines after the docstring."""
    text = file.read_text()
    end = ast.parse(text).body[0].end_lineno
    assert end is not None
    return text.splitlines()[end:]


def test_the_trl_and_retouch_scripts_differ_in_at_most_ten_lines() -> None:
    matcher = difflib.SequenceMatcher(a=code(SCRIPTS["trl"]), b=code(SCRIPTS["retouch"]), autojunk=False)
    changes = [(high - low, to - start) for tag, low, high, start, to in matcher.get_opcodes() if tag != "equal"]
    assert sum(max(sizes) for sizes in changes) <= 10


def test_the_page_shows_both_scripts() -> None:
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "coming-from.md").read_text(), re.DOTALL)
    assert shown == [file.read_text() for file in SCRIPTS.values()]


def test_the_script_with_retouch_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import tiny

    real = retouch.Trainer.__init__

    def small(self: retouch.Trainer, **given: Any) -> None:
        changed = {key: value for key, value in tiny.enhancer().items() if key != "train_dataset"}
        real(self, **{**given, **changed})

    monkeypatch.setattr(retouch.Trainer, "__init__", small)
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(SCRIPTS["retouch"]))
    assert names["trainer"].state.step == 2
    assert 0 <= names["trainer"].state.log_history[-1]["eval/describes_light"] <= 1
    assert (tmp_path / "lora" / "adapter_model.safetensors").is_file()


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed (extra `trl`)")
@pytest.mark.filterwarnings("ignore::FutureWarning")  # TRL sets arguments of transformers that are deprecated
def test_the_script_with_trl_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl = pytest.importorskip("trl")
    trainer, config = trl.GRPOTrainer, trl.GRPOConfig

    def small(model: str, **given: Any) -> Any:
        return trainer(model=tiny_writers.module("qwen2.5"), processing_class=tiny_writers.tokenizer(), **given)

    def short(**given: Any) -> Any:
        cpu = {"use_cpu": True, "bf16": False, "report_to": "none", "max_completion_length": 8}
        return config(**{**given, "max_steps": 1, **cpu})

    monkeypatch.setattr(trl, "GRPOTrainer", small)
    monkeypatch.setattr(trl, "GRPOConfig", short)
    monkeypatch.chdir(tmp_path)
    names = runpy.run_path(str(SCRIPTS["trl"]))
    assert names["trainer"].state.global_step == 1
    assert (tmp_path / "lora" / "adapter_model.safetensors").is_file()
    assert "trl" in sys.modules
