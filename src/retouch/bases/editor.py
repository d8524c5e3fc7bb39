"""The playground's base editor: transformer and text encoder trained together by supervised flow matching on single edits.

It runs through the project's own loop and objective; only the model differs from a run's, in that its text encoder is part of
what trains. The shipped weights are the running average.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn

from retouch.bases import parts
from retouch.core.random import generator
from retouch.loop import Phase, Run, train
from retouch.models.qwen_flow import Prepared
from retouch.models.qwen_image_edit import QwenImageEdit
from retouch.objectives.supervised import Supervised
from retouch.playground.tasks import PlaygroundTasks
from retouch.policies.denoising import DenoisingPolicy, Sampling
from retouch.policies.weights import WeightCopies
from retouch.policies.windows import Window
from retouch.renderers.latents import LatentRenderer
from retouch.runs.clock import Clock
from retouch.runs.ranks import Ranks
from retouch.runs.stepper import ReplicatedStepper
from retouch.types import Batch, Conditioning, Task

NO_INSTRUCTION = " "


@dataclass(frozen=True, kw_only=True)
class Round:
    """``learning_rate``: the peak, after the warm-up; from there it falls to 0 as a cosine. ``vain``: see ``PlaygroundTasks``."""

    steps: int
    learning_rate: float
    vain: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EditorTraining:
    """``rounds``, one after the other, each with tasks and an average of its own.

    ``unconditional``: the share of tasks whose instruction is blank, which guidance needs.
    ``filler``: the share of batches whose instructions hold more than the edit, so that later positions in a text are met, and
    clauses that must be told apart.
    """

    rounds: tuple[Round, ...]
    seed: int = 0
    batch: int = 64
    warmup: int = 100
    average_decay: float = 0.997
    unconditional: float = 0.05
    filler: float = 0.5
    shift: float = 3.0


class JointModel:
    """A Qwen-Image-Edit whose text encoder trains with the transformer (implements ``retouch.types.DenoisingModel``).

    Its conditioning is what the text encoder reads, and the velocity embeds it on the way, with gradient.
    """

    def __init__(self, model: QwenImageEdit) -> None:
        self.model = model
        self.module: nn.Module = nn.ModuleDict({"transformer": model.module, "text_encoder": model.text.encoder})

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        prepared = self.model.prepare(tasks)
        tokens = dict(prepared.tokens)
        tokens["pixel_values"] = tokens["pixel_values"].unflatten(0, (len(tasks), -1))
        assert prepared.source is not None
        return Conditioning({**tokens, "source": prepared.source}, frozenset({"input_ids", "attention_mask"}), prepared.shared)

    def velocity(self, module: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Float[Tensor, "r s d"]:
        tokens = dict(conditioning.tensors)
        source = tokens.pop("source")
        tokens["pixel_values"] = tokens["pixel_values"].flatten(0, 1)
        embedded = self.model.embed(Prepared(tokens, source, conditioning.shared))
        return self.model.velocity(module.get_submodule("transformer"), x, sigma, embedded)

    def encode_images(self, images: Sequence[Image]) -> Float[Tensor, "r s d"]:
        return self.model.encode_images(images)

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        return self.encode([replace(task, instruction=NO_INSTRUCTION) for task in tasks])

    def combine(self, positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        return self.model.combine(positive, negative, guidance_scale)

    def initial_noise(self, conditioning: Conditioning, generators: Sequence[torch.Generator]) -> Float[Tensor, "r s d"]:
        return self.model.initial_noise(conditioning, generators)

    def sigmas(self, num_steps: int, conditioning: Conditioning) -> Float[Tensor, " num_steps_plus_1"]:
        return self.model.sigmas(num_steps, conditioning)

    def decode(self, x: Float[Tensor, "r s d"], conditioning: Conditioning) -> list[Image]:
        return self.model.decode(x, conditioning)


def untrained(vae: AutoencoderKLQwenImage, seed: int) -> QwenImageEdit:
    """The editor before training, its weights drawn from the seed."""
    parts.seeded(seed)
    words = parts.tokenizer(seed)
    return QwenImageEdit(
        transformer=parts.transformer(),
        vae=vae,
        text_encoder=parts.text_encoder(words),
        tokenizer=words,
        image_processor=parts.image_processor(),
        scheduler_config=dict(parts.scheduler().config),
        template=parts.TEMPLATE,
        condition_area="as_is",
        source_area="as_is",
    )


def train_editor(vae: AutoencoderKLQwenImage, settings: EditorTraining, log: Callable[[str], None]) -> QwenImageEdit:
    """Train from the seed; the editor comes back with its averaged weights, the transformer's as exact as half precision is."""
    model = untrained(vae, settings.seed)
    for number in range(len(settings.rounds)):
        train_round(model, settings, number, log)
    return model


def train_round(model: QwenImageEdit, settings: EditorTraining, number: int, log: Callable[[str], None]) -> None:
    """Train one of the rounds; what it leaves is what a folder holds, so a round can go on from there."""
    joint = JointModel(model)
    joint.module.requires_grad_(True)
    steps = settings.rounds[number].steps
    copies = WeightCopies(joint.module)
    copies.keep("average")
    sampling = Sampling(num_steps=1, kind="ode", noise_level=0.0, reduction="mean", window=Window())
    policy = DenoisingPolicy(joint, sampling=sampling, eval_steps=1, microbatch=settings.batch, copies=copies)
    clock = Clock()
    run = Run(
        policy=policy,
        renderer=LatentRenderer(joint),
        judge=_no_judge,
        stepper=ReplicatedStepper(joint.module, Ranks(), betas=(0.9, 0.99), weight_decay=0.01),
        ranks=Ranks(),
        chunk=settings.batch,
        max_missing=0.0,
        average=lambda taken: copies.blend("average", min((1 + taken) / (10 + taken), settings.average_decay)),
        clock=clock,
    )
    for step, _, metrics in train(run, _phase(settings, number), start=0):
        if step % 50 == 0 or step == steps - 1:
            log(f"editor round {number + 1}  step {step}/{steps}  loss {metrics['policy/loss']:.4f}")
    with torch.no_grad():
        for name, parameter in copies.parameters.items():
            average = copies.copies["average"][name]
            parameter.copy_(average.half() if name.startswith("transformer.") else average)
    joint.module.requires_grad_(False).eval()


def _phase(settings: EditorTraining, number: int) -> Phase:
    seed, this = settings.seed + number, settings.rounds[number]
    plain, filled = (
        PlaygroundTasks(seed=seed, count=settings.batch * this.steps, complexity=[1], split="train", filler=filler, vain=this.vain)
        for filler in (0.0, 1.0)
    )

    def batch(step: int) -> Batch:
        tasks = filled if torch.rand((), generator=generator(seed, "filler", step)) < settings.filler else plain
        rows = [tasks[index] for index in range(step * settings.batch, (step + 1) * settings.batch)]
        blank = torch.rand(len(rows), generator=generator(seed, "unconditional", step)) < settings.unconditional
        rows = [replace(row, instruction=NO_INSTRUCTION) if empty else row for row, empty in zip(rows, blank, strict=True)]
        ids = tuple(range(settings.batch))
        return Batch(seed=seed, step=step, tasks=tuple(rows), group_ids=ids, group=ids, slot=(0,) * settings.batch)

    def learning_rate(step: int) -> float:
        rising = min(1.0, (step + 1) / settings.warmup)
        return this.learning_rate * rising * 0.5 * (1 + math.cos(math.pi * step / this.steps))

    return Phase(
        name="supervised",
        steps=range(this.steps),
        objective=Supervised(sigma_sampling="uniform", shift=settings.shift),
        batch=batch,
        order=torch.arange(settings.batch),
        group=torch.arange(settings.batch),
        advantage=None,
        normalise="sequence",
        max_length=None,
        epochs=1,
        minibatches=1,
        learning_rate=learning_rate,
    )


def _no_judge(batch: Batch, samples: Sequence[Any]) -> Any:
    raise AssertionError("imitation asks no judge")
