"""Tiny models with attention heads of 32, as vLLM needs them on a CPU, and policies whose completions a server generates."""

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

import tiny_models
import tiny_writer_runs
import tiny_writers
import tiny_writing
from retouch.models.common.lora import write_lora
from retouch.models.emu3.load import load_emu3, save_for_vllm
from retouch.models.emu3.model import DRAW
from retouch.models.playground.family import PlaygroundModel
from retouch.models.qwen_vl.load import load_writer
from retouch.models.qwen_vl.model import QwenWriter
from retouch.policies.autoregressive.policy import AutoregressivePolicy
from retouch.policies.engines.base import EngineContext
from retouch.policies.engines.vllm import VllmEngine
from retouch.pretraining.networks import qwen_parts


def save_writer(folder: Path) -> None:
    """Save a random vision-language model whose tokenizer is that of the playground's editor."""
    words = PlaygroundModel().build(device=torch.device("cpu")).text.tokenizer
    config = Qwen2_5_VLConfig(
        text_config=qwen_parts.text_config(words, layers=2, heads=2, inner=128),
        vision_config=qwen_parts.vision_config(),
        tie_word_embeddings=False,
        **qwen_parts.picture_tokens(words),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Qwen2_5_VLForConditionalGeneration(config)
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1 and "visual" not in name:
                torch.nn.init.normal_(parameter, std=0.25)
    module.save_pretrained(folder)
    words.save_pretrained(folder)
    qwen_parts.image_processor().save_pretrained(folder)


def save_text(folder: Path) -> None:
    """Save a random Qwen2.5 with a tokenizer of bytes."""
    tiny_writers.module("qwen2.5", hidden_size=64).save_pretrained(folder)
    tiny_writers.tokenizer().save_pretrained(folder)


def save_image_tokens(folder: Path) -> Path:
    """Save the playground's untrained Emu3 in ``folder``; return the folder that a server serves."""
    tiny_writer_runs.save_emu3(folder)
    editor = load_emu3(folder, size=(24, 24), prefill=DRAW, dtype=torch.float32, device="cpu")
    save_for_vllm(editor, folder / "served")
    return folder / "served"


def writer(folder: Path, *, train: str = "lora") -> QwenWriter:
    """Load the model of the folder; its completions end at any of 26 letters."""
    made = load_writer(folder, template=tiny_writers.TEMPLATE, dtype=torch.float32, device="cpu", stop=tiny_writing.STOPS)
    tiny_writers.make_trainable(made.module, train)
    return made


def policy(model: Any, url: str, folder: Path, *, sampling: dict[str, Any] | None = None, **engine: Any) -> AutoregressivePolicy:
    """Make a policy with completions by the server at ``url``. ``folder``: of the run. ``engine``: keys of the engine section."""
    section = VllmEngine(url=url, **{"timeout": 600.0, "patience": 60.0, "truncate_at": None, **engine})
    train = "lora" if hasattr(model.module, "peft_config") else "full"
    made = tiny_writing.policy(writer=model, sampling=sampling, train=train)
    made.limits = section
    full = train == "full"
    save = model.module.save_pretrained if full else functools.partial(write_lora, model.module, pipeline=None)
    context = EngineContext(weights=made.copies.parameters, save=save, folder=folder, full_weights=full)
    made.engine = section.build(model, context)
    return made


def tasks(count: int = 3, *, images: bool = True) -> Any:
    """Make tasks with no, one and two images that the image processor does not resize, and one with an image that it resizes."""
    made = tiny_writers.tasks(count, pictures=images)
    return (*made, tiny_models.task("resized", "a", tiny_models.picture(7, 37, 51))) if images else made
