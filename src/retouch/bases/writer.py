"""The playground's base writer: Qwen2.5-VL's own classes in small, over the editor's tokenizer, in front of the editor.

It learns by the project's own supervised objective to look at the picture and name things in full, from imperfect completions:
where several edits are asked for, most of them say nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from retouch.bases.imitating import imitate
from retouch.bases.legible import Legible
from retouch.bases.parts import INITIALIZER_RANGE, seeded
from retouch.models.qwen_image_edit import QwenImageEdit
from retouch.models.qwen_responses import writer_for
from retouch.playground.changed import Changed
from retouch.playground.indirect import indirect
from retouch.playground.tasks import PlaygroundTasks

LONGEST = 40


@dataclass(frozen=True)
class Round:
    """``learning_rate``: the peak, after the warm-up; from there it falls to 0 as a cosine.

    ``complexity``: numbers of edits in an instruction, cycled through. ``legible``: weight of the distance of states (``Legible``).
    """

    steps: int
    learning_rate: float
    complexity: tuple[int, ...]
    legible: float = 0.0


@dataclass(frozen=True, kw_only=True)
class WriterTraining:
    """``rounds``, one after the other, each with tasks of its own.

    What stands where is learned suddenly, or not at all in the time, so first it is all there is to learn: single edits, and states
    of any kind. ``lazy``: see ``indirect``.
    """

    rounds: tuple[Round, ...]
    seed: int = 0
    batch: int = 32
    warmup: int = 50
    lazy: float = 0.75


def untrained_writer(words: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """Four layers that see the whole text. As wide as the editor's text encoder, so that the editor can be shown its states."""
    ids = {name: words.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad", "vision_start", "vision_end")}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(words),
            "hidden_size": 64,
            "intermediate_size": 256,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 2048,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": words.eos_token_id,
            "eos_token_id": words.eos_token_id,
            "pad_token_id": words.pad_token_id,
            "initializer_range": INITIALIZER_RANGE,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 4,
            "temporal_patch_size": 1,
            "spatial_merge_size": 2,
            "window_size": 32,
            "fullatt_block_indexes": [1],
            "out_hidden_size": 64,
            "initializer_range": INITIALIZER_RANGE,
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
        tie_word_embeddings=False,
        initializer_range=INITIALIZER_RANGE,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def train_writer(editor: QwenImageEdit, settings: WriterTraining, log: Callable[[str], None]) -> Qwen2_5_VLForConditionalGeneration:
    """Train a writer in front of the editor from the seed."""
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
    """Train one of the rounds, with an optimizer of its own."""
    this, seed = settings.rounds[number], settings.seed + number
    count = settings.batch * this.steps
    tasks = PlaygroundTasks(seed=seed + 100, count=count, complexity=this.complexity, split="train")
    imitate(
        writer_for(editor, module),
        Changed(tasks, partial(indirect, lazy=settings.lazy)),
        rows=settings.batch,
        steps=this.steps,
        learning_rate=this.learning_rate,
        warmup=settings.warmup,
        longest=LONGEST,
        seed=seed,
        log=lambda line: log(f"writer round {number + 1}  {line}"),
        objective=Legible(editor, module, weight=this.legible) if this.legible > 0 else None,
    )
