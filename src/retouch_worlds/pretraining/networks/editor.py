"""The playground's base editor: its transformer and text encoder are trained together by supervised flow matching on single edits.

See ``retouch_worlds.pretraining.joint_training``; the packaged weights are the running average.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from torch import nn

from retouch.core.random import generator
from retouch.models.qwen_image.model import QwenImageEdit
from retouch.types import Batch
from retouch_worlds.data.tasks import PlaygroundData
from retouch_worlds.pretraining.joint_training import JointModel, train_jointly, with_blank_instructions
from retouch_worlds.pretraining.networks import qwen_parts
from retouch_worlds.pretraining.supervised import ungrouped_batch

_BLOCKS = "transformer_blocks."


@dataclass(frozen=True, kw_only=True)
class EditorRound:
    """One round of training. ``learning_rate``: the peak after the warm-up, from which the learning rate falls to 0 along a cosine.
    ``impossible``: as in ``PlaygroundData``."""

    steps: int
    learning_rate: float
    impossible: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EditorTraining:
    """``rounds``: the rounds of training, one after the other, each with its own tasks and its own weight average.

    ``unconditional``: the share of the tasks with a blank instruction, which guidance needs. ``filler``: the share of the batches
    whose instructions contain filler, so that the model learns the later positions in a text and learns to separate clauses."""

    rounds: tuple[EditorRound, ...]
    seed: int = 0
    batch: int = 64
    warmup: int = 100
    average_decay: float = 0.997
    unconditional: float = 0.05
    filler: float = 0.5
    shift: float = 3.0


def untrained(vae: AutoencoderKLQwenImage, seed: int) -> QwenImageEdit:
    """The editor before training, with initial weights from the seed."""
    qwen_parts.seeded(seed)
    words = qwen_parts.tokenizer(seed)
    return _assembled(transformer=qwen_parts.transformer(), vae=vae, text_encoder=qwen_parts.text_encoder(words), tokenizer=words)


def _assembled(**parts: Any) -> QwenImageEdit:
    return QwenImageEdit(
        **parts,
        image_processor=qwen_parts.image_processor(),
        scheduler_config=dict(qwen_parts.scheduler().config),
        template=qwen_parts.TEMPLATE,
        condition_area="as_is",
        source_area="as_is",
    )


def deepened(model: QwenImageEdit, factor: int, seed: int) -> QwenImageEdit:
    """The editor with ``factor`` times as many blocks, whose output is still the same.

    Each block is followed by new blocks, which add nothing before they are trained, because their modulation is 0 (adaLN-Zero,
    Peebles and Xie 2023, arXiv 2212.09748).
    """
    qwen_parts.seeded(seed)
    old: Any = model.module
    new = qwen_parts.transformer(factor * len(old.transformer_blocks))
    new.load_state_dict({name: value for name, value in old.state_dict().items() if not name.startswith(_BLOCKS)}, strict=False)
    for number, block in enumerate(new.transformer_blocks):
        if number % factor == 0:
            block.load_state_dict(old.transformer_blocks[number // factor].state_dict())
            continue
        for modulation in (block.img_mod[-1], block.txt_mod[-1]):
            nn.init.zeros_(modulation.weight)
            nn.init.zeros_(modulation.bias)
    return _assembled(transformer=new, vae=model.latents.vae, text_encoder=model.text.encoder, tokenizer=model.text.tokenizer)


def train_editor(vae: AutoencoderKLQwenImage, settings: EditorTraining, log: Callable[[str], None]) -> QwenImageEdit:
    """Train from the seed. Returns the editor with averaged weights; those of the transformer are rounded to half precision."""
    model = untrained(vae, settings.seed)
    train_rounds(model, settings, log)
    return model


def train_rounds(model: QwenImageEdit, settings: EditorTraining, log: Callable[[str], None]) -> None:
    """Train all rounds, one after the other."""
    for number in range(len(settings.rounds)):
        train_round(model, settings, number, log)


def train_round(model: QwenImageEdit, settings: EditorTraining, number: int, log: Callable[[str], None]) -> None:
    """Train one of the rounds. The final weights equal the weights that are saved to a folder, so the next round can start from a
    folder."""
    seed, this = settings.seed + number, settings.rounds[number]
    plain, filled = (
        PlaygroundData(
            seed=seed, count=settings.batch * this.steps, complexity=[1], filler=filler, impossible=this.impossible
        ).tasks(in_turn=True)
        for filler in (0.0, 1.0)
    )

    def batch(step: int) -> Batch:
        tasks = filled if torch.rand((), generator=generator(seed, "filler", step)) < settings.filler else plain
        rows = tasks[step * settings.batch : (step + 1) * settings.batch]
        return ungrouped_batch(
            with_blank_instructions(rows, settings.unconditional, generator(seed, "unconditional", step)), seed=seed, step=step
        )

    train_jointly(
        JointModel(model),
        batch,
        rows=settings.batch,
        steps=this.steps,
        learning_rate=this.learning_rate,
        warmup=settings.warmup,
        shift=settings.shift,
        average_decay=settings.average_decay,
        log=lambda line: log(f"editor round {number + 1}  {line}"),
    )
