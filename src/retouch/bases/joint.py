"""Training an image model of the Qwen-Image family together with its text encoder, through the project's own loop and objective.

Only the model differs from a run's, in that its text encoder is part of what trains. What comes out is the running average.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from retouch.loop import Phase, Run, train
from retouch.models.around import Around
from retouch.models.qwen_flow import Prepared
from retouch.models.qwen_image import QwenImage
from retouch.models.qwen_image_edit import QwenImageEdit
from retouch.objectives.supervised import Supervised
from retouch.policies.denoising import DenoisingPolicy, Sampling
from retouch.policies.weights import WeightCopies
from retouch.policies.windows import Window
from retouch.renderers.latents import LatentRenderer
from retouch.runs.clock import Clock
from retouch.runs.ranks import Ranks
from retouch.runs.stepper import ReplicatedStepper
from retouch.types import Batch, Conditioning, DenoisingModel, Task

NO_INSTRUCTION = " "


class JointModel(Around[QwenImage | QwenImageEdit]):
    """A Qwen-Image or Qwen-Image-Edit whose text encoder trains with the transformer.

    Its conditioning is what the text encoder reads, and the velocity embeds it on the way, with gradient.
    """

    def __init__(self, model: QwenImage | QwenImageEdit) -> None:
        super().__init__(model)
        self.module = nn.ModuleDict({"transformer": model.module, "text_encoder": model.text.encoder})

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        prepared = self.model.prepare(tasks)
        tensors = dict(prepared.tokens)
        if prepared.source is not None:
            tensors["pixel_values"] = tensors["pixel_values"].unflatten(0, (len(tasks), -1))
            tensors["source"] = prepared.source
        return Conditioning(tensors, frozenset({"input_ids", "attention_mask"}), prepared.shared)

    def velocity(self, module: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Float[Tensor, "r s d"]:
        tokens = dict(conditioning.tensors)
        source = tokens.pop("source", None)
        if source is not None:
            tokens["pixel_values"] = tokens["pixel_values"].flatten(0, 1)
        embedded = self.model.embed(Prepared(tokens, source, conditioning.shared))
        return self.model.velocity(module.get_submodule("transformer"), x, sigma, embedded)

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        return self.encode([replace(task, instruction=NO_INSTRUCTION) for task in tasks])


def train_jointly(
    joint: DenoisingModel,
    batch: Callable[[int], Batch],
    *,
    rows: int,
    steps: int,
    learning_rate: float,
    warmup: int,
    shift: float,
    average_decay: float,
    log: Callable[[str], None],
) -> None:
    """Train on ``steps`` batches of ``rows`` tasks; what it leaves is what a folder holds (the transformer is as exact as half
    precision is), so that training can go on from there.

    ``joint``: a model whose module has the ``transformer`` and what else trains, as ``JointModel`` makes it.
    ``learning_rate``: the peak, after ``warmup`` steps; from there it falls to 0 as a cosine. ``log`` takes the lines.
    """
    joint.module.requires_grad_(True)
    copies = WeightCopies(joint.module)
    copies.keep("average")
    sampling = Sampling(num_steps=1, kind="ode", noise_level=0.0, reduction="mean", window=Window())
    run = Run(
        policy=DenoisingPolicy(joint, sampling=sampling, eval_steps=1, microbatch=rows, copies=copies),
        renderer=LatentRenderer(joint),
        judge=_no_judge,
        stepper=ReplicatedStepper(joint.module, Ranks(), betas=(0.9, 0.99), weight_decay=0.01),
        ranks=Ranks(),
        chunk=rows,
        max_missing=0.0,
        average=lambda taken: copies.blend("average", min((1 + taken) / (10 + taken), average_decay)),
        clock=Clock(),
    )
    phase = Phase(
        name="supervised",
        steps=range(steps),
        objective=Supervised(sigma_sampling="uniform", shift=shift),
        batch=batch,
        order=torch.arange(rows),
        group=torch.arange(rows),
        advantage=None,
        normalise="sequence",
        max_length=None,
        epochs=1,
        minibatches=1,
        learning_rate=lambda step: cosine(learning_rate, step, warmup=warmup, steps=steps),
    )
    for step, _, metrics in train(run, phase, start=0):
        if step % 50 == 0 or step == steps - 1:
            log(f"step {step}/{steps}  loss {metrics['policy/loss']:.4f}")
    with torch.no_grad():
        for name, parameter in copies.parameters.items():
            average = copies.copies["average"][name]
            parameter.copy_(average.half() if name.startswith("transformer.") else average)
    joint.module.requires_grad_(False).eval()


def each_alone(tasks: Sequence[Task], *, seed: int, step: int) -> Batch:
    """A batch of tasks that are not compared with one another."""
    ids = tuple(range(len(tasks)))
    return Batch(seed=seed, step=step, tasks=tuple(tasks), group_ids=ids, group=ids, slot=(0,) * len(tasks))


def with_blanks(tasks: Sequence[Task], share: float, random: torch.Generator) -> list[Task]:
    """The tasks, of which a share is asked for nothing: what guidance compares with."""
    blank = torch.rand(len(tasks), generator=random) < share
    return [replace(task, instruction=NO_INSTRUCTION) if empty else task for task, empty in zip(tasks, blank, strict=True)]


def cosine(peak: float, step: int, *, warmup: int, steps: int) -> float:
    """Up to the peak in ``warmup`` steps, and from there down to 0."""
    return peak * min(1.0, (step + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * step / steps))


def _no_judge(batch: Batch, samples: Sequence[Any]) -> Any:
    raise AssertionError("imitation asks no judge")
