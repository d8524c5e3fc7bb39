"""Tiny random models of the real classes, with tokenizers that have the real special tokens."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImageTransformer2DModel,
    SD3Transformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from peft import LoraConfig
from PIL.Image import Image, fromarray
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessorPil,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

from retouch.core.random import generator
from retouch.policies.weights import WeightCopies
from retouch.types import Batch, Conditioning, Task
from retouch_models.flux.model import FluxText

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
    "use_dynamic_shifting": True,
}
FLUX_SCHEDULER = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "max_image_seq_len": 4096,
    "max_shift": 1.15,
    "shift": 3.0,
    "use_dynamic_shifting": True,
}
TEXT_SIZES = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512},
}
"""The sizes of a language model, as its configuration names them."""
VISION_SIZES = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "patch_size": 8, "out_hidden_size": 32}
"""The sizes of Qwen's vision towers."""
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
AUTOENCODER = {
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "block_out_channels": (8,) * 3,
    "norm_num_groups": 4,
    "latent_channels": 16,
}
"""An autoencoder with 4 x downsampling and 16 channels."""
FILL_CHANNELS = 64 + 64 + 4 * 4**2
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
TEXT_TEMPLATE = "<|im_start|>system\nedit<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
TEMPLATE = TEXT_TEMPLATE.replace("{}", VISION + "{}")


def byte_tokenizer(*special: str, **named: str) -> Qwen2Tokenizer:
    """Make a tokenizer with bytes as tokens and these special tokens. ``named``: tokens with a purpose, such as ``bos_token``."""
    vocab = {symbol: k for k, symbol in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Qwen2Tokenizer(vocab={**vocab, "<|endoftext|>": len(vocab)}, merges=[])
    tokenizer.add_special_tokens({**named, "additional_special_tokens": list(special)})
    return tokenizer


def qwen_tokenizer() -> Qwen2Tokenizer:
    return byte_tokenizer(*SPECIAL)


def vision_ids(tokenizer: Qwen2Tokenizer) -> dict[str, int]:
    """Return the ids of the tokens that mark images, as the configurations of Qwen's models name them."""
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return dict(zip(names, tokenizer.convert_tokens_to_ids(list(SPECIAL[2:])), strict=True))


def qwen_image_processor(**options: Any) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(patch_size=8, merge_size=2, min_pixels=16 * 16, max_pixels=64 * 64, **options)


def qwen_text_encoder(tokenizer: Qwen2Tokenizer, seed: int = 0) -> Qwen2_5_VLForConditionalGeneration:
    torch.manual_seed(seed)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    config = Qwen2_5_VLConfig(
        text_config={
            **TEXT_SIZES,
            "vocab_size": len(tokenizer),
            "bos_token_id": end,
            "eos_token_id": end,
            "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": MROPE,
        },
        vision_config={**VISION_SIZES, "spatial_merge_size": 2, "window_size": 32, "fullatt_block_indexes": [1]},
        **vision_ids(tokenizer),
    )
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def qwen_vae(seed: int = 0) -> AutoencoderKLQwenImage:
    """Make an autoencoder with 4 x downsampling and 16 channels."""
    torch.manual_seed(seed)
    return AutoencoderKLQwenImage(base_dim=8, dim_mult=[1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True]).eval()


def qwen_transformer(seed: int = 0, *, zero_cond_t: bool = False) -> QwenImageTransformer2DModel:
    torch.manual_seed(seed)
    return QwenImageTransformer2DModel(
        num_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(8, 12, 12),
        zero_cond_t=zero_cond_t,
    ).eval()


def make_trainable(module: Any, train: str, targets: Sequence[str], *, seed: int = 11) -> None:
    """Make LoRA matrices trainable (with B = 0, as at the start of a run), or all weights ("full"), or none."""
    module.requires_grad_(train == "full")
    if train == "lora":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian", target_modules=list(targets)))
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("lora_" in name)


@torch.no_grad()
def perturb(module: Any, size: float = 0.1, key: int = 0) -> None:
    """Add random noise to the trained weights."""
    random = generator("move", key)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.add_(size * torch.randn(parameter.shape, generator=random).to(parameter))


def weight_copies(module: Any, names: Sequence[str], train: str) -> WeightCopies:
    """Make copies of the weights with these names; the reference of a LoRA is the model without it."""
    made = WeightCopies(module)
    for name in names:
        if name == "reference" and train == "lora":
            made.snapshot_without_adapter(name)
        else:
            made.snapshot(name)
    return made


def batch(tasks: Sequence[Task], group_size: int = 2, *, seed: int = 3, step: int = 5, first: int = 0) -> Batch:
    """Make a batch with a group of ``group_size`` rows per task. ``first``: the id of the first group."""
    rows = range(len(tasks) * group_size)
    return Batch(
        seed=seed,
        step=step,
        tasks=tuple(tasks),
        group_ids=tuple(range(first, first + len(tasks))),
        group=tuple(row // group_size for row in rows),
        slot=tuple(row % group_size for row in rows),
    )


def clip_tokenizer() -> CLIPTokenizer:
    """Make a tokenizer with bytes as tokens and at most 77 tokens."""
    symbols = sorted(ByteLevel.alphabet())
    vocab = {symbol: k for k, symbol in enumerate([*symbols, *(f"{symbol}</w>" for symbol in symbols)])}
    vocab |= {"<|startoftext|>": len(vocab), "<|endoftext|>": len(vocab) + 1}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def clip(width: int, seed: int) -> CLIPTextModelWithProjection:
    torch.manual_seed(seed)
    end = len(clip_tokenizer()) - 1
    config = CLIPTextConfig(
        vocab_size=end + 1,
        hidden_size=width,
        intermediate_size=32,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=end - 1,
        eos_token_id=end,
        pad_token_id=end,
    )
    return CLIPTextModelWithProjection(config).eval()


def t5_tokenizer() -> T5Tokenizer:
    """Make a tokenizer with letters as tokens."""
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    letters = [(letter, -3.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return T5Tokenizer(vocab=[*special, *letters], extra_ids=0)


def t5(width: int, seed: int) -> T5EncoderModel:
    torch.manual_seed(seed)
    vocab = len(t5_tokenizer())
    return T5EncoderModel(T5Config(vocab_size=vocab, d_model=width, d_kv=8, d_ff=32, num_layers=2, num_heads=2)).eval()


def sd3_vae(seed: int = 0) -> AutoencoderKL:
    """Make an autoencoder with 4 x downsampling and 16 channels."""
    torch.manual_seed(seed)
    convolutions = {"use_quant_conv": False, "use_post_quant_conv": False}
    return AutoencoderKL(**AUTOENCODER, shift_factor=0.0609, scaling_factor=1.5305, **convolutions).eval()


def sd3_transformer(seed: int = 0) -> SD3Transformer2DModel:
    """Make a tiny SD3.5-medium: normalized queries and keys, dual attention in the first block."""
    torch.manual_seed(seed)
    return SD3Transformer2DModel(
        sample_size=8,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=48,
        caption_projection_dim=32,
        pooled_projection_dim=40,
        pos_embed_max_size=12,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    ).eval()


def clip_text(width: int, seed: int) -> CLIPTextModel:
    """Make a CLIP text encoder without projection, as Flux uses it."""
    torch.manual_seed(seed)
    return CLIPTextModel(clip(width, seed).config).eval()


def flux_text() -> FluxText:
    """Make both text encoders of Flux, for instructions of at most 20 tokens."""
    return FluxText(
        clip_text(16, 1), t5(48, 3), clip_tokenizer=clip_tokenizer(), t5_tokenizer=t5_tokenizer(), max_sequence_length=20
    )


def flux_transformer(seed: int = 0, *, channels: int = 64, distilled: bool = True) -> FluxTransformer2DModel:
    """Make a transformer of one double and two single blocks; 64 of its ``channels`` input channels are the noisy latent."""
    torch.manual_seed(seed)
    return FluxTransformer2DModel(
        in_channels=channels,
        out_channels=64,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=32,
        num_attention_heads=2,
        joint_attention_dim=48,
        pooled_projection_dim=16,
        guidance_embeds=distilled,
        axes_dims_rope=(8, 12, 12),
    ).eval()


def save_flux(folder: Path, *, fills: bool = False, distilled: bool = True) -> Path:
    """Save a folder in the format of the pipelines of FLUX.1 and Kontext, or of Fill if ``fills``."""
    FluxPipeline(
        transformer=flux_transformer(channels=FILL_CHANNELS if fills else 64, distilled=distilled),
        vae=sd3_vae(),
        text_encoder=clip_text(16, 1),
        tokenizer=clip_tokenizer(),
        text_encoder_2=t5(48, 3),
        tokenizer_2=t5_tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(**SCHEDULER),
    ).save_pretrained(folder)
    return folder


CHAT_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


def chat_tokenizer() -> Qwen2Tokenizer:
    """Make a tokenizer with Qwen3's chat template, in which thinking is off unless it is requested."""
    tokenizer = qwen_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def qwen3(tokenizer: Qwen2Tokenizer, seed: int = 0, *, width: int = 32, layers: int = 3) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 3 // 2,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=width // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config).eval()


def z_image_transformer(seed: int = 0) -> ZImageTransformer2DModel:
    """Make a transformer of two blocks and a refiner block each for image and text.

    Its padding tokens are random instead of 0, the value with which the class initializes them.
    """
    torch.manual_seed(seed)
    made = ZImageTransformer2DModel(
        dim=64,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[8, 12, 12],
        axes_lens=[576, 16, 16],
    )
    with torch.no_grad():
        for token in (made.x_pad_token, made.cap_pad_token):
            token.normal_()
    return made.eval()


def save_z_image(folder: Path, *, head: bool = True) -> Path:
    """Save a folder in the pipeline's format. ``head``: whether its text encoder has the head of a language model."""
    tokenizer = chat_tokenizer()
    encoder = qwen3(tokenizer)
    ZImagePipeline(
        transformer=z_image_transformer(),
        vae=sd3_vae(),
        text_encoder=encoder if head else encoder.model,
        tokenizer=tokenizer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    ).save_pretrained(folder)
    return folder


class ImageProcessorOnly(Qwen2_5_VLProcessor):
    """The pipelines' processor without the video processor, which would need torchvision."""

    def check_argument_for_proper_class(self, argument_name, argument):
        return None if argument_name == "video_processor" else super().check_argument_for_proper_class(argument_name, argument)


class TypedTextEncoder(Qwen2_5_VLForConditionalGeneration):
    """Passes the encoder the token types that diffusers' edit pipelines drop (huggingface/diffusers#14194)."""

    def forward(self, input_ids=None, **inputs):
        return super().forward(input_ids, mm_token_type_ids=(input_ids == self.config.image_token_id).int(), **inputs)


def pass_token_types(encoder: Qwen2_5_VLForConditionalGeneration) -> TypedTextEncoder:
    twin = TypedTextEncoder(encoder.config)
    twin.load_state_dict(encoder.state_dict())
    return twin.eval()


def image(seed: int, height: int = 24, width: int = 24) -> Image:
    return fromarray(np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8))


def task(name: str, instruction: str, *images: Image) -> Task:
    return Task(id=name, instruction=instruction, images=images)


def euler(
    model, conditioning: Conditioning, generators, *, num_steps: int, negative=None, guidance_scale: float = 1.0
) -> torch.Tensor:
    """Sample deterministically with Euler steps, using only the methods of the protocol ``DenoisingModel``."""
    x = model.initial_noise(conditioning, generators)
    sigmas = model.sigmas(num_steps, conditioning)
    with torch.no_grad():
        for now, then in itertools.pairwise(sigmas):
            sigma = now.expand(len(x))
            velocity = model.velocity(model.module, x, sigma, conditioning)
            if negative is not None:
                velocity = model.combine(velocity, model.velocity(model.module, x, sigma, negative), guidance_scale)
            x = x + (then - now) * velocity
    return x


def generators(count: int) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(100 + k) for k in range(count)]
