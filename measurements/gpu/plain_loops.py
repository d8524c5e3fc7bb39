"""A training step of Flow-GRPO on Stable Diffusion 3 in plain PyTorch, to which a step of this library is compared.

The settings are those of the recipe: a rollout with guidance and SDE noise, decoding, then the clipped loss with a KL to the model
without its adapter. ``Style.BARE`` makes the same model calls as the library, in bfloat16. ``Style.FLOW_GRPO`` computes like the
code of Flow-GRPO: adapters in fp32 under autocast with TF32, and one denoising step of all rows at a time in the update.

Source: Flow-GRPO (Liu et al. 2025, arXiv 2505.05470).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor


class Style(Enum):
    """Whether a plain loop computes like this library (``BARE``) or like the code of Flow-GRPO."""

    BARE = "bare"
    FLOW_GRPO = "flow-grpo"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a step.

    ``rows``: images of one prompt. ``latent``: (channels, height, width). ``sigmas``: (steps + 1,), from 1 to 0.
    """

    rows: int
    latent: tuple[int, int, int]
    sigmas: Tensor
    guidance_scale: float
    noise_level: float
    clip: float
    kl_weight: float
    learning_rate: float


class PlainLoop:
    """A plain training loop. ``embed`` encodes texts as (tokens, pooled). Only the adapters of ``transformer`` are trained."""

    def __init__(
        self, transformer: Any, vae: Any, embed: Callable[[list[str]], tuple[Tensor, Tensor]], settings: Settings, style: Style
    ) -> None:
        self.transformer, self.vae, self.embed, self.settings, self.style = transformer, vae, embed, settings, style
        self.trained = [weight for weight in transformer.parameters() if weight.requires_grad]
        if style is Style.FLOW_GRPO:
            for weight in self.trained:
                weight.data = weight.data.float()
        self.device = self.trained[0].device
        self.dtype = next(weight.dtype for weight in transformer.parameters() if not weight.requires_grad)
        self.optimizer = torch.optim.AdamW(self.trained, lr=settings.learning_rate, weight_decay=1e-4)

    def step(self, prompt: str) -> Tensor:
        """Do a rollout, decode the images and update the weights. Returns the images (rows, 3, height, width) in CPU memory."""
        with torch.no_grad():
            tokens, pooled = self.embed([prompt, ""])
            self.text = [(tokens[k : k + 1].to(self.dtype), pooled[k : k + 1].to(self.dtype)) for k in (0, 1)]
            states, log_probs = self.rollout()
            images = self.decode(states[-1])
        rewards = images.float().mean(dim=(1, 2, 3))
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        self.update(states, log_probs, advantages.to(self.device))
        return images

    def rollout(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the states of all steps, and the log-probabilities of all steps except the last, which is deterministic."""
        settings, sigmas = self.settings, self.settings.sigmas
        states, log_probs = [torch.randn(settings.rows, *settings.latent, device=self.device)], []
        for k in range(len(sigmas) - 1):
            x = states[-1]
            velocity = self.velocity(x, sigmas[k].expand(len(x)))
            if k == len(sigmas) - 2:
                states.append(x + (sigmas[k + 1] - sigmas[k]) * velocity)
                break
            mean, std = self.transition(x, velocity, sigmas[k].expand(len(x)), sigmas[k + 1].expand(len(x)))
            states.append(mean + std * torch.randn_like(mean))
            log_probs.append(log_density(states[-1], mean, std))
        return states, log_probs

    def decode(self, latents: Tensor) -> Tensor:
        config = self.vae.config
        with self.autocast():
            pixels = self.vae.decode((latents / config.scaling_factor + config.shift_factor).to(self.vae.dtype)).sample
        return (pixels.float() / 2 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8).cpu()

    def update(self, states: list[Tensor], log_probs: list[Tensor], advantages: Tensor) -> None:
        """Make one pass over all transitions, and one optimizer step."""
        settings, actions, rows = self.settings, len(log_probs), self.settings.rows
        before, after = torch.stack(states[:actions], 1), torch.stack(states[1 : actions + 1], 1)
        old, sigmas = torch.stack(log_probs, 1), settings.sigmas
        every = torch.arange(actions, device=self.device)
        parts = [(slice(row, row + 1), every) for row in range(rows)]
        if self.style is Style.FLOW_GRPO:
            parts = [(slice(0, rows), every[action : action + 1]) for action in range(actions)]
        for chosen, index in parts:
            x, following = before[chosen, index].flatten(0, 1), after[chosen, index].flatten(0, 1)
            count = len(x) // len(index)
            sigma, sigma_next = sigmas[index].repeat(count), sigmas[index + 1].repeat(count)
            mean, std = self.transition(x, self.velocity(x, sigma), sigma, sigma_next)
            with torch.no_grad():
                self.transformer.disable_adapters()
                reference, _ = self.transition(x, self.velocity(x, sigma), sigma, sigma_next)
                self.transformer.enable_adapters()
            ratio = (log_density(following, mean, std) - old[chosen, index].flatten()).exp()
            advantage = advantages[chosen].repeat_interleave(len(index))
            clipped = ratio.clamp(1 - settings.clip, 1 + settings.clip)
            kl = ((mean - reference).square() / (2 * std.square())).mean(dim=(1, 2, 3))
            loss = (-torch.minimum(ratio * advantage, clipped * advantage) + settings.kl_weight * kl).sum() / (rows * actions)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def velocity(self, x: Tensor, sigma: Tensor) -> Tensor:
        """The guided velocity; one forward pass computes both branches of the guidance."""
        (tokens, pooled), (no_tokens, no_pooled) = self.text
        count = len(x)
        with self.autocast():
            both = self.transformer(
                hidden_states=torch.cat([x, x]).to(self.dtype),
                timestep=torch.cat([sigma, sigma]) * 1000,
                encoder_hidden_states=torch.cat([tokens.expand(count, -1, -1), no_tokens.expand(count, -1, -1)]),
                pooled_projections=torch.cat([pooled.expand(count, -1), no_pooled.expand(count, -1)]),
                return_dict=False,
            )[0]
        positive, negative = both.float().chunk(2)
        return negative + self.settings.guidance_scale * (positive - negative)

    def transition(self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor) -> tuple[Tensor, Tensor]:
        """The mean, and the standard deviation (r, 1, 1, 1), of the next state, by equation 9 of Flow-GRPO."""
        sigma, sigma_next = sigma.view(-1, 1, 1, 1), sigma_next.view(-1, 1, 1, 1)
        dt = sigma_next - sigma
        below_one = torch.where(sigma == 1, self.settings.sigmas[1], sigma)
        scale = self.settings.noise_level * (sigma / (1 - below_one)).sqrt()
        drift = scale.square() / (2 * sigma) * dt
        return x * (1 + drift) + velocity * (dt + drift * (1 - sigma)), scale * (-dt).sqrt()

    def autocast(self) -> AbstractContextManager[Any]:
        if self.style is Style.BARE:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


def log_density(following: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """The log-density of each row, averaged over the elements of the row."""
    density = -(following.detach() - mean).square() / (2 * std.square()) - std.log()
    return density.mean(dim=(1, 2, 3))
