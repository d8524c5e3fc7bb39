"""The playground's image tokenizer: Emu3's class with a spatial factor of 8, so that an image of nine cells has nine codes.

The quantiser of transformers' class has no gradient. So training first reconstructs images from noisy continuous latents, then
initialises the codebook with k-means, and then continues with the straight-through estimator and a codebook of running means
(VQ-VAE, arXiv 1711.00937). The latents of a cell must not depend on its neighbours. Otherwise cells that look the same would have
many different codes, and a policy would have to guess which code the target has."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import Emu3VQVAE
from transformers.models.emu3.configuration_emu3 import Emu3VQVAEConfig

from retouch.core.random import generator
from retouch_worlds.playground.world.rendering import pixels
from retouch_worlds.playground.world.scenes import CELLS, GRID, SIZE, random_scene
from retouch_worlds.pretraining.networks.autoencoder import rearranged

CODES = 80
_WIDTH = 8
_DECAY = 0.99
_LEAST_COUNT = 1e-2


@dataclass(frozen=True, kw_only=True)
class CodesTraining:
    """``steps``: the number of all steps. ``free_steps``: the number of steps before codes are used; in these steps the latents get
    noise of ``latent_noise`` times their standard deviation. ``commitment``: the weight of the distance of the latents to their
    codes."""

    steps: int
    free_steps: int
    seed: int = 0
    batch: int = 32
    learning_rate: float = 2e-3
    latent_noise: float = 0.1
    commitment: float = 0.25
    alone: float = 1.0
    """Weight of the distance between the latents of the same cell in two images with different neighbours."""


def untrained_codes() -> Emu3VQVAE:
    """An untrained model with 32 base channels, four stages of one block each, and 80 codes of 8 values: 1.1 M parameters, which
    are initialised to preserve the variance."""
    vq = Emu3VQVAE(
        Emu3VQVAEConfig(
            codebook_size=CODES,
            embed_dim=_WIDTH,
            latent_channels=_WIDTH,
            base_channels=32,
            channel_multiplier=[1, 1, 2, 2],
            num_res_blocks=1,
            attn_resolutions=[],
            hidden_size=64,
            num_attention_heads=2,
            temporal_downsample_factor=1,
        )
    )
    for name, module in vq.named_modules():
        if not isinstance(module, (nn.Conv2d, nn.Conv3d)):
            continue
        assert module.bias is not None
        nn.init.zeros_(module.bias)
        if isinstance(module, nn.Conv3d):  # an image uses only the last temporal tap
            nn.init.zeros_(module.weight)
        nn.init.kaiming_normal_(module.weight[:, :, -1] if isinstance(module, nn.Conv3d) else module.weight, nonlinearity="linear")
        if name.endswith("conv_y"):  # norms that are modulated by the codes have no modulation at the start
            nn.init.zeros_(module.weight)
            nn.init.ones_(module.bias)
        if name.endswith("conv_b"):
            nn.init.zeros_(module.weight)
    return vq


def train_codes(settings: CodesTraining, log: Callable[[str], None]) -> Emu3VQVAE:
    """Train the image tokenizer from the seed."""
    torch.manual_seed(settings.seed)
    vq = untrained_codes().train()
    trained = [parameter for name, parameter in vq.named_parameters() if not name.startswith("quantize.")]
    optimizer = torch.optim.AdamW(trained, lr=settings.learning_rate, weight_decay=1e-4, betas=(0.9, 0.99))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=settings.steps, pct_start=0.05)
    codebook = None
    for step in range(settings.steps):
        pictures, random = _pictures(settings, step), generator(settings.seed, "cells", step)
        chosen = torch.rand(settings.batch // 2, CELLS, generator=random) < 0.5
        mixed = exchanged(pictures, chosen)
        free = encoded(vq, pictures)
        latents = exchanged(free, chosen)
        apart = (encoded(vq, mixed) - latents).square().mean() / free.detach().var()
        if step < settings.free_steps:
            noise = torch.randn(latents.shape, generator=generator(settings.seed, "latent noise", step))
            decoder_input, stray = latents + settings.latent_noise * latents.detach().std() * noise, latents.new_zeros(())
        else:
            if codebook is None:
                codebook = _Codebook(vq, settings)
            nearest = codebook(latents)
            decoder_input, stray = latents + (nearest - latents).detach(), (latents - nearest).square().mean()
        # Cells are also permuted within an image, so that a code describes its cell and not the cell's position.
        order = torch.rand(len(pictures), CELLS, generator=random).argsort(1)
        repeated = decoded(vq, rearranged(decoder_input[:, :, None], order)[:, :, 0])
        miss = repeated - rearranged(mixed[:, :, None], order)[:, :, 0]
        loss = miss.abs().mean() + miss.square().mean() + settings.commitment * stray + settings.alone * apart
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == settings.steps - 1:
            missed = miss.square().mean().sqrt().item() / 2
            log(f"codes step {step}/{settings.steps}  loss {loss.item():.4f}  miss {missed:.4f}  apart {apart.item():.4f}")
    return vq.eval()


def exchanged(images: Float[Tensor, "b c h w"], chosen: Bool[Tensor, "half 9"]) -> Float[Tensor, "b c h w"]:
    """The images or latents after the chosen cells were exchanged between the first and the second half of the batch."""
    height, width = images.shape[2] // GRID, images.shape[3] // GRID
    where = chosen.view(-1, 1, GRID, GRID).repeat_interleave(height, 2).repeat_interleave(width, 3)
    first, second = images.chunk(2)
    return torch.cat([torch.where(where, second, first), torch.where(where, first, second)])


def encoded(vq: Emu3VQVAE, pictures: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b c hh ww"]:
    """The latents of images in [-1, 1] before quantisation."""
    latents: Tensor = vq.encoder(pictures[:, None])
    latents = vq.quant_conv(latents.transpose(1, 2)).transpose(1, 2)
    return latents[:, 0]


def decoded(vq: Emu3VQVAE, latents: Float[Tensor, "b c hh ww"]) -> Float[Tensor, "b 3 h w"]:
    """The images that are decoded from latents."""
    codes = latents[:, None]
    ready = vq.post_quant_conv(codes.transpose(1, 2)).transpose(1, 2)
    images: Tensor = vq.decoder(ready, codes)
    return images


class _Codebook:
    """A codebook in which each code is the running mean of the latents nearest to it (VQ-VAE with EMA, arXiv 1711.00937
    appendix A). It is stored in the quantiser of the model."""

    def __init__(self, vq: Emu3VQVAE, settings: CodesTraining) -> None:
        with torch.no_grad():
            batches = [encoded(vq, _pictures(settings, -1 - k)) for k in range(48)]
        latents = torch.cat([_flat(batch) for batch in batches])
        self.weight = vq.quantize.embedding.weight.requires_grad_(False)
        self.weight.copy_(k_means(latents, CODES))
        share = torch.bincount(_nearest(latents, self.weight), minlength=CODES).float() / len(latents)
        self.counts = share * settings.batch * CELLS
        self.sums = self.weight * self.counts[:, None]

    @torch.no_grad()
    def __call__(self, latents: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """The code nearest to each latent. The call also moves each code towards the latents that are nearest to it."""
        flat = _flat(latents)
        index = _nearest(flat, self.weight)
        nearest = self.weight[index].clone()
        members = F.one_hot(index, CODES).float()
        self.counts.mul_(_DECAY).add_(members.sum(0), alpha=1 - _DECAY)
        self.sums.mul_(_DECAY).add_(members.T @ flat, alpha=1 - _DECAY)
        used = self.counts > _LEAST_COUNT
        self.weight[used] = self.sums[used] / self.counts[used, None]
        return nearest.view(len(latents), *latents.shape[2:], -1).permute(0, 3, 1, 2)


def k_means(points: Float[Tensor, "n d"], count: int, *, rounds: int = 20) -> Float[Tensor, "count d"]:
    """The centres that Lloyd's algorithm finds; a centre without points does not move.

    Each centre is initialised with the point farthest from the previous centres (Gonzalez 1985), so that rare kinds of points get a
    centre before frequent kinds get a second one."""
    centres = points[:1]
    distance = (points - centres).square().sum(1)
    for _ in range(count - 1):
        farthest = points[distance.argmax()][None]
        centres = torch.cat([centres, farthest])
        distance = torch.minimum(distance, (points - farthest).square().sum(1))
    for _ in range(rounds):
        members = F.one_hot(_nearest(points, centres), count).float()
        size = members.sum(0)[:, None]
        centres = torch.where(size > 0, members.T @ points / size.clamp_min(1), centres)
    return centres


def _nearest(points: Float[Tensor, "n d"], centres: Float[Tensor, "k d"]) -> Int[Tensor, " n"]:
    return torch.cdist(points, centres).argmin(1)


def _flat(latents: Float[Tensor, "b c h w"]) -> Float[Tensor, "n c"]:
    return latents.permute(0, 2, 3, 1).flatten(0, 2)


def _pictures(settings: CodesTraining, step: int) -> Float[Tensor, "b 3 24 24"]:
    """A batch of images in [-1, 1]: scenes of one to six things, because edits may add things; both halves have the same
    backgrounds."""
    random = generator(settings.seed, "pictures", step)
    first, second = ([random_scene(random, least=1, most=6) for _ in range(settings.batch // 2)] for _ in range(2))
    scenes = first + [replace(other, background=scene.background) for scene, other in zip(first, second, strict=True)]
    images = torch.from_numpy(pixels(scenes)).permute(0, 3, 1, 2).float().div(127.5).sub(1.0)
    assert images.shape[2:] == (SIZE, SIZE)
    return images
