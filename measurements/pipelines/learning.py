"""Do pipelines without an adapter of their own learn? Trains small ones on the playground, first supervised, then by RL.

    python measurements/pipelines/learning.py FOLDER
    python measurements/pipelines/learning.py FOLDER --only sd3 sdxl --seeds 0 1 2

Stable Diffusion XL, Lumina 2 and InstructPix2Pix train through their own ``__call__``, Stable Diffusion 3 also with its adapter.
First, each learns by plain prediction of noise or velocity, which shares no code with adapters; FOLDER keeps these weights. Then
it learns by RL. A run writes its line into learning.jsonl, and all lines into docs/models.md.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import diffusers
import numpy as np
import torch
import transformers
from diffusers import AutoencoderKL, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from rehearsal.table import insert
from torch import Tensor
from transformers import CLIPTokenizer

import retouch
from retouch.models.any_pipeline.model import denoiser_name
from retouch_worlds.data import PlaygroundData, TextToImageData
from retouch_worlds.models.tiny_fill import clip_tokenizer
from retouch_worlds.playground.scenes import SIZE
from retouch_worlds.pretraining.training import one_cycle

KEPT = Path(__file__).with_suffix(".jsonl")
PAGE, MARK = Path(__file__).parents[2] / "docs" / "models.md", "<!-- learning -->"
HEADER = "| class | adapter | objective | reward | seeds | before | after | gain (seeds) | ± of a seed | ratio | seconds a step |"
CLASSES = {
    "sd3": "StableDiffusion3Pipeline",
    "sdxl": "StableDiffusionXLPipeline",
    "lumina2": "Lumina2Pipeline",
    "pix2pix": "StableDiffusionInstructPix2PixPipeline",
}
WIDTH, CHANNELS, ROWS = 64, 8, 64
LENGTH = 13
"""Tokens of the longest prompt."""
WRONG = 0.4
"""The share of demonstrations that show something else, so that RL has something to correct."""
NOISE = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "steps_offset": 1}
SCENES = TextToImageData(count=100_000, complexity=[1], known_words=True)
EDITS = PlaygroundData(count=100_000, complexity=[1])
Unknown: Any = type("Unknown", (diffusers.StableDiffusion3Pipeline,), {})  # the same under a name that no adapter has


class ShortSD3(retouch.models.SD3):  # type: ignore[name-defined,misc]
    """The registered family with one token in place of the 256 zeros that stand for an absent T5."""

    def build(self, *, device: torch.device) -> Any:
        model = super().build(device=device)
        model.text.lengths = (LENGTH, LENGTH, 1)
        return model


def tokenizer() -> CLIPTokenizer:
    texts = [task.instruction for task in [*SCENES.tasks()[:400], *EDITS.tasks()[:800]]]
    made = clip_tokenizer().train_new_from_iterator([*texts, *["<Prompt Start>"] * 50], 800)
    made.model_max_length = LENGTH
    return made


def small(words: CLIPTokenizer) -> dict[str, Any]:
    ends = {name: getattr(words, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    sizes = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 3, "num_attention_heads": 4}
    return {"vocab_size": len(words), "max_position_embeddings": 64, **sizes, **ends}


def clip(words: CLIPTokenizer, kind: Any = transformers.CLIPTextModelWithProjection) -> Any:
    made = kind(transformers.CLIPTextConfig(projection_dim=WIDTH, **small(words)))
    for name, parameter in made.named_parameters():
        if name.endswith("embedding.weight"):  # the usual 0.02 is meant for long training
            torch.nn.init.normal_(parameter, std=0.5)
    return made


def unet(*, channels: int = CHANNELS, text: int, **more: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=6, in_channels=channels, out_channels=CHANNELS, block_out_channels=(32, WIDTH), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4, cross_attention_dim=text, norm_num_groups=8, **more,
    )  # fmt: skip


def sdxl(vae: AutoencoderKL, words: CLIPTokenizer) -> Any:
    more = {"addition_embed_type": "text_time", "addition_time_embed_dim": 8, "use_linear_projection": True}
    return diffusers.StableDiffusionXLPipeline(
        unet=unet(text=2 * WIDTH, projection_class_embeddings_input_dim=6 * 8 + WIDTH, **more), vae=vae,
        text_encoder=clip(words, transformers.CLIPTextModel), tokenizer=words, text_encoder_2=clip(words), tokenizer_2=words,
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
        sample_size=6, pos_embed_max_size=6, patch_size=2, in_channels=CHANNELS, out_channels=CHANNELS, num_layers=4,
        num_attention_heads=4, attention_head_dim=WIDTH // 4, joint_attention_dim=2 * WIDTH, caption_projection_dim=WIDTH,
        pooled_projection_dim=2 * WIDTH,
    )  # fmt: skip
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer, vae=vae, scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), text_encoder=clip(words),
        tokenizer=words, text_encoder_2=clip(words), tokenizer_2=words, text_encoder_3=None, tokenizer_3=None,
    )  # fmt: skip


def lumina2(vae: AutoencoderKL, words: CLIPTokenizer) -> Any:
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=6, in_channels=CHANNELS, hidden_size=WIDTH, num_layers=4, num_refiner_layers=1, num_attention_heads=4,
        num_kv_heads=2, multiple_of=16, axes_dim_rope=[8, 4, 4], cap_feat_dim=WIDTH,
    )  # fmt: skip
    heads = {"num_key_value_heads": 2, "head_dim": 16, "query_pre_attn_scalar": 16, "initializer_range": WIDTH**-0.5}
    reader = transformers.Gemma2Model(transformers.Gemma2Config(**{**small(words), **heads}))
    return diffusers.Lumina2Pipeline(transformer, FlowMatchEulerDiscreteScheduler(shift=3.0), vae, reader, words)


# A builder, the arguments of calls, the tasks, and the size in px. Lumina 2 takes its autoencoder for one of a factor of 8.
MODELS: dict[str, tuple[Any, dict[str, Any], Any, int]] = {
    "sd3": (sd3, {"guidance_scale": 1.0, "max_sequence_length": 1}, SCENES, SIZE),
    "sdxl": (sdxl, {"guidance_scale": 1.0}, SCENES, SIZE),
    "lumina2": (lumina2, {"guidance_scale": 1.0, "system_prompt": "", "max_sequence_length": LENGTH}, SCENES, 2 * SIZE),
    "pix2pix": (pix2pix, {"guidance_scale": 1.0}, EDITS, SIZE),
}
SCORES = {"scene": retouch.rewards.Scene(), "share": retouch.rewards.Share(channel="red")}
COLUMNS = {"scene": "overall", "share": "share"}
RUNS = [
    *(("sd3", kind, "GRPO", "scene") for kind in ("sd3", "pipeline")),
    *(("sd3", kind, "GRPO", "share") for kind in ("sd3", "pipeline")),
    *((name, "pipeline", "GRPO", "share") for name in ("sdxl", "lumina2", "pix2pix")),
    ("sdxl", "pipeline", "DiffusionNFT", "share"),
]


def predicted(pipe: Any, sample: Tensor, time: Tensor, prompts: list[str], sources: Tensor | None) -> Tensor:
    """What the denoiser predicts at times from 0 to 999: noise, or noise - data."""
    options = {"do_classifier_free_guidance": False}
    if sources is not None:
        embeds = pipe._encode_prompt(prompts, sample.device, 1, **options)
        made = pipe.unet(torch.cat([sample, sources], 1), time, embeds)
    elif hasattr(pipe, "unet"):
        embeds, _, pooled, _ = pipe.encode_prompt(prompts, **options)
        sizes = torch.tensor([[SIZE, SIZE, 0, 0, SIZE, SIZE]] * len(sample), dtype=torch.float32)
        made = pipe.unet(sample, time, embeds, added_cond_kwargs={"text_embeds": pooled, "time_ids": sizes})
    elif hasattr(pipe, "text_encoder_3"):
        embeds, _, pooled, _ = pipe.encode_prompt(prompts, None, None, max_sequence_length=1, **options)
        made = pipe.transformer(sample, embeds, pooled, time)
    else:
        embeds, mask, _, _ = pipe.encode_prompt(prompts, system_prompt="", max_sequence_length=LENGTH, **options)
        return -pipe.transformer(sample, 1 - time / 1000, embeds, mask).sample  # type: ignore[no-any-return]
    return made.sample  # type: ignore[no-any-return]


def pixels(images: Sequence[Any]) -> Tensor:
    """Images as (b, 3, h, w) in [-1, 1]."""
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2) / 127.5 - 1


@torch.no_grad()
def encoded(vae: AutoencoderKL, images: Tensor) -> Tensor:
    return vae.encode(images).latent_dist.mode()  # type: ignore[no-any-return]


def train_autoencoder(steps: int) -> AutoencoderKL:
    """Train to reconstruct scenes, with noise on the latents, so that the decoder tolerates a denoiser's errors."""
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3, block_out_channels=(32,) * 3,
        layers_per_block=0, norm_num_groups=8, latent_channels=CHANNELS, mid_block_add_attention=False, use_quant_conv=False,
        use_post_quant_conv=False, shift_factor=0.0,
    )  # fmt: skip
    for name, module in vae.named_modules():
        if name.endswith("conv2"):  # residual branches begin at zero
            torch.nn.init.zeros_(module.weight)
    advance = one_cycle(vae.parameters(), 3e-3, steps)
    images = pixels([task.target for task in TextToImageData(count=2048, complexity=[4, 5]).tasks()[:]])
    for _ in range(steps):
        shown = images[torch.randint(len(images), (16,))]
        posterior = vae.encode(shown).latent_dist
        latents = posterior.mode()
        error = vae.decode(latents + 0.1 * latents.detach().std() * torch.randn(latents.shape)).sample - shown
        advance(error.abs().mean() + error.square().mean() + 1e-5 * posterior.kl().mean())
    vae.register_to_config(scaling_factor=round(1 / encoded(vae, images[:256]).std().item(), 4))
    return vae


def pretrain(pipe: Any, data: Any, steps: int) -> float:
    """Train the denoiser and the text encoders; the last losses' mean."""
    tasks = data.tasks()[:4096]
    parts = [getattr(pipe, name) for name in pipe.components if name == denoiser_name(pipe) or name.startswith("text_encoder")]
    parameters = [each for part in parts if part is not None for each in part.parameters()]
    advance, losses = one_cycle(parameters, 2e-3, steps, betas=(0.9, 0.99)), []
    clean = encoded(pipe.vae, pixels([task.target for task in tasks])) * pipe.vae.config.scaling_factor
    sources = encoded(pipe.vae, pixels([task.images[0] for task in tasks])) if data is EDITS else None
    for _ in range(steps):
        rows = torch.randint(len(tasks), (ROWS,))
        x0, noise, u = clean[rows], torch.randn(ROWS, *clean.shape[1:]), torch.rand(ROWS, 1, 1, 1)
        if hasattr(pipe, "transformer"):
            s = 3 * u / (1 + 2 * u)
            a, time, target = 1 - s, 1000 * s.flatten(), noise - x0
        else:
            time = (1000 * u.flatten()).long()
            kept = pipe.scheduler.alphas_cumprod[time].view(-1, 1, 1, 1)
            a, s, target = kept.sqrt(), (1 - kept).sqrt(), noise
        asked = torch.where(torch.rand(ROWS) < WRONG, rows.roll(1), rows)
        prompts = [tasks[row].instruction for row in asked.tolist()]
        loss = (predicted(pipe, a * x0 + s * noise, time, prompts, sources if sources is None else sources[rows]) - target).square()
        advance(loss.mean())
        losses.append(loss.mean().item())
    return sum(losses[-20:]) / len(losses[-20:])


def learn(folder: Path, name: str, kind: str, objective: str, reward: str, seed: int, given: argparse.Namespace) -> dict[str, Any]:
    """Train a pre-trained model by RL; the line of the run."""
    _, call, data, side = MODELS[name]
    path, size, none = folder / name, (side, side), {"text_encoder_3": None, "tokenizer_3": None}
    if kind == "sd3":
        model, call = ShortSD3(path=str(path), size=size, dtype="float32"), None
    else:
        model = Unknown.from_pretrained(path, **none) if name == "sd3" else DiffusionPipeline.from_pretrained(path)
    window = {"window": {"mode": "window", "size": 2, "high": 4}, "transition": {"kind": "cps", "noise_level": 0.7}}
    with TemporaryDirectory() as out:  # a finished run in a folder would be taken again, although the code has changed
        trainer = retouch.Trainer(
            model, SCORES[reward], data.model_copy(update={"seed": 1}),
            objective=retouch.GRPO(clip=1e-4) if objective == "GRPO" else retouch.NFT(beta=1.0),
            reward_weights={COLUMNS[reward]: 1.0},
            rollout={"num_steps": 6, **(window if objective == "GRPO" else {"transition": {"kind": "ode"}})}, size=size, call=call,
            tasks_per_step=6, group_size=8, microbatch=48, learning_rate=2e-4, steps=given.steps, seed=seed, device="cpu",
            eval={"tasks": given.tasks, "num_steps": 6, "every": 0, "batch": 64, "column": COLUMNS[reward], "best_of_k": 0},
            samples={"every": 0}, checkpoints={"every": 0}, trackers=(), output_dir=out, progress=False,
        )  # fmt: skip
        found = trainer.train()
        assert found is not None, "the run was stopped"
        ratios = [entry["policy/ratio_max_first"] for entry in trainer.state.log_history if "policy/ratio_max_first" in entry]
    line = {"model": name, "kind": kind, "objective": objective, "reward": reward, "seed": seed}
    line |= {"steps": given.steps, "tasks": given.tasks}
    line |= {key: getattr(found, key) for key in ("before", "after", "gain", "gain_ci95")}
    return {**line, "ratio": max(ratios, default=None), "seconds": float(str(found.cost["training seconds"])) / given.steps}


def row(lines: list[dict[str, Any]]) -> str:
    """The row of a run with its seeds in docs/models.md."""
    line, ratios = lines[0], [each["ratio"] for each in lines if each["ratio"] is not None]
    before, after, gains = ([each[key] for each in lines] for key in ("before", "after", "gain"))
    known = [each["gain_ci95"][1] - each["gain"] for each in lines if each["gain_ci95"] is not None]  # none below 8 tasks
    widest = f"{max(known):.3f}" if known else "-"
    scores = f"{mean(before):.3f} | {mean(after):.3f} | {mean(gains):+.3f} ({min(gains):+.3f} to {max(gains):+.3f}) | {widest}"
    ratio = "" if not ratios else "< 1e-06" if max(ratios) < 1e-6 else f"{max(ratios):.0e}"
    cells = [f"`{CLASSES[line['model']]}`", f"`{line['kind']}`", line["objective"], f"`{line['reward']}`", str(len(lines))]
    cells += [scores, ratio]
    return f"| {' | '.join(cells)} | {median(each['seconds'] for each in lines):.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument("--pretraining", type=int, default=700, help="steps of the autoencoder, and of each model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=128)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    kept = [json.loads(line) for line in KEPT.read_text(encoding="utf-8").splitlines()] if KEPT.exists() else []
    lines = {tuple(line[key] for key in ("model", "kind", "objective", "reward", "seed")): line for line in kept}
    for name in ["autoencoder", *given.only]:
        if not (given.folder / name).is_dir():
            torch.manual_seed(0)
            began, loss = time.perf_counter(), 0.0
            made: Any = train_autoencoder(given.pretraining) if name == "autoencoder" else None
            if made is None:
                made = MODELS[name][0](AutoencoderKL.from_pretrained(given.folder / "autoencoder"), tokenizer())
                loss = pretrain(made, MODELS[name][2], given.pretraining)
            made.save_pretrained(given.folder / name)
            print(f"{name}: {given.pretraining} steps, loss {loss:.3f}, {time.perf_counter() - began:.0f} s", flush=True)
        for run in [(*run, seed) for run in RUNS if run[0] == name for seed in given.seeds]:
            lines[run] = learn(given.folder, *run, given)
            print(json.dumps(lines[run]), flush=True)
            groups = [[lines[each] for each in sorted(lines) if each[:-1] == run] for run in RUNS]
            KEPT.write_text("".join(f"{json.dumps(line)}\n" for group in groups for line in group), encoding="utf-8")
            insert(PAGE, MARK, "\n".join([HEADER, "| --- " * 11 + "|", *(row(group) for group in groups if group)]))


if __name__ == "__main__":
    main()
