"""`retouch playground build`: trains the playground's editor and its autoencoder from a seed; with `--large`, a deeper editor."""

import math
from dataclasses import replace
from pathlib import Path

import torch

from retouch.models.qwen_image.model import QwenImageEdit
from retouch.policies.denoising.policy import DenoisingPolicy
from retouch.policies.denoising.rollout import DenoisingRollout
from retouch.policies.denoising.transitions import ODETransition
from retouch.policies.weights import WeightCopies
from retouch.records import files
from retouch.renderers.decoders import LatentRenderer
from retouch.run.evaluation import score_table
from retouch_worlds.data.tasks import PlaygroundData
from retouch_worlds.models.family import PlaygroundModel
from retouch_worlds.playground import playground_weights
from retouch_worlds.pretraining.networks import qwen_parts
from retouch_worlds.pretraining.networks.autoencoder import AutoencoderTraining, train_autoencoder
from retouch_worlds.pretraining.networks.editor import EditorRound, EditorTraining, deepened, train_editor, train_rounds
from retouch_worlds.pretraining.record import BuildRecord, halved, held_out, log, one_thread, write_index
from retouch_worlds.rewards.edit_judge import PlaygroundReward

AUTOENCODER = AutoencoderTraining(steps=2000, decoder_steps=2000)
EDITOR = EditorTraining(
    rounds=(EditorRound(steps=4500, learning_rate=2e-3), EditorRound(steps=900, learning_rate=1e-3, impossible=0.6))
)
LARGE = EditorTraining(rounds=(EditorRound(steps=300, learning_rate=1e-3, impossible=0.6),))
DEPTH = 4
"""Number of blocks of the large editor for each block of the packaged editor."""
LARGE_FOLDER = Path("runs/playground/editor-large")
PARTS = {
    "processor": ("transformers", "Qwen2VLProcessor"),
    "scheduler": ("diffusers", "FlowMatchEulerDiscreteScheduler"),
    "text_encoder": ("transformers", "Qwen2_5_VLForConditionalGeneration"),
    "tokenizer": ("transformers", "Qwen2Tokenizer"),
    "transformer": ("diffusers", "QwenImageTransformer2DModel"),
    "vae": ("diffusers", "AutoencoderKLQwenImage"),
}
HELD_OUT = 320
EVAL_STEPS = 6


def build_editor(
    out: Path | None, *, seed: int, autoencoder: AutoencoderTraining = AUTOENCODER, editor: EditorTraining = EDITOR
) -> dict[str, float]:
    """Train the autoencoder and the editor and write them to ``out`` (None: into the package). Returns held-out means.

    It takes about an hour on one core of a laptop. It uses one thread, so that the bits do not depend on the number of cores.
    """
    record = BuildRecord(seed=seed)
    with one_thread():
        vae = train_autoencoder(replace(autoencoder, seed=seed), log.info)
        vae.requires_grad_(False)
        model = train_editor(vae, replace(editor, seed=seed), log.info)
    return _finished(model, playground_weights() if out is None else out, record)


def build_large_editor(out: Path | None, *, seed: int, editor: EditorTraining = LARGE) -> dict[str, float]:
    """Make the packaged editor four times as deep, continue to train it, and write it to ``out`` (None: `LARGE_FOLDER`). Returns
    held-out means.

    The packaged editor was trained on different tasks. It takes about a quarter of an hour on one core.
    """
    record = BuildRecord(seed=seed, command="retouch playground build --large")
    with one_thread():
        small = PlaygroundModel().build(device=torch.device("cpu"))
        assert isinstance(small, QwenImageEdit)
        model = deepened(small, DEPTH, seed)
        train_rounds(model, replace(editor, seed=seed + len(EDITOR.rounds)), log.info)
    return _finished(model, LARGE_FOLDER if out is None else out, record)


def _finished(model: QwenImageEdit, folder: Path, record: BuildRecord) -> dict[str, float]:
    """Write the editor and measure it. Returns held-out means."""
    write(model, folder)
    scores = measure(model)
    record.finish(scores, folder)
    return scores


def write(model: QwenImageEdit, folder: Path) -> None:
    """Write the editor in diffusers' layout (its transformer in half precision), and its settings as ``adapter.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    halved(model.module).save_pretrained(folder / "transformer")
    model.latents.vae.save_pretrained(folder / "vae")
    model.text.encoder.save_pretrained(folder / "text_encoder")
    model.text.tokenizer.save_pretrained(folder / "tokenizer")
    model.text.image_processor.save_pretrained(folder / "processor")
    qwen_parts.scheduler().save_pretrained(folder / "scheduler")
    write_index(folder, "QwenImageEditPipeline", PARTS)
    files.write_json(folder / "adapter.json", {"template": qwen_parts.TEMPLATE, "condition_area": "as_is", "source_area": "as_is"})


def measure(model: QwenImageEdit) -> dict[str, float]:
    """Held-out means of the editor by complexity, and of the true targets after encoding and decoding them (the ceiling)."""
    sampling = DenoisingRollout(num_steps=EVAL_STEPS, transition=ODETransition())
    policy = DenoisingPolicy(
        model, sampling=sampling, eval_steps=EVAL_STEPS, microbatch=HELD_OUT, copies=WeightCopies(model.module)
    )
    ceiling, edited = held_out(
        policy,
        tasks=PlaygroundData(seed=1, count=HELD_OUT, complexity=[1, 2, 3, 4], split="test").tasks(in_turn=True),
        renderer=LatentRenderer(model),
        reward=PlaygroundReward(),
        column="overall",
    )
    found = {f"ceiling {name}": value for name, value in score_table(ceiling)[0]["all"].items() if name in ("overall", "exact")}
    for row, means in score_table(edited)[0].items():
        found |= {f"{row} {name}": value for name, value in means.items() if name in ("overall", "IF", "IP", "PQ", "exact")}
    return {name: value for name, value in found.items() if not math.isnan(value)}
