"""Flow-GRPO in one file: reinforcement learning of a text-to-image flow model, on a laptop, with nothing hidden.

Flow models generate images by integrating an ODE from noise (sigma 1) to data (sigma 0): each step follows a predicted velocity,
noise minus data. That is deterministic, so there are no actions with a probability. Flow-GRPO (Liu et al., arXiv 2505.05470) makes
some steps stochastic without changing the distribution of the result: each of these steps samples from a Gaussian whose mean the
model predicts. Such a sample is an action with a probability, so policy gradients apply. One training step:

    rollout    generate a group of 8 images for each of 2 prompts, and keep the stochastic steps
    reward     score each image: here by its share of red
    advantage  compare each image with the rest of its group
    update     make the steps that led to better images more probable, and those that led to worse images less probable

The model is Stable Diffusion 3 with its real classes, but tiny and with random weights; a LoRA of its attention is trained.
The script leaves out what it does not need: guidance, a KL penalty, averaged weights, several devices.
Axes: b rows (images; those of a group are contiguous), (c, h, w) a latent.
"""

import argparse
import hashlib
import json
import math
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from string import ascii_lowercase as letters
from typing import NamedTuple

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from peft import LoraConfig
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModelWithProjection, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

PROMPTS = ["a fox in the snow", "two ripe pears", "a lighthouse at dusk", "an old blue bus", "a winter moon", "a bowl of soup"]
PROMPTS_PER_STEP = 2
GROUP_SIZE = 8  # images per prompt
LATENT = (4, 16, 16)  # decoded to an image of 32 x 32 pixels
NUM_STEPS = 6  # from noise to image
NOISE_LEVEL = 0.8  # how much of the noise is drawn anew in a stochastic step: at 0 nothing, at 1 all of it
WINDOW = 2  # number of stochastic steps (Flow-GRPO-Fast)
WINDOW_END = NUM_STEPS // 2  # the window lies in the first half of the steps, where colours and layout are decided
LEARNING_RATE = 3e-3
CLIP_RANGE = 1e-5  # small because a log-probability here is a mean over all elements of a latent
ADVANTAGE_MAX, GRAD_NORM_MAX = 5.0, 1.0
LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]


def build_models(seed: int) -> StableDiffusion3Pipeline:
    """Build a diffusers pipeline with random weights from the seed, all frozen. The policy is its `transformer`."""
    words = {token: i for i, token in enumerate([*letters, *(a + "</w>" for a in letters), "<|startoftext|>", "<|endoftext|>"])}
    clip_tokenizer = CLIPTokenizer(vocab=words, merges=[], model_max_length=77)
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((a, -1.0) for a in "▁" + letters)]
    sizes = {"hidden_size": 32, "projection_dim": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    clip = CLIPTextConfig(vocab_size=len(words), bos_token_id=len(words) - 2, eos_token_id=len(words) - 1, **sizes)
    t5 = T5Config(vocab_size=len(pieces), d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    with torch.random.fork_rng(devices=[]):  # weights are drawn from the global generator: restore it afterwards
        torch.manual_seed(seed)
        pipeline = StableDiffusion3Pipeline(
            transformer=SD3Transformer2DModel(
                sample_size=LATENT[-1], pos_embed_max_size=LATENT[-1], patch_size=1, in_channels=LATENT[0], out_channels=LATENT[0],
                num_layers=2, num_attention_heads=4, attention_head_dim=8,
                joint_attention_dim=32, caption_projection_dim=32, pooled_projection_dim=64,
            ),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=AutoencoderKL(
                block_out_channels=(8, 16), latent_channels=LATENT[0], norm_num_groups=4, sample_size=32,
                down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
                scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False,
            ),
            text_encoder=CLIPTextModelWithProjection(clip), tokenizer=clip_tokenizer,
            text_encoder_2=CLIPTextModelWithProjection(clip), tokenizer_2=clip_tokenizer,
            text_encoder_3=T5EncoderModel(t5), tokenizer_3=T5Tokenizer(vocab=pieces, extra_ids=0),
        )  # fmt: skip
    for part in (pipeline.transformer, pipeline.vae, pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3):
        part.eval().requires_grad_(False)
    return pipeline


def add_lora(transformer: SD3Transformer2DModel, seed: int) -> None:
    """Add a LoRA, the only trained weights, to the attention projections. One of its factors is 0, so it has no effect yet."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "lora").initial_seed())
        transformer.add_adapter(LoraConfig(r=32, lora_alpha=64, init_lora_weights="gaussian", target_modules=LORA_TARGETS))


class Text(NamedTuple):
    tokens: Tensor  # (b, 77 + 128, 32): embeddings of CLIP, then of T5
    pooled: Tensor  # (b, 64)


@torch.no_grad()
def encode(pipeline: StableDiffusion3Pipeline, prompts: list[str]) -> Text:
    """Encode prompts with both CLIPs and T5. They are frozen, so each prompt is encoded only once."""
    tokens, _, pooled, _ = pipeline.encode_prompt(prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=128)
    return Text(tokens, pooled)


def for_groups(text: Text, prompts: Tensor) -> Text:
    """The rows of these prompts, each repeated for its group."""
    rows = prompts.repeat_interleave(GROUP_SIZE)
    return Text(text.tokens[rows], text.pooled[rows])


def velocity(pipeline: StableDiffusion3Pipeline, x: Tensor, sigma: float, text: Text) -> Tensor:
    """The predicted velocity, noise - data, for x (b, c, h, w)."""
    times = torch.full((len(x),), sigma * pipeline.scheduler.config.num_train_timesteps)
    return pipeline.transformer(x, text.tokens, text.pooled, times, return_dict=False)[0]


def generator(*key: int | str) -> torch.Generator:
    """A random generator for one draw, keyed by the purpose of the draw, so that no image depends on the others."""
    digest = hashlib.sha256(repr(key).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


class Noise(NamedTuple):
    start: int  # first step of the window
    initial: Tensor  # (b, c, h, w): the initial noise
    transitions: Tensor  # (WINDOW, b, c, h, w)


def draw_noise(seed: int, step: int) -> Noise:
    """Keys of the draws: (seed, "window", step), (seed, "noise", step, group, slot), (seed, "transition", step, group, slot, j)."""
    start = int(torch.randint(WINDOW_END - WINDOW + 1, (1,), generator=generator(seed, "window", step)))
    rows = [(step, group, slot) for group in range(PROMPTS_PER_STEP) for slot in range(GROUP_SIZE)]
    initial = [torch.randn(LATENT, generator=generator(seed, "noise", *row)) for row in rows]
    transitions = [torch.randn(LATENT, generator=generator(seed, "transition", *row, j)) for j in range(WINDOW) for row in rows]
    return Noise(start, torch.stack(initial), torch.stack(transitions).view(WINDOW, len(rows), *LATENT))


def cps_transition(x: Tensor, v: Tensor, sigma: float, sigma_next: float) -> tuple[Tensor, float]:
    """Mean and standard deviation of a stochastic step to the next x: "coefficients preserving sampling" (arXiv 2509.05952).

    Mixes the model's estimates of data and noise as sigma_next requires, and draws part of the noise anew, at the same variance.
    """
    std = sigma_next * math.sin(NOISE_LEVEL * math.pi / 2)
    data, noise = x - sigma * v, x + (1 - sigma) * v  # since v = noise - data and x = (1 - sigma) data + sigma noise
    return (1 - sigma_next) * data + math.sqrt(sigma_next**2 - std**2) * noise, std


def log_prob(x_next: Tensor, mean: Tensor) -> Tensor:
    """(b,): log-probability of a stochastic step, up to a constant and a scale that do not depend on the model."""
    return -(x_next - mean).square().mean(dim=(1, 2, 3))


class Action(NamedTuple):
    sigma: float
    sigma_next: float
    x: Tensor  # (b, c, h, w): before the step
    x_next: Tensor  # after the step
    log_prob: Tensor  # (b,): log-probability of the step in the rollout


@torch.no_grad()
def rollout(pipeline: StableDiffusion3Pipeline, text: Text, noise: Noise) -> tuple[list[Action], Tensor]:
    """Integrate from noise to latents (b, c, h, w), with stochastic steps inside the window and Euler steps outside it."""
    pipeline.scheduler.set_timesteps(NUM_STEPS)
    x, actions = noise.initial, []
    for i, (sigma, sigma_next) in enumerate(pairwise(pipeline.scheduler.sigmas.tolist())):
        v = velocity(pipeline, x, sigma, text)
        if noise.start <= i < noise.start + WINDOW:
            mean, std = cps_transition(x, v, sigma, sigma_next)
            x_next = mean + std * noise.transitions[i - noise.start]
            actions.append(Action(sigma, sigma_next, x, x_next, log_prob(x_next, mean)))
        else:
            x_next = x + (sigma_next - sigma) * v
        x = x_next
    return actions, x


@torch.no_grad()
def decode(pipeline: StableDiffusion3Pipeline, latents: Tensor) -> Tensor:
    """Images (b, 3, 32, 32), 0 to 255, rounded like in a saved file."""
    config = pipeline.vae.config
    pixels = pipeline.vae.decode(latents / config.scaling_factor + config.shift_factor, return_dict=False)[0]
    return (pixels / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)


def share_of_red(pictures: Tensor) -> Tensor:
    """(b,): r / (r + g + b), averaged over the pixels; 1 for red, 1/3 for grey, and for black as well."""
    red, light = pictures[:, 0].double(), pictures.double().sum(dim=1)
    return torch.where(light > 0, red / light, 1 / 3).mean(dim=(1, 2)).float()


def group_advantages(rewards: Tensor) -> Tensor:
    """(b,): difference to the mean of the group, in standard deviations. No critic is needed: the group is the baseline."""
    groups = rewards.view(-1, GROUP_SIZE).double()  # rewards differ so little that their mean in fp32 would be too coarse
    advantages = (groups - groups.mean(dim=1, keepdim=True)) / (groups.std(dim=1, correction=0, keepdim=True) + 1e-4)
    return advantages.clamp(-ADVANTAGE_MAX, ADVANTAGE_MAX).flatten().float()


def backward(pipeline: StableDiffusion3Pipeline, text: Text, actions: list[Action], advantages: Tensor) -> float:
    """Add the gradient of the loss to the LoRA. Returns the largest |ratio - 1|: 0 if the weights are those of the rollout."""
    ratio_off = 0.0
    for action in actions:
        v = velocity(pipeline, action.x, action.sigma, text)
        mean, _ = cps_transition(action.x, v, action.sigma, action.sigma_next)
        ratio = (log_prob(action.x_next, mean) - action.log_prob).exp()
        clipped = ratio.clamp(1 - CLIP_RANGE, 1 + CLIP_RANGE)  # outside this range, the samples of the rollout are not reliable
        loss = -torch.minimum(ratio * advantages, clipped * advantages).mean() / len(actions)
        loss.backward()
        ratio_off = max(ratio_off, (ratio.detach() - 1).abs().max().item())
    return ratio_off


def act_and_learn(pipeline: StableDiffusion3Pipeline, text: Text, noise: Noise) -> tuple[float, float]:
    """A training step without the optimizer. Returns the mean reward and the largest |ratio - 1|."""
    actions, latents = rollout(pipeline, text, noise)
    rewards = share_of_red(decode(pipeline, latents))
    return rewards.mean().item(), backward(pipeline, text, actions, group_advantages(rewards))


def first_gradient(pipeline: StableDiffusion3Pipeline, prompts: list[str], noise: Noise) -> dict[str, Tensor]:
    """The gradient of each LoRA weight by its name, for these prompts (one per group) and this noise."""
    act_and_learn(pipeline, for_groups(encode(pipeline, prompts), torch.arange(len(prompts))), noise)
    gradients = {name: weight.grad for name, weight in pipeline.transformer.named_parameters() if weight.requires_grad}
    pipeline.transformer.zero_grad()
    return gradients


def train(steps: int, seed: int) -> Iterator[dict[str, float]]:
    """Do the whole training. Yields one record per step."""
    pipeline = build_models(seed)
    add_lora(pipeline.transformer, seed)
    trained = [weight for weight in pipeline.transformer.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, weight_decay=1e-4)
    text = encode(pipeline, PROMPTS)
    for step in range(steps):
        began = time.perf_counter()
        prompts = torch.randperm(len(PROMPTS), generator=generator(seed, "prompts", step))[:PROMPTS_PER_STEP]
        reward, ratio_off = act_and_learn(pipeline, for_groups(text, prompts), draw_noise(seed, step))
        grad_norm = torch.nn.utils.clip_grad_norm_(trained, GRAD_NORM_MAX).item()
        optimizer.step()
        optimizer.zero_grad()
        yield {"reward": reward, "ratio_max_first": ratio_off, "grad_norm": grad_norm, "seconds": time.perf_counter() - began}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Flow-GRPO on a tiny Stable Diffusion 3: learns to paint in red.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="file for the numbers of each step")
    args = parser.parse_args()
    history = []
    for row in train(args.steps, args.seed):
        history.append(row)
        print(f"step {len(history):3d}  reward {row['reward']:.4f}  {row['seconds']:.2f} s", flush=True)
    if args.json:
        args.json.write_text(json.dumps(history, indent=1))
