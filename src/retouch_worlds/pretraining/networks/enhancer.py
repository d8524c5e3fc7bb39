"""The playground's base prompt enhancer: Qwen2-VL's classes with few parameters. It rewrites the requests of users in words that
the text-to-image model knows.

It learns from imperfect completions: if a request has several things, most completions stop after the first or second thing.
"""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from retouch.models.common.chat_template import TURNS
from retouch.models.qwen_vl.model import QwenWriter
from retouch_worlds.data.text_to_image import TextToImageData
from retouch_worlds.pretraining.networks.qwen_parts import (
    INITIALIZER_RANGE,
    WIDTH,
    build_tokenizer,
    picture_tokens,
    seeded,
    text_config,
)
from retouch_worlds.pretraining.supervised import train_on_completions

SYSTEM = "Say it for the painter."
TEMPLATE = TURNS.format(system=SYSTEM, user="{}")
LONGEST = 26


@dataclass(frozen=True, kw_only=True)
class EnhancerTraining:
    """``learning_rate``: the peak, which is reached after ``warmup`` steps; the learning rate then falls to 0 along a cosine.

    ``complexity``: the numbers of things in a request; successive tasks take them in turn. ``incomplete``: as in
    ``TextToImageData``.
    """

    steps: int
    seed: int = 0
    batch: int = 32
    learning_rate: float = 2e-3
    warmup: int = 50
    complexity: tuple[int, ...] = (1, 2, 3, 4)
    incomplete: float = 0.8


def tokenizer(seed: int) -> Qwen2Tokenizer:
    """A tokenizer trained on requests and their completions, so that each word of both is one token."""
    tasks = TextToImageData(seed=seed, count=2000, complexity=[1, 2, 3, 4]).tasks(in_turn=True)
    texts = [text for task in tasks for text in (task.instruction, str(task.meta["completion"]))]
    return build_tokenizer([*texts, *[f"{SYSTEM}\nuser\nsystem\nassistant\n"] * 50], vocabulary=480)


def untrained_enhancer(words: Qwen2Tokenizer) -> Qwen2VLForConditionalGeneration:
    """An untrained model with four layers of width 64; its vision tower is not used."""
    config = Qwen2VLConfig(
        text_config=text_config(words, layers=4, heads=4, inner=192),
        vision_config={
            "depth": 1,
            "embed_dim": 16,
            "hidden_size": WIDTH,
            "num_heads": 1,
            "mlp_ratio": 1,
            "patch_size": 4,
            "temporal_patch_size": 1,
            "spatial_merge_size": 2,
            "initializer_range": INITIALIZER_RANGE,
        },
        tie_word_embeddings=False,
        initializer_range=INITIALIZER_RANGE,
        **picture_tokens(words),
    )
    return Qwen2VLForConditionalGeneration(config)


def train_enhancer(settings: EnhancerTraining, log: Callable[[str], None]) -> QwenWriter:
    """Train from the seed. Returns the enhancer with weights that are rounded to half precision."""
    seeded(settings.seed)
    words = tokenizer(settings.seed)
    writer = QwenWriter(untrained_enhancer(words), words, template=TEMPLATE)
    data = TextToImageData(
        seed=settings.seed + 100,
        count=settings.batch * settings.steps,
        complexity=settings.complexity,
        incomplete=settings.incomplete,
    )
    train_on_completions(
        writer,
        data.tasks(in_turn=True),
        rows=settings.batch,
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        warmup=settings.warmup,
        longest=LONGEST,
        seed=settings.seed,
        log=lambda line: log(f"enhancer {line}"),
    )
    writer.module.half().float()
    return writer
