"""`retouch playground build --words`: trains the playground's text-rendering model and its autoencoder from a seed."""

from dataclasses import replace
from pathlib import Path

from retouch.models.flux.model import FluxFill
from retouch.policies.denoising.policy import DenoisingPolicy
from retouch.policies.denoising.rollout import DenoisingRollout
from retouch.policies.denoising.transitions import ODETransition
from retouch.policies.weights import WeightCopies
from retouch.protocols import Reward
from retouch.records import files
from retouch.renderers.decoders import LatentRenderer
from retouch.rewards.text.ocr import OcrReward
from retouch.run.evaluation import score_table
from retouch_worlds.data.words import WordData
from retouch_worlds.models import flux_parts
from retouch_worlds.playground import playground_weights
from retouch_worlds.pretraining.networks.words import (
    WordAutoencoderTraining,
    WordRound,
    WordTraining,
    train_word_autoencoder,
    train_words,
)
from retouch_worlds.pretraining.record import BuildRecord, halved, held_out, log, one_thread, write_index

AUTOENCODER = WordAutoencoderTraining(steps=700)
WORDS = WordTraining(
    rounds=(
        WordRound(steps=900, learning_rate=2e-3, wrong_letters=0.0),
        WordRound(steps=150, learning_rate=1e-3, wrong_letters=0.5),
    )
)
COMMAND = "retouch playground build --words"
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
    computes these, so the extra ``ocr`` must be installed.

    It takes about 20 minutes on one core of a laptop. It uses one thread, so that the bits do not depend on the number of cores.
    """
    record = BuildRecord(seed=seed, command=COMMAND)
    folder = playground_weights("words") if out is None else out
    judge = OcrReward(where="box", line_width=160).build()
    with one_thread():
        vae = train_word_autoencoder(replace(autoencoder, seed=seed), log.info)
        model = train_words(vae, replace(words, seed=seed), log.info)
    write(model, folder)
    scores = measure(model, judge)
    record.finish(scores, folder)
    return scores


def write(model: FluxFill, folder: Path) -> None:
    """Write the model in diffusers' layout (its transformer in half precision), and its settings as ``adapter.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    halved(model.module).save_pretrained(folder / "transformer")
    model.latents.vae.save_pretrained(folder / "vae")
    model.text.clip.save_pretrained(folder / "text_encoder")
    model.text.t5.save_pretrained(folder / "text_encoder_2")
    model.text.clip_tokenizer.save_pretrained(folder / "tokenizer")
    model.text.t5_tokenizer.save_pretrained(folder / "tokenizer_2")
    flux_parts.scheduler().save_pretrained(folder / "scheduler")
    write_index(folder, "FluxFillPipeline", PARTS)
    files.write_json(folder / "adapter.json", {"max_sequence_length": model.text.max_sequence_length})


def measure(model: FluxFill, judge: Reward) -> dict[str, float]:
    """Held-out means of the model by the length of the word, and of the true targets after encoding and decoding them (the
    ceiling)."""
    sampling = DenoisingRollout(num_steps=EVAL_STEPS, transition=ODETransition())
    policy = DenoisingPolicy(
        model, sampling=sampling, eval_steps=EVAL_STEPS, microbatch=HELD_OUT, copies=WeightCopies(model.module)
    )
    ceiling, painted = held_out(
        policy,
        tasks=WordData(seed=1, count=HELD_OUT, split="test").tasks(),
        renderer=LatentRenderer(model),
        reward=judge,
        column="correctness",
    )
    found = {"ceiling correctness": float(score_table(ceiling)[0]["all"]["correctness"])}
    return found | {f"{row} correctness": float(means["correctness"]) for row, means in score_table(painted)[0].items()}
