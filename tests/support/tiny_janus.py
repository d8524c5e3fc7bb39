"""A tiny Janus of the real classes, with a byte tokenizer that has Janus' special tokens."""

import functools

import torch
from transformers import JanusConfig, JanusForConditionalGeneration, Qwen2Tokenizer

import tiny_models
from retouch.models.base import PretrainedLanguageModel
from retouch.types import Prompts
from retouch_models.janus import BEGIN, JanusImageModel, JanusImageModules

CODES, SIDE = 32, 4
BOS, EOS, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<end_of_image>"
SPREAD = 0.12


@functools.cache
def tokenizer() -> Qwen2Tokenizer:
    return tiny_models.byte_tokenizer(BEGIN, END, "<image_placeholder>", bos_token=BOS, eos_token=EOS)


def whole(seed: int = 0) -> JanusForConditionalGeneration:
    words = tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = JanusConfig(
            text_config={
                **tiny_models.TEXT_SIZES,
                "model_type": "llama",
                "vocab_size": len(words) + 5,
                "max_position_embeddings": 256,
                "initializer_range": SPREAD,
                "bos_token_id": words.bos_token_id,
                "eos_token_id": words.eos_token_id,
                "pad_token_id": words.pad_token_id,
            },
            vision_config={
                "hidden_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 4 * SIDE,
                "patch_size": 4,
                "projection_dim": 32,
                "num_image_tokens": SIDE * SIDE,
            },
            vq_config={
                "embed_dim": 8,
                "num_embeddings": CODES,
                "latent_channels": 32,
                "base_channels": 32,
                "channel_multiplier": [1, 1, 1, 1],
                "num_res_blocks": 1,
                "projection_dim": 32,
                "image_token_embed_dim": 32,
                "initializer_range": SPREAD,
            },
            image_token_id=words.convert_tokens_to_ids("<image_placeholder>"),
        )
        return JanusForConditionalGeneration(config).eval()


def image_model(*, train: str = "lora", seed: int = 0, **options) -> JanusImageModel:
    """Make an image model with the trainable weights that a recipe would select."""
    made = whole(seed).requires_grad_(False)
    module = JanusImageModules(made)
    tiny_models.make_trainable(module, train, PretrainedLanguageModel.lora_targets, seed=seed + 1)
    return JanusImageModel(module, tokenizer(), vq=made.model.vqmodel, **options)


def generate_with_transformers(whole: JanusForConditionalGeneration, prompts: Prompts) -> torch.Tensor:
    """Generate codes greedily with transformers. The guidance scale is 1 + 1e-9, because generation fails with exactly 1."""
    words = tokenizer()
    settings = whole.generation_config
    settings.generation_kwargs = {"boi_token_id": words.convert_tokens_to_ids(BEGIN)}
    settings.bos_token_id, settings.pad_token_id = words.bos_token_id, words.pad_token_id
    return whole.generate(
        inputs=prompts.ids,
        attention_mask=prompts.mask.long(),
        generation_mode="image",
        do_sample=False,
        guidance_scale=1 + 1e-9,
        max_length=prompts.ids.shape[1] + SIDE * SIDE,
    )
