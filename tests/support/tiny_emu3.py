"""A tiny Emu3 of the real classes, with a byte tokenizer that has Emu3's special tokens, and an autoencoder with 32 codes."""

import functools

import torch
from transformers import Emu3Config, Emu3ForConditionalGeneration, Qwen2Tokenizer

import tiny_models
from retouch.models.base import PretrainedLanguageModel
from retouch_models.emu3 import BOI, BOS, DRAW, EOF, EOI, EOL, EOS, IMG, Emu3Editor, language_model

CODES = 32
SIZE = (16, 24)
SPREAD = 0.12


@functools.cache
def tokenizer() -> Qwen2Tokenizer:
    thoughts = ["<|start thinking|>", "<|end thinking|>"]
    visual = [f"<|visual token {code:06d}|>" for code in range(CODES)]
    return tiny_models.byte_tokenizer(BOS, EOS, BOI, IMG, EOL, EOF, EOI, *thoughts, *visual)


def module(seed: int = 0, *, deep: bool = False) -> Emu3ForConditionalGeneration:
    """Make a random Emu3. ``deep``: with attention in the autoencoder's stages; the published one has it in its last stage."""
    words = tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = Emu3Config(
            vq_config={
                "codebook_size": CODES,
                "embed_dim": 4,
                "latent_channels": 4,
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "attn_resolutions": [1] if deep else [],
                "hidden_size": 32,
                "temporal_downsample_factor": 1,
            },
            text_config={
                **tiny_models.TEXT_SIZES,
                "vocab_size": len(words) + 5,
                "attention_dropout": 0.0,
                "initializer_range": SPREAD,
                "bos_token_id": words.convert_tokens_to_ids(BOS),
                "eos_token_id": words.convert_tokens_to_ids(EOS),
                "pad_token_id": words.pad_token_id,
            },
            vocabulary_map={**words.get_vocab(), "<image>": words.convert_tokens_to_ids(IMG)},
        )
        return Emu3ForConditionalGeneration(config).eval()


def editor(*, prefill: str = DRAW, train: str = "lora", seed: int = 0, **options) -> Emu3Editor:
    """Make an editor with the trainable weights that a recipe would select."""
    whole = module(seed).requires_grad_(False)
    made = language_model(whole)
    tiny_models.make_trainable(made, train, PretrainedLanguageModel.lora_targets, seed=seed + 1)
    return Emu3Editor(made, tokenizer(), vq=whole.model.vqmodel, size=SIZE, prefill=prefill, **options)
