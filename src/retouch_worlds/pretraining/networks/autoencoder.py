"""The playground's autoencoder: Qwen-Image's class with a spatial factor of 4, trained to reconstruct images of the playground."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage
from PIL.Image import Image
from torch import Tensor, nn

from retouch.core.random import generator
from retouch.models.qwen_image.model import use_last_temporal_tap
from retouch_worlds.data.tasks import PlaygroundData
from retouch_worlds.playground.world.scenes import CELLS, GRID


@dataclass(frozen=True, kw_only=True)
class AutoencoderTraining:
    """``latent_noise``: noise on the latents in training, relative to their standard deviation, so that the decoder tolerates the
    errors of a denoiser. ``steps``: steps that train encoder and decoder together. ``decoder_steps``: further steps that train only
    the decoder, with ``decoder_noise`` on the latents.
    """

    steps: int
    decoder_steps: int
    seed: int = 0
    batch: int = 32
    learning_rate: float = 2e-3
    decoder_learning_rate: float = 1e-3
    latent_channels: int = 8
    latent_noise: float = 0.1
    decoder_noise: float = 0.03
    kl_weight: float = 1e-5


def train_autoencoder(settings: AutoencoderTraining, log: Callable[[str], None]) -> AutoencoderKLQwenImage:
    """Train from the seed. Returns the model, whose configuration has the mean and the standard deviation of its latents."""
    torch.manual_seed(settings.seed)
    channels = settings.latent_channels
    vae = _build(channels, [0.0] * channels, [1.0] * channels)
    _with_unit_gain(vae)
    use_last_temporal_tap(vae)
    _train_both(vae, settings, log)
    mean, std = _latent_statistics(vae, settings)
    train_decoder(vae, settings, log)
    measured = _build(channels, mean, std)
    measured.load_state_dict(vae.state_dict())
    return measured.eval()


def _with_unit_gain(vae: AutoencoderKLQwenImage) -> None:
    """Initialise the convolutions so that each preserves the variance of its input.

    The default initialisation counts all three temporal taps, but an image uses only the last tap. So activations would shrink from
    layer to layer, and training would start many times slower."""
    for module in vae.modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            assert module.bias is not None
            nn.init.zeros_(module.bias)
            if isinstance(module, nn.Conv3d):
                nn.init.zeros_(module.weight)
            weight = module.weight[:, :, -1] if isinstance(module, nn.Conv3d) else module.weight
            nn.init.kaiming_normal_(weight, nonlinearity="linear")


def _train_both(vae: AutoencoderKLQwenImage, settings: AutoencoderTraining, log: Callable[[str], None]) -> None:
    advance = _optimizer(vae.parameters(), settings.learning_rate, settings.steps)
    for step, images in enumerate(_images(settings, range(settings.steps))):
        posterior = vae.encode(images).latent_dist
        latents = posterior.mode()
        noise = torch.randn(latents.shape, generator=generator(settings.seed, "latent noise", step))
        noisy = latents + settings.latent_noise * latents.detach().std() * noise
        order = torch.rand(len(images), CELLS, generator=generator(settings.seed, "cells", step)).argsort(1)
        repeated = vae.decode(rearranged(noisy, order)).sample
        loss = _reconstruction_loss(repeated, rearranged(images, order)) + settings.kl_weight * posterior.kl().mean()
        advance(loss)
        if step % 100 == 0:
            log(f"autoencoder step {step}/{settings.steps}  loss {loss.item():.4f}")


def train_decoder(vae: AutoencoderKLQwenImage, settings: AutoencoderTraining, log: Callable[[str], None]) -> None:
    """Train only the decoder, in place, so that the latents do not change."""
    decoder = [*vae.post_quant_conv.parameters(), *vae.decoder.parameters()]
    advance = _optimizer(decoder, settings.decoder_learning_rate, settings.decoder_steps)
    steps = range(settings.steps, settings.steps + settings.decoder_steps)
    for step, images in zip(steps, _images(settings, steps), strict=True):
        with torch.no_grad():
            latents = vae.encode(images).latent_dist.mode()
        spread = latents.std(dim=(0, 2, 3, 4), keepdim=True)
        noise = torch.randn(latents.shape, generator=generator(settings.seed, "latent noise", step))
        loss = _reconstruction_loss(vae.decode(latents + settings.decoder_noise * spread * noise).sample, images)
        advance(loss)
        if step % 100 == 0:
            log(f"decoder step {step - settings.steps}/{settings.decoder_steps}  loss {loss.item():.4f}")


def rearranged(images: Tensor, order: Tensor) -> Tensor:
    """Images or latents (b, c, 1, h, w) with their cells in another order: cell i of image b is the former cell ``order[b, i]``."""
    cells = images.unflatten(4, (GRID, -1)).unflatten(3, (GRID, -1)).permute(0, 3, 5, 1, 2, 4, 6).flatten(1, 2)
    moved = cells[torch.arange(len(cells))[:, None], order]
    return moved.unflatten(1, (GRID, GRID)).permute(0, 3, 4, 1, 5, 2, 6).flatten(5, 6).flatten(3, 4)


def _reconstruction_loss(repeated: Tensor, images: Tensor) -> Tensor:
    error = repeated - images
    return error.abs().mean() + error.square().mean()


def _optimizer(parameters: Iterable[nn.Parameter], learning_rate: float, steps: int) -> Callable[[Tensor], None]:
    """AdamW with a one-cycle schedule. Returns a function that takes a loss and performs one step."""
    trained = list(parameters)
    optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=steps, pct_start=0.05)

    def advance(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()

    return advance


def _build(channels: int, mean: list[float], std: list[float]) -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=16,
        z_dim=channels,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, False],
        latents_mean=mean,
        latents_std=std,
    )


def _images(settings: AutoencoderTraining, steps: range) -> Iterator[Tensor]:
    """Batches (b, 3, 1, 24, 24) in [-1, 1]: sources and targets of training tasks."""
    half = settings.batch // 2
    tasks = PlaygroundData(seed=settings.seed, count=half * steps.stop, complexity=[1, 2, 3]).tasks(in_turn=True)
    for step in steps:
        rows = [tasks[index] for index in range(step * half, (step + 1) * half)]
        yield pixels([row.images[0] for row in rows] + [row.target for row in rows if row.target is not None])


def pixels(images: list[Image]) -> Tensor:
    """The images as a tensor (b, 3, 1, h, w) in [-1, 1]."""
    stacked = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return stacked.permute(0, 3, 1, 2).float().div(127.5).sub(1.0).unsqueeze(2)


@torch.no_grad()
def _latent_statistics(vae: AutoencoderKLQwenImage, settings: AutoencoderTraining) -> tuple[list[float], list[float]]:
    tasks = PlaygroundData(seed=settings.seed + 1, count=1024, complexity=[1, 2, 3]).tasks(in_turn=True)
    latents = torch.cat(
        [vae.encode(pixels([tasks[i].images[0] for i in range(k, k + 128)])).latent_dist.mode() for k in range(0, 1024, 128)]
    )
    flat = latents.transpose(0, 1).flatten(1)
    return [round(v, 4) for v in flat.mean(dim=1).tolist()], [round(v, 4) for v in flat.std(dim=1).tolist()]
