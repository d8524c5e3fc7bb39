"""The playground's text-rendering model. First its autoencoder is trained, then its transformer and text encoders together, by
supervised flow matching.

The model imitates demonstrations in which a share of the letters is wrong. So more supervised training does not lower its error
rate below this share, but a reward that reads the text can.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from diffusers import AutoencoderKL
from jaxtyping import Float
from torch import Tensor, nn

from retouch.core.random import generator
from retouch.models.common.wrappers import ModelWrapper
from retouch.models.flux.model import FluxFill
from retouch.types import Batch, Conditioning, Task
from retouch_worlds.data.words import WordData
from retouch_worlds.models.flux_parts import autoencoder, untrained
from retouch_worlds.pretraining.joint_training import train_jointly
from retouch_worlds.pretraining.supervised import ungrouped_batch


@dataclass(frozen=True, kw_only=True)
class WordAutoencoderTraining:
    """``latent_noise``: noise on the latents in training, relative to their standard deviation, so that the decoder tolerates the
    errors of a denoiser."""

    steps: int
    seed: int = 0
    batch: int = 16
    learning_rate: float = 5e-3
    latent_noise: float = 0.1
    kl_weight: float = 1e-5


@dataclass(frozen=True, kw_only=True)
class WordRound:
    """One round of training. ``learning_rate``: the peak after the warm-up, from which the learning rate falls to 0 along a cosine.
    ``wrong_letters``: as in ``WordData``."""

    steps: int
    learning_rate: float
    wrong_letters: float


@dataclass(frozen=True, kw_only=True)
class WordTraining:
    """``rounds``: the rounds of training, one after the other, each with its own tasks and its own weight average."""

    rounds: tuple[WordRound, ...]
    seed: int = 0
    batch: int = 32
    warmup: int = 50
    average_decay: float = 0.997
    shift: float = 3.0


def train_word_autoencoder(settings: WordAutoencoderTraining, log: Callable[[str], None]) -> AutoencoderKL:
    """Train from the seed to reconstruct targets. Returns the model, whose configuration has the mean and the scale of its
    latents."""
    torch.manual_seed(settings.seed)
    vae, rows = autoencoder(), settings.batch
    tasks = WordData(seed=settings.seed, count=rows * settings.steps).tasks()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=settings.learning_rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=settings.steps, pct_start=0.05)
    for step in range(settings.steps):
        images = targets(tasks[step * rows : (step + 1) * rows])
        posterior = vae.encode(images).latent_dist
        latents = posterior.mode()
        noise = torch.randn(latents.shape, generator=generator(settings.seed, "latent noise", step))
        error = vae.decode(latents + settings.latent_noise * latents.detach().std() * noise).sample - images
        loss = error.abs().mean() + error.square().mean() + settings.kl_weight * posterior.kl().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0 or step == settings.steps - 1:
            log(f"word autoencoder step {step}/{settings.steps}  loss {loss.item():.4f}")
    with torch.no_grad():
        latents = vae.encode(targets(WordData(seed=settings.seed + 1, count=256).tasks()[:])).latent_dist.mode()
    measured = autoencoder(round(latents.mean().item(), 4), round(1 / latents.std().item(), 4))
    measured.load_state_dict(vae.state_dict())
    return measured.requires_grad_(False).eval()


def targets(tasks: Sequence[Task]) -> Float[Tensor, "b 3 h w"]:
    """The target images of the tasks in [-1, 1]."""
    images = [task.target for task in tasks if task.target is not None]
    return torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2).float().div(127.5).sub(1.0)


def train_words(vae: AutoencoderKL, settings: WordTraining, log: Callable[[str], None]) -> FluxFill:
    """Train with tasks and noise from the seed. Returns the model with averaged weights."""
    model = untrained(vae, settings.seed)
    for number in range(len(settings.rounds)):
        train_round(model, settings, number, log)
    return model


def train_round(model: FluxFill, settings: WordTraining, number: int, log: Callable[[str], None]) -> None:
    """Train the model in one of the rounds, in place."""
    this, rows = settings.rounds[number], settings.batch
    seed = settings.seed + number
    tasks = WordData(seed=seed, count=rows * this.steps, wrong_letters=this.wrong_letters).tasks()

    def batch(step: int) -> Batch:
        return ungrouped_batch(tasks[step * rows : (step + 1) * rows], seed=seed, step=step)

    train_jointly(
        JointFill(model),
        batch,
        rows=rows,
        steps=this.steps,
        learning_rate=this.learning_rate,
        warmup=settings.warmup,
        shift=settings.shift,
        average_decay=settings.average_decay,
        log=lambda line: log(f"words, round {number}, {line}"),
    )


class JointFill(ModelWrapper[FluxFill]):
    """A FluxFill whose text encoders are trained together with the transformer.

    Its conditioning contains the inputs of the text encoders; ``velocity`` embeds them, with gradient.
    """

    def __init__(self, model: FluxFill) -> None:
        super().__init__(model)
        self.module = nn.ModuleDict({"transformer": model.module, "clip": model.text.clip, "t5": model.text.t5})

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        clip_ids, t5_ids = self.model.text.tokenise([task.instruction for task in tasks])
        encoded = self.model.encode(tasks)
        return Conditioning({"clip_ids": clip_ids, "t5_ids": t5_ids, "source": encoded.tensors["source"]}, shared=encoded.shared)

    def velocity(self, module: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Float[Tensor, "r s d"]:
        tensors = conditioning.tensors
        embeds, pooled = self.model.text.read(tensors["clip_ids"], tensors["t5_ids"])
        known = Conditioning({"embeds": embeds, "pooled": pooled, "source": tensors["source"]}, shared=conditioning.shared)
        return self.model.velocity(module.get_submodule("transformer"), x, sigma, known)

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        raise NotImplementedError("supervised training uses no guidance")
