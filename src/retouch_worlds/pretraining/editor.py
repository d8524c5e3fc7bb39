"""`retouch tools playground`: trains the playground's editor and its autoencoder from a seed; with `--large`, a deeper editor.

The autoencoder is Qwen-Image's class with a spatial factor of 4, trained to reconstruct images of the playground. The editor has
Qwen-Image-Edit's classes with few parameters; its transformer and text encoder are trained together by supervised flow matching on
single edits. The packaged weights are the running average.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from PIL.Image import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from retouch.core.random import generator
from retouch.records import files
from retouch.renderers.base import LatentRenderer
from retouch.run.evaluation import score_table
from retouch.types import Batch, Task
from retouch_models.chat_template import VISION
from retouch_models.qwen_image.model import QwenImageEdit, use_last_temporal_tap
from retouch_worlds.data import PlaygroundData
from retouch_worlds.models.family import PlaygroundModel
from retouch_worlds.playground import playground_weights
from retouch_worlds.playground.scenes import CELLS, GRID
from retouch_worlds.playground.texts import corpus
from retouch_worlds.pretraining.training import (
    JointModel,
    JointTraining,
    build,
    evaluation_policy,
    halved,
    held_out,
    log,
    one_cycle,
    train_jointly,
    ungrouped_batch,
    with_blank_instructions,
    with_unit_gain,
    write_index,
)
from retouch_worlds.rewards import PlaygroundReward

SYSTEM = "Edit the picture."
TEMPLATE = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{VISION}{{}}<|im_end|>\n<|im_start|>assistant\n"

WIDTH = 64
# 1 / sqrt(width): the default of the classes, 0.02, is meant for widths of several thousand.
INITIALIZER_RANGE = 0.125


SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip


def build_tokenizer(texts: Sequence[str], *, vocabulary: int, special: Sequence[str] = SPECIAL_TOKENS) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer with ``vocabulary`` tokens and the ``special`` tokens, trained on ``texts``. Other texts are
    tokenized byte by byte."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    learner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    state = json.loads(learner.to_str())["model"]
    tokenizer = Qwen2Tokenizer(vocab=state["vocab"], merges=[tuple(merge) for merge in state["merges"]], pad_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special], special_tokens=True)
    return tokenizer


def tokenizer(seed: int) -> Qwen2Tokenizer:
    """A tokenizer trained on the playground's instructions and the words of the template."""
    texts = [*corpus(generator(seed, "tokenizer"), 4000), *[f"{SYSTEM}\nuser\nsystem\nassistant\n"] * 50]
    return build_tokenizer(texts, vocabulary=640)


def image_processor() -> Qwen2VLImageProcessorPil:
    """The image processor: an image of 24 x 24 px becomes 6 x 6 patches of 4 px, which are merged to 9 tokens, one per cell."""
    return Qwen2VLImageProcessorPil(
        patch_size=4, temporal_patch_size=1, merge_size=2, size={"shortest_edge": 8 * 8, "longest_edge": 256 * 256}
    )


def text_encoder(words: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """An untrained text encoder with two layers of width 64, in which a token attends only to itself and the 3 tokens before it. So
    a token depends only on its clause, and the model generalises to longer texts."""
    near = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    config = Qwen2_5_VLConfig(
        text_config=text_config(words, layers=2, heads=2, inner=192) | near,
        vision_config=vision_config(),
        tie_word_embeddings=True,
        initializer_range=INITIALIZER_RANGE,
        **picture_tokens(words),
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def text_config(words: Qwen2Tokenizer, *, layers: int, heads: int, inner: int) -> dict[str, Any]:
    """The text part of a Qwen configuration, with width 64, and width ``inner`` inside the MLPs."""
    pairs = WIDTH // heads // 2
    return {
        "vocab_size": len(words),
        "hidden_size": WIDTH,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [pairs // 4, 3 * pairs // 8, 3 * pairs // 8],
        },
        "bos_token_id": words.eos_token_id,
        "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id,
        "initializer_range": INITIALIZER_RANGE,
    }


def vision_config() -> dict[str, Any]:
    """The vision part of a Qwen2.5-VL configuration: two layers of width 32, patches of 4 px."""
    return {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "patch_size": 4,
        "temporal_patch_size": 1,
        "spatial_merge_size": 2,
        "window_size": 32,
        "fullatt_block_indexes": [1],
        "out_hidden_size": WIDTH,
        "initializer_range": INITIALIZER_RANGE,
    }


def picture_tokens(words: Qwen2Tokenizer) -> dict[str, int]:
    """The ids of image and video tokens in a Qwen configuration."""
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{name}_token_id": words.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}


def transformer(blocks: int = 4) -> QwenImageTransformer2DModel:
    """An untrained transformer with joint blocks of width 128; four blocks have 2.5 M parameters. With half the width, it would
    learn instructions several times more slowly."""
    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=32,
        out_channels=8,
        num_layers=blocks,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(8, 12, 12),
    )


def scheduler() -> FlowMatchEulerDiscreteScheduler:
    """The noise schedule, with a static shift of 2, because small images need little shift."""
    return FlowMatchEulerDiscreteScheduler(shift=2.0)


@dataclass(frozen=True, kw_only=True)
class AutoencoderTraining:
    """``latent_noise``: noise on the latents in training, relative to their standard deviation, so that the decoder tolerates the
    errors of a denoiser. ``steps``: steps that train encoder and decoder together. ``decoder_steps``: further steps that train only
    the decoder, with ``decoder_noise`` on the latents.
    """

    steps: int
    decoder_steps: int
    seed: int = 0
    batch: int = 32
    learning_rate: float = 2e-3
    decoder_learning_rate: float = 1e-3
    latent_channels: int = 8
    latent_noise: float = 0.1
    decoder_noise: float = 0.03
    kl_weight: float = 1e-5


def train_autoencoder(settings: AutoencoderTraining) -> AutoencoderKLQwenImage:
    """Train from the seed. Returns the model, whose configuration has the mean and the standard deviation of its latents."""
    torch.manual_seed(settings.seed)
    channels = settings.latent_channels
    vae = _autoencoder(channels, [0.0] * channels, [1.0] * channels)
    with_unit_gain(vae)
    use_last_temporal_tap(vae)
    advance = one_cycle(vae.parameters(), settings.learning_rate, settings.steps)
    for step, images in enumerate(_images(settings, range(settings.steps))):
        posterior = vae.encode(images).latent_dist
        latents = posterior.mode()
        noise = torch.randn(latents.shape, generator=generator(settings.seed, "latent noise", step))
        noisy = latents + settings.latent_noise * latents.detach().std() * noise
        order = torch.rand(len(images), CELLS, generator=generator(settings.seed, "cells", step)).argsort(1)
        repeated = vae.decode(rearranged(noisy, order)).sample
        loss = _reconstruction_loss(repeated, rearranged(images, order)) + settings.kl_weight * posterior.kl().mean()
        advance(loss)
        if step % 100 == 0:
            log.info("autoencoder step %d/%d  loss %.4f", step, settings.steps, loss.item())
    with torch.no_grad():
        tasks = PlaygroundData(seed=settings.seed + 1, count=1024, complexity=[1, 2, 3]).tasks(in_turn=True)
        batches = [pixels([tasks[i].images[0] for i in range(k, k + 128)]) for k in range(0, 1024, 128)]
        flat = torch.cat([vae.encode(images).latent_dist.mode() for images in batches]).transpose(0, 1).flatten(1)
        mean, std = ([round(value, 4) for value in each.tolist()] for each in (flat.mean(dim=1), flat.std(dim=1)))
    train_decoder(vae, settings)
    measured = _autoencoder(channels, mean, std)
    measured.load_state_dict(vae.state_dict())
    return measured.eval()


def train_decoder(vae: AutoencoderKLQwenImage, settings: AutoencoderTraining) -> None:
    """Train only the decoder, in place, so that the latents do not change."""
    decoder = [*vae.post_quant_conv.parameters(), *vae.decoder.parameters()]
    advance = one_cycle(decoder, settings.decoder_learning_rate, settings.decoder_steps)
    steps = range(settings.steps, settings.steps + settings.decoder_steps)
    for step, images in zip(steps, _images(settings, steps), strict=True):
        with torch.no_grad():
            latents = vae.encode(images).latent_dist.mode()
        spread = latents.std(dim=(0, 2, 3, 4), keepdim=True)
        noise = torch.randn(latents.shape, generator=generator(settings.seed, "latent noise", step))
        loss = _reconstruction_loss(vae.decode(latents + settings.decoder_noise * spread * noise).sample, images)
        advance(loss)
        if step % 100 == 0:
            log.info("decoder step %d/%d  loss %.4f", step - settings.steps, settings.decoder_steps, loss.item())


def rearranged(images: Tensor, order: Tensor) -> Tensor:
    """Images or latents (b, c, 1, h, w) with their cells in another order: cell i of image b is the former cell ``order[b, i]``."""
    cells = images.unflatten(4, (GRID, -1)).unflatten(3, (GRID, -1)).permute(0, 3, 5, 1, 2, 4, 6).flatten(1, 2)
    moved = cells[torch.arange(len(cells))[:, None], order]
    return moved.unflatten(1, (GRID, GRID)).permute(0, 3, 4, 1, 5, 2, 6).flatten(5, 6).flatten(3, 4)


def _reconstruction_loss(repeated: Tensor, images: Tensor) -> Tensor:
    error = repeated - images
    return error.abs().mean() + error.square().mean()


def _autoencoder(channels: int, mean: list[float], std: list[float]) -> AutoencoderKLQwenImage:
    return AutoencoderKLQwenImage(
        base_dim=16,
        z_dim=channels,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[False, False],
        latents_mean=mean,
        latents_std=std,
    )


def _images(settings: AutoencoderTraining, steps: range) -> Iterator[Tensor]:
    """Batches (b, 3, 1, 24, 24) in [-1, 1]: sources and targets of training tasks."""
    half = settings.batch // 2
    tasks = PlaygroundData(seed=settings.seed, count=half * steps.stop, complexity=[1, 2, 3]).tasks(in_turn=True)
    for step in steps:
        rows = [tasks[index] for index in range(step * half, (step + 1) * half)]
        yield pixels([row.images[0] for row in rows] + [row.target for row in rows if row.target is not None])


def pixels(images: list[Image]) -> Tensor:
    """The images as a tensor (b, 3, 1, h, w) in [-1, 1]."""
    stacked = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
    return stacked.permute(0, 3, 1, 2).float().div(127.5).sub(1.0).unsqueeze(2)


_BLOCKS = "transformer_blocks."


@dataclass(frozen=True, kw_only=True)
class EditorRound:
    """One round of training. ``learning_rate``: the peak after the warm-up, from which the learning rate falls to 0 along a cosine.
    ``impossible``: as in ``PlaygroundData``."""

    steps: int
    learning_rate: float
    impossible: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EditorTraining(JointTraining):
    """``rounds``: the rounds of training, one after the other, each with its own tasks and its own weight average.

    ``unconditional``: the share of the tasks with a blank instruction, which guidance needs. ``filler``: the share of the batches
    whose instructions contain filler, so that the model learns the later positions in a text and learns to separate clauses."""

    rounds: tuple[EditorRound, ...]
    unconditional: float = 0.05
    filler: float = 0.5


def untrained(vae: AutoencoderKLQwenImage, seed: int) -> QwenImageEdit:
    """The editor before training, with initial weights from the seed."""
    torch.manual_seed(seed)
    words = tokenizer(seed)
    return _assembled(transformer=transformer(), vae=vae, text_encoder=text_encoder(words), tokenizer=words)


def _assembled(**parts: Any) -> QwenImageEdit:
    return QwenImageEdit(
        **parts,
        image_processor=image_processor(),
        scheduler_config=dict(scheduler().config),
        template=TEMPLATE,
        condition_area="as_is",
        source_area="as_is",
    )


def deepened(model: QwenImageEdit, factor: int, seed: int) -> QwenImageEdit:
    """The editor with ``factor`` times as many blocks, whose output is still the same. Each block is followed by new blocks, which
    add nothing before they are trained, because their modulation is 0 (adaLN-Zero, Peebles and Xie 2023, arXiv 2212.09748)."""
    torch.manual_seed(seed)
    old: Any = model.module
    new = transformer(factor * len(old.transformer_blocks))
    new.load_state_dict({name: value for name, value in old.state_dict().items() if not name.startswith(_BLOCKS)}, strict=False)
    for number, block in enumerate(new.transformer_blocks):
        if number % factor == 0:
            block.load_state_dict(old.transformer_blocks[number // factor].state_dict())
            continue
        for modulation in (block.img_mod[-1], block.txt_mod[-1]):
            nn.init.zeros_(modulation.weight)
            nn.init.zeros_(modulation.bias)
    return _assembled(transformer=new, vae=model.latents.vae, text_encoder=model.text.encoder, tokenizer=model.text.tokenizer)


def train_rounds(model: QwenImageEdit, settings: EditorTraining) -> None:
    """Train all rounds, one after the other. The final weights of a round equal the weights that are saved to a folder, so the next
    round can start from a folder."""
    rows = settings.batch
    for number, this in enumerate(settings.rounds):
        seed = settings.seed + number
        plain, filled = (
            PlaygroundData(seed=seed, count=rows * this.steps, complexity=[1], filler=filler, impossible=this.impossible).tasks(
                in_turn=True
            )
            for filler in (0.0, 1.0)
        )

        def batch(step: int, seed: int = seed, plain: Sequence[Task] = plain, filled: Sequence[Task] = filled) -> Batch:
            tasks = filled if torch.rand((), generator=generator(seed, "filler", step)) < settings.filler else plain
            some = tasks[step * rows : (step + 1) * rows]
            some = with_blank_instructions(some, settings.unconditional, generator(seed, "unconditional", step))
            return ungrouped_batch(some, seed=seed, step=step)

        name = f"editor round {number + 1} "
        train_jointly(JointModel(model), batch, settings, steps=this.steps, learning_rate=this.learning_rate, name=name)


# The builds


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
    """Train the autoencoder and the editor and write them to ``out`` (None: into the package). Returns held-out means. It takes
    about an hour on one core of a laptop."""
    folder = playground_weights() if out is None else out

    def train() -> QwenImageEdit:
        vae = train_autoencoder(replace(autoencoder, seed=seed))
        model = untrained(vae.requires_grad_(False), seed)
        train_rounds(model, replace(editor, seed=seed))
        return model

    return build([folder], train, lambda model: _write_and_measure(model, folder), seed=seed)


def build_large_editor(out: Path | None, *, seed: int, editor: EditorTraining = LARGE) -> dict[str, float]:
    """Make the packaged editor four times as deep, continue to train it, and write it to ``out`` (None: `LARGE_FOLDER`). Returns
    held-out means. The packaged editor was trained on different tasks. It takes about a quarter of an hour on one core."""
    folder = LARGE_FOLDER if out is None else out

    def train() -> QwenImageEdit:
        small = PlaygroundModel().build(device=torch.device("cpu"))
        assert isinstance(small, QwenImageEdit)
        model = deepened(small, DEPTH, seed)
        train_rounds(model, replace(editor, seed=seed + len(EDITOR.rounds)))
        return model

    command = "retouch tools playground --large"
    return build([folder], train, lambda model: _write_and_measure(model, folder), seed=seed, command=command)


def _write_and_measure(model: QwenImageEdit, folder: Path) -> dict[str, float]:
    """Write the editor in diffusers' layout (its transformer in half precision), and its settings as ``adapter.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    halved(model.module).save_pretrained(folder / "transformer")
    model.latents.vae.save_pretrained(folder / "vae")
    model.text.encoder.save_pretrained(folder / "text_encoder")
    model.text.tokenizer.save_pretrained(folder / "tokenizer")
    model.text.image_processor.save_pretrained(folder / "processor")
    scheduler().save_pretrained(folder / "scheduler")
    write_index(folder, "QwenImageEditPipeline", PARTS)
    files.write_json(folder / "adapter.json", {"template": TEMPLATE, "condition_area": "as_is", "source_area": "as_is"})
    return measure(model)


def measure(model: QwenImageEdit) -> dict[str, float]:
    """Held-out means of the editor by complexity, and of the true targets after encoding and decoding them (the ceiling)."""
    ceiling, edited = held_out(
        evaluation_policy(model, steps=EVAL_STEPS, batch=HELD_OUT),
        tasks=PlaygroundData(seed=1, count=HELD_OUT, complexity=[1, 2, 3, 4], split="test").tasks(in_turn=True),
        renderer=LatentRenderer(model),
        reward=PlaygroundReward(),
        column="overall",
    )
    found = {f"ceiling {name}": value for name, value in score_table(ceiling)[0]["all"].items() if name in ("overall", "exact")}
    for row, means in score_table(edited)[0].items():
        found |= {f"{row} {name}": value for name, value in means.items() if name in ("overall", "IF", "IP", "PQ", "exact")}
    return {name: value for name, value in found.items() if not math.isnan(value)}
