"""The playground's base writer for its editor: Qwen2.5-VL's classes with few parameters, and the tokenizer of the editor.

It learns to read the image and to write the complete names of things, with the library's own supervised objective. Its
demonstrations are imperfect: for instructions with several edits, most completions are empty."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from retouch.models.qwen_image.model import QwenImageEdit
from retouch.models.qwen_image.responses import writer_for
from retouch_worlds.data.indirect import IndirectPlaygroundData
from retouch_worlds.pretraining.distillation import HiddenStateDistillation
from retouch_worlds.pretraining.networks.qwen_parts import INITIALIZER_RANGE, picture_tokens, seeded, text_config, vision_config
from retouch_worlds.pretraining.supervised import train_on_completions

LONGEST = 40


@dataclass(frozen=True)
class WriterRound:
    """One round of training. ``learning_rate``: the peak after the warm-up, from which the learning rate falls to 0 along a cosine.
    ``complexity``: the numbers of edits in an instruction; successive tasks take them in turn. ``distillation``: the weight of the
    distance between hidden states (``HiddenStateDistillation``)."""

    steps: int
    learning_rate: float
    complexity: tuple[int, ...]
    distillation: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WriterTraining:
    """``rounds``: the rounds of training, one after the other, each with its own tasks. ``incomplete``: as in ``indirect``.

    The writer learns to find things in the image suddenly, or not at all in the available time. So the first rounds train only
    this: single edits, without distillation."""

    rounds: tuple[WriterRound, ...]
    seed: int = 0
    batch: int = 32
    warmup: int = 50
    incomplete: float = 0.75


def untrained_writer(words: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained writer with four layers of full attention. It has the width of the editor's text encoder, so that the editor can
    read its hidden states."""
    config = Qwen2_5_VLConfig(
        text_config=text_config(words, layers=4, heads=4, inner=256),
        vision_config=vision_config(),
        tie_word_embeddings=False,
        initializer_range=INITIALIZER_RANGE,
        **picture_tokens(words),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def train_writer(editor: QwenImageEdit, settings: WriterTraining, log: Callable[[str], None]) -> Qwen2_5_VLForConditionalGeneration:
    """Train a writer for the editor from the seed."""
    seeded(settings.seed)
    module = untrained_writer(editor.text.tokenizer)
    for number in range(len(settings.rounds)):
        train_round(editor, module, settings, number, log)
    module.requires_grad_(False).eval()
    return module


def train_round(
    editor: QwenImageEdit,
    module: Qwen2_5_VLForConditionalGeneration,
    settings: WriterTraining,
    number: int,
    log: Callable[[str], None],
) -> None:
    """Train one of the rounds, with a new optimizer."""
    this, seed = settings.rounds[number], settings.seed + number
    count = settings.batch * this.steps
    data = IndirectPlaygroundData(seed=seed + 100, count=count, complexity=this.complexity, incomplete=settings.incomplete)
    train_on_completions(
        writer_for(editor, module),
        data.tasks(in_turn=True),
        rows=settings.batch,
        steps=this.steps,
        learning_rate=this.learning_rate,
        warmup=settings.warmup,
        longest=LONGEST,
        seed=seed,
        log=lambda line: log(f"writer round {number + 1}  {line}"),
        objective=HiddenStateDistillation(editor, module, weight=this.distillation) if this.distillation > 0 else None,
    )
