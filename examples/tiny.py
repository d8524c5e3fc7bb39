"""The ``--tiny`` settings of the other examples: models with few parameters, their data, and runs of two steps on a CPU.

``sd3``, ``enhancer``, ``writer``, ``inpainting`` and ``emu3`` return arguments of ``retouch.Trainer``, which replace those of the
full size. Stable Diffusion 3 and CLIP have random weights; the other models are the trained models of the playground, which come
with Retouch.
"""

import string
from pathlib import Path
from typing import Any

from PIL import Image

import retouch

FOLDER = Path("tiny-models")
RUN: dict[str, Any] = {
    **{"steps": 2, "tasks_per_step": 2, "group_size": 2, "microbatch": 8, "learning_rate": 1e-3, "minibatches": 1},
    **{"device": "cpu", "trackers": (), "progress": False, "eval": {"tasks": 4}, "samples": {"every": 0, "tasks": 1}},
    **{"checkpoints": {"every": 0}, "gradient_checkpointing": False, "ema": None, "sharding": None, "size": None},
}


def sd3() -> dict[str, Any]:
    """Stable Diffusion 3 for images of 32 x 32 pixels."""
    from one_file_flow_grpo import build_models

    pipeline = build_models(seed=0)
    pipeline.set_progress_bar_config(disable=True)
    sampling = {"num_steps": 3, "transition": {"kind": "sde", "noise_level": 0.7}}
    return {**RUN, "model": pipeline, "size": 32, "rollout": sampling}


def enhancer() -> dict[str, Any]:
    """A tiny Qwen2-VL that writes prompts, and a text-to-image model that renders them."""
    from retouch_worlds.data import TextToImageData

    return {
        **RUN,
        "model": retouch.models.PlaygroundEnhancer(),
        "renderer": {"model": retouch.models.PlaygroundTextToImage(), "num_steps": 2, "batch": 8},
        "train_dataset": TextToImageData(complexity={1: 1.0, 2: 1.0}, count=100),
        "rollout": {"kind": "tokens", "max_new_tokens": 26},
    }


def writer() -> dict[str, Any]:
    """A tiny Qwen2.5-VL that sees an image and writes how to edit it, and an editor that follows this text."""
    from retouch_worlds.data import IndirectPlaygroundData

    return {
        **RUN,
        "model": retouch.models.PlaygroundWriter(),
        "renderer": {"model": retouch.models.PlaygroundModel(), "num_steps": 2, "batch": 8},
        "train_dataset": IndirectPlaygroundData(complexity={1: 1.0, 2: 1.0}, count=100),
        "reward_funcs": retouch.rewards.Playground(),
        "reward_weights": {"overall": 1.0},
        # In most tasks, the writer's token probabilities are almost 1; at temperature 1 their gradient would vanish.
        "rollout": {"kind": "tokens", "max_new_tokens": 32, "temperature": 2.0},
    }


def inpainting() -> dict[str, Any]:
    """A tiny FLUX.1-Fill that renders words on signs, with an IP-Adapter."""
    from retouch_worlds.data import WordData

    return {
        **RUN,
        "model": retouch.models.PlaygroundWords(),
        "peft_config": retouch.IpAdapter(encoder="playground", tokens=4),
        "train_dataset": WordData(count=100, style_from_reference=True),
        "rollout": {"num_steps": 3, "transition": {"kind": "sde", "noise_level": 0.8}},
        "phases": phases(warm_up={"objective": retouch.Supervised(), "group_size": 1}, rl={}),
    }


def emu3() -> dict[str, Any]:
    """A tiny Emu3 that edits images of the playground."""
    from retouch_worlds.data import PlaygroundData

    return {
        **RUN,
        "model": retouch.models.PlaygroundEmu3(),
        "train_dataset": PlaygroundData(complexity={1: 1.0}, count=100),
        "reward_funcs": retouch.rewards.Playground(),
        "reward_weights": {"overall": 1.0},
        "rollout": {"kind": "tokens", "max_new_tokens": 24},
        "phases": phases(supervised={"objective": retouch.CrossEntropy(), "group_size": 1}, rl={}),
    }


def phases(**named: dict[str, Any]) -> list[dict[str, Any]]:
    """The phases with these names and keys, with one step each."""
    return [{"name": name.replace("_", "-"), "steps": 1, **keys} for name, keys in named.items()]


def pairs(count: int = 12) -> list[dict[str, Any]]:
    """``count`` preference pairs of different images: a red one is chosen, a blue one is rejected."""

    def flat(red: int, blue: int) -> Image.Image:
        return Image.new("RGB", (32, 32), (red, 30, blue))

    return [
        {"prompt": f"a picture of {letter}", "chosen": flat(220 - number, 30), "rejected": flat(30, 220 - number)}
        for number, letter in enumerate(string.ascii_lowercase[:count])
    ]


def clip() -> str:
    """Write a CLIP with random weights, for which each letter is a token, unless it exists. Returns its folder."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel, PreTrainedTokenizerFast

    folder = FOLDER / "clip"
    if (folder / "config.json").is_file():
        return str(folder)
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *string.ascii_lowercase]
    letters = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    letters.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    letters.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)])
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>", "unk_token": "<unk>"}
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {
        **tower,
        "vocab_size": len(words),
        "max_position_embeddings": 77,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    vision = {**tower, "image_size": 16, "patch_size": 8}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=12))
    model.save_pretrained(folder)
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=letters, model_max_length=77, **special).save_pretrained(folder)
    return str(folder)
