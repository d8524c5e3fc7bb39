"""FLUX.1-Fill's classes with few parameters: the untrained model of the playground that renders words, and a model with which a
recipe can be tried from end to end without a download."""

import string
from collections.abc import Sequence

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from tokenizers.pre_tokenizers import ByteLevel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from retouch_models.flux.model import FluxFill, FluxText
from retouch_worlds.playground.words import LETTERS

_LONGEST = 64
"""Maximum number of tokens of a prompt; each letter is a token."""


class TinyFluxFill(FluxFill):
    """FLUX.1-Fill's classes with random weights from ``seed``; ``size``: (height, width) of the images in px, multiples of 8.

    Example, in a recipe::

        policy.model: {
          kind: 'import',
          class: 'retouch_worlds.models.tiny_fill:TinyFluxFill',
          args: { seed: 0, size: [64, 64] },
        }
    """

    def __init__(self, *, seed: int, size: Sequence[int], device: torch.device | str = "cpu") -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
            letters = T5Tokenizer(vocab=[*special, *((sign, -3.0) for sign in string.printable.strip())], extra_ids=0)
            reader = text(letters, max_sequence_length=_LONGEST)
            module, vae = transformer(), autoencoder()
        for frozen in (*reader.encoders, vae):
            frozen.requires_grad_(False).eval().to(device)
        super().__init__(
            transformer=module.to(device), vae=vae, text=reader, scheduler_config=dict(scheduler().config), size=(size[0], size[1])
        )


LATENT_CHANNELS = 8
TEXT_WIDTH, POOLED_WIDTH = 64, 32
MAX_SEQUENCE_LENGTH = 14
"""Tokens of the longest instruction: four words, a quotation mark, six letters, two marks and the end."""


def t5_tokenizer() -> T5Tokenizer:
    """A tokenizer with one token for each word of the instruction and for each letter of the quoted text."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    words = [("▁The", -1.0), ("▁text", -1.0), ("▁is", -1.0), ("▁'", -1.0), ("'", -2.0), (".", -2.0), ("▁", -6.0)]
    return T5Tokenizer(vocab=[*special, *words, *((letter, -3.0) for letter in LETTERS)], extra_ids=0)


def clip_tokenizer() -> CLIPTokenizer:
    """A byte-level tokenizer."""
    symbols = sorted(ByteLevel.alphabet())
    vocab = {symbol: place for place, symbol in enumerate([*symbols, *(f"{symbol}</w>" for symbol in symbols)])}
    vocab |= {"<|startoftext|>": len(vocab), "<|endoftext|>": len(vocab) + 1}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=32)


def text(t5_words: T5Tokenizer | None = None, *, max_sequence_length: int = MAX_SEQUENCE_LENGTH) -> FluxText:
    """A T5 with two layers of width 64, and a CLIP with one layer. ``t5_words``: T5's tokenizer; None takes ``t5_tokenizer``."""
    t5_words, clip_words = t5_words or t5_tokenizer(), clip_tokenizer()
    t5 = T5Config(vocab_size=len(t5_words), d_model=TEXT_WIDTH, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0)
    end = len(clip_words) - 1
    clip = CLIPTextConfig(
        vocab_size=end + 1,
        hidden_size=POOLED_WIDTH,
        intermediate_size=64,
        projection_dim=POOLED_WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=clip_words.model_max_length,
        bos_token_id=end - 1,
        eos_token_id=end,
        pad_token_id=end,
    )
    return FluxText(
        CLIPTextModel(clip),
        T5EncoderModel(t5),
        clip_tokenizer=clip_words,
        t5_tokenizer=t5_words,
        max_sequence_length=max_sequence_length,
    )


def autoencoder(shift: float = 0.0, scale: float = 1.0) -> AutoencoderKL:
    """An autoencoder with a factor of 4: a token of 2 x 2 latents is as wide as a letter and half as high."""
    blocks = 3
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(8, 16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=LATENT_CHANNELS,
        shift_factor=shift,
        scaling_factor=scale,
        mid_block_add_attention=False,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def transformer() -> FluxTransformer2DModel:
    """Two double and three single blocks of width 96: 1.2 M parameters. A token has 4 latents of noise, 4 of image, and a mask."""
    channels = 4 * LATENT_CHANNELS
    return FluxTransformer2DModel(
        in_channels=2 * channels + 4 * 16,
        out_channels=channels,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=32,
        num_attention_heads=3,
        joint_attention_dim=TEXT_WIDTH,
        pooled_projection_dim=POOLED_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """A scheduler with a static shift of 3."""
    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def untrained(vae: AutoencoderKL, seed: int) -> FluxFill:
    """Build the model with initial weights from the seed."""
    torch.manual_seed(seed)
    return FluxFill(transformer=transformer(), vae=vae, text=text(), scheduler_config=dict(scheduler().config))
