"""The recipe's settings for GPU numerics: deterministic algorithms, and TF32 for fp32 products."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_emu3
from retouch.distributed.ranks import set_numerics
from retouch.models.emu3 import Emu3ImageTokenizer
from retouch.models.parts import without_tf32
from retouch.recipe.recipe import parse
from tiny_models import image
from tiny_recipes import SMALL
from warm_python import python

SUPPORT = Path(__file__).parents[1] / "support"


def allowed() -> list[bool]:
    return [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32]


def record_settings(forward: Callable[..., Any], seen: list[list[bool]]) -> Callable[..., Any]:
    def noted(*inputs: Any, **options: Any) -> Any:
        seen.append(allowed())
        return forward(*inputs, **options)

    return noted


def test_deterministic_algorithms_are_chosen_and_change_nothing_on_the_cpu(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])}
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        environment.pop(name, None)
    command = [python(), str(SUPPORT / "numerics_run.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    off = {
        **{"deterministic": False, "warns": False, "workspace": None, "flash_attention": None},
        **{"cudnn_attention": False, "tf32": [False, False]},
    }
    assert found["plain"]["settings"] == off
    on = {**off, "deterministic": True, "workspace": ":4096:8", "flash_attention": "1"}
    assert found["exact"]["settings"] == on
    assert len(found["plain"]["metrics"]) == 2
    assert found["exact"]["metrics"] == found["plain"]["metrics"]


def test_tf32_follows_the_recipe_and_is_off_in_the_image_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        set_numerics(parse(SMALL))
        assert allowed() == [False, False]
        set_numerics(parse({**SMALL, "tf32": True}))
        assert allowed() == [True, True]
        with without_tf32():
            assert allowed() == [False, False]
        seen: list[list[bool]] = []
        vq = tiny_emu3.module().model.vqmodel
        monkeypatch.setattr(vq.encoder, "forward", record_settings(vq.encoder.forward, seen))
        Emu3ImageTokenizer(vq, tiny_emu3.SIZE).encode([image(0, *tiny_emu3.SIZE)])
        assert seen == [[False, False]]
        assert allowed() == [True, True]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
