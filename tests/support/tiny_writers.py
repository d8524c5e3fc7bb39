"""Tiny random writers of the real classes, with one byte tokenizer."""

import functools

import torch
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

import tiny_models
from retouch.models.base import TURNS, PretrainedLanguageModel
from retouch.types import Task
from retouch_models.qwen_vl import QwenWriter

VISION_KINDS = ("qwen2-vl", "qwen2.5-vl", "qwen3-vl")
TEXT_KINDS = ("qwen2.5", "qwen3")
KINDS = (*VISION_KINDS, *TEXT_KINDS)
TEMPLATE = TURNS.format(system="write", user="{}")
SPREAD = 0.3  # standard deviation of the weights: with the classes' default of 0.02 all tokens would be about equally likely


@functools.cache
def tokenizer():
    return tiny_models.qwen_tokenizer()


def _text(**more):
    end = tokenizer().convert_tokens_to_ids("<|im_end|>")
    return {
        **tiny_models.TEXT_SIZES,
        "vocab_size": len(tokenizer()) + 5,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": tokenizer().pad_token_id,
        "initializer_range": SPREAD,
        **more,
    }


def _whole(kind, vision, *, rope=tiny_models.MROPE, **text):
    """Return the configuration of a vision-language model."""
    config = _text(rope_parameters=rope, **text)
    return kind(text_config=config, vision_config=vision, **tiny_models.vision_ids(tokenizer()))


def _qwen2_vl():
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 8, "mlp_ratio": 2}
    return Qwen2VLForConditionalGeneration(_whole(Qwen2VLConfig, vision))


def _qwen2_5_vl(**text):
    vision = {**tiny_models.VISION_SIZES, "window_size": 32, "fullatt_block_indexes": [1]}
    vision["out_hidden_size"] = text.get("hidden_size", 32)
    return Qwen2_5_VLForConditionalGeneration(_whole(Qwen2_5_VLConfig, vision, **text))


def _qwen3_vl():
    vision = {**tiny_models.VISION_SIZES, "depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
    rope = {**tiny_models.MROPE, "mrope_interleaved": True}
    return Qwen3VLForConditionalGeneration(_whole(Qwen3VLConfig, vision, rope=rope, head_dim=16))


def module(kind="qwen2.5-vl", *, seed=0, **text):
    """Make a model with random weights. ``text``: keys of the text configuration of Qwen2.5-VL and Qwen2.5."""
    makers = {
        "qwen2-vl": _qwen2_vl,
        "qwen2.5-vl": lambda: _qwen2_5_vl(**text),
        "qwen3-vl": _qwen3_vl,
        "qwen2.5": lambda: Qwen2ForCausalLM(Qwen2Config(**_text(**text))),
        "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_text(head_dim=16))),
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = makers[kind]().eval()
        for name, parameter in made.named_parameters():
            if parameter.ndim > 1 and "visual" not in name:
                torch.nn.init.normal_(parameter, std=SPREAD)
    return made


def image_processor(kind):
    return tiny_models.qwen_image_processor(**({"image_mean": [0.5] * 3, "image_std": [0.5] * 3} if kind == "qwen3-vl" else {}))


def writer(kind="qwen2.5-vl", *, train="lora", seed=0, checkpointing=False, text=None, **options):
    made = module(kind, seed=seed, **(text or {}))
    make_trainable(made, train)
    return QwenWriter(
        made,
        tokenizer(),
        template=TEMPLATE,
        image_processor=image_processor(kind) if kind in VISION_KINDS else None,
        gradient_checkpointing=checkpointing,
        **options,
    )


make_trainable = functools.partial(tiny_models.make_trainable, targets=PretrainedLanguageModel.lora_targets)
perturb = tiny_models.perturb


def tasks(count=3, *, with_images=True):
    """Make tasks with different instructions; the first has one image, the second none, the third two."""
    texts = ["red", "make it blue and put it left of that", "a"]
    # The larger images have more tokens than the longer side of their grid, so positions are smaller than token indices.
    shapes = [((32, 32),), (), ((48, 32), (16, 32))]
    return tuple(
        Task(
            id=f"t{k}",
            instruction=texts[k % 3],
            images=tuple(tiny_models.image(10 * k + n, *shape) for n, shape in enumerate(shapes[k % 3])) if with_images else (),
        )
        for k in range(count)
    )
