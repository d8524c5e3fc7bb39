"""Model folders and recipes of tiny writers, for tests of complete runs."""

from pathlib import Path
from typing import Any

import torch

import tiny_models
import tiny_writers
from changed_recipes import changed
from retouch_models.qwen_image.model import QwenImageEdit
from retouch_models.sd3.model import SD3
from retouch_worlds.models.family import PlaygroundModel
from retouch_worlds.pretraining import editor as qwen_parts
from retouch_worlds.pretraining.emu3 import LONGEST, emu3_tokenizer, untrained_codes, untrained_emu3
from retouch_worlds.pretraining.writer import untrained_writer


def save_writer(folder: Path) -> None:
    """Save an untrained writer with the tokenizer of the playground's editor."""
    editor = PlaygroundModel().build(device=torch.device("cpu"))
    assert isinstance(editor, QwenImageEdit)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        untrained_writer(editor.text.tokenizer).save_pretrained(folder)
    editor.text.tokenizer.save_pretrained(folder)
    qwen_parts.image_processor().save_pretrained(folder)


def save_language_model(folder: Path, **text: Any) -> None:
    """Save a random Qwen2.5, a language model without vision. ``text``: keys of its configuration."""
    tiny_writers.module("qwen2.5", **text).save_pretrained(folder)
    tiny_writers.tokenizer().save_pretrained(folder)


def save_emu3(folder: Path) -> None:
    """Save the playground's untrained image-token editor in the layout of transformers."""
    words = emu3_tokenizer(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        untrained_emu3(words, untrained_codes().eval()).save_pretrained(folder)
    words.save_pretrained(folder)


def image_tokens(folder: Path) -> dict[str, Any]:
    """Return the changes of ``recipe`` for the image-token editor in the folder."""
    return {
        "policy__model": {"kind": "emu3", "path": str(folder), "size": [24, 24], "dtype": "float32"},
        "renderer": {"kind": "codes"},
        "rollout__max_new_tokens": LONGEST,
    }


class TinySD3(SD3):
    """A random text-to-image model that a recipe can import by name."""

    def __init__(self) -> None:
        super().__init__(
            transformer=tiny_models.sd3_transformer(),
            vae=tiny_models.sd3_vae(),
            text_encoders=(tiny_models.clip(16, 1), tiny_models.clip(24, 2), None),
            tokenizers=[tiny_models.clip_tokenizer(), tiny_models.clip_tokenizer(), None],
            scheduler_config={"shift": 3.0},
            size=(32, 32),
        )


def recipe(out: Path, writer: Path, **changes: Any) -> dict[str, Any]:
    """Return a recipe of two GRPO steps on responses for the playground's editor. ``changes``: paths with ``__`` for the dot."""
    document: dict[str, Any] = {
        "name": "written",
        "out": str(out),
        "steps": 2,
        "tasks_per_step": 2,
        "group_size": 4,
        "learning_rate": 0.01,
        "microbatch": 4,
        "device": "cpu",
        "trackers": [],
        "policy": {
            "kind": "autoregressive",
            "model": {"kind": "playground-writer", "path": str(writer)},
            "train": {"kind": "lora", "rank": 4, "alpha": 8},
            "entropy": True,
        },
        "rollout": {"kind": "tokens", "max_new_tokens": 5},
        "renderer": {
            **{"kind": "response", "model": {"kind": "playground"}, "encoder": "frozen", "num_steps": 2, "cut_off": "draw"}
        },
        "data": {"kind": "playground", "complexity": [1, 2], "count": 32},
        "reward": {"kind": "playground", "combine": {"overall": 1}},
        "objective": {"kind": "policy_gradient", "clip_low": 0.2, "clip_high": 0.2, "kl": {"kind": "k3", "weight": 0.01}},
        "samples": {"every": 1, "tasks": 2, "groups": 1},
        "eval": {"tasks": 4, "complexity": [1, 2]},
    }
    return changed(document, **changes)
