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
    Qwen2VLImageProcessorPil,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

import tiny_models
from retouch.core.random import generator
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
        "vocab_size": len(tokenizer()) + 5,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": tokenizer().pad_token_id,
        "initializer_range": SPREAD,
        **more,
    }


def _ids():
    tokens = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, tokenizer().convert_tokens_to_ids(list(tokens)), strict=True))


def _mrope(**more):
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3], **more}


def _qwen2_vl():
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 8, "mlp_ratio": 2}
    config = Qwen2VLConfig(text_config=_text(rope_parameters=_mrope()), vision_config=vision, **_ids())
    return Qwen2VLForConditionalGeneration(config)


def _qwen2_5_vl(**text):
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 8,
        "window_size": 32,
        "out_hidden_size": text.get("hidden_size", 32),
        "fullatt_block_indexes": [1],
    }
    config = Qwen2_5_VLConfig(text_config=_text(rope_parameters=_mrope(), **text), vision_config=vision, **_ids())
    return Qwen2_5_VLForConditionalGeneration(config)


def _qwen3_vl():
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "patch_size": 8,
        "out_hidden_size": 32,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
    }
    text = _text(rope_parameters=_mrope(mrope_interleaved=True), head_dim=16)
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **_ids()))


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
    temporal = {} if kind != "qwen3-vl" else {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=16 * 16, max_pixels=64 * 64, **temporal)


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


@torch.no_grad()
def perturb(module, size=0.1, key=0):
    random = generator("move", key)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.add_(size * torch.randn(parameter.shape, generator=random).to(parameter))


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
