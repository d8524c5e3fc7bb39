"""The keys of a recipe, and its sections that are no kinds: phases, ``watch``, optimizer, devices, evaluation, samples, ..."""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, Discriminator, Field, JsonValue, PlainSerializer, Tag

from retouch.config.section import UNTAGGED, Count, NonNegative, Positive, Section, Share, StepInterval
from retouch.data.base import DataSource, Mixture
from retouch.data.kinds import DATA
from retouch.data.tasks import steps_for_passes
from retouch.models.base import ImageModel, LanguageModel
from retouch.models.train import FullWeights, Lora
from retouch.objectives.advantages import Advantage, GroupAdvantage
from retouch.objectives.base import Objective
from retouch.objectives.kinds import ADVANTAGES, OBJECTIVES
from retouch.policies.rollout import DenoisingRollout, TokenRollout
from retouch.recipe.policy import AutoregressivePolicyKeys, DenoisingPolicyKeys
from retouch.renderers.base import RendererSection
from retouch.renderers.kinds import RENDERERS
from retouch.rewards.kinds import AnyReward, RunReward
from retouch.types import SplitName


def _rollout_kind(value: Any) -> str:
    kind = value.get("kind", UNTAGGED) if isinstance(value, dict) else getattr(value, "kind", UNTAGGED)
    return kind if isinstance(kind, str) else UNTAGGED


Rollout: TypeAlias = Annotated[
    Annotated[DenoisingRollout, Tag(UNTAGGED)] | Annotated[TokenRollout, Tag("tokens")], Discriminator(_rollout_kind)
]
"""How a policy samples during training: a denoising chain (without a kind), or tokens."""


class InTurn(Section):
    """Writer and image model train in turn: only the writer in ``writer_steps`` steps, then only the image model in
    ``image_steps``."""

    writer_steps: Count
    """Number of steps in which only the writer trains."""
    image_steps: Count
    """Number of steps in which only the image model trains."""


class TextToImage(Section):
    """How the image model of the renderer trains together with the language model that writes its prompts. Each sample is a
    completion and an image that the image model makes from it with exploration, so one group of samples, one reward and one
    advantage teach both. Evaluations and inference make images as the renderer says, with the trained weights.

    Source: joint training of a prompt writer and a flow model (PromptRL).
    """

    train: Annotated[FullWeights | Lora, Field(discriminator="kind")]
    """Which weights of the image model are trained."""
    objective: Annotated[Objective, OBJECTIVES]
    """How advantages become the image model's loss; the objective of the recipe is the writer's."""
    rollout: DenoisingRollout
    """How the image model samples during training, without engine, staleness and refill; ``chunk`` is that of the
    writer's rollout."""
    learning_rate: Positive
    """Learning rate of the image model, before the schedule of ``optimizer``."""
    microbatch: Count = 32
    """Velocities per forward pass of the image model with gradient; changes memory and time only."""
    gradient_checkpointing: bool = False
    """Recompute activations in the image model's backward pass: less memory, about a third more time."""
    turns: InTurn | None = None
    """Train writer and image model in turn; null trains both in every step."""

    def trains(self, step: int) -> tuple[bool, bool]:
        """Whether the writer and the image model train in this step of the run, from 0."""
        if self.turns is None:
            return True, True
        writer = step % (self.turns.writer_steps + self.turns.image_steps) < self.turns.writer_steps
        return writer, not writer


class PhaseKeys(Section):
    """A phase of a run. A key that is null has the value of the recipe's top level."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the phase in metrics and messages."""
    steps: StepInterval | None = None
    """Training steps of the phase; give this or ``passes``. 0 skips the phase."""
    passes: Positive | None = None
    """Length of the phase in passes over its data."""
    objective: Annotated[Objective, OBJECTIVES] | None = None
    """How advantages become a loss."""
    learning_rate: Positive | None = None
    """Learning rate of the optimizer, before its schedule; the schedule restarts with each phase."""
    tasks_per_step: Count | None = None
    """Tasks per training step, over all ranks."""
    group_size: Count | None = None
    """Samples per task."""
    data: Annotated[DataSource, DATA] | None = None
    """The tasks."""
    rollout: Rollout | None = None
    """How the policy samples during training."""
    keep_optimizer: bool = False
    """Continue with the optimizer state of the previous phase."""


@dataclass(frozen=True, kw_only=True)
class ResolvedPhase:
    """A phase with all its keys: its own, and those of the recipe that it does not override."""

    name: str
    steps: int | None
    passes: float | None
    objective: Objective
    learning_rate: float
    tasks_per_step: int
    group_size: int
    data: DataSource
    rollout: Rollout
    keep_optimizer: bool

    @property
    def rows(self) -> int:
        """Samples per step, over all ranks."""
        return self.tasks_per_step * self.group_size

    @property
    def imitates(self) -> bool:
        """Whether the phase learns from the targets of its tasks, without rollout and reward."""
        return self.objective.imitates

    @property
    def most_turns(self) -> int:
        """The largest number of turns in which its samples are edited; 1 without ``rollout.turns``."""
        return 1 if self.imitates or self.rollout.turns is None else self.rollout.turns.most

    def total_steps(self, tasks: int) -> int:
        """Training steps of the phase, for a data set of ``tasks`` tasks."""
        if self.steps is not None:
            return self.steps
        assert self.passes is not None, "a phase has steps or passes"
        return steps_for_passes(self.passes, size=tasks, count=self.tasks_per_step)


Response: TypeAlias = Literal["note", "stop", "roll_back"]


class Rule(Section):
    """Base class of all rules."""

    on_alarm: Response = "note"
    """``note`` writes to the log and continues; ``stop`` saves a checkpoint and ends the run; ``roll_back`` ends it too, with the
    newest checkpoint from before the alarm as the run's last state."""


class HeldOutJudge(Rule):
    """A judge whose scores are never trained on. Alarm: its mean score is below its best measurement by more than ``sigmas``
    standard errors of the paired difference, while the mean reward has not fallen."""

    reward: AnyReward
    """The held-out reward with its ``combine``. It may not share a trained column with the reward of the run."""
    sigmas: Positive = 3.0
    """Number of standard errors from which a fall counts as significant."""


class Canaries(Rule):
    """Images of the untrained policy, which are scored again at every measurement. Alarm: the scores of a column have changed by
    more than ``limit`` on average, which means that the judge has changed."""

    count: Count = 8
    """Number of images, at most ``watch.tasks``."""
    limit: Share = 0.05
    """Mean absolute change, as a share of the column's range."""


class PaintedText(Rule):
    """Text in the image that was not requested and addresses a judge, found by OCR (extra ``ocr``). Alarm: the share of images with
    such text is more than ``limit`` above the share at the start."""

    limit: Share = 0.05
    """Largest increase of the share of images."""


class Diversity(Rule):
    """How different the images of a group are from each other, in every step. Alarm: the mean over the last ``window`` steps is
    below ``limit`` times the mean over the first ``window`` steps."""

    window: Count = 10
    """Number of steps that are averaged."""
    limit: Share = 0.5
    """Smallest diversity, as a share of the diversity in the first steps."""


class Shift(Rule):
    """A mean over the images. Alarm: it differs from its value at the start by more than ``limit`` (for ``preservation``: it is
    lower by more than ``limit``)."""

    limit: Share = 0.1
    """Largest change, of a quantity from 0 to 1."""


class Factor(Rule):
    """A mean over the images. Alarm: it has grown or shrunk by more than the factor ``limit`` since the start."""

    limit: Annotated[float, Field(gt=1.0)] = 1.5
    """Largest factor."""


class Watch(Section):
    """Regular measurements of the images that the policy makes for a few held-out tasks, always the same tasks with the same noise,
    and rules that raise alarms. All measurements are logged as ``watch/...``; a rule that is null raises no alarm."""

    every: Count = 10
    """Steps between two measurements; the first is before the first step."""
    tasks: Count = 32
    """Number of held-out tasks to observe, from the first."""
    judge: HeldOutJudge | None = None
    """A held-out judge; null uses none."""
    canaries: Canaries | None = None
    """Images whose scores must not change; null uses none."""
    text: PaintedText | None = None
    """Search for text that addresses a judge; null does not read the images."""
    diversity: Diversity | None = Diversity()
    """Diversity within groups."""
    preservation: Shift | None = Shift()
    """Preservation of the source outside the mask, for tasks with masks."""
    brightness: Shift | None = Shift()
    """Mean luminance."""
    saturation: Shift | None = Shift()
    """Mean saturation."""
    detail: Factor | None = Factor()
    """Energy of the finest frequencies: patterns as fine as the pixels, or blur."""

    @property
    def rules(self) -> dict[str, Rule]:
        """The rules that can raise an alarm, by name."""
        return {name: rule for name in type(self).model_fields if isinstance(rule := getattr(self, name), Rule)}

    @property
    def rolls_back(self) -> bool:
        """Whether an alarm may go back to a checkpoint."""
        return any(rule.on_alarm == "roll_back" for rule in self.rules.values())


def _steps_or_share(value: float) -> int | float:
    """A number of steps as int, so that recipes contain 5 and not 5.0. Raises ValueError for a fraction above 1."""
    if value == int(value):
        return int(value)
    if value > 1:
        raise ValueError("give a whole number of steps, or a share of the phase's steps below 1")
    return value


class Optimizer(Section):
    """AdamW and its learning rate over time.

    Source: AdamW (Loshchilov & Hutter 2019, arXiv 1711.05101).
    """

    betas: tuple[Annotated[float, Field(ge=0.0, lt=1.0)], Annotated[float, Field(ge=0.0, lt=1.0)]] = (0.9, 0.999)
    """Decay of the running means of the gradient and of the squared gradient."""
    eps: Positive = 1e-8
    """Added to the square root of the running mean of the squared gradient."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    max_grad_norm: Positive | None = 1.0
    """Gradients with a larger norm are scaled down to it; null does not clip."""
    moments: Literal["8bit", "cpu"] | None = Field(default=None, exclude_if=operator.not_)
    """How AdamW's two moments are stored: null is fp32 on the device, 8 bytes per trained weight; ``8bit`` takes 2 (arXiv
    2110.02861), for runs without ``sharding``; ``cpu`` keeps fp32 in CPU memory, with ``fsdp2`` or without sharding."""
    fused: Literal["always", "never"] | None = Field(default=None, exclude_if=operator.not_)
    """Whether one kernel updates all weights. This needs fewer kernels and no temporary copies of weights, and gives the same
    weights up to rounding. Null fuses on accelerators, but not on the CPU. Moments in 8 bits or in CPU memory are never fused."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """Learning rate after the warm-up; cosine and linear end at ``final_share`` of the phase's learning rate."""
    final_share: Share = Field(default=0.0, exclude_if=operator.not_)
    """Learning rate at the end of cosine and linear, as a share of the phase's learning rate."""
    warmup_steps: Annotated[float, Field(ge=0), AfterValidator(_steps_or_share), PlainSerializer(_steps_or_share)] = 0
    """Steps over which the learning rate rises from 0: a whole number, or a share of the phase's steps below 1, rounded up. If a
    run is extended, the share is taken of the new number of steps."""

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments of a stepper."""
        found = self.model_dump(include={"betas", "eps", "weight_decay", "max_grad_norm"})
        if self.fused:
            found["fused"] = self.fused == "always"
        return {**found, "moments": self.moments} if self.moments else found

    def warmup_of(self, steps: int) -> int:
        """The number of warm-up steps of a phase with this number of steps; a share is rounded up."""
        share = round(self.warmup_steps * steps, 6)  # 0.07 * 100 is 7.000000000000001
        return math.ceil(share) if self.warmup_steps < 1 else int(self.warmup_steps)

    def learning_rate(self, *, peak: float, steps: range) -> Callable[[int], float]:
        """The learning rate of each step of a phase that takes ``steps``: a linear warm-up to ``peak``, then the schedule. It is a
        pure function of the step, so checkpoints contain no state of it."""
        warmup = self.warmup_of(len(steps))

        def at(step: int) -> float:
            done = step - steps.start
            if done < warmup:
                return peak * (done + 1) / warmup
            progress = (done - warmup) / max(1, len(steps) - warmup)
            match self.schedule:
                case "constant":
                    return peak
                case "cosine":
                    left = 0.5 * (1 + math.cos(math.pi * progress))
                case "linear":
                    left = 1 - progress
            return peak * (self.final_share + (1 - self.final_share) * left)

        return at


Place: TypeAlias = Annotated[str, Field(pattern=r"^(cpu|mps|cuda(:\d+)?)$")]


class Devices(Section):
    """A device for each part. ``cuda:N`` counts the GPUs of a rank. Each rank gets as many GPUs as are named here, in the order of
    the ranks on a machine."""

    policy: Place | None = None
    """Device of the policy; null uses ``device``."""
    renderer: Place | None = None
    """Device of the image model behind a writer; null uses the policy's device."""
    reward: Place | None = None
    """Device of the reward models that run in this process; null uses the policy's device."""
    offload: bool = False
    """Keep frozen parts in CPU memory while they are not used: the image model behind a writer, so that it and the policy can share
    a device, or the text encoders and the autoencoder of a denoising policy."""
    reference: Literal["cpu"] | None = Field(default=None, exclude_if=lambda place: place is None)
    """Where the frozen reference of a writer is kept if all weights train: ``cpu``, or null for the policy's device. From the CPU
    it is copied to the device for each microbatch."""
    weights: Literal["cpu"] | None = Field(default=None, exclude_if=lambda place: place is None)
    """Where the weights that ``sharding: fsdp2`` shards are kept while they are not used: ``cpu``, or null for the policy's device.
    Each block is copied to the device when it computes. The gradients and moments of these weights are then in CPU memory too."""
    swap_blocks: StepInterval = Field(default=0, exclude_if=operator.not_)
    """Number of blocks, counted from the transformer's last one, whose frozen weights wait in CPU memory and are copied to the
    device for each use, while the block before computes. Two of these blocks are on the device at a time. Needs a LoRA or an
    IP-Adapter, and gradient checkpointing."""
    memory_fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Largest share of a GPU's memory that this process may use; null sets no limit."""
    empty_cache_every: Count | None = None
    """Steps between two releases of the memory that torch has cached; null never releases it."""

    @property
    def named(self) -> dict[str, str]:
        """The parts for which a device is set: name of the part to device."""
        parts = {"policy": self.policy, "renderer": self.renderer, "reward": self.reward}
        return {part: place for part, place in parts.items() if place is not None}


OMITTED_IF_NULL = ("renderer", "text_to_image", "ledger", "watch", "devices", "sharding", "push")
"""Keys that a resolved recipe contains only if they are not null."""


class SuiteKeys(Section):
    """A published benchmark that is run during training, on the current policy. See docs/benchmarks.md.

    An alarm is raised if the headline score of the suite has fallen while the training reward has not.
    """

    suite: str
    """The suite's name, as `retouch bench list` shows it."""
    every: StepInterval = 0
    """Steps between two runs of the suite; 0 runs it only before the first and after the last step."""
    subset: Count | None = 64
    """Number of items, taken evenly from the categories; null is the whole suite."""
    data: str | None = None
    """Folder of the suite's published data."""
    judge: dict[str, JsonValue] | None = None
    """The vision-language model that answers the suite's questions, with the keys of a reward's ``judge``."""
    options: dict[str, JsonValue] = Field(default={})
    """Fields of the suite."""
    sigmas: Positive = 3.0
    """Number of standard errors from which a fall below the best result so far raises an alarm."""
    on_alarm: Response = Field(default="note", exclude_if=lambda response: response == "note")
    """``note`` writes to the log and continues; ``stop`` saves a checkpoint and ends the run; ``roll_back`` ends it too, with the
    newest checkpoint from before the alarm as the run's last state."""


class EvaluationKeys(Section):
    """Held-out evaluation: before and after the run, and every ``every`` steps during it."""

    every: StepInterval = 0
    """Steps between evaluations; 0 evaluates only before and after the run."""
    tasks: Count = 64
    """Number of held-out tasks."""
    seed: int = 0
    """Seed of the held-out tasks, and of the noise that their images start from."""
    split: SplitName = "test"
    """Held-out split of the playground. With other data, ``train`` evaluates on the training tasks, for data sets too small to hold
    any out (``data.held_out: 0``); this measures fit, not generalisation."""
    complexity: Mixture | None = None
    """Mixture of the held-out playground tasks; null uses the mixture of the training data."""
    num_steps: Count | None = None
    """Denoising steps per image; null uses ``num_steps`` of the rollout or of the renderer."""
    column: str | None = None
    """Column of the reward that the summary reports; null is the combined reward."""
    headline: dict[str, tuple[str, ...]] | None = None
    """Tags of the tasks that the summary reports, for example {"complexity": ["2", "3"]}; null is all tasks."""
    turns: bool | None = Field(default=None, exclude_if=partial(operator.is_, None))
    """Whether the policy makes the edits of held-out tasks in turns; the last image is scored against the whole task. null does as
    ``rollout``. Without ``rollout.turns``, true measures edit by edit a model that was not trained for it."""
    best_of_k: StepInterval = 0
    """Also measure the best of this many samples of the untrained policy, and its score edit by edit if tasks have turns; 0 does
    not."""
    guided_k: StepInterval = Field(default=0, exclude_if=operator.not_)
    """Also measure the untrained policy guided by its reward: of this many noisy denoising steps, the one with the best predicted
    image continues. The policy computes as much as for ``best_of_k``; the reward is asked in every step. 0 does not."""
    batch: Count = 128
    """Number of rows that are sampled together."""
    suites: tuple[SuiteKeys, ...] = Field(default=(), exclude_if=operator.not_)
    """Published benchmarks to run during training."""
    audit: bool = Field(default=True, exclude_if=bool)
    """Whether the judges of ``suites`` are audited before the first step. The audit is short, and its result is stored."""


class Samples(Section):
    """Images of a few held-out tasks and training groups, saved during the run."""

    every: StepInterval = 25
    """Steps between two saves; 0 saves only before and after the run."""
    tasks: Count = 8
    """Number of held-out tasks."""
    groups: Count = 4
    """Number of training groups."""
    tables: bool = Field(default=False, exclude_if=operator.not_)
    """Also send the images, with texts and scores, as a table to W&B and Trackio, if ``trackers`` contains them."""
    tokens: bool = Field(default=False, exclude_if=operator.not_)
    """Also store the sampled text tokens of each stored training sample, with their log-probabilities."""
    states: bool = Field(default=False, exclude_if=operator.not_)
    """Also store an image of each state of the denoising chain around its actions, for the first stored sample of each group."""


class Checkpoints(Section):
    """Checkpoints. A run that resumes from one continues bit for bit."""

    every: StepInterval = 25
    """Steps between two checkpoints; 0 saves only at the end or when the run is interrupted."""
    keep: Count = 2
    """Number of newest checkpoints to keep."""
    keep_every: Count | None = Field(default=None, exclude_if=lambda every: every is None)
    """Also keep every checkpoint whose step is a multiple of this number; null keeps only the newest ones."""


class Push(Section):
    """Upload of the trained weights to the Hugging Face Hub, in the format of `retouch export`. Each push is a revision named after
    its step; the last one is also on main. Without a token nothing is pushed, and the run reports it."""

    repo: Annotated[str, Field(pattern=r"^([\w.-]+/)?[\w.-]+$")]
    """The repository, USER/NAME, or NAME for the owner of the token. It is created if it does not exist."""
    every: StepInterval = 0
    """Steps between pushes; 0 pushes only at the end."""
    private: bool = True
    """Whether a newly created repository is private."""


class LedgerKeys(Section):
    """What the ledger stores in addition to every score and answer."""

    keep_images: bool = False
    """Store every scored image, so that another reward can score it later (``retouch ledger RUN rescore REWARD``)."""


class RecipeKeys(Section):
    """The keys of a recipe. ``retouch.recipe.recipe.Recipe`` adds the checks between them."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run, and of its folder under ``out``."""
    seed: int = 0
    """Seed of every random draw of the run."""
    steps: Count | None = None
    """Training steps of the run; give this, or ``passes``, or ``phases``."""
    passes: Positive | None = None
    """Length of the run in passes over the data."""
    out: str = "runs"
    """Folder that contains the run folders."""
    tasks_per_step: Count
    """Tasks per training step, over all ranks."""
    group_size: Count
    """Samples per task (the G of GRPO)."""
    learning_rate: Positive
    """Learning rate of the optimizer, before its schedule."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    """``auto`` uses the first of CUDA, MPS and CPU that is available, and reports it."""
    devices: Devices | None = None
    """Devices of single parts of the run; null puts all parts on ``device``."""
    sharding: Literal["zero2", "zero3", "fsdp2"] | None = None
    """What is sharded over ranks: with ``zero2`` (DeepSpeed) gradients and optimizer state, with ``fsdp2`` the weights too; null is
    data parallelism without sharding. ``zero3`` is refused."""
    deterministic: bool = Field(default=False, exclude_if=lambda chosen: not chosen)
    """On a GPU, use only deterministic algorithms, so that a run gives the same bits twice; an operation that has none raises an
    error. Without it, the gradient of attention and some sums are added up in an order that differs from run to run, and a resumed
    run equals an uninterrupted one up to rounding. Its cost in time is not known. On the CPU, runs give the same bits without
    it."""
    tf32: bool = Field(default=False, exclude_if=lambda chosen: not chosen)
    """Let a GPU round the factors of fp32 matrix products and convolutions to TF32 (10 bits), which is several times faster. False
    also turns TF32 off for convolutions, where torch uses it by default. Image codes are always looked up in full fp32."""
    ranks: Count | None = None
    """Number of ranks that the recipe is made for. Another number only causes a warning; null is any number."""
    epochs: Count = 1
    """Passes over the samples of a step."""
    minibatches: Count = 1
    """Optimizer steps per pass."""
    microbatch: Count = 32
    """Velocities or completions per forward pass with gradient; changes memory and time only."""
    policy: Annotated[DenoisingPolicyKeys | AutoregressivePolicyKeys, Field(discriminator="kind")]
    """The policy: the model that is trained."""
    rollout: Rollout
    """How the policy samples during training."""
    renderer: Annotated[RendererSection, RENDERERS] | None = None
    """Makes images from the completions of a language-model policy; a denoising policy has no renderer."""
    data: Annotated[DataSource, DATA]
    """The tasks."""
    reward: RunReward
    """The reward of a sample."""
    advantage: Annotated[Advantage, ADVANTAGES] = GroupAdvantage()
    """How rewards become advantages."""
    objective: Annotated[Objective, OBJECTIVES]
    """How advantages become a loss."""
    text_to_image: TextToImage | None = None
    """Trains the image model of a ``prompt`` renderer too; null keeps it frozen."""
    optimizer: Optimizer = Optimizer()
    """The optimizer and its learning-rate schedule."""
    eval: EvaluationKeys = EvaluationKeys()
    """Held-out evaluation."""
    samples: Samples = Samples()
    """Images saved to look at."""
    checkpoints: Checkpoints = Checkpoints()
    """Checkpoints."""
    push: Push | None = None
    """Upload to the Hugging Face Hub; null uploads nothing."""
    ledger: LedgerKeys | None = None
    """What the ledger stores; null is the default."""
    watch: Watch | None = None
    """Monitoring for reward hacking; null monitors nothing."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """Trackers that get the metrics, in addition to ``metrics.jsonl``."""
    phases: tuple[PhaseKeys, ...] | None = None
    """Consecutive phases of the run; null is one phase that consists of the keys above."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.out) / self.name

    def resolved_phases(self) -> tuple[ResolvedPhase, ...]:
        """The phases with all their keys; without ``phases`` there is one, ``main``."""
        phases = (PhaseKeys(name="main", steps=self.steps, passes=self.passes),) if self.phases is None else self.phases
        return tuple(
            ResolvedPhase(
                name=phase.name,
                steps=phase.steps,
                passes=phase.passes,
                objective=self.objective if phase.objective is None else phase.objective,
                learning_rate=self.learning_rate if phase.learning_rate is None else phase.learning_rate,
                tasks_per_step=self.tasks_per_step if phase.tasks_per_step is None else phase.tasks_per_step,
                group_size=self.group_size if phase.group_size is None else phase.group_size,
                data=self.data if phase.data is None else phase.data,
                rollout=self.rollout if phase.rollout is None else phase.rollout,
                keep_optimizer=phase.keep_optimizer,
            )
            for phase in phases
        )

    def phase_key(self, index: int, key: str) -> str:
        """Where a key of the phase with this index is set: in the phase itself, or at the recipe's top level."""
        own = self.phases is not None and getattr(self.phases[index], key) is not None
        return f"phases.{index}.{key}" if own else key

    def eval_data(self) -> DataSource:
        """The data source of the evaluation: the run's data, with the held-out tasks that ``eval`` selects."""
        given = self.eval
        return self.data.for_evaluation(tasks=given.tasks, seed=given.seed, split=given.split, complexity=given.complexity)

    @property
    def heldout_objective(self) -> Objective | None:
        """The objective that measures the held-out tasks itself, in addition to the reward: the first objective with held-out
        columns whose phase uses the data of the first phase. None if there is none."""
        phases = self.resolved_phases()
        return next((each.objective for each in phases if each.objective.heldout_columns and each.data == phases[0].data), None)

    @property
    def evaluates_in_turns(self) -> bool:
        """Whether the held-out tasks are edited in turns."""
        trained = any(phase.most_turns > 1 for phase in self.resolved_phases())
        return trained if self.eval.turns is None else self.eval.turns

    @property
    def image_model(self) -> ImageModel | LanguageModel:
        """The model that makes the images: the policy's own, or the renderer's."""
        of_renderer = None if self.renderer is None else self.renderer.image_model
        return self.policy.model if of_renderer is None else of_renderer

    @property
    def image_model_key(self) -> str:
        """The recipe key of ``image_model``."""
        return "policy.model" if self.image_model is self.policy.model else "renderer.model"

    @property
    def image_size(self) -> tuple[int, int] | None:
        """(height, width) in pixels of the images of ``image_model``; None if the recipe does not fix it."""
        return getattr(self.image_model, "size", None)

    def document(self) -> dict[str, JsonValue]:
        """Return the resolved recipe as JSON, with all defaults. It has the keys of ``OMITTED_IF_NULL`` only if they are not null.

        ``parse`` reads it.
        """
        return self.model_dump(mode="json", exclude={key for key in OMITTED_IF_NULL if getattr(self, key) is None})
