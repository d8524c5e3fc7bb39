"""The playground's text-to-image model: Qwen-Image's classes with few parameters, trained with supervised flow matching.

Training starts from the weights of the editor, which knows most of the words. ``world.descriptions`` defines the
vocabulary; user requests with other words are out of distribution.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from retouch.core.random import generator
from retouch.models.common.chat_template import TURNS
from retouch.models.qwen_image.model import QwenImage, QwenImageEdit
from retouch.types import Batch, Task
from retouch_worlds.data.text_to_image import TextToImageData
from retouch_worlds.playground.world.descriptions import free_description
from retouch_worlds.playground.world.scenes import SIZE, Scene
from retouch_worlds.pretraining.joint_training import JointModel, train_jointly, with_blank_instructions
from retouch_worlds.pretraining.supervised import ungrouped_batch

TEMPLATE = TURNS.format(system="Paint the picture.", user="{}")


@dataclass(frozen=True, kw_only=True)
class TextToImageTraining:
    """``learning_rate``: the peak after the warm-up, from which the learning rate falls to 0 along a cosine. ``unconditional``: the
    share of the tasks with a blank description, which guidance needs.
    """

    steps: int
    seed: int = 0
    batch: int = 64
    learning_rate: float = 1.5e-3
    warmup: int = 100
    average_decay: float = 0.997
    unconditional: float = 0.05
    shift: float = 3.0


def from_editor(editor: QwenImageEdit) -> QwenImage:
    """The text-to-image model from which training starts: it consists of the parts of the editor.

    The editor knows colours, shapes and positions, but was never trained to generate images without a source image.
    """
    return QwenImage(
        transformer=editor.module,
        vae=editor.latents.vae,
        text_encoder=editor.text.encoder,
        tokenizer=editor.text.tokenizer,
        scheduler_config=editor.scheduler,
        size=(SIZE, SIZE),
        template=TEMPLATE,
    )


def train_text_to_image(editor: QwenImageEdit, settings: TextToImageTraining, log: Callable[[str], None]) -> QwenImage:
    """Train the parts of the editor as a text-to-image model, with tasks and noise from the seed. Returns the model with averaged
    weights."""
    model, seed, rows = from_editor(editor), settings.seed, settings.batch
    tasks = TextToImageData(seed=seed, count=rows * settings.steps, complexity=[1, 2, 3, 4]).tasks(in_turn=True)

    def batch(step: int) -> Batch:
        rewritten = [described(task) for task in tasks[step * rows : (step + 1) * rows]]
        return ungrouped_batch(
            with_blank_instructions(rewritten, settings.unconditional, generator(seed, "unconditional", step)), seed=seed, step=step
        )

    train_jointly(
        JointModel(model),
        batch,
        rows=rows,
        steps=settings.steps,
        learning_rate=settings.learning_rate,
        warmup=settings.warmup,
        shift=settings.shift,
        average_decay=settings.average_decay,
        log=lambda line: log(f"text-to-image model {line}"),
    )
    return model


def described(task: Task) -> Task:
    """The task of ``TextToImageTasks`` with a description in the vocabulary of the model, drawn with a generator keyed by the
    task's id."""
    scene = Scene.from_json(task.meta["scene"])
    return replace(task, instruction=free_description(scene, generator(0, "description", task.id)))
