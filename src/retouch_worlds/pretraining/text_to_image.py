"""`retouch tools playground --text-to-image`: trains the playground's text-to-image model, and a base prompt enhancer, from a seed.

The text-to-image model has Qwen-Image's classes with few parameters. Its training starts from the weights of the editor, which
knows most of the words of ``playground.texts``; user requests with other words are out of distribution.

The enhancer has Qwen2-VL's classes, and rewrites the requests of users in words that the text-to-image model knows. It learns from
imperfect completions: if a request has several things, most completions stop after the first or second thing.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import Qwen2Tokenizer, Qwen2VLConfig, Qwen2VLForConditionalGeneration

from retouch.core.random import generator
from retouch.models.base import TURNS
from retouch.policies.autoregressive import AutoregressivePolicy
from retouch.policies.rollout import TokenRollout
from retouch.policies.weights import WeightCopies
from retouch.records import files
from retouch.renderers.prompts import PromptRenderer
from retouch.run.evaluation import score_table
from retouch.types import Batch, Task
from retouch_models.qwen_image.model import QwenImage, QwenImageEdit
from retouch_models.qwen_vl import QwenWriter
from retouch_worlds.data import TextToImageData
from retouch_worlds.models.family import PlaygroundModel, PlaygroundTextToImage
from retouch_worlds.playground import playground_weights
from retouch_worlds.playground.scenes import SIZE, Scene
from retouch_worlds.playground.texts import free_description
from retouch_worlds.pretraining.editor import (
    INITIALIZER_RANGE,
    PARTS,
    WIDTH,
    build_tokenizer,
    image_processor,
    picture_tokens,
    scheduler,
    text_config,
)
from retouch_worlds.pretraining.training import (
    JointModel,
    JointTraining,
    Training,
    build,
    halved,
    held_out,
    train_jointly,
    train_on_completions,
    ungrouped_batch,
    with_blank_instructions,
    write_index,
)
from retouch_worlds.rewards import SceneReward

TEMPLATE = TURNS.format(system="Paint the picture.", user="{}")


@dataclass(frozen=True, kw_only=True)
class TextToImageTraining(JointTraining):
    """``unconditional``: the share of the tasks with a blank description, which guidance needs."""

    steps: int
    learning_rate: float = 1.5e-3
    unconditional: float = 0.05


def train_text_to_image(editor: QwenImageEdit, settings: TextToImageTraining) -> QwenImage:
    """Train the parts of the editor as a text-to-image model, with tasks and noise from the seed. Returns the model with averaged
    weights. The editor knows colours, shapes and positions, but was never trained to generate images without a source image."""
    model = QwenImage(
        transformer=editor.module,
        vae=editor.latents.vae,
        text_encoder=editor.text.encoder,
        tokenizer=editor.text.tokenizer,
        scheduler_config=editor.scheduler,
        size=(SIZE, SIZE),
        template=TEMPLATE,
    )
    seed, rows = settings.seed, settings.batch
    tasks = TextToImageData(seed=seed, count=rows * settings.steps, complexity=[1, 2, 3, 4]).tasks(in_turn=True)

    def batch(step: int) -> Batch:
        rewritten = [described(task) for task in tasks[step * rows : (step + 1) * rows]]
        rewritten = with_blank_instructions(rewritten, settings.unconditional, generator(seed, "unconditional", step))
        return ungrouped_batch(rewritten, seed=seed, step=step)

    train_jointly(
        JointModel(model),
        batch,
        settings,
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        name="text-to-image model",
    )
    return model


def described(task: Task) -> Task:
    """The task of ``TextToImageTasks`` with a description in the vocabulary of the model, drawn with a generator keyed by the
    task's id."""
    scene = Scene.from_json(task.meta["scene"])
    return replace(task, instruction=free_description(scene, generator(0, "description", task.id)))


SYSTEM = "Say it for the painter."
ENHANCING = TURNS.format(system=SYSTEM, user="{}")
LONGEST = 26


@dataclass(frozen=True, kw_only=True)
class EnhancerTraining(Training):
    """``complexity``: the numbers of things in a request; successive tasks take them in turn. ``incomplete``: as in
    ``TextToImageData``."""

    steps: int
    learning_rate: float = 2e-3
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


def train_enhancer(settings: EnhancerTraining) -> QwenWriter:
    """Train from the seed. Returns the enhancer with weights that are rounded to half precision."""
    torch.manual_seed(settings.seed)
    words = tokenizer(settings.seed)
    writer = QwenWriter(untrained_enhancer(words), words, template=ENHANCING)
    data = TextToImageData(
        seed=settings.seed + 100,
        count=settings.batch * settings.steps,
        complexity=settings.complexity,
        incomplete=settings.incomplete,
    )
    train_on_completions(
        writer,
        data.tasks(in_turn=True),
        settings,
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        longest=LONGEST,
        seed=settings.seed,
        name="enhancer",
    )
    writer.module.half().float()
    return writer


TEXT_TO_IMAGE = TextToImageTraining(steps=2600)
ENHANCER = EnhancerTraining(steps=1500)
HELD_OUT = 320
EVAL_STEPS = 6


def build_text_to_image(
    out: Path | None, *, seed: int, text_to_image: TextToImageTraining = TEXT_TO_IMAGE, enhancer: EnhancerTraining = ENHANCER
) -> dict[str, float]:
    """Train both models and write them to ``out``/text_to_image and ``out``/enhancer (None: into the package). Returns the means.
    It takes about half an hour on one core of a laptop."""
    folders = [playground_weights(name) if out is None else out / name for name in ("text_to_image", "enhancer")]

    def train() -> tuple[QwenImage, QwenWriter]:
        editor = PlaygroundModel(kind="playground").build(device=torch.device("cpu"))
        assert isinstance(editor, QwenImageEdit)
        return train_text_to_image(editor, replace(text_to_image, seed=seed)), train_enhancer(replace(enhancer, seed=seed))

    def finish(trained: tuple[QwenImage, QwenWriter]) -> dict[str, float]:
        """Write both models in half precision: in diffusers' and in transformers' layout, each with its ``adapter.json``."""
        (model, writer), folder = trained, folders[0]
        folder.mkdir(parents=True, exist_ok=True)
        halved(model.module).save_pretrained(folder / "transformer")
        halved(model.latents.vae).save_pretrained(folder / "vae")
        halved(model.text.encoder).save_pretrained(folder / "text_encoder")
        model.text.tokenizer.save_pretrained(folder / "tokenizer")
        scheduler().save_pretrained(folder / "scheduler")
        write_index(folder, "QwenImagePipeline", {name: found for name, found in PARTS.items() if name != "processor"})
        files.write_json(folder / "adapter.json", {"template": TEMPLATE, "size": list(model.size)})
        for part in ("transformer", "vae"):  # without the local path of the weights
            config = folder / part / "config.json"
            files.write_json(config, {key: value for key, value in files.read_json(config).items() if key != "_name_or_path"})
        halved(writer.module).save_pretrained(folders[1])
        writer.template.tokenizer.save_pretrained(folders[1])
        image_processor().save_pretrained(folders[1])
        files.write_json(folders[1] / "adapter.json", {"template": ENHANCING})
        return measure(model, writer)

    return build(folders, train, finish, seed=seed, command="retouch tools playground --text-to-image")


def measure(model: QwenImage, writer: QwenWriter) -> dict[str, float]:
    """Held-out means of images from the correct prompts, and of images from the greedy completions of the enhancer."""
    policy = AutoregressivePolicy(
        writer, sampling=TokenRollout(max_new_tokens=LONGEST), microbatch=HELD_OUT, copies=WeightCopies(writer.module)
    )
    renderer = PromptRenderer(model=PlaygroundTextToImage(), num_steps=EVAL_STEPS, batch=HELD_OUT)
    right, enhanced = held_out(
        policy,
        tasks=TextToImageData(seed=1, count=HELD_OUT, complexity=[1, 2, 3, 4], split="test").tasks(in_turn=True),
        renderer=renderer.build(model, writer),
        reward=SceneReward(),
        column="overall",
    )
    found: dict[str, float] = {}
    for words, evaluated in (("right words", right), ("enhancer", enhanced)):
        for row, means in score_table(evaluated)[0].items():
            found |= {f"{words}, {row} {name}": float(means[name]) for name in ("overall", "alignment", "quality", "exact")}
    return found
