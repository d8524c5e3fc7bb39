"""`retouch tools playground --writer`: trains the base writer for the playground's editor, from a seed.

The writer has Qwen2.5-VL's classes with few parameters, and the tokenizer of the editor. It learns to read the image and to write
the complete names of things, with the library's own supervised objective. Its demonstrations are imperfect: for instructions with
several edits, most completions are empty. In the last rounds, its hidden states are also distilled from the editor's text encoder,
because they condition the editor.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from pydantic import PrivateAttr
from torch import Tensor, nn
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from retouch.objectives.imitation import CrossEntropy
from retouch.policies.autoregressive import AutoregressivePolicy
from retouch.policies.rollout import TokenRollout
from retouch.policies.weights import WeightCopies
from retouch.run.evaluation import score_table
from retouch.types import Loss, Minibatch, Task
from retouch_models.qwen_image.model import QwenImageEdit, QwenText
from retouch_models.qwen_image.responses import CLOSING, QwenResponses, ResponseEncoder, writer_for
from retouch_models.responses import ResponseRenderer, ResponseSampler
from retouch_worlds.data import IndirectPlaygroundData
from retouch_worlds.models.family import PlaygroundModel
from retouch_worlds.playground import playground_weights
from retouch_worlds.pretraining.editor import INITIALIZER_RANGE, image_processor, picture_tokens, text_config, vision_config
from retouch_worlds.pretraining.training import Training, build, held_out, train_on_completions
from retouch_worlds.rewards import PlaygroundReward

STRIDE = 2  # distil the states of only every second task, which halves the cost and is sufficient


class HiddenStateDistillation(CrossEntropy):
    """Cross-entropy plus the distance between the hidden states of the writer and of the editor's text encoder for the same
    dialogues.

    The distance is the squared error divided by the variance, after the editor's text norm and projection. So the writer may use
    the directions that the editor ignores in order to predict its next token.
    """

    _weight: float = PrivateAttr()
    _norm: nn.Module = PrivateAttr()
    _project: nn.Module = PrivateAttr()
    _turn: str = PrivateAttr()
    _editor_text: QwenText = PrivateAttr()
    _writer_text: QwenText = PrivateAttr()

    def __init__(self, editor: QwenImageEdit, module: Qwen2_5_VLForConditionalGeneration, *, weight: float) -> None:
        super().__init__()
        words = editor.text
        self._weight = weight
        self._norm, self._project = (editor.module.get_submodule(name) for name in ("txt_norm", "txt_in"))
        self._turn = words.template.tail + "{}" + CLOSING
        self._editor_text, self._writer_text = (
            QwenText(encoder, words.tokenizer, template=words.template.head + "{}", image_processor=words.image_processor)
            for encoder in (words.encoder, module)
        )

    def losses(self, policy: Any, minibatch: Minibatch) -> Iterator[Loss]:
        yield from super().losses(policy, minibatch)
        distance = self.distance(minibatch.batch.tasks[::STRIDE])
        yield Loss(self._weight * distance, {"policy/distance": distance.detach()})

    def distance(self, tasks: tuple[Task, ...]) -> Float[Tensor, ""]:
        """The distance for the given tasks and their completions (``completion`` in ``meta``). It is 0 if the writer is the
        editor's own text encoder."""
        bodies = [task.instruction + self._turn.format(task.meta["completion"]) for task in tasks]
        tokens = self._editor_text.tokenise(bodies, [task.images for task in tasks])
        with torch.no_grad():
            states, real = self._editor_text.embed(tokens)
            target = self._projected(states[real])
        projected = self._projected(self._writer_text.embed(tokens)[0][real])
        return (projected - target).square().mean() / (target - target.mean(dim=0)).square().mean()

    def _projected(self, states: Float[Tensor, "n d"]) -> Float[Tensor, "n e"]:
        projected: Tensor = self._project(self._norm(states))
        return projected


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
class WriterTraining(Training):
    """``rounds``: the rounds of training, one after the other, each with its own tasks. ``incomplete``: as in ``indirect``.

    The writer learns to find things in the image suddenly, or not at all in the available time. So the first rounds train only
    this: single edits, without distillation."""

    rounds: tuple[WriterRound, ...]
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


def train_writer(editor: QwenImageEdit, settings: WriterTraining) -> Qwen2_5_VLForConditionalGeneration:
    """Train a writer for the editor from the seed, in each round with a new optimizer."""
    torch.manual_seed(settings.seed)
    module = untrained_writer(editor.text.tokenizer)
    for number, this in enumerate(settings.rounds):
        seed, count = settings.seed + number, settings.batch * this.steps
        data = IndirectPlaygroundData(seed=seed + 100, count=count, complexity=this.complexity, incomplete=settings.incomplete)
        train_on_completions(
            writer_for(editor, module),
            data.tasks(in_turn=True),
            settings,
            steps=this.steps,
            learning_rate=this.learning_rate,
            longest=LONGEST,
            seed=seed,
            name=f"writer round {number + 1} ",
            objective=HiddenStateDistillation(editor, module, weight=this.distillation) if this.distillation > 0 else None,
        )
    module.requires_grad_(False).eval()
    return module


WRITER = WriterTraining(
    rounds=(
        WriterRound(800, 2e-3, (1,)),
        WriterRound(1500, 2e-3, (1, 2, 3)),
        WriterRound(1200, 1e-3, (1, 2, 3), distillation=1.0),
        WriterRound(2000, 1e-3, (1, 2, 3), distillation=3.0),
    )
)
HELD_OUT = 330
EVAL_STEPS = 6


def build_writer(out: Path | None, *, seed: int, writer: WriterTraining = WRITER) -> dict[str, float]:
    """Train the writer for the packaged editor and write it to ``out`` (None: into the package). Returns held-out means. It takes
    about 25 minutes on one core of a laptop."""
    folder = playground_weights("writer") if out is None else out

    def train() -> tuple[QwenImageEdit, Qwen2_5_VLForConditionalGeneration]:
        editor = PlaygroundModel(kind="playground").build(device=torch.device("cpu"))
        assert isinstance(editor, QwenImageEdit)
        return editor, train_writer(editor, replace(writer, seed=seed))

    def finish(trained: tuple[QwenImageEdit, Qwen2_5_VLForConditionalGeneration]) -> dict[str, float]:
        editor, module = trained
        module.save_pretrained(folder)
        editor.text.tokenizer.save_pretrained(folder)
        image_processor().save_pretrained(folder)
        return measure(editor, module)

    return build([folder], train, finish, seed=seed)


def measure(editor: QwenImageEdit, module: Qwen2_5_VLForConditionalGeneration) -> dict[str, float]:
    """Held-out means of the edited images for the writer's greedy completions and for the correct completions, by the encoder that
    reads the completion and by complexity."""
    tasks = IndirectPlaygroundData(seed=1, count=HELD_OUT, complexity=[1, 2, 3], split="test").tasks(in_turn=True)
    policy = AutoregressivePolicy(
        writer_for(editor, module), sampling=TokenRollout(max_new_tokens=LONGEST), microbatch=HELD_OUT, copies=WeightCopies(module)
    )
    config = ResponseRenderer(
        model=PlaygroundModel(), encoder="frozen", num_steps=EVAL_STEPS, encoder_batch=HELD_OUT, batch=HELD_OUT
    )
    scores: dict[str, float] = {}
    for reader, encoder in (("the editor's encoder", editor.text.encoder), ("the writer", module)):
        right, own = held_out(
            policy,
            tasks=tasks,
            renderer=ResponseSampler(QwenResponses(editor, ResponseEncoder.frozen(encoder)), config),
            reward=PlaygroundReward(),
            column="overall",
        )
        for said, found in (("right words", right), ("its own words", own)):
            rows = {row: means for row, means in score_table(found)[0].items() if "kinds" not in row}
            scores |= {f"{said}, read by {reader}, {row}": float(means["overall"]) for row, means in rows.items()}
    return scores
