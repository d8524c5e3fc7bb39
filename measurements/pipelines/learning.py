"""Do pipelines without an adapter of their own learn? Trains small pipelines on the playground, first supervised, then by RL.

    python measurements/pipelines/learning.py FOLDER > measurements/pipelines/learning.jsonl
    python measurements/pipelines/learning.py FOLDER --only sd3 --minutes 2 --steps 20 --seed 1

Stable Diffusion XL, Lumina 2 and InstructPix2Pix are trained through their own ``__call__``, Stable Diffusion 3 in both ways. Each is
pre-trained for ``--minutes`` by plain prediction of noise or velocity, which is written here from the published formulas and shares
no code with the adapter. Its weights are kept in FOLDER, and a second call only trains them by RL. Prints a line of JSON for each
run. ``measurements/pipelines/table.py`` puts the lines of learning.jsonl into docs/models.md.
"""

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from diffusers import AutoencoderKL, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from torch import Tensor
from transformers import CLIPTokenizer

import retouch
from retouch.models.any_pipeline.model import denoiser_name
from retouch.types import Task
from retouch_worlds.data import PlaygroundData, TextToImageData
from retouch_worlds.models.tiny_fill import clip_tokenizer
from retouch_worlds.playground.scenes import SIZE
from retouch_worlds.pretraining.training import one_cycle

WIDTH = 64
LENGTH = 13
"""Tokens of the longest prompt; most words are a token."""
LATENT, CHANNELS = SIZE // 4, 8
ROWS = 64
NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
FLAT = {"guidance_scale": 1.0}


class ShortSD3(retouch.models.SD3):  # type: ignore[name-defined,misc]
    """The registered family, without the 256 zeros that stand for the tokens of an absent T5."""

    def build(self, *, device: torch.device) -> Any:
        model = super().build(device=device)
        model.text.lengths = (LENGTH, LENGTH, 1)
        return model


# Tasks. Each model is pre-trained on simple tasks, and trained by RL on tasks that are more complex.


def scenes(seed: int, *, most: int, **split: Any) -> TextToImageData:
    return TextToImageData(seed=seed, count=100_000, complexity=[most], known_words=True, **split)


def edits(seed: int, *, most: int, **split: Any) -> PlaygroundData:
    return PlaygroundData(seed=seed, count=100_000, complexity=[most], **split)


def pixels(images: Sequence[Any]) -> Tensor:
    """Images as (b, 3, h, w) in [-1, 1]."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2) / 127.5 - 1


# Parts.


def tokenizer() -> CLIPTokenizer:
    tasks = [*scenes(0, most=2).tasks()[:400], *edits(0, most=2).tasks()[:800]]
    made = clip_tokenizer().train_new_from_iterator([*(task.instruction for task in tasks), *["<Prompt Start>"] * 50], 800)
    made.model_max_length = LENGTH
    return made


def clip(words: CLIPTokenizer, kind: Any, *, width: int = WIDTH) -> Any:
    ends = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    sizes = {"hidden_size": width, "projection_dim": width, "intermediate_size": 2 * width, "num_hidden_layers": 3}
    config = {"vocab_size": len(words), "num_attention_heads": 4, "max_position_embeddings": LENGTH, **sizes, **ends}
    made = kind(transformers.CLIPTextConfig(**config))
    for name, parameter in made.named_parameters():
        if name.endswith("embedding.weight"):  # the usual 0.02 is meant for long training
            torch.nn.init.normal_(parameter, std=0.5)
    return made


def gemma(words: CLIPTokenizer) -> Any:
    config = transformers.Gemma2Config(
        vocab_size=len(words), hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, initializer_range=WIDTH**-0.5,
        bos_token_id=words.bos_token_id, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    return transformers.Gemma2Model(config)


def unet(*, channels: int = CHANNELS, text: int, **more: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=LATENT, in_channels=channels, out_channels=CHANNELS, block_out_channels=(32, WIDTH), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4, cross_attention_dim=text, norm_num_groups=8, **more,
    )  # fmt: skip


def sdxl(vae: AutoencoderKL, words: CLIPTokenizer) -> Any:
    more = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "use_linear_projection": True}
    return diffusers.StableDiffusionXLPipeline(
        unet=unet(text=2 * WIDTH, projection_class_embeddings_input_dim=6 * 8 + WIDTH, **more), vae=vae,
        text_encoder=clip(words, transformers.CLIPTextModel), tokenizer=words,
        text_encoder_2=clip(words, transformers.CLIPTextModelWithProjection), tokenizer_2=words,
        scheduler=diffusers.EulerDiscreteScheduler(timestep_spacing="leading", **NOISE), add_watermarker=False,
    )  # fmt: skip


def pix2pix(vae: AutoencoderKL, words: CLIPTokenizer) -> Any:
    return diffusers.StableDiffusionInstructPix2PixPipeline(
        unet=unet(channels=2 * CHANNELS, text=WIDTH), vae=vae, text_encoder=clip(words, transformers.CLIPTextModel),
        tokenizer=words, scheduler=diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=True, **NOISE),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def sd3(vae: AutoencoderKL, words: CLIPTokenizer) -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=LATENT, pos_embed_max_size=LATENT, patch_size=2, in_channels=CHANNELS, out_channels=CHANNELS,
        num_layers=4, num_attention_heads=4, attention_head_dim=WIDTH // 4, joint_attention_dim=2 * WIDTH,
        caption_projection_dim=WIDTH, pooled_projection_dim=2 * WIDTH,
    )  # fmt: skip
    readers = [clip(words, transformers.CLIPTextModelWithProjection) for _ in range(2)]
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), text_encoder=readers[0],
        tokenizer=words, text_encoder_2=readers[1], tokenizer_2=words, text_encoder_3=None, tokenizer_3=None,
    )  # fmt: skip


def lumina2(vae: AutoencoderKL, words: CLIPTokenizer) -> Any:
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=LATENT, in_channels=CHANNELS, hidden_size=WIDTH, num_layers=4, num_refiner_layers=1,
        num_attention_heads=4, num_kv_heads=2, multiple_of=16, axes_dim_rope=[8, 4, 4], cap_feat_dim=WIDTH,
    )  # fmt: skip
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    return diffusers.Lumina2Pipeline(
        transformer=transformer, vae=vae, text_encoder=gemma(words), tokenizer=words, scheduler=scheduler
    )


# What each model predicts for samples at times from 0 to 999, of prompts and source images.


def sdxl_output(pipe: Any, sample: Tensor, time: Tensor, prompts: list[str], sources: Tensor | None) -> Tensor:
    embeds, _, pooled, _ = pipe.encode_prompt(prompts, do_classifier_free_guidance=False)
    sizes = torch.tensor([[SIZE, SIZE, 0, 0, SIZE, SIZE]] * len(sample), dtype=torch.float32)
    return pipe.unet(sample, time, embeds, added_cond_kwargs={"text_embeds": pooled, "time_ids": sizes}).sample  # type: ignore[no-any-return]


def pix2pix_output(pipe: Any, sample: Tensor, time: Tensor, prompts: list[str], sources: Tensor | None) -> Tensor:
    embeds = pipe._encode_prompt(prompts, sample.device, 1, False)
    return pipe.unet(torch.cat([sample, sources], 1), time, embeds).sample  # type: ignore[list-item,no-any-return]


def sd3_output(pipe: Any, sample: Tensor, time: Tensor, prompts: list[str], sources: Tensor | None) -> Tensor:
    embeds, _, pooled, _ = pipe.encode_prompt(prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=1)
    return pipe.transformer(sample, embeds, pooled, time).sample  # type: ignore[no-any-return]


def lumina2_output(pipe: Any, sample: Tensor, time: Tensor, prompts: list[str], sources: Tensor | None) -> Tensor:
    given = {"do_classifier_free_guidance": False, "system_prompt": "", "max_sequence_length": LENGTH}
    embeds, mask, _, _ = pipe.encode_prompt(prompts, **given)
    return -pipe.transformer(sample, 1 - time / 1000, embeds, mask).sample  # type: ignore[no-any-return]


# Training. A spec has the builder of a model, what it predicts, the arguments of its calls, its tasks, and the size in px.

MODELS: dict[str, tuple[Any, Any, dict[str, Any], Any, int]] = {
    "sdxl": (sdxl, sdxl_output, FLAT, scenes, SIZE),
    # Lumina 2 takes its autoencoder for one of a factor of 8, whatever it is.
    "lumina2": (lumina2, lumina2_output, {**FLAT, "system_prompt": "", "max_sequence_length": LENGTH}, scenes, 2 * SIZE),
    "pix2pix": (pix2pix, pix2pix_output, FLAT, edits, SIZE),
    "sd3": (sd3, sd3_output, {**FLAT, "max_sequence_length": 1}, scenes, SIZE),
}
GRPO, NFT = retouch.GRPO(clip=1e-4), retouch.NFT(beta=1.0)
RUNS = [("sd3", "sd3", GRPO), ("sd3", "pipeline", GRPO)]
RUNS += [("sdxl", "pipeline", GRPO), ("sdxl", "pipeline", NFT), ("lumina2", "pipeline", GRPO), ("pix2pix", "pipeline", GRPO)]


def new_autoencoder(scale: float = 1.0) -> AutoencoderKL:
    """An autoencoder with a factor of 4, whose residual branches begin at zero."""
    made = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3, block_out_channels=(32,) * 3,
        layers_per_block=0, norm_num_groups=8, latent_channels=CHANNELS, mid_block_add_attention=False, use_quant_conv=False,
        use_post_quant_conv=False, shift_factor=0.0, scaling_factor=scale,
    )  # fmt: skip
    for name, module in made.named_modules():
        if name.endswith("conv2"):
            torch.nn.init.zeros_(module.weight)
    return made


def train_autoencoder(steps: int) -> AutoencoderKL:
    """Train to reconstruct scenes, with noise on the latents, so that the decoder tolerates a denoiser's errors."""
    vae = new_autoencoder()
    advance = one_cycle(vae.parameters(), 3e-3, steps)
    images = pixels([task.target for task in scenes(1, most=5).tasks()[:2048]])
    for _ in range(steps):
        shown = images[torch.randint(len(images), (16,))]
        posterior = vae.encode(shown).latent_dist
        latents = posterior.mode()
        error = vae.decode(latents + 0.1 * latents.detach().std() * torch.randn(latents.shape)).sample - shown
        advance(error.abs().mean() + error.square().mean() + 1e-5 * posterior.kl().mean())
    with torch.no_grad():
        spread = vae.encode(images[:256]).latent_dist.mode().std()
    scaled = new_autoencoder(scale=round(1 / spread.item(), 4))
    scaled.load_state_dict(vae.state_dict())
    return scaled.requires_grad_(False).eval()


def pretrain(pipe: Any, output: Any, tasks: Sequence[Task], steps: int) -> float:
    """Train the denoiser and the text encoders by plain prediction of noise or velocity; the last loss."""
    name = denoiser_name(pipe)
    trained = [part for key, part in pipe.components.items() if key == name or key.startswith("text_encoder")]
    parameters = [each for part in trained if part is not None for each in part.train().requires_grad_(True).parameters()]
    advance, losses = one_cycle(parameters, 2e-3, steps, betas=(0.9, 0.99)), []
    with torch.no_grad():
        clean = pipe.vae.encode(pixels([task.target for task in tasks])).latent_dist.mode() * pipe.vae.config.scaling_factor
        sources = pipe.vae.encode(pixels([task.images[0] for task in tasks])).latent_dist.mode() if tasks[0].images else None
    flow = isinstance(pipe.scheduler, FlowMatchEulerDiscreteScheduler)
    for _ in range(steps):
        rows = torch.randint(len(tasks), (ROWS,))
        x0, noise, u = clean[rows], torch.randn(ROWS, *clean.shape[1:]), torch.rand(ROWS, 1, 1, 1)
        if flow:
            s = 3 * u / (1 + 2 * u)
            a, time, target = 1 - s, 1000 * s.flatten(), noise - x0
        else:
            time = (1000 * u.flatten()).long()
            kept = pipe.scheduler.alphas_cumprod[time].view(-1, 1, 1, 1)
            a, s, target = kept.sqrt(), (1 - kept).sqrt(), noise
        prompts = [tasks[row].instruction for row in rows.tolist()]
        made = output(pipe, a * x0 + s * noise, time, prompts, None if sources is None else sources[rows])
        loss = (made - target).square().mean()
        advance(loss)
        losses.append(loss.item())
    for part in trained:
        if part is not None:
            part.requires_grad_(False).eval()
    return sum(losses[-20:]) / len(losses[-20:])


def learn(folder: Path, name: str, kind: str, objective: Any, *, steps: int, tasks: int, seed: int) -> dict[str, Any]:
    """Train a pre-trained model by RL; the line of the run."""
    _, _, call, data, side = MODELS[name]
    weights = folder / name
    model = ShortSD3(path=str(weights), size=(side, side)) if kind == "sd3" else DiffusionPipeline.from_pretrained(weights)
    if name == "sd3" and kind == "pipeline":
        model, call = retouch.models.DiffusersPipeline(path=str(weights), call=call, size=(side, side)), None
    settings = {"steps": steps, "seed": seed, "tasks_per_step": 8, "group_size": 8, "learning_rate": 3e-4, "microbatch": 64}
    window = {"window": {"mode": "window", "size": 2, "high": 4}, "transition": {"kind": "cps", "noise_level": 0.7}}
    trainer = retouch.Trainer(
        model, (retouch.rewards.Scene if data is scenes else retouch.rewards.Playground)(), data(seed, most=3 if data is scenes else 2),
        objective=objective, reward_weights={"overall": 1.0}, call=None if kind == "sd3" else call, size=(side, side), device="cpu",
        rollout={"num_steps": 6, **(window if objective is GRPO else {"transition": {"kind": "ode"}})}, ema={"decay": 0.9},
        eval={"tasks": tasks, "num_steps": 6, "every": 0, "batch": 32, "column": "overall", "best_of_k": 0}, samples={"every": 0},
        checkpoints={"every": 0}, trackers=(), output_dir=folder, progress=False,
        run_name=f"{name}-{kind}-{'grpo' if objective is GRPO else 'nft'}-{seed}-{time.time():.0f}", **settings,
    )  # fmt: skip
    began, found = time.perf_counter(), trainer.train()
    assert found is not None, "the run was stopped"
    ratios = [entry["policy/ratio_max_first"] for entry in trainer.state.log_history if "policy/ratio_max_first" in entry]
    line = {"model": name, "kind": kind, "objective": "GRPO" if objective is GRPO else "DiffusionNFT", "seed": seed, "steps": steps}
    line |= {key: getattr(found, key) for key in ("before", "after", "ceiling", "gain", "gain_ci95", "gap_closed")}
    line |= {"ratio": max(ratios, default=None), "seconds": time.perf_counter() - began, "cost": dict(found.cost)}
    return line
