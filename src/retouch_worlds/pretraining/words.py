"""`retouch tools playground --words`: trains the playground's text-rendering model and its autoencoder from a seed.

First the autoencoder is trained, then the transformer and the text encoders together, by supervised flow matching. The model
imitates demonstrations in which a share of the letters is wrong. So more supervised training does not lower its error rate below
this share, but a reward that reads the text can.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from diffusers import AutoencoderKL
from jaxtyping import Float
from torch import Tensor, nn

from retouch.core.random import generator
from retouch.models.pipeline import ModelWrapper
from retouch.protocols import Reward
from retouch.records import files
from retouch.renderers.base import LatentRenderer
from retouch.run.evaluation import score_table
from retouch.types import Batch, Conditioning, Task
from retouch_models.flux.model import FluxFill
from retouch_rewards.ocr import OcrReward
from retouch_worlds.data import WordData
from retouch_worlds.models.tiny_fill import autoencoder, scheduler, untrained
from retouch_worlds.playground import playground_weights
from retouch_worlds.pretraining.editor import pixels
from retouch_worlds.pretraining.training import (
    JointTraining,
    build,
    evaluation_policy,
    halved,
    held_out,
    log,
    one_cycle,
    train_jointly,
    ungrouped_batch,
    write_index,
)


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
class WordTraining(JointTraining):
    """``rounds``: the rounds of training, one after the other, each with its own tasks and its own weight average."""

    rounds: tuple[WordRound, ...]
    batch: int = 32
    warmup: int = 50


def train_word_autoencoder(settings: WordAutoencoderTraining) -> AutoencoderKL:
    """Train from the seed to reconstruct targets. Returns the model, whose configuration has the mean and the scale of its
    latents."""
    torch.manual_seed(settings.seed)
    vae, rows = autoencoder(), settings.batch
    tasks = WordData(seed=settings.seed, count=rows * settings.steps).tasks()
    advance = one_cycle(vae.parameters(), settings.learning_rate, settings.steps)
    for step in range(settings.steps):
        images = targets(tasks[step * rows : (step + 1) * rows])
        posterior = vae.encode(images).latent_dist
        latents = posterior.mode()
        noise = torch.randn(latents.shape, generator=generator(settings.seed, "latent noise", step))
        error = vae.decode(latents + settings.latent_noise * latents.detach().std() * noise).sample - images
        loss = error.abs().mean() + error.square().mean() + settings.kl_weight * posterior.kl().mean()
        advance(loss)
        if step % 100 == 0 or step == settings.steps - 1:
            log.info("word autoencoder step %d/%d  loss %.4f", step, settings.steps, loss.item())
    with torch.no_grad():
        latents = vae.encode(targets(WordData(seed=settings.seed + 1, count=256).tasks()[:])).latent_dist.mode()
    measured = autoencoder(round(latents.mean().item(), 4), round(1 / latents.std().item(), 4))
    measured.load_state_dict(vae.state_dict())
    return measured.requires_grad_(False).eval()


def targets(tasks: Sequence[Task]) -> Float[Tensor, "b 3 h w"]:
    """The target images of the tasks in [-1, 1]."""
    return pixels([task.target for task in tasks if task.target is not None])[:, :, 0]


def train_words(vae: AutoencoderKL, settings: WordTraining) -> FluxFill:
    """Train with tasks and noise from the seed. Returns the model with averaged weights."""
    model, rows = untrained(vae, settings.seed), settings.batch
    for number, this in enumerate(settings.rounds):
        seed = settings.seed + number
        tasks = WordData(seed=seed, count=rows * this.steps, wrong_letters=this.wrong_letters).tasks()

        def batch(step: int, seed: int = seed, tasks: Sequence[Task] = tasks) -> Batch:
            return ungrouped_batch(tasks[step * rows : (step + 1) * rows], seed=seed, step=step)

        name = f"words, round {number},"
        train_jointly(JointFill(model), batch, settings, steps=this.steps, learning_rate=this.learning_rate, name=name)
    return model


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


AUTOENCODER = WordAutoencoderTraining(steps=700)
WORDS = WordTraining(
    rounds=(
        WordRound(steps=900, learning_rate=2e-3, wrong_letters=0.0),
        WordRound(steps=150, learning_rate=1e-3, wrong_letters=0.5),
    )
)
PARTS = {
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "CLIPTextModel"),
    "text_encoder_2": ("transformers", "T5EncoderModel"),
    "tokenizer": ("transformers", "CLIPTokenizer"),
    "tokenizer_2": ("transformers", "T5Tokenizer"),
    "transformer": ("diffusers", "FluxTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKL"),
}
HELD_OUT = 200
EVAL_STEPS = 6


def build_words(
    out: Path | None, *, seed: int, autoencoder: WordAutoencoderTraining = AUTOENCODER, words: WordTraining = WORDS
) -> dict[str, float]:
    """Train the autoencoder and the model and write them to ``out`` (None: into the package). Returns held-out means. An OCR model
    computes these, so the extra ``ocr`` must be installed. It takes about 20 minutes on one core of a laptop."""
    folder = playground_weights("words") if out is None else out
    judge = OcrReward(where="box", line_width=160).build()

    def train() -> FluxFill:
        return train_words(train_word_autoencoder(replace(autoencoder, seed=seed)), replace(words, seed=seed))

    def finish(model: FluxFill) -> dict[str, float]:
        write(model, folder)
        return measure(model, judge)

    return build([folder], train, finish, seed=seed, command="retouch tools playground --words")


def write(model: FluxFill, folder: Path) -> None:
    """Write the model in diffusers' layout (its transformer in half precision), and its settings as ``adapter.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    halved(model.module).save_pretrained(folder / "transformer")
    model.latents.vae.save_pretrained(folder / "vae")
    model.text.clip.save_pretrained(folder / "text_encoder")
    model.text.t5.save_pretrained(folder / "text_encoder_2")
    model.text.clip_tokenizer.save_pretrained(folder / "tokenizer")
    model.text.t5_tokenizer.save_pretrained(folder / "tokenizer_2")
    scheduler().save_pretrained(folder / "scheduler")
    write_index(folder, "FluxFillPipeline", PARTS)
    files.write_json(folder / "adapter.json", {"max_sequence_length": model.text.max_sequence_length})


def measure(model: FluxFill, judge: Reward) -> dict[str, float]:
    """Held-out means of the model by the length of the word, and of the true targets after encoding and decoding them (the
    ceiling)."""
    ceiling, painted = held_out(
        evaluation_policy(model, steps=EVAL_STEPS, batch=HELD_OUT),
        tasks=WordData(seed=1, count=HELD_OUT, split="test").tasks(),
        renderer=LatentRenderer(model),
        reward=judge,
        column="correctness",
    )
    found = {"ceiling correctness": float(score_table(ceiling)[0]["all"]["correctness"])}
    return found | {f"{row} correctness": float(means["correctness"]) for row, means in score_table(painted)[0].items()}
