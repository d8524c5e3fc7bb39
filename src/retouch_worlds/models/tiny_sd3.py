"""A tiny untrained Stable Diffusion 3, to try a recipe or a script from end to end without a download."""

import string

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from retouch_models.sd3.model import SD3

_LONGEST = 128
"""Maximum number of tokens of a prompt in T5; each letter is a token."""
_WIDTH = 32
_CHANNELS = 4
_LATENT_SIDE = 16


class TinySD3(SD3):
    """Stable Diffusion 3's classes with random weights from ``seed``, on the CPU. The images have 32 x 32 px.

    ``examples/one_file_flow_grpo.py`` draws the same weights, tensor by tensor.

    Example, in a recipe::

        policy.model: { kind: 'import', class: 'retouch_worlds.models.tiny_sd3:TinySD3', args: { seed: 0 } }
    """

    def __init__(self, *, seed: int) -> None:
        pipeline = tiny_sd3_pipeline(seed)
        super().__init__(
            transformer=pipeline.transformer,
            vae=pipeline.vae,
            text_encoders=(pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3),
            tokenizers=[pipeline.tokenizer, pipeline.tokenizer_2, pipeline.tokenizer_3],
            scheduler_config=dict(pipeline.scheduler.config),
            max_sequence_length=_LONGEST,
        )


def tiny_sd3_pipeline(seed: int = 0) -> StableDiffusion3Pipeline:
    """diffusers' pipeline with random weights from ``seed``, frozen, for images of 32 x 32 px.

    Example: ``retouch.Trainer(model=tiny_sd3_pipeline(), ...)``
    """
    # A token of CLIP is a lower-case letter, inside or at the end of a word; a token of T5 is a letter.
    letters = string.ascii_lowercase
    ends = ["<|startoftext|>", "<|endoftext|>"]
    words = {word: index for index, word in enumerate([*letters, *(f"{letter}</w>" for letter in letters), *ends])}
    clip_config = CLIPTextConfig(
        vocab_size=len(words),
        hidden_size=_WIDTH,
        projection_dim=_WIDTH,
        intermediate_size=2 * _WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=len(words) - 2,
        eos_token_id=len(words) - 1,
    )
    t5_letters = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((letter, -1.0) for letter in f"▁{letters}")]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # The order of these lines is the order in which the weights are drawn.
        transformer, vae = (
            (
                SD3Transformer2DModel(
                    sample_size=_LATENT_SIDE,
                    pos_embed_max_size=_LATENT_SIDE,
                    patch_size=1,
                    in_channels=_CHANNELS,
                    out_channels=_CHANNELS,
                    num_layers=2,
                    num_attention_heads=4,
                    attention_head_dim=8,
                    joint_attention_dim=_WIDTH,
                    caption_projection_dim=_WIDTH,
                    pooled_projection_dim=2 * _WIDTH,
                )
            ),
            (
                AutoencoderKL(
                    block_out_channels=(8, 16),
                    latent_channels=_CHANNELS,
                    norm_num_groups=4,
                    sample_size=2 * _LATENT_SIDE,
                    down_block_types=("DownEncoderBlock2D",) * 2,
                    up_block_types=("UpDecoderBlock2D",) * 2,
                    scaling_factor=1.5305,
                    shift_factor=0.0609,
                    use_quant_conv=False,
                    use_post_quant_conv=False,
                )
            ),
        )
        clip, clip_2, t5 = (
            CLIPTextModelWithProjection(clip_config),
            CLIPTextModelWithProjection(clip_config),
            T5EncoderModel(
                T5Config(vocab_size=len(t5_letters), d_model=_WIDTH, d_kv=8, d_ff=2 * _WIDTH, num_layers=2, num_heads=4)
            ),
        )
    tokenizer, tokenizer_2 = (CLIPTokenizer(vocab=words, merges=[], model_max_length=77) for _ in range(2))
    for part in (transformer, vae, clip, clip_2, t5):
        part.eval().requires_grad_(False)
    return StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        vae=vae,
        text_encoder=clip,
        tokenizer=tokenizer,
        text_encoder_2=clip_2,
        tokenizer_2=tokenizer_2,
        text_encoder_3=t5,
        tokenizer_3=T5Tokenizer(vocab=t5_letters, extra_ids=0),
    )
