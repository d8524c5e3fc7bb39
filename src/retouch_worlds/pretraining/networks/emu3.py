"""The playground's base editor that generates image tokens: Emu3's classes with few parameters, trained with the library's own
supervised objective."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from tokenizers import AddedToken
from transformers import Emu3Config, Emu3ForConditionalGeneration, Emu3VQVAE, Qwen2Tokenizer

from retouch.core.random import generator
from retouch.models.emu3.load import language_model
from retouch.models.emu3.model import Emu3Editor
from retouch.models.emu3.tokens import BOI, BOS, EOF, EOI, EOL, EOS, IMG, PAD
from retouch_worlds.data.tasks import PlaygroundData
from retouch_worlds.playground.world.instructions import corpus
from retouch_worlds.playground.world.scenes import SIZE
from retouch_worlds.pretraining.networks.image_codes import CODES
from retouch_worlds.pretraining.networks.qwen_parts import build_tokenizer, seeded
from retouch_worlds.pretraining.supervised import train_on_completions

THOUGHTS = ("<|start thinking|>", "<|end thinking|>")
LONGEST = 24
_WIDTH = 96


@dataclass(frozen=True, kw_only=True)
class Emu3Training:
    """``complexity``: the weight of each number of edits in an instruction. ``rounds``: the steps of each round, which has its own
    tasks and its own optimizer. ``learning_rate``: the peak of each round, which is reached after ``warmup`` steps; the learning
    rate then falls to 0 along a cosine. ``impossible``: the share of the tasks whose instruction also requests edits of things that
    are not in the image, which the target ignores. ``unfinished``: the share of the tasks with several edits whose target lacks one
    of the edits. ``before``: the number of earlier rounds."""

    complexity: Mapping[int, float]
    rounds: tuple[int, ...]
    seed: int = 0
    batch: int = 32
    learning_rate: float = 2e-3
    warmup: int = 100
    filler: float = 0.25
    impossible: float = 0.0
    unfinished: float = 0.0
    before: int = 0


def emu3_tokenizer(seed: int) -> Qwen2Tokenizer:
    """A tokenizer trained on the playground's instructions, with Emu3's special tokens and one token for each image code."""
    words = build_tokenizer([*corpus(generator(seed, "tokenizer"), 4000)], vocabulary=640, special=(PAD,))
    visual = [f"<|visual token {code:06d}|>" for code in range(CODES)]
    words.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in (BOS, EOS, BOI, IMG, EOL, EOF, EOI, *THOUGHTS, *visual)],
        special_tokens=True,
    )
    return words


def untrained_emu3(words: Qwen2Tokenizer, vq: Emu3VQVAE) -> Emu3ForConditionalGeneration:
    """An untrained language model with four layers of width 96, together with the trained autoencoder."""
    config = Emu3Config(
        vq_config=vq.config.to_dict(),
        text_config={
            "vocab_size": len(words),
            "hidden_size": _WIDTH,
            "intermediate_size": 3 * _WIDTH,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "attention_dropout": 0.0,  # the class also applies it to the residuals
            "initializer_range": _WIDTH**-0.5,
            "bos_token_id": words.convert_tokens_to_ids(BOS),
            "eos_token_id": words.convert_tokens_to_ids(EOS),
            "pad_token_id": words.convert_tokens_to_ids(PAD),
        },
        vocabulary_map={**words.get_vocab(), "<image>": words.convert_tokens_to_ids(IMG)},
    )
    module = Emu3ForConditionalGeneration(config)
    module.model.vqmodel.load_state_dict(vq.state_dict())
    return module.requires_grad_(False).eval()


def train_emu3(
    vq: Emu3VQVAE, words: Qwen2Tokenizer, settings: Emu3Training, log: Callable[[str], None]
) -> Emu3ForConditionalGeneration:
    """Train the editor from the seed, with the cross-entropy of the codes of the target image."""
    seeded(settings.seed)
    whole = untrained_emu3(words, vq)
    train_rounds(Emu3Editor(language_model(whole), words, vq=whole.model.vqmodel, size=(SIZE, SIZE)), settings, log)
    return whole.requires_grad_(False).eval()


def train_rounds(editor: Emu3Editor, settings: Emu3Training, log: Callable[[str], None]) -> None:
    """Train the editor in all rounds, one after the other, in place."""
    for number, steps in enumerate(settings.rounds, start=settings.before):
        seed = settings.seed + number
        data = PlaygroundData(
            seed=seed + 200,
            count=settings.batch * steps,
            complexity=dict(settings.complexity),
            filler=settings.filler,
            impossible=settings.impossible,
            unfinished=settings.unfinished,
        )
        train_on_completions(
            editor,
            data.tasks(),
            rows=settings.batch,
            steps=steps,
            learning_rate=settings.learning_rate,
            warmup=settings.warmup,
            longest=LONGEST,
            seed=seed,
            log=partial(_log_round, log, number + 1),
        )


def _log_round(log: Callable[[str], None], number: int, line: str) -> None:
    log(f"round {number}  {line}")
