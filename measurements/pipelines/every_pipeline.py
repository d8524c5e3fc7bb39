"""A tiny pipeline with random weights of every text-to-image and editing pipeline class of diffusers.

Each has its own text encoders, tokenizers and processors, so that a call needs only a prompt, and a source image where
``SOURCES`` names the argument that takes one:

    pipeline, call = PIPELINES["FluxKontextPipeline"]()
    pipeline(prompt="red cube", image=photo(), num_inference_steps=2, **call).images[0]
"""

import inspect
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers import DiffusionPipeline
from diffusers import FlowMatchEulerDiscreteScheduler as Flow
from diffusers.pipelines.joyimage import image_processor as joy_images
from diffusers.pipelines.latent_diffusion import pipeline_latent_diffusion as ldm
from PIL.Image import Image, fromarray
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))

import tiny_flux2
import tiny_models
import tiny_pipelines
import tiny_qwen_image_2
import tiny_towers

Built = tuple[DiffusionPipeline, dict[str, Any]]
SIZE = {"height": 32, "width": 32}
DOUBLE = {"height": 64, "width": 64}
LETTERS = "abcdefghijklmnopqrstuvwxyz"
NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
SANA = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)


def photo(size: int = 32, seed: int = 0) -> Image:
    """Make a source image of ``size`` x ``size`` px."""
    return fromarray(np.random.default_rng(seed).integers(0, 255, (size, size, 3), dtype=np.uint8))


def _made(kind: Any, *args: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # `torch.empty` then gives NaN, and `_awake` finds what a class leaves unset
    try:
        return kind(*args, **options).eval()
    finally:
        torch.use_deterministic_algorithms(before)


def _awake(pipeline: Any) -> Any:
    """Give random values to parameters that are only zeros or unset: a zero gate makes most gradients 0."""
    torch.manual_seed(1)
    with torch.no_grad():
        for part in pipeline.components.values():
            for parameter in part.parameters() if isinstance(part, torch.nn.Module) else ():
                if not parameter.any() or parameter.isnan().any():
                    parameter.normal_(std=0.2)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _pipeline(name: str, **parts: Any) -> Any:
    return _awake(getattr(diffusers, name)(**parts))


# Autoencoders: 4 x downsampling unless the name says otherwise.


def _vae(channels: int = 4, *, blocks: int = 3, **options: Any) -> Any:
    return _made(
        diffusers.AutoencoderKL, down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks, block_out_channels=(8 if blocks < 6 else 4,) * blocks,
        norm_num_groups=4, latent_channels=channels, **{"scaling_factor": 1.0, **options},
    )  # fmt: skip


def _wan_vae(**options: Any) -> Any:
    """8 x downsampling and 16 channels."""
    return _made(
        diffusers.AutoencoderKLWan, base_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True], **options,
    )  # fmt: skip


def _dc_vae() -> Any:
    """4 x downsampling, 4 channels, of Sana's class."""
    blocks = (8, 8, 8)
    return _made(
        diffusers.AutoencoderDC, latent_channels=4, attention_head_dim=2,
        encoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "ResBlock", "EfficientViTBlock"), encoder_block_out_channels=blocks,
        decoder_block_out_channels=blocks, encoder_qkv_multiscales=((), (), (5,)),
        decoder_qkv_multiscales=((), (), (5,)), encoder_layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1), downsample_block_type="conv", upsample_block_type="interpolate",
        decoder_norm_types="rms_norm", decoder_act_fns="silu", scaling_factor=0.41407,
    )  # fmt: skip


# Text encoders of width 32, unless the arguments say otherwise.


def _decoder(name: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Any:
    """A language model of the class ``name``, whose configuration class has the same beginning."""
    kind = getattr(transformers, name)
    config = kind.config_class(
        vocab_size=options.pop("vocab_size", len(tokenizer)), hidden_size=32, intermediate_size=48,
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        max_position_embeddings=2048, pad_token_id=tokenizer.pad_token_id, bos_token_id=0, eos_token_id=1,
        **options,
    )  # fmt: skip
    return _made(kind, config)


def _mistral3(name: str, tokenizer: PreTrainedTokenizerBase, *, width: int) -> Any:
    small = {"hidden_size": width, "intermediate_size": 32, "num_attention_heads": 2, "head_dim": width // 2}
    text = transformers.MistralConfig(vocab_size=len(tokenizer), num_hidden_layers=3, num_key_value_heads=1, **small)
    vision = transformers.PixtralVisionConfig(num_hidden_layers=1, image_size=32, patch_size=8, **small)
    config = transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_index=1)
    return _made(getattr(transformers, name), config)


def _gemma_tokenizer(length: int = 64) -> Any:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁"]
    vocab = {word: number for number, word in enumerate([*special, *LETTERS])}
    tokenizer = transformers.GemmaTokenizer(vocab=vocab, merges=[], model_max_length=length)
    beginning = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])])
    tokenizer.backend_tokenizer.post_processor = beginning  # as the published ones: an empty prompt has one token
    return tokenizer


def _bert_tokenizer() -> Any:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{letter}" for letter in LETTERS)]
    return transformers.BertTokenizer(vocab={word: number for number, word in enumerate(words)}, model_max_length=77)


def _t5_parts(width: int = 32, suffix: str = "") -> dict[str, Any]:
    return {f"text_encoder{suffix}": tiny_models.t5(width, 3), f"tokenizer{suffix}": tiny_models.t5_tokenizer()}


def _qwen3vl() -> tuple[Any, Any]:
    """Qwen3-VL and its processor, with one token per 32 x 32 px."""
    processor = tiny_qwen_image_2.processor()
    processor.chat_template = processor.tokenizer.chat_template = CHAT
    return tiny_qwen_image_2.text_encoder(processor.tokenizer), processor


def _qwen25vl() -> tuple[Any, Any]:
    """Qwen2.5-VL and its processor, with one token per 16 x 16 px."""
    tokenizer = tiny_models.qwen_tokenizer()
    processor = tiny_models.ImageProcessorOnly(image_processor=tiny_models.qwen_image_processor(), tokenizer=tokenizer)
    return tiny_models.qwen_text_encoder(tokenizer), processor


# Stable Diffusion 1.5 and XL.


def _unet(*, sdxl: bool = False, channels: int = 4) -> Any:
    more: dict[str, Any] = {}
    if sdxl:
        more = {
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 6 * 8 + 16,
            "use_linear_projection": True,
        }
    return _made(
        diffusers.UNet2DConditionModel, block_out_channels=(8, 16), layers_per_block=1, sample_size=8,
        in_channels=channels, out_channels=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=(2, 4), cross_attention_dim=32,
        norm_num_groups=4, **more,
    )  # fmt: skip


def _sd(name: str, scheduler: Any, *, channels: int = 4) -> Any:
    return _pipeline(
        name, unet=_unet(channels=channels), vae=_vae(), text_encoder=tiny_models.clip_text(32, 1),
        tokenizer=tiny_models.clip_tokenizer(), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False, scheduler=scheduler,
    )  # fmt: skip


def stable_diffusion() -> Built:
    scheduler = diffusers.PNDMScheduler(skip_prk_steps=True, set_alpha_to_one=False, **NOISE)
    return _sd("StableDiffusionPipeline", scheduler), {**SIZE, "guidance_scale": 7.5}


def pix2pix() -> Built:
    scheduler = diffusers.EulerAncestralDiscreteScheduler(**NOISE)
    pipeline = _sd("StableDiffusionInstructPix2PixPipeline", scheduler, channels=8)
    return pipeline, {"guidance_scale": 7.5, "image_guidance_scale": 1.5}


def latent_diffusion() -> Built:
    tokenizer = _bert_tokenizer()
    config = ldm.LDMBertConfig(
        vocab_size=len(tokenizer), encoder_layers=2, encoder_ffn_dim=32, encoder_attention_heads=2, head_dim=16, d_model=32
    )
    pipeline = _pipeline(
        "LDMTextToImagePipeline", vqvae=_vae(blocks=4), bert=_made(ldm.LDMBertModel, config), tokenizer=tokenizer, unet=_unet(),
        scheduler=diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=False, **NOISE),
    )  # fmt: skip
    return pipeline, {**DOUBLE, "guidance_scale": 6.0}


def _sdxl(name: str, *, channels: int = 4, prediction: str = "epsilon") -> Any:
    return _pipeline(
        name, unet=_unet(sdxl=True, channels=channels), vae=_vae(), text_encoder=tiny_models.clip_text(16, 1),
        tokenizer=tiny_models.clip_tokenizer(), text_encoder_2=tiny_models.clip(16, 2),
        tokenizer_2=tiny_models.clip_tokenizer(),
        scheduler=diffusers.EulerDiscreteScheduler(prediction_type=prediction, timestep_spacing="leading", **NOISE),
        add_watermarker=False,
    )  # fmt: skip


def sdxl(prediction: str = "epsilon") -> Built:
    return _sdxl("StableDiffusionXLPipeline", prediction=prediction), {**SIZE, "guidance_scale": 5.0}


def sdxl_pix2pix() -> Built:
    pipeline = _sdxl("StableDiffusionXLInstructPix2PixPipeline", channels=8)
    return pipeline, {**SIZE, "guidance_scale": 5.0, "image_guidance_scale": 1.5}


def sd3() -> Built:
    return _awake(tiny_pipelines.sd3()), {**SIZE, "guidance_scale": 7.0, "max_sequence_length": 20}


# Transformers that predict noise.


def pixart(name: str) -> Built:
    transformer = _made(
        diffusers.PixArtTransformer2DModel, sample_size=8, num_layers=2, attention_head_dim=8,
        num_attention_heads=3, caption_channels=32, cross_attention_dim=24, out_channels=8, norm_eps=1e-6,
        use_additional_conditions=False,
    )  # fmt: skip
    scheduler = diffusers.DPMSolverMultistepScheduler(beta_start=0.0001, beta_end=0.02)
    pipeline = _pipeline(name, transformer=transformer, vae=_vae(), scheduler=scheduler, **_t5_parts())
    sizes = {**SIZE, "use_resolution_binning": False, "clean_caption": False, "max_sequence_length": 20}
    return pipeline, {**sizes, "guidance_scale": 4.5}


def hunyuan_dit() -> Built:
    transformer = _made(
        diffusers.HunyuanDiT2DModel, sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8,
        num_attention_heads=3, hidden_size=24, in_channels=4, cross_attention_dim=32,
        cross_attention_dim_t5=32, pooled_projection_dim=16, text_len=77,
    )  # fmt: skip
    tokenizer = _bert_tokenizer()
    config = transformers.BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    pipeline = _pipeline(
        "HunyuanDiTPipeline", transformer=transformer, vae=_vae(blocks=4),
        text_encoder=_made(transformers.BertModel, config),
        tokenizer=tokenizer, scheduler=diffusers.DDPMScheduler(prediction_type="v_prediction", **NOISE), safety_checker=None,
        feature_extractor=None, requires_safety_checker=False, **_t5_parts(suffix="_2"),
    )  # fmt: skip
    return pipeline, {**DOUBLE, "guidance_scale": 5.0, "use_resolution_binning": False}


def cogview3() -> Built:
    transformer = _made(
        diffusers.CogView3PlusTransformer2DModel, in_channels=4, num_layers=2, attention_head_dim=4,
        num_attention_heads=4, out_channels=4, text_embed_dim=32, time_embed_dim=8, condition_dim=2,
        pos_embed_max_size=16, sample_size=8,
    )  # fmt: skip
    scheduler = diffusers.CogVideoXDDIMScheduler(prediction_type="v_prediction", timestep_spacing="trailing")
    pipeline = _pipeline("CogView3PlusPipeline", transformer=transformer, vae=_vae(), scheduler=scheduler, **_t5_parts())
    return pipeline, {**SIZE, "guidance_scale": 5.0, "max_sequence_length": 20}


def kandinsky3() -> Built:
    unet = _made(
        diffusers.Kandinsky3UNet, time_embedding_dim=4, groups=2, attention_head_dim=4, layers_per_block=2,
        block_out_channels=(16, 16), cross_attention_dim=8, encoder_hid_dim=32,
    )  # fmt: skip
    movq = _made(
        diffusers.VQModel, down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("AttnUpDecoderBlock2D",) + ("UpDecoderBlock2D",) * 3, block_out_channels=(32,) * 4,
        latent_channels=4, num_vq_embeddings=12, norm_type="spatial", vq_embed_dim=4,
    )  # fmt: skip
    scheduler = diffusers.DDPMScheduler(beta_schedule="squaredcos_cap_v2", clip_sample=False)
    pipeline = _pipeline("Kandinsky3Pipeline", unet=unet, movq=movq, scheduler=scheduler, **_t5_parts())
    return pipeline, {**DOUBLE, "guidance_scale": 3.0}


# FLUX.1, FLUX.2 and their descendants.


def _flux(name: str, *, channels: int = 64) -> Any:
    return _pipeline(
        name, transformer=tiny_models.flux_transformer(channels=channels), vae=tiny_models.sd3_vae(),
        text_encoder=tiny_models.clip_text(16, 1), tokenizer=tiny_models.clip_tokenizer(),
        scheduler=Flow(**tiny_models.FLUX_SCHEDULER), **_t5_parts(48, "_2"),
    )  # fmt: skip


def flux() -> Built:
    return _flux("FluxPipeline"), {**SIZE, "guidance_scale": 3.5, "max_sequence_length": 20}


def flux_kontext() -> Built:
    sizes = {**SIZE, "max_area": 32 * 32, "_auto_resize": False}
    return _flux("FluxKontextPipeline"), {**sizes, "guidance_scale": 3.5, "max_sequence_length": 20}


def flux_fill() -> Built:
    mask = np.zeros((32, 32), dtype=np.uint8)
    mask[8:24, 8:24] = 255
    pipeline = _flux("FluxFillPipeline", channels=tiny_models.FILL_CHANNELS)
    return pipeline, {**SIZE, "mask_image": fromarray(mask), "guidance_scale": 30.0, "max_sequence_length": 20}


def flux2() -> Built:
    tokenizer = tiny_models.qwen_tokenizer()
    tokenizer.chat_template = CHAT
    pipeline = _pipeline(
        "Flux2Pipeline", transformer=tiny_flux2.transformer(guidance_embeds=True), vae=tiny_flux2.vae(),
        text_encoder=_mistral3("Mistral3ForConditionalGeneration", tokenizer, width=16), tokenizer=tokenizer,
        scheduler=Flow(**tiny_flux2.SCHEDULER),
    )  # fmt: skip
    pipeline.system_message = ""
    return pipeline, {**SIZE, "guidance_scale": 4.0, "max_sequence_length": 64, "text_encoder_out_layers": (1, 2, 3)}


def flux2_klein() -> Built:
    return _awake(tiny_flux2.pipeline()), {**SIZE, "guidance_scale": 4.0, "max_sequence_length": 32}


def chroma() -> Built:
    transformer = _made(
        diffusers.ChromaTransformer2DModel, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=[4, 4, 8], approximator_hidden_dim=32,
        approximator_layers=1, approximator_num_channels=16,
    )  # fmt: skip
    pipeline = _pipeline("ChromaPipeline", transformer=transformer, vae=tiny_models.sd3_vae(), scheduler=Flow(), **_t5_parts())
    return pipeline, {**SIZE, "guidance_scale": 5.0, "max_sequence_length": 20}


def _longcat(name: str, vae: Any) -> Any:
    transformer = _made(
        diffusers.LongCatImageTransformer2DModel, num_layers=1, num_single_layers=2, attention_head_dim=32,
        num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=[8, 12, 12],
    )  # fmt: skip
    encoder, processor = _qwen25vl()
    pipeline = _pipeline(
        name, transformer=transformer, vae=vae, text_encoder=encoder, tokenizer=processor.tokenizer,
        text_processor=processor, scheduler=Flow(**tiny_models.FLUX_SCHEDULER),
    )  # fmt: skip
    pipeline.tokenizer_max_length = 32
    return pipeline


def longcat() -> Built:
    pipeline = _longcat("LongCatImagePipeline", tiny_models.sd3_vae())
    return pipeline, {**SIZE, "guidance_scale": 4.5, "enable_prompt_rewrite": False}


def longcat_edit() -> Built:
    # The pipeline edits at 1024 x 1024 px, whatever the source's size.
    return _longcat("LongCatImageEditPipeline", _vae(16, blocks=7, shift_factor=0.0)), {"guidance_scale": 4.5}


def ovis() -> Built:
    transformer = _made(
        diffusers.OvisImageTransformer2DModel, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    tokenizer = tiny_models.chat_tokenizer()
    pipeline = _pipeline(
        "OvisImagePipeline", transformer=transformer, vae=tiny_models.sd3_vae(),
        text_encoder=_decoder("Qwen3Model", tokenizer), tokenizer=tokenizer,
        scheduler=Flow(**tiny_models.FLUX_SCHEDULER),
    )  # fmt: skip
    return pipeline, {**SIZE, "guidance_scale": 5.0}


def bria() -> Built:
    transformer = _made(
        diffusers.BriaTransformer2DModel, in_channels=16, num_layers=1, num_single_layers=1,
        attention_head_dim=8, num_attention_heads=2, joint_attention_dim=32, axes_dims_rope=[0, 4, 4],
    )  # fmt: skip
    pipeline = _pipeline("BriaPipeline", transformer=transformer, vae=_vae(), scheduler=Flow(), **_t5_parts())
    return pipeline, {**SIZE, "guidance_scale": 5.0, "max_sequence_length": 20}


def fibo() -> Built:
    transformer = _made(
        diffusers.BriaFiboTransformer2DModel, in_channels=16, num_layers=1, num_single_layers=1,
        attention_head_dim=8, num_attention_heads=2, joint_attention_dim=64, text_encoder_dim=32,
        axes_dims_rope=[0, 4, 4],
    )  # fmt: skip
    tokenizer = tiny_models.qwen_tokenizer()
    # The vocabulary has Llama's token 128000, which stands for an empty prompt whatever the tokenizer.
    pipeline = _pipeline(
        "BriaFiboPipeline", transformer=transformer,
        vae=_wan_vae(patch_size=2, in_channels=12, out_channels=12, scale_factor_spatial=16),
        text_encoder=_decoder("SmolLM3ForCausalLM", tokenizer, vocab_size=128_001), tokenizer=tokenizer,
        scheduler=Flow(),
    )  # fmt: skip
    return pipeline, {**DOUBLE, "guidance_scale": 5.0, "max_sequence_length": 64}


def fibo2() -> Built:
    transformer = _made(
        diffusers.BriaFibo2Transformer2DModel, in_channels=16, dim=32, n_layers=3, n_refiner_layers=1,
        n_heads=2, cap_feat_dim=96, injection_layer_ids=(1,), perceiver_num_layers=1, min_num_gist_tokens=4,
        max_num_gist_tokens=8, gist_step=4, gist_min_text_len=8, gist_max_text_len=64, axes_dims=(4, 6, 6),
        axes_lens=(512, 64, 64),
    )  # fmt: skip
    encoder, processor = _qwen3vl()
    pipeline = _pipeline(
        "BriaFibo2Pipeline", transformer=transformer, vae=tiny_flux2.vae(), text_encoder=encoder,
        processor=processor, scheduler=Flow(**tiny_flux2.SCHEDULER),
    )  # fmt: skip
    pipeline.text_encoder_out_layers = ((0, 1, 2), (1, 2, 3))
    pipeline.text_encoder_image_size = 32
    return pipeline, {**SIZE, "guidance_scale": 5.0}


# Qwen-Image and others with a Qwen encoder.


def qwen_image() -> Built:
    return _awake(tiny_pipelines.qwen_image()), {**SIZE, "negative_prompt": "bad", "true_cfg_scale": 4.0}


def qwen_image_edit(name: str) -> Built:
    pipeline = tiny_pipelines.qwen_image_edit(getattr(diffusers, name))
    levels = [False] * 5
    # The pipelines encode the source at 1024 x 1024 px, which a VAE of 32 x downsampling keeps small.
    vae = _made(diffusers.AutoencoderKLQwenImage, base_dim=2, dim_mult=[1] * 6, num_res_blocks=1, temperal_downsample=levels)
    parts = {**pipeline.components, "vae": vae}
    return _pipeline(name, **parts), {"height": 128, "width": 128, "negative_prompt": "bad", "true_cfg_scale": 4.0}


def qwen_image_21() -> Built:
    guidance = {"negative_prompt": "bad", "true_cfg_scale": 4.0}
    return _awake(tiny_qwen_image_2.pipeline()), {**SIZE, **guidance, "output_resolution": 32}


def hunyuan_image(*, guided: bool = False) -> Built:
    transformer = _made(
        diffusers.HunyuanImageTransformer2DModel, in_channels=4, out_channels=4, num_attention_heads=4,
        attention_head_dim=8, num_layers=1, num_single_layers=1, num_refiner_layers=1,
        guidance_embeds=not guided, text_embed_dim=32, text_embed_2_dim=32, rope_axes_dim=(4, 4),
    )  # fmt: skip
    vae = _made(
        diffusers.AutoencoderKLHunyuanImage, in_channels=3, out_channels=3, latent_channels=4,
        block_out_channels=(32, 64, 64, 64), layers_per_block=1, scaling_factor=0.476986,
        spatial_compression_ratio=8, sample_size=128,
    )  # fmt: skip
    encoder, processor = _qwen25vl()
    glyphs = transformers.ByT5Tokenizer(extra_ids=0)
    config = transformers.T5Config(vocab_size=len(glyphs), d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    pipeline = _pipeline(
        "HunyuanImagePipeline", transformer=transformer, vae=vae, text_encoder=encoder,
        tokenizer=processor.tokenizer, text_encoder_2=_made(transformers.T5EncoderModel, config),
        tokenizer_2=glyphs, scheduler=Flow(shift=7.0),
        guider=diffusers.AdaptiveProjectedMixGuidance(adaptive_projected_guidance_start_step=2) if guided else None,
    )  # fmt: skip
    pipeline.tokenizer_max_length = 256
    return pipeline, {**DOUBLE, "distilled_guidance_scale": 3.25}


def krea2() -> Built:
    transformer = _made(
        diffusers.Krea2Transformer2DModel, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=32, timestep_embed_dim=8, text_hidden_dim=32,
        num_text_layers=3, text_num_attention_heads=2, text_num_key_value_heads=1, text_intermediate_size=16,
        num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 2, 2),
    )  # fmt: skip
    encoder, processor = _qwen3vl()
    pipeline = _pipeline(
        "Krea2Pipeline", transformer=transformer, vae=tiny_models.qwen_vae(), text_encoder=encoder.model,
        tokenizer=processor.tokenizer, scheduler=Flow(use_dynamic_shifting=True),
        text_encoder_select_layers=(1, 2, 3),
    )  # fmt: skip
    return pipeline, {**SIZE, "guidance_scale": 4.5, "max_sequence_length": 256}


def kandinsky5(name: str, *, edits: bool) -> Built:
    transformer = _made(
        diffusers.Kandinsky5Transformer3DModel, in_visual_dim=16, in_text_dim=32, in_text_dim2=16,
        time_dim=16, out_visual_dim=16, patch_size=(1, 2, 2), model_dim=16, ff_dim=32, num_text_blocks=1,
        num_visual_blocks=2, axes_dims=(1, 1, 2), visual_cond=edits, attention_type="regular",
    )  # fmt: skip
    encoder, processor = _qwen25vl()
    pipeline = _pipeline(
        name, transformer=transformer, vae=_vae(16, blocks=4), text_encoder=encoder, tokenizer=processor,
        text_encoder_2=tiny_models.clip_text(16, 1), tokenizer_2=tiny_models.clip_tokenizer(),
        scheduler=Flow(shift=7.0),
    )  # fmt: skip
    pipeline.resolutions = [(64, 64)]
    return pipeline, {**DOUBLE, "guidance_scale": 3.5}


def nucleus() -> Built:
    transformer = _made(
        diffusers.NucleusMoEImageTransformer2DModel, out_channels=16, num_layers=5, attention_head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, joint_attention_dim=32, axes_dims_rope=(4, 6, 6),
        mlp_ratio=6.0, num_experts=4, moe_intermediate_dim=16, capacity_factors=[2.0] * 5,
    )  # fmt: skip
    encoder, processor = _qwen3vl()
    pipeline = _pipeline(
        "NucleusMoEImagePipeline", transformer=transformer, vae=tiny_models.qwen_vae(), text_encoder=encoder,
        processor=processor, scheduler=Flow(**tiny_models.SCHEDULER),
    )  # fmt: skip
    return pipeline, {**SIZE, "guidance_scale": 4.0, "return_index": -2}


def joy_edit(name: str, kind: str) -> Built:
    options = {"hidden_size": 32, "num_attention_heads": 2, "text_dim": 32, "num_layers": 2, "rope_dim_list": [4, 6, 6]}
    encoder, processor = _qwen3vl()
    joy_images.BUCKETS[32] = [(32, 32)]  # the class knows sizes of about 1024 x 1024 px only
    pipeline = _pipeline(
        name, transformer=_made(getattr(diffusers, kind), **options), vae=_wan_vae(), text_encoder=encoder,
        tokenizer=processor.tokenizer, processor=processor, scheduler=Flow(shift=3.0),
    )  # fmt: skip
    small = joy_images.JoyImageEditImageProcessor(vae_scale_factor=8, basesize=32)
    pipeline.image_processor = pipeline.vae_image_processor = small
    return pipeline, {**SIZE, "guidance_scale": 4.0}


def _dreamlite(name: str) -> Any:
    unet = _made(
        diffusers.DreamLiteUNetModel, sample_size=8, block_out_channels=(8, 16, 16), layers_per_block=1,
        norm_num_groups=4, cross_attention_dim=32, attention_head_dim=(1, 2, 2),
    )  # fmt: skip
    vae = _made(
        diffusers.AutoencoderTiny, encoder_block_out_channels=(8,) * 3, decoder_block_out_channels=(8,) * 3,
        num_encoder_blocks=(1,) * 3, num_decoder_blocks=(1,) * 3,
    )  # fmt: skip
    encoder, processor = _qwen3vl()
    return _pipeline(
        name, unet=unet, vae=vae, text_encoder=encoder, tokenizer=processor.tokenizer, processor=processor,
        scheduler=Flow(**tiny_models.FLUX_SCHEDULER),
    )  # fmt: skip


def dreamlite() -> Built:
    return _dreamlite("DreamLitePipeline"), {**SIZE, "guidance_scale": 3.5}


def dreamlite_mobile() -> Built:
    return _dreamlite("DreamLiteMobilePipeline"), dict(SIZE)


# Other flow models.


def sana(*, euler: bool = False) -> Built:
    transformer = _made(
        diffusers.SanaTransformer2DModel, in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2,
        attention_head_dim=4, num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8,
        caption_channels=32, sample_size=8,
    )  # fmt: skip
    tokenizer = _gemma_tokenizer()
    pipeline = _pipeline(
        "SanaPipeline", transformer=transformer, vae=_dc_vae(),
        text_encoder=_decoder("Gemma2Model", tokenizer), tokenizer=tokenizer,
        scheduler=Flow(shift=3.0) if euler else diffusers.DPMSolverMultistepScheduler(**SANA),
    )  # fmt: skip
    sizes = {**SIZE, "use_resolution_binning": False, "complex_human_instruction": None, "max_sequence_length": 20}
    return pipeline, {**sizes, "guidance_scale": 4.5}


def lumina() -> Built:
    transformer = _made(
        diffusers.LuminaNextDiT2DModel, sample_size=8, hidden_size=16, num_layers=2, num_attention_heads=2,
        num_kv_heads=1, multiple_of=16, cross_attention_dim=32,
    )  # fmt: skip
    tokenizer = _gemma_tokenizer()
    pipeline = _pipeline(
        "LuminaPipeline", transformer=transformer, vae=_vae(blocks=4),
        text_encoder=_decoder("GemmaModel", tokenizer), tokenizer=tokenizer, scheduler=Flow(),
    )  # fmt: skip
    return pipeline, {**DOUBLE, "guidance_scale": 4.0, "clean_caption": False, "max_sequence_length": 20}


def lumina2() -> Built:
    transformer = _made(
        diffusers.Lumina2Transformer2DModel, sample_size=8, in_channels=4, hidden_size=16, num_layers=2,
        num_attention_heads=2, num_kv_heads=1, multiple_of=16, axes_dim_rope=[4, 2, 2], cap_feat_dim=32,
    )  # fmt: skip
    tokenizer = _gemma_tokenizer()
    pipeline = _pipeline(
        "Lumina2Pipeline", transformer=transformer, vae=_vae(blocks=4, shift_factor=0.0),
        text_encoder=_decoder("Gemma2Model", tokenizer), tokenizer=tokenizer, scheduler=Flow(shift=6.0),
    )  # fmt: skip
    return pipeline, {**DOUBLE, "guidance_scale": 4.0, "system_prompt": "draw", "max_sequence_length": 40}


def aura_flow() -> Built:
    transformer = _made(
        diffusers.AuraFlowTransformer2DModel, sample_size=8, num_mmdit_layers=1, num_single_dit_layers=1,
        attention_head_dim=8, num_attention_heads=4, caption_projection_dim=32, joint_attention_dim=32,
        pos_embed_max_size=64,
    )  # fmt: skip
    tokenizer = tiny_models.t5_tokenizer()
    config = transformers.UMT5Config(vocab_size=len(tokenizer), d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=2)
    pipeline = _pipeline(
        "AuraFlowPipeline", transformer=transformer, vae=_vae(),
        text_encoder=_made(transformers.UMT5EncoderModel, config), tokenizer=tokenizer,
        scheduler=Flow(shift=1.73),
    )  # fmt: skip
    return pipeline, {**SIZE, "guidance_scale": 3.5, "max_sequence_length": 20}


def cogview4() -> Built:
    transformer = _made(
        diffusers.CogView4Transformer2DModel, in_channels=4, num_layers=2, attention_head_dim=4,
        num_attention_heads=4, out_channels=4, text_embed_dim=32, time_embed_dim=8, condition_dim=4,
    )  # fmt: skip
    tokenizer = tiny_towers.tokenizer(64, pad="<pad>")
    shifts = {"base_shift": 0.25, "max_shift": 0.75, "base_image_seq_len": 256, "use_dynamic_shifting": True}
    pipeline = _pipeline(
        "CogView4Pipeline", transformer=transformer, vae=_vae(), text_encoder=_decoder("GlmModel", tokenizer),
        tokenizer=tokenizer, scheduler=Flow(time_shift_type="linear", **shifts),
    )  # fmt: skip
    return pipeline, {**SIZE, "guidance_scale": 5.0, "max_sequence_length": 32}


def hidream() -> Built:
    transformer = _made(
        diffusers.HiDreamImageTransformer2DModel, patch_size=2, in_channels=4, out_channels=4, num_layers=1,
        num_single_layers=1, attention_head_dim=8, num_attention_heads=4, caption_channels=[32, 32],
        text_emb_dim=64, num_routed_experts=4, num_activated_experts=2, axes_dims_rope=(4, 2, 2),
        max_resolution=(16, 16), llama_layers=(0, 1),
    )  # fmt: skip
    tokenizer = tiny_models.qwen_tokenizer()
    tokenizer.model_max_length = 128
    pipeline = _pipeline(
        "HiDreamImagePipeline", transformer=transformer, vae=_vae(shift_factor=0.0),
        text_encoder=tiny_models.clip(32, 1), tokenizer=tiny_models.clip_tokenizer(),
        text_encoder_2=tiny_models.clip(32, 2), tokenizer_2=tiny_models.clip_tokenizer(),
        text_encoder_4=_decoder("LlamaForCausalLM", tokenizer), tokenizer_4=tokenizer,
        scheduler=Flow(shift=3.0), **_t5_parts(suffix="_3"),
    )  # fmt: skip
    pipeline.default_sample_size = 8  # the class turns every size into one of about 128 x 128 latents
    return pipeline, {**SIZE, "guidance_scale": 5.0, "max_sequence_length": 20}


def ernie() -> Built:
    transformer = _made(
        diffusers.ErnieImageTransformer2DModel, hidden_size=32, num_attention_heads=2, num_layers=2,
        ffn_hidden_size=32, in_channels=64, out_channels=64, text_in_dim=32, rope_axes_dim=(4, 6, 6),
    )  # fmt: skip
    tokenizer = tiny_models.qwen_tokenizer()
    pipeline = _pipeline(
        "ErnieImagePipeline", transformer=transformer, vae=tiny_flux2.vae(),
        text_encoder=_mistral3("Mistral3Model", tokenizer, width=32), tokenizer=tokenizer,
        scheduler=Flow(shift=3.0),
    )  # fmt: skip
    return pipeline, {**SIZE, "guidance_scale": 4.0, "use_pe": False}


def prx() -> Built:
    transformer = _made(
        diffusers.PRXTransformer2DModel, in_channels=4, context_in_dim=32, hidden_size=16, mlp_ratio=2.0,
        num_heads=2, depth=2, axes_dim=[4, 4],
    )  # fmt: skip
    tokenizer = _gemma_tokenizer(20)
    kind = transformers.models.t5gemma.modeling_t5gemma.T5GemmaEncoder
    text = transformers.T5GemmaModuleConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    pipeline = _pipeline(
        "PRXPipeline", transformer=transformer, vae=_vae(shift_factor=0.0),
        text_encoder=_made(kind, transformers.T5GemmaConfig(encoder=text, decoder=text).encoder),
        tokenizer=tokenizer, scheduler=Flow(shift=3.0),
    )  # fmt: skip
    pipeline.text_preprocessor.clean_text = str.lower  # the class's own needs ftfy
    return pipeline, {**SIZE, "guidance_scale": 4.0, "use_resolution_binning": False}


def z_image() -> Built:
    tokenizer = tiny_models.chat_tokenizer()
    pipeline = _pipeline(
        "ZImagePipeline", transformer=tiny_models.z_image_transformer(), vae=tiny_models.sd3_vae(),
        text_encoder=tiny_models.qwen3(tokenizer), tokenizer=tokenizer, scheduler=Flow(shift=3.0),
    )  # fmt: skip
    return pipeline, {**SIZE, "guidance_scale": 4.0, "max_sequence_length": 64}


def z_image_omni(*, edits: bool = False) -> Built:
    transformer = _made(
        diffusers.ZImageTransformer2DModel, dim=64, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
        cap_feat_dim=32, siglip_feat_dim=16, axes_dims=[8, 12, 12], axes_lens=[576, 16, 16],
    )  # fmt: skip
    tokenizer = tiny_models.chat_tokenizer()
    vision = transformers.Siglip2VisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_patches=16, patch_size=8
    )
    vae = tiny_models.sd3_vae()
    # The class encodes sources in bfloat16, whatever the VAE's type.
    pipeline = _pipeline(
        "ZImageOmniPipeline", transformer=transformer, vae=vae.bfloat16() if edits else vae,
        text_encoder=tiny_models.qwen3(tokenizer), tokenizer=tokenizer, scheduler=Flow(shift=3.0),
        siglip=_made(transformers.Siglip2VisionModel, vision),
        siglip_processor=transformers.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16),
    )  # fmt: skip
    return pipeline, {**SIZE, "guidance_scale": 4.0, "max_sequence_length": 64}


PIPELINES: dict[str, Callable[[], Built]] = {
    "AuraFlowPipeline": aura_flow,
    "BriaFibo2Pipeline": fibo2,
    "BriaFibo2Pipeline:edit": fibo2,
    "BriaFiboPipeline": fibo,
    "BriaPipeline": bria,
    "ChromaPipeline": chroma,
    "CogView3PlusPipeline": cogview3,
    "CogView4Pipeline": cogview4,
    "DreamLiteMobilePipeline": dreamlite_mobile,
    "DreamLitePipeline": dreamlite,
    "DreamLitePipeline:edit": dreamlite,
    "ErnieImagePipeline": ernie,
    "Flux2KleinPipeline": flux2_klein,
    "Flux2KleinPipeline:edit": flux2_klein,
    "Flux2Pipeline": flux2,
    "Flux2Pipeline:edit": flux2,
    "FluxFillPipeline": flux_fill,
    "FluxKontextPipeline": flux_kontext,
    "FluxPipeline": flux,
    "HiDreamImagePipeline": hidream,
    "HunyuanDiTPipeline": hunyuan_dit,
    "HunyuanImagePipeline": hunyuan_image,
    "HunyuanImagePipeline:guider": partial(hunyuan_image, guided=True),
    "JoyImageEditPipeline": partial(joy_edit, "JoyImageEditPipeline", "JoyImageEditTransformer3DModel"),
    "JoyImageEditPlusPipeline": partial(joy_edit, "JoyImageEditPlusPipeline", "JoyImageEditPlusTransformer3DModel"),
    "Kandinsky3Pipeline": kandinsky3,
    "Kandinsky5I2IPipeline": partial(kandinsky5, "Kandinsky5I2IPipeline", edits=True),
    "Kandinsky5T2IPipeline": partial(kandinsky5, "Kandinsky5T2IPipeline", edits=False),
    "Krea2Pipeline": krea2,
    "LDMTextToImagePipeline": latent_diffusion,
    "LongCatImageEditPipeline": longcat_edit,
    "LongCatImagePipeline": longcat,
    "Lumina2Pipeline": lumina2,
    "LuminaPipeline": lumina,
    "NucleusMoEImagePipeline": nucleus,
    "OvisImagePipeline": ovis,
    "PRXPipeline": prx,
    "PixArtAlphaPipeline": partial(pixart, "PixArtAlphaPipeline"),
    "PixArtSigmaPipeline": partial(pixart, "PixArtSigmaPipeline"),
    "QwenImage21Pipeline": qwen_image_21,
    "QwenImage21Pipeline:edit": qwen_image_21,
    "QwenImageEditPipeline": partial(qwen_image_edit, "QwenImageEditPipeline"),
    "QwenImageEditPlusPipeline": partial(qwen_image_edit, "QwenImageEditPlusPipeline"),
    "QwenImagePipeline": qwen_image,
    "SanaPipeline": sana,
    "SanaPipeline:euler": partial(sana, euler=True),
    "StableDiffusion3Pipeline": sd3,
    "StableDiffusionInstructPix2PixPipeline": pix2pix,
    "StableDiffusionPipeline": stable_diffusion,
    "StableDiffusionXLInstructPix2PixPipeline": sdxl_pix2pix,
    "StableDiffusionXLPipeline": sdxl,
    "StableDiffusionXLPipeline:v": partial(sdxl, "v_prediction"),
    "ZImageOmniPipeline": z_image_omni,
    "ZImageOmniPipeline:edit": partial(z_image_omni, edits=True),
    "ZImagePipeline": z_image,
}
"""Builders by the name of the class, with a variant after a colon: (pipeline, arguments of every call)."""

SOURCES = {
    "FluxFillPipeline": "image",
    "FluxKontextPipeline": "image",
    "JoyImageEditPipeline": "image",
    "JoyImageEditPlusPipeline": "images",
    "Kandinsky5I2IPipeline": "image",
    "LongCatImageEditPipeline": "image",
    "QwenImageEditPipeline": "image",
    "QwenImageEditPlusPipeline": "image",
    "StableDiffusionInstructPix2PixPipeline": "image",
    "StableDiffusionXLInstructPix2PixPipeline": "image",
    **{name: "image" for name in PIPELINES if name.endswith(":edit")},
}
"""The argument that takes the source image, of the builders that need one; ``images`` takes a list."""

REFUSED = {
    "AmusedPipeline": "predicts discrete tokens of an image",
    "BriaFiboEditPipeline": "its prompts are JSON objects with an edit_instruction, not sentences",
    "Cosmos2TextToImagePipeline": "cannot be made without the weights of its guardrail",
    "DiffusionGemmaPipeline": "writes text",
    "Flux2KleinKVPipeline": "keeps keys and values of the first step for the later ones",
    "GlmImagePipeline": "a language model draws tokens of the image from a global seed before the denoising loop",
    "HunyuanImageRefinerPipeline": "refines an image that another pipeline made",
    "IFPipeline": "the first of three stages in pixel space, with a learned variance",
    "Ideogram4Pipeline": "two denoisers, one of them for the negative prompt",
    "KandinskyPipeline": "the second of two stages; its prompt is an embedding of the prior",
    "LLaDA2Pipeline": "writes text",
    "LatentConsistencyModelPipeline": "distilled to few steps of a scheduler that adds its own noise",
    "OmniGenPipeline": "its processor needs torchvision",
    "PRXPixelPipeline": "its prompts pass through ftfy, which is not a dependency",
    "QwenImageLayeredPipeline": "gives the layers of a source image, not an image",
    "SanaSprintPipeline": "distilled to few steps of a scheduler (SCM) that is neither a flow nor variance-preserving",
    "StableDiffusionLDM3DPipeline": "gives an image with a depth map",
    "StableUnCLIPPipeline": "two denoisers: a prior for image embeddings, and the decoder",
}
"""Why a class for text to image or editing has no builder, by its name."""

VARIANTS = {
    "Onnx": "runs ONNX files, which have no gradients",
    "^Kolors": "needs sentencepiece",
    "Audio|Spectrogram": "makes sound",
    "SuperResolution|Upscale": "enlarges an image",
    "Combined|Prior|Decoder": "one stage of several, or all of them with several denoisers",
    "Control|Adapter": "adds a control image to a listed class",
    "Inpaint": "fills a mask with the model of a listed class",
    "Img2Img|Depth2Img": "a listed class that begins at a noised source image, with a part of the steps",
    "PAG": "a listed class with another guidance, which changes the attention of its model",
}
"""The same for all classes whose name matches; the first match holds."""


def image_pipelines() -> list[str]:
    """Return the names of the classes that diffusers exports for text to image or editing.

    These are pipelines that take ``prompt``, and no argument about frames, videos or sound, without the modular and the
    deprecated ones. A class whose optional dependency is missing has no signature; it is in the list.
    """
    names = []
    for name in dir(diffusers):
        kind = getattr(diffusers, name) if name.endswith("Pipeline") else None
        if not isinstance(kind, type) or name == "DiffusionPipeline" or ".deprecated." in kind.__module__:
            continue
        missing = hasattr(kind, "_backends")
        taken = inspect.signature(kind.__call__).parameters if issubclass(kind, DiffusionPipeline) else {}
        if missing or ("prompt" in taken and not any(re.search("frame|video|audio", argument) for argument in taken)):
            names.append(name)
    return names


def why_not(name: str) -> str | None:
    """Return why the class ``name`` has no builder, or None if it has one or nobody has decided yet."""
    if name in PIPELINES:
        return None
    return REFUSED.get(name) or next((reason for pattern, reason in VARIANTS.items() if re.search(pattern, name)), None)
