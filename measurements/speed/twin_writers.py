"""The setup for both sides of the comparison with TRL: two writers with equal weights, and a reward for their completions.

The writer is that of the playground, untrained. The reward of a completion is the share of its tokens that belong to a small part
of the vocabulary: exact, cheap, and easy to learn. TRL gets the same reward through ``retouch.integrations.trl``.
"""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from PIL import Image
from trl import GRPOConfig, GRPOTrainer

from retouch.distributed.optimizer import ReplicatedStepper
from retouch.distributed.ranks import Ranks
from retouch.integrations.trl import RetouchReward, dataset_of, processor_for
from retouch.models.base import PretrainedLanguageModel
from retouch.objectives.advantages import GroupAdvantage
from retouch.objectives.policy_gradient import PolicyGradient
from retouch.policies.autoregressive import AutoregressivePolicy
from retouch.policies.rollout import TokenRollout
from retouch.policies.weights import WeightCopies
from retouch.recipe.policy import LanguageModelLora
from retouch.rewards.judging import RewardScorer
from retouch.run.metrics import Clock
from retouch.run.step import Phase, Run, collect, update
from retouch.types import Batch, Column, Sample, Scores, Task
from retouch_models.qwen_image.responses import writer_for
from retouch_models.qwen_vl import QwenWriter
from retouch_worlds.data import PlaygroundData
from retouch_worlds.models.family import PlaygroundModel
from retouch_worlds.pretraining.writer import untrained_writer

TASKS_PER_STEP, GROUP_SIZE = 4, 8
ROWS = TASKS_PER_STEP * GROUP_SIZE
LORA = LanguageModelLora(kind="lora")
LEARNING_RATE = 1e-2
WANTED = range(100, 132)  # token ids that the reward wants


@dataclass(frozen=True)
class Setting:
    """A setting of the comparison.

    ``side``: side of the square source image in px; each 8 x 8 px are a token. ``longest``: most tokens of a completion.
    """

    name: str
    side: int
    longest: int


class Strips:
    """Renders a completion as a white pixel per wanted token and a black pixel per other token; None if it is empty."""

    def __call__(self, tasks: Sequence[Task], trajectory: Any) -> list[Image.Image | None]:
        return [_strip(output.ids) if output.ids else None for output in trajectory.outputs]


class Light:
    """The mean brightness of a strip, 0 to 1, which is the share of wanted tokens."""

    columns = {"wanted": Column(0.0, 1.0)}  # noqa: RUF012

    def __call__(self, samples: Sequence[Sample]) -> Scores:
        strips = [sample.image for sample in samples]
        return {"wanted": torch.tensor([sum(strip.getdata()) / 255 / strip.width for strip in strips if strip is not None])}


def _strip(ids: Sequence[int]) -> Image.Image:
    strip = Image.new("L", (len(ids), 1))
    strip.putdata([255 * (k in WANTED) for k in ids])
    return strip


@dataclass(frozen=True, eq=False)
class Twins:
    """Two writers with equal weights and adapters. ``wrapped``: the module of ``theirs`` as a PEFT model, which TRL expects."""

    ours: QwenWriter
    theirs: QwenWriter
    wrapped: Any
    tasks: Sequence[Task]


def twins(setting: Setting, *, seed: int, steps: int) -> Twins:
    """Build both writers, and draw the tasks for all steps."""
    editor: Any = PlaygroundModel(kind="playground").build(device=torch.device("cpu"))
    config = LoraConfig(
        r=LORA.rank,
        lora_alpha=LORA.alpha,
        lora_dropout=0.0,
        init_lora_weights="gaussian",
        target_modules=list(PretrainedLanguageModel.lora_targets),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = untrained_writer(editor.text.tokenizer).requires_grad_(False).eval()
        other = copy.deepcopy(module)
        module.add_adapter(config)
        wrapped = get_peft_model(other, config)
    for name, weight in module.named_parameters():
        weight.requires_grad_("lora_" in name)
        if weight.requires_grad:
            other.get_parameter(name).data.copy_(weight.data)
    tasks = PlaygroundData(seed=seed, count=TASKS_PER_STEP * steps, complexity=[1, 2]).tasks(in_turn=True)
    seen = [replace(task, images=(task.images[0].resize((setting.side, setting.side)),)) for task in tasks]
    return Twins(writer_for(editor, module), writer_for(editor, other), wrapped, seen)


def library(pair: Twins, setting: Setting, *, seed: int) -> Callable[[int], float]:
    """Return a function that makes a step of the library and returns the mean reward."""
    module = pair.ours.module
    policy = AutoregressivePolicy(
        pair.ours, sampling=TokenRollout(max_new_tokens=setting.longest), microbatch=ROWS, copies=WeightCopies(module)
    )
    judge = RewardScorer(Light(), {"wanted": 1.0})
    run = Run(
        policy=policy,
        renderer=Strips(),
        judge=lambda batch, samples: judge.submit(samples),
        stepper=ReplicatedStepper(module, Ranks(), weight_decay=0.0),
        ranks=Ranks(),
        chunk=ROWS,
        max_missing=0.0,
        average=lambda taken: None,
        clock=Clock(),
    )

    def batch(step: int) -> Batch:
        rows = range(ROWS)
        return Batch(
            seed=seed,
            step=step,
            tasks=tuple(pair.tasks[TASKS_PER_STEP * step + k] for k in range(TASKS_PER_STEP)),
            group_ids=tuple(range(TASKS_PER_STEP)),
            group=tuple(row // GROUP_SIZE for row in rows),
            slot=tuple(row % GROUP_SIZE for row in rows),
        )

    phase = Phase(
        name="main",
        steps=range(len(pair.tasks) // TASKS_PER_STEP),
        # TRL always measures the entropy.
        objective=PolicyGradient(clip_low=0.2, clip_high=0.2, normalise="token").build(entropy=True),
        batch=batch,
        order=torch.arange(ROWS),
        group=torch.arange(ROWS) // GROUP_SIZE,
        advantage=GroupAdvantage(ddof=1, clip=None),
        epochs=1,
        minibatches=1,
        learning_rate=lambda step: LEARNING_RATE,
    )

    def step(number: int) -> float:
        collected = collect(run, phase, number)
        update(run, phase, number, collected)
        return collected.metrics["reward/mean"]

    return step


class Kept:
    """A reward function for TRL that keeps the rewards of all calls."""

    def __init__(self, reward: RetouchReward) -> None:
        self.reward = reward
        self.calls: list[list[float | None]] = []

    def __call__(self, **given: Any) -> list[float | None]:
        self.calls.append(self.reward(**given))
        return self.calls[-1]

    def means(self) -> list[float]:
        """The mean reward of each call, without missing rewards."""
        return [statistics.mean(each for each in call if each is not None) for call in self.calls]


def trainer(pair: Twins, setting: Setting, *, seed: int, folder: str) -> tuple[GRPOTrainer, Kept]:
    """Build TRL's trainer with the settings of the library. Defaults of TRL that the library can match are kept."""
    steps = len(pair.tasks) // TASKS_PER_STEP
    judged = RetouchReward(pair.theirs, Strips(), Light(), combine={"wanted": 1.0}, task=lambda row: pair.tasks[row["task"]])
    kept = Kept(judged)
    config = GRPOConfig(
        folder,
        max_steps=steps,
        per_device_train_batch_size=ROWS,
        num_generations=GROUP_SIZE,
        max_completion_length=setting.longest,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        shuffle_dataset=False,
        gradient_checkpointing=False,
        bf16=False,
        use_cpu=True,
        seed=seed,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    made = GRPOTrainer(
        model=pair.wrapped,
        reward_funcs=kept,
        args=config,
        train_dataset=dataset_of(pair.tasks, pair.theirs),
        processing_class=processor_for(pair.theirs),
    )
    return made, kept
