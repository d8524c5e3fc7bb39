"""`retouch tools playground --emu3`: trains the base editors that generate image tokens and their image tokenizer, from a seed.

The image tokenizer is Emu3's class with a spatial factor of 8, so that an image of nine cells has nine codes. The quantiser of
transformers' class has no gradient. So training first reconstructs images from noisy continuous latents, then initialises the
codebook with k-means, and then continues with the straight-through estimator and a codebook of running means (VQ-VAE, arXiv
1711.00937). The latents of a cell must not depend on its neighbours. Otherwise cells that look the same would have many different
codes, and a policy would have to guess which code the target has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from tokenizers import AddedToken
from torch import Tensor, nn
from transformers import Emu3Config, Emu3ForConditionalGeneration, Emu3VQVAE, Qwen2Tokenizer
from transformers.models.emu3.configuration_emu3 import Emu3VQVAEConfig

from retouch.core.random import generator
from retouch.policies.autoregressive import AutoregressivePolicy
from retouch.policies.rollout import TokenRollout
from retouch.policies.weights import WeightCopies
from retouch.renderers.base import CodesDecoder
from retouch.run.evaluation import score_table
from retouch_models.emu3 import BOI, BOS, EOF, EOI, EOL, EOS, IMG, PAD, Emu3Editor, language_model
from retouch_models.language import Emu3Model
from retouch_worlds.data import PlaygroundData
from retouch_worlds.playground import playground_weights
from retouch_worlds.playground.rendering import pixels
from retouch_worlds.playground.scenes import CELLS, GRID, SIZE, random_scene
from retouch_worlds.playground.texts import corpus
from retouch_worlds.pretraining.editor import build_tokenizer, rearranged
from retouch_worlds.pretraining.training import (
    Training,
    build,
    halved,
    held_out,
    log,
    one_cycle,
    train_on_completions,
    with_unit_gain,
)
from retouch_worlds.rewards import PlaygroundReward

CODES = 80
_WIDTH = 8
_DECAY = 0.99
_LEAST_COUNT = 1e-2


@dataclass(frozen=True, kw_only=True)
class CodesTraining:
    """``steps``: the number of all steps. ``free_steps``: the number of steps before codes are used; in these steps the latents get
    noise of ``latent_noise`` times their standard deviation. ``commitment``: the weight of the distance of the latents to their
    codes."""

    steps: int
    free_steps: int
    seed: int = 0
    batch: int = 32
    learning_rate: float = 2e-3
    latent_noise: float = 0.1
    commitment: float = 0.25
    alone: float = 1.0
    """Weight of the distance between the latents of the same cell in two images with different neighbours."""


def untrained_codes() -> Emu3VQVAE:
    """An untrained model with 32 base channels, four stages of one block each, and 80 codes of 8 values: 1.1 M parameters, which
    are initialised to preserve the variance."""
    vq = Emu3VQVAE(
        Emu3VQVAEConfig(
            codebook_size=CODES,
            embed_dim=_WIDTH,
            latent_channels=_WIDTH,
            base_channels=32,
            channel_multiplier=[1, 1, 2, 2],
            num_res_blocks=1,
            attn_resolutions=[],
            hidden_size=64,
            num_attention_heads=2,
            temporal_downsample_factor=1,
        )
    )
    with_unit_gain(vq)
    for name, parameter in vq.named_parameters():  # norms that are modulated by the codes have no modulation at the start
        if name.endswith(("conv_y.weight", "conv_b.weight")):
            nn.init.zeros_(parameter)
        if name.endswith("conv_y.bias"):
            nn.init.ones_(parameter)
    return vq


def train_codes(settings: CodesTraining) -> Emu3VQVAE:
    """Train the image tokenizer from the seed."""
    torch.manual_seed(settings.seed)
    vq = untrained_codes().train()
    trained = [parameter for name, parameter in vq.named_parameters() if not name.startswith("quantize.")]
    advance = one_cycle(trained, settings.learning_rate, settings.steps, betas=(0.9, 0.99))
    codebook = None
    for step in range(settings.steps):
        pictures, random = _pictures(settings, step), generator(settings.seed, "cells", step)
        chosen = torch.rand(settings.batch // 2, CELLS, generator=random) < 0.5
        mixed = exchanged(pictures, chosen)
        free = encoded(vq, pictures)
        latents = exchanged(free, chosen)
        apart = (encoded(vq, mixed) - latents).square().mean() / free.detach().var()
        if step < settings.free_steps:
            noise = torch.randn(latents.shape, generator=generator(settings.seed, "latent noise", step))
            decoder_input, stray = latents + settings.latent_noise * latents.detach().std() * noise, latents.new_zeros(())
        else:
            if codebook is None:
                codebook = _Codebook(vq, settings)
            nearest = codebook(latents)
            decoder_input, stray = latents + (nearest - latents).detach(), (latents - nearest).square().mean()
        # Cells are also permuted within an image, so that a code describes its cell and not the cell's position.
        order = torch.rand(len(pictures), CELLS, generator=random).argsort(1)
        repeated = decoded(vq, rearranged(decoder_input[:, :, None], order)[:, :, 0])
        miss = repeated - rearranged(mixed[:, :, None], order)[:, :, 0]
        loss = miss.abs().mean() + miss.square().mean() + settings.commitment * stray + settings.alone * apart
        advance(loss)
        if step % 100 == 0 or step == settings.steps - 1:
            missed = miss.square().mean().sqrt().item() / 2
            line = f"codes step {step}/{settings.steps}  loss {loss.item():.4f}  miss {missed:.4f}  apart {apart.item():.4f}"
            log.info("%s", line)
    return vq.eval()


def exchanged(images: Float[Tensor, "b c h w"], chosen: Bool[Tensor, "half 9"]) -> Float[Tensor, "b c h w"]:
    """The images or latents after the chosen cells were exchanged between the first and the second half of the batch."""
    height, width = images.shape[2] // GRID, images.shape[3] // GRID
    where = chosen.view(-1, 1, GRID, GRID).repeat_interleave(height, 2).repeat_interleave(width, 3)
    first, second = images.chunk(2)
    return torch.cat([torch.where(where, second, first), torch.where(where, first, second)])


def encoded(vq: Emu3VQVAE, pictures: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b c hh ww"]:
    """The latents of images in [-1, 1] before quantisation."""
    latents: Tensor = vq.encoder(pictures[:, None])
    latents = vq.quant_conv(latents.transpose(1, 2)).transpose(1, 2)
    return latents[:, 0]


def decoded(vq: Emu3VQVAE, latents: Float[Tensor, "b c hh ww"]) -> Float[Tensor, "b 3 h w"]:
    """The images that are decoded from latents."""
    codes = latents[:, None]
    ready = vq.post_quant_conv(codes.transpose(1, 2)).transpose(1, 2)
    images: Tensor = vq.decoder(ready, codes)
    return images


class _Codebook:
    """A codebook in which each code is the running mean of the latents nearest to it (VQ-VAE with EMA, arXiv 1711.00937
    appendix A). It is stored in the quantiser of the model."""

    def __init__(self, vq: Emu3VQVAE, settings: CodesTraining) -> None:
        with torch.no_grad():
            batches = [encoded(vq, _pictures(settings, -1 - k)) for k in range(48)]
        latents = torch.cat([_flat(batch) for batch in batches])
        self.weight = vq.quantize.embedding.weight.requires_grad_(False)
        self.weight.copy_(k_means(latents, CODES))
        share = torch.bincount(_nearest(latents, self.weight), minlength=CODES).float() / len(latents)
        self.counts = share * settings.batch * CELLS
        self.sums = self.weight * self.counts[:, None]

    @torch.no_grad()
    def __call__(self, latents: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c h w"]:
        """The code nearest to each latent. The call also moves each code towards the latents that are nearest to it."""
        flat = _flat(latents)
        index = _nearest(flat, self.weight)
        nearest = self.weight[index].clone()
        members = F.one_hot(index, CODES).float()
        self.counts.mul_(_DECAY).add_(members.sum(0), alpha=1 - _DECAY)
        self.sums.mul_(_DECAY).add_(members.T @ flat, alpha=1 - _DECAY)
        used = self.counts > _LEAST_COUNT
        self.weight[used] = self.sums[used] / self.counts[used, None]
        return nearest.view(len(latents), *latents.shape[2:], -1).permute(0, 3, 1, 2)


def k_means(points: Float[Tensor, "n d"], count: int, *, rounds: int = 20) -> Float[Tensor, "count d"]:
    """The centres that Lloyd's algorithm finds; a centre without points does not move.

    Each centre is initialised with the point farthest from the previous centres (Gonzalez 1985), so that rare kinds of points get a
    centre before frequent kinds get a second one."""
    centres = points[:1]
    distance = (points - centres).square().sum(1)
    for _ in range(count - 1):
        farthest = points[distance.argmax()][None]
        centres = torch.cat([centres, farthest])
        distance = torch.minimum(distance, (points - farthest).square().sum(1))
    for _ in range(rounds):
        members = F.one_hot(_nearest(points, centres), count).float()
        size = members.sum(0)[:, None]
        centres = torch.where(size > 0, members.T @ points / size.clamp_min(1), centres)
    return centres


def _nearest(points: Float[Tensor, "n d"], centres: Float[Tensor, "k d"]) -> Int[Tensor, " n"]:
    return torch.cdist(points, centres).argmin(1)


def _flat(latents: Float[Tensor, "b c h w"]) -> Float[Tensor, "n c"]:
    return latents.permute(0, 2, 3, 1).flatten(0, 2)


def _pictures(settings: CodesTraining, step: int) -> Float[Tensor, "b 3 24 24"]:
    """A batch of images in [-1, 1]: scenes of one to six things, because edits may add things; both halves have the same
    backgrounds."""
    random = generator(settings.seed, "pictures", step)
    first, second = ([random_scene(random, least=1, most=6) for _ in range(settings.batch // 2)] for _ in range(2))
    scenes = first + [replace(other, background=scene.background) for scene, other in zip(first, second, strict=True)]
    images = torch.from_numpy(pixels(scenes)).permute(0, 3, 1, 2).float().div(127.5).sub(1.0)
    assert images.shape[2:] == (SIZE, SIZE)
    return images


THOUGHTS = ("<|start thinking|>", "<|end thinking|>")
LONGEST = 24
_HIDDEN = 96


@dataclass(frozen=True, kw_only=True)
class Emu3Training(Training):
    """``complexity``: the weight of each number of edits in an instruction. ``rounds``: the steps of each round, which has its own
    tasks and its own optimizer. ``learning_rate``: the peak of each round. ``impossible``: the share of the tasks whose instruction
    also requests edits of things that are not in the image, which the target ignores. ``unfinished``: the share of the tasks with
    several edits whose target lacks one of the edits. ``before``: the number of earlier rounds."""

    complexity: Mapping[int, float]
    rounds: tuple[int, ...]
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
            "hidden_size": _HIDDEN,
            "intermediate_size": 3 * _HIDDEN,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "attention_dropout": 0.0,  # the class also applies it to the residuals
            "initializer_range": _HIDDEN**-0.5,
            "bos_token_id": words.convert_tokens_to_ids(BOS),
            "eos_token_id": words.convert_tokens_to_ids(EOS),
            "pad_token_id": words.convert_tokens_to_ids(PAD),
        },
        vocabulary_map={**words.get_vocab(), "<image>": words.convert_tokens_to_ids(IMG)},
    )
    module = Emu3ForConditionalGeneration(config)
    module.model.vqmodel.load_state_dict(vq.state_dict())
    return module.requires_grad_(False).eval()


def train_rounds(editor: Emu3Editor, settings: Emu3Training, name: str) -> None:
    """Train the editor in all rounds, one after the other, in place, with the cross-entropy of the codes of the target image."""
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
            settings,
            steps=steps,
            learning_rate=settings.learning_rate,
            longest=LONGEST,
            seed=seed,
            name=f"{name} round {number + 1} ",
        )


HELD_OUT = 330
CODES_TRAINING = CodesTraining(steps=1500, free_steps=700)
STARTS = {
    "s": Emu3Training(complexity={1: 1.0}, rounds=(2200, 2200)),
    "sc": Emu3Training(complexity={1: 0.75, 2: 0.125, 3: 0.125}, rounds=(2200, 2200)),
}
"""Two base editors: "s" is trained on single edits, "sc" also on some instructions with two or three edits."""
FURTHER = {
    "s-distractors": ("s", replace(STARTS["s"], rounds=(2200, 2200), before=2, learning_rate=1.5e-3, impossible=0.5)),
    "sc-unfinished": ("sc", replace(STARTS["sc"], rounds=(500,), before=2, learning_rate=5e-4, warmup=50, unfinished=0.9)),
}
"""Base editors that continue from another one: its name, and the settings. "s-distractors" is trained on single edits, and half of
its instructions also request edits of things that are not in the image, which the targets ignore. "sc-unfinished" is trained on
complex edits, and most of their targets lack one of the edits."""


def build_emu3(
    out: Path | None,
    *,
    seed: int,
    codes: CodesTraining = CODES_TRAINING,
    starts: Mapping[str, Emu3Training] = STARTS,
    further: Mapping[str, tuple[str, Emu3Training]] = FURTHER,
) -> dict[str, float]:
    """Train the autoencoder and the editors and write them to ``out`` (None: into the package). Returns held-out means."""
    folder = playground_weights("emu3") if out is None else out

    def train() -> dict[str, float]:
        vq = train_codes(replace(codes, seed=seed))
        words = emu3_tokenizer(seed)
        halved(vq).save_pretrained(folder / "autoencoder")
        words.save_pretrained(folder / "tokenizer")
        scores: dict[str, float] = {}
        for name, settings in starts.items():
            torch.manual_seed(seed)
            whole = untrained_emu3(words, vq)
            editor = Emu3Editor(language_model(whole), words, vq=whole.model.vqmodel, size=(SIZE, SIZE))
            train_rounds(editor, replace(settings, seed=seed), name)
            whole.requires_grad_(False).eval()
            halved(language_model(whole)).save_pretrained(folder / name)
            scores |= {f"{name}, {what}": value for what, value in measure(editor).items()}
        for name, (start, settings) in further.items():
            section = Emu3Model(
                path=str(folder / start),
                tokenizer=str(folder / "tokenizer"),
                autoencoder=str(folder / "autoencoder"),
                size=(SIZE, SIZE),
                dtype="float32",
            )
            model = section.build(device=torch.device("cpu"), gradient_checkpointing=False)
            assert isinstance(model, Emu3Editor)
            train_rounds(model, replace(settings, seed=seed), name)
            halved(model.module).save_pretrained(folder / name)
            scores |= {f"{name}, {what}": value for what, value in measure(model).items()}
        return scores

    return build([folder], train, lambda scores: scores, seed=seed, command="retouch tools playground --emu3")


def measure(editor: Emu3Editor) -> dict[str, float]:
    """Held-out means of greedily generated images by complexity, and of the true targets after encoding and decoding them (the
    ceiling)."""
    sampling = TokenRollout(max_new_tokens=LONGEST)
    policy = AutoregressivePolicy(editor, sampling=sampling, microbatch=HELD_OUT, copies=WeightCopies(editor.module))
    ceiling, edited = held_out(
        policy,
        tasks=PlaygroundData(seed=1, count=HELD_OUT, complexity=[1, 2, 3], split="test").tasks(in_turn=True),
        renderer=CodesDecoder(editor, batch=HELD_OUT),
        reward=PlaygroundReward(),
        column="overall",
    )
    found = {
        f"ceiling {name}": float(value) for name, value in score_table(ceiling)[0]["all"].items() if name in ("overall", "exact")
    }
    for row, means in score_table(edited)[0].items():
        if "kinds" not in row:
            found |= {f"{row} {name}": float(means[name]) for name in ("overall", "IF", "IP", "PQ", "exact")}
    return found
