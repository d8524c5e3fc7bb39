"""Tiny models in fp32 must give the same noise, and nearly the same latents, log-probabilities and images, on CPU and GPU."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from findings import Finding, at_most, measured
from PIL.Image import Image, fromarray
from target import Target
from torch import Tensor

from retouch.core.random import generator
from retouch.distributed.ranks import Ranks, set_numerics
from retouch.recipe.recipe import Recipe, load
from retouch.run.build import assemble_policy
from retouch.types import Batch, Task
from retouch_models.emu3 import Emu3ImageTokenizer, load_autoencoder
from retouch_worlds.models.tiny_sd3 import tiny_sd3_pipeline
from retouch_worlds.playground import playground_weights

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
LATENT_LIMIT = 1e-4
LEVELS = 1.0
"""Levels (of 255) by which a pixel may differ, because pixels are rounded."""
ROWS = 4
INSTRUCTION = "make the red circle blue"
CODE_SIZE = (64, 64)


def run(target: Target) -> Iterator[Finding]:
    """Compare rollouts of tiny models, and codes of Emu3, on the CPU and on the device."""
    folder = target.scratch / "tiny-sd3"
    tiny_sd3_pipeline(0).save_pretrained(folder)
    sd3 = [f'policy.model={{"kind": "sd3", "path": "{folder}", "dtype": "float32", "size": [32, 32]}}', "device=auto"]
    for name, recipe in (
        ("SD3", load(str(RECIPES / "tiny-sd3.jsonnet"), sd3)),
        ("Qwen-Image-Edit", load(str(RECIPES / "qwen-image-edit" / "flow-grpo-playground.jsonnet"))),
    ):
        yield from _model(name, recipe, target)
    yield from _codes(target)


def _model(name: str, recipe: Recipe, target: Target) -> Iterator[Finding]:
    set_numerics(recipe)
    here, there = (_sampled(recipe, device) for device in (torch.device("cpu"), target.device))
    yield at_most(f"{name}: noise, largest difference", _off(here["noise"], there["noise"]), 0.0)
    yield at_most(f"{name}: latents, largest difference", _off(here["latents"], there["latents"]), LATENT_LIMIT)
    yield at_most(f"{name}: log-probabilities, largest difference", _off(here["log_probs"], there["log_probs"]), LATENT_LIMIT)
    yield at_most(f"{name}: images, largest difference", _off(here["images"], there["images"]), LEVELS, "levels")


def _sampled(recipe: Recipe, device: torch.device) -> dict[str, Tensor]:
    """The noise, latents, log-probabilities and images of a rollout of `ROWS` rows on the device, copied to CPU memory."""
    parts = assemble_policy(recipe, Ranks(device=device))
    policy: Any = parts.policy(recipe.resolved_phases()[0].rollout)
    image = _image(64, 64)
    task = Task(id="parity", instruction=INSTRUCTION, images=(image,) if recipe.image_model.takes.images[1] else ())
    batch = Batch(seed=0, step=0, tasks=(task,), group_ids=(0,), group=(0,) * ROWS, slot=tuple(range(ROWS)))
    made = policy.rollout(batch)
    conditioning = made.conditioning.take(made.group)
    noise = parts.model.initial_noise(conditioning, [generator(0, "noise", 0, 0, slot) for slot in batch.slot])
    images = parts.renderer()([task] * ROWS, made)
    pixels = torch.stack([torch.from_numpy(np.asarray(each, dtype=np.float32).copy()) for each in images])
    return {"noise": noise.cpu(), "latents": made.latents.cpu(), "log_probs": made.log_probs.cpu(), "images": pixels}


def _codes(target: Target) -> Iterator[Finding]:
    """Compare the image tokens of Emu3's autoencoder (nearest neighbours in a code book), with and without TF32."""
    path = playground_weights("emu3") / "autoencoder"
    images = [_image(*CODE_SIZE, seed=seed) for seed in range(ROWS)]
    expected = Emu3ImageTokenizer(load_autoencoder(path), CODE_SIZE).encode(images)
    tokenizer = Emu3ImageTokenizer(load_autoencoder(path).to(target.device), CODE_SIZE)
    for allowed in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
        flips = int((tokenizer.encode(images).cpu() != expected).sum())
        yield at_most(f"codes that differ, TF32 {'allowed' if allowed else 'not allowed'}", flips, 0)
    yield measured("codes compared", expected.numel())


def _image(height: int, width: int, *, seed: int = 0) -> Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return fromarray(pixels.repeat(8, axis=0).repeat(8, axis=1))


def _off(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())
