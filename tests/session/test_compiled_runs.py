"""A run with compiled blocks, by torch's own compiler: it trains, resumes and exports under the usual names."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from retouch import cli
from tiny_recipes import SMALL


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of torch's own code
def test_a_compiled_run_resumes_and_exports_under_the_usual_names(tmp_path: Path) -> None:
    policy: dict[str, Any] = {**SMALL["policy"], "compile": "regional", "gradient_checkpointing": True}
    file = tmp_path / "small.json"
    file.write_text(json.dumps({**SMALL, "out": str(tmp_path), "checkpoints": {"every": 1}, "policy": policy}))
    for steps in (1, 2):
        assert cli.main(["train", str(file), "--set", f"steps={steps}"]) == 0
    assert cli.main(["export", str(tmp_path / "small"), "--to", str(tmp_path / "export")]) == 0
    names: list[str] = []
    for written in tmp_path.rglob("*.safetensors"):
        with safe_open(written, framework="pt") as tensors:
            names += tensors.keys()
    assert len(names) > 500
    assert not [name for name in names if "_orig_mod" in name]
    metrics = [json.loads(line) for line in (tmp_path / "small" / "metrics.jsonl").read_text().splitlines()]
    assert [line["policy/ratio_max_first"] for line in metrics] == [0.0, 0.0]
