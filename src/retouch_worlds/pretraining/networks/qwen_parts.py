"""The untrained parts of the playground's editor: Qwen-Image-Edit's classes with few parameters, and the special tokens of its
published tokenizer."""

import json
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from retouch.core.random import generator
from retouch.models.common.chat_template import VISION
from retouch_worlds.playground.world.instructions import corpus

SYSTEM = "Edit the picture."
TEMPLATE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{VISION}{{}}<|im_end|>\n<|im_start|>assistant\n"

WIDTH = 64
# 1 / sqrt(width): the default of the classes, 0.02, is meant for widths of several thousand.
INITIALIZER_RANGE = 0.125


SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip


def build_tokenizer(texts: Sequence[str], *, vocabulary: int, special: Sequence[str] = SPECIAL_TOKENS) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer with ``vocabulary`` tokens and the ``special`` tokens, trained on ``texts``. Other texts are
    tokenized byte by byte."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    learner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    state = json.loads(learner.to_str())["model"]
    tokenizer = Qwen2Tokenizer(vocab=state["vocab"], merges=[tuple(merge) for merge in state["merges"]], pad_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special], special_tokens=True)
    return tokenizer


def tokenizer(seed: int) -> Qwen2Tokenizer:
    """A tokenizer trained on the playground's instructions and the words of the template."""
    texts = [*corpus(generator(seed, "tokenizer"), 4000), *[f"{SYSTEM}\nuser\nsystem\nassistant\n"] * 50]
    return build_tokenizer(texts, vocabulary=640)


def image_processor() -> Qwen2VLImageProcessorPil:
    """The image processor: an image of 24 x 24 px becomes 6 x 6 patches of 4 px, which are merged to 9 tokens, one per cell."""
    return Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=1, merge_size=2, size={"shortest_edge": 8 * 8, "longest_edge": 256 * 256}
    )


def text_encoder(words: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained text encoder with two layers of width 64, in which a token attends only to itself and the 3 tokens before it. So
    a token depends only on its clause, and the model generalises to longer texts."""
    near = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    config = Qwen2_5_VLConfig(
        text_config=text_config(words, layers=2, heads=2, inner=192) | near,
        vision_config=vision_config(),
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        **picture_tokens(words),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def text_config(words: Qwen2Tokenizer, *, layers: int, heads: int, inner: int) -> dict[str, Any]:
    """The text part of a Qwen configuration, with width 64, and width ``inner`` inside the MLPs."""
    pairs = WIDTH // heads // 2
    return {
        "vocab_size": len(words),
        "hidden_size": WIDTH,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [pairs // 4, 3 * pairs // 8, 3 * pairs // 8],
        },
        "bos_token_id": words.eos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
        "initializer_range": INITIALIZER_RANGE,
    }


def vision_config() -> dict[str, Any]:
    """The vision part of a Qwen2.5-VL configuration: two layers of width 32, patches of 4 px."""
    return {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 1,
        "spatial_merge_size": 2,
        "window_size": 32,
        "fullatt_block_indexes": [1],
        "out_hidden_size": WIDTH,
        "initializer_range": INITIALIZER_RANGE,
    }


def picture_tokens(words: Qwen2Tokenizer) -> dict[str, int]:
    """The ids of image and video tokens in a Qwen configuration."""
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{name}_token_id": words.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}


def transformer(blocks: int = 4) -> QwenImageTransformer2DModel:
    """An untrained transformer with joint blocks of width 128; four blocks have 2.5 M parameters. With half the width, it would
    learn instructions several times more slowly."""
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=32,
        out_channels=8,
        num_layers=blocks,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(8, 12, 12),
    )


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The noise schedule, with a static shift of 2, because small images need little shift."""
    return FlowMatchEulerDiscreteScheduler(shift=2.0)


def seeded(seed: int) -> None:
    """Seed the global generator, which the classes use to initialise their weights."""
    torch.manual_seed(seed)
