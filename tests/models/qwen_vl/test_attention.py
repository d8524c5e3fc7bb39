"""The attention implementation of a writer: the one that the recipe names, with close results, or an error with the reason."""

import importlib.util

import pytest
import torch

import tiny_writers
from retouch.models.base import require_attention
from retouch.models.qwen_vl import load_writer

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


@pytest.mark.parametrize("kind", ["qwen2.5-vl", "qwen2.5"])
def test_sdpa_and_eager_attention_give_close_logits(kind, tmp_path):
    made = tiny_writers.module(kind)
    made.save_pretrained(tmp_path)
    tiny_writers.tokenizer().save_pretrained(tmp_path)
    if kind in tiny_writers.VISION_KINDS:
        tiny_writers.image_processor(kind).save_pretrained(tmp_path)
    states = []
    for attention in ("sdpa", "eager"):
        writer = load_writer(tmp_path, template=tiny_writers.TEMPLATE, dtype=torch.float32, device="cpu", attention=attention)
        text = writer.module.config.get_text_config()
        assert text._attn_implementation == attention
        with torch.no_grad():
            states.append(writer.module(torch.arange(1, 40)[None]).logits)
    assert (states[0] - states[1]).abs().max() < 1e-4
    assert not torch.equal(states[0], states[1])  # so they were computed differently


@pytest.mark.parametrize(
    ("installed", "dtype", "device", "why"),
    [
        (False, torch.bfloat16, CUDA, "flash-attn is not installed"),
        (True, torch.bfloat16, CPU, "needs a CUDA device, not cpu"),
        (True, torch.float32, CUDA, "needs a 16-bit dtype, not float32"),
    ],
)
def test_unavailable_flash_attention_is_refused_with_a_suggestion(monkeypatch, installed, dtype, device, why):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    with pytest.raises(ValueError, match=rf"policy\.model\.attention: flash_attention_2: .*{why}; use sdpa"):
        require_attention("flash_attention_2", dtype=dtype, device=device)


def test_available_flash_attention_is_accepted(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    require_attention("flash_attention_2", dtype=torch.bfloat16, device=CUDA)
