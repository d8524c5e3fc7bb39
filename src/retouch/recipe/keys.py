"""The keys of a recipe, section by section. What is not in a recipe does not decide how a run goes."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, JsonValue

from retouch.config.section import Cadence, Count, Positive, Section
from retouch.models.base import ImageModel, ImportedModel
from retouch.objectives.advantages import Advantage, GroupAdvantage
from retouch.objectives.base import Objective
from retouch.objectives.kinds import ADVANTAGES, OBJECTIVES
from retouch.recipe.data import Data, DrawnData, IndirectPlaygroundData, Mixture, PaintingData, PlaygroundData, WordData
from retouch.recipe.devices import Devices
from retouch.recipe.emu3 import TokenModel
from retouch.recipe.optimizer import Optimizer
from retouch.recipe.phases import Phase, ResolvedPhase
from retouch.recipe.policy import DenoisingPolicyKeys
from retouch.recipe.renderer import CodesRenderer, Renderer
from retouch.recipe.reward import Reward
from retouch.recipe.rollout import Rollout
from retouch.recipe.watch import Watch
from retouch.recipe.writer import AutoregressivePolicy

LEFT_OUT = ("renderer", "ledger", "watch", "devices", "sharding", "push")
"""Keys that a resolved recipe has only where they are not null."""


class Evaluation(Section):
    """Held-out evaluation: always before and after the run, and in between as ``every`` says."""

    every: Cadence = 0
    """Steps between evaluations; 0 evaluates only before and after."""
    tasks: Count = 64
    """Held-out tasks."""
    seed: int = 0
    """What held-out tasks are drawn from, and the noise their pictures start from."""
    split: Literal["train", "validation", "test"] = "test"
    """Which held-out split of the playground. Of other data ``train`` takes the tasks that train, where there are too few to hold
    any out (``data.held_out: 0``): what is then measured is fit and no gain."""
    complexity: Mixture | None = None
    """Mixture of the held-out playground tasks; null takes that of the data."""
    num_steps: Count | None = None
    """Denoising steps of a picture; null takes the rollout's, or the renderer's."""
    column: str | None = None
    """What the summary speaks of: a column of the reward; null takes the combined reward."""
    headline: dict[str, tuple[str, ...]] | None = None
    """Tags of the tasks that the summary speaks of, {"complexity": ["2", "3"]} say; null takes all."""
    best_of_k: Cadence = 0
    """Also take the best of so many samples of the untrained policy; 0 does not."""
    batch: Count = 128
    """Rows sampled at once."""


class Samples(Section):
    """Pictures of a few held-out tasks and training groups, kept as the run goes on."""

    every: Cadence = 25
    """Steps between them; 0 keeps only those before and after."""
    tasks: Count = 8
    """Held-out tasks to picture."""
    groups: Count = 4
    """Training groups to picture."""


class Checkpoints(Section):
    """Saved states, from which a run goes on to the same bits."""

    every: Cadence = 25
    """Steps between them; 0 saves only at the end, or when the run is told to stop."""
    keep: Count = 2
    """How many of the newest to keep."""
    keep_every: Count | None = Field(default=None, exclude_if=lambda every: every is None)
    """Of every so many steps one stays for good, beside the newest; null lets all others go."""


class Push(Section):
    """The trained weights on the Hugging Face Hub, as `retouch export` writes them: each push under a revision of its step's name,
    the last one under main too. Without a token nothing is pushed, and the run says so."""

    repo: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    """The repository, USER/NAME; it is made if there is none."""
    every: Cadence = 0
    """Steps between pushes; 0 pushes only at the end."""
    private: bool = True
    """Whether a repository that is made for the run is private."""


class Ledger(Section):
    """What is kept of judging, beside every score and answer, which are kept in any case."""

    keep_images: bool = False
    """Keep every picture that was judged, so that another judge can look at it later (``retouch ledger RUN rescore REWARD``)."""


class RecipeKeys(Section):
    """The keys of a recipe. ``retouch.recipe.recipe.Recipe`` adds the checks between them."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """Name of the run, and of its folder under ``out``."""
    seed: int = 0
    """What every random draw of the run is keyed by."""
    steps: Count | None = None
    """Training steps of the run; give this, or ``passes``, or ``phases``."""
    passes: Positive | None = None
    """Length of the run in passes over the data."""
    out: str = "runs"
    """Folder of runs."""
    tasks_per_step: Count
    """Tasks that the policy acts on in a step, over all ranks."""
    group_size: Count
    """Samples of each task."""
    learning_rate: Positive
    """Learning rate of the optimizer, before its schedule."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    """``auto`` takes CUDA, then MPS, then the CPU, and says which."""
    devices: Devices | None = None
    """Where parts of the run lie that are not on ``device``; null: all of them are."""
    sharding: Literal["zero2", "zero3", "fsdp2"] | None = None
    """What ranks share: ``zero2`` (DeepSpeed) gradients and the optimizer's state, ``fsdp2`` the weights too; null: nothing, each
    rank holds all. ``zero3`` is refused."""
    ranks: Count | None = None
    """Ranks that the recipe is meant for; another number is said and not refused, null means any."""
    epochs: Count = 1
    """Passes over the samples of a step."""
    minibatches: Count = 1
    """Optimizer steps in each of them."""
    microbatch: Count = 32
    """Velocities, or a writer's completions, per forward with gradient; changes memory and time only."""
    policy: Annotated[DenoisingPolicyKeys | AutoregressivePolicy, Field(discriminator="kind")]
    """What gets the gradient."""
    rollout: Rollout
    """How it samples while it learns."""
    renderer: Renderer | None = None
    """What makes pictures of what a writer wrote; a denoising policy makes its own and has none."""
    data: Data
    """Where the tasks come from."""
    reward: Reward
    """What judges the samples."""
    advantage: Annotated[Advantage, ADVANTAGES] = GroupAdvantage()
    """How rewards become advantages."""
    objective: Annotated[Objective, OBJECTIVES]
    """How advantages become a loss."""
    optimizer: Optimizer = Optimizer()
    """What makes the optimizer's steps."""
    eval: Evaluation = Evaluation()
    """Held-out evaluation."""
    samples: Samples = Samples()
    """Pictures to look at."""
    checkpoints: Checkpoints = Checkpoints()
    """Saved states."""
    push: Push | None = None
    """Weights on the Hugging Face Hub; null pushes none."""
    ledger: Ledger | None = None
    """What is kept of judging; null is the default."""
    watch: Watch | None = None
    """What is watched against reward hacking; null watches nothing."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ("tensorboard",)
    """Where metrics go, beside ``metrics.jsonl``."""
    phases: tuple[Phase, ...] | None = None
    """Stages of the run, one after the other; null is one phase made of the keys above."""

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.out) / self.name

    def resolved_phases(self) -> tuple[ResolvedPhase, ...]:
        """The phases with nothing left open; without ``phases`` there is one, ``main``."""
        if self.phases is None:
            return (self._resolved(Phase(name="main", steps=self.steps, passes=self.passes)),)
        return tuple(self._resolved(phase) for phase in self.phases)

    def _resolved(self, phase: Phase) -> ResolvedPhase:
        """The keys of the phase, and those of the recipe where the phase has none."""
        return ResolvedPhase(
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

    def eval_data(self) -> Data:
        """The data of evaluation: the run's own, with what ``eval`` says about held-out playground tasks."""
        if not isinstance(self.data, DrawnData):
            return self.data
        changes: dict[str, object] = {"count": self.eval.tasks, "seed": self.eval.seed, "split": self.eval.split}
        if isinstance(self.data, WordData):
            return self.data.model_copy(update=changes | {"slips": 0})
        if isinstance(self.data, PlaygroundData):
            changes |= {"vain": 0, "unfinished": 0}
        if isinstance(self.data, IndirectPlaygroundData | PaintingData):
            changes["lazy"] = 0
        return self.data.model_copy(update=changes | ({} if self.eval.complexity is None else {"complexity": self.eval.complexity}))

    @property
    def image_model(self) -> ImageModel | TokenModel:
        """The image model that the tasks' pictures are for: the policy's own, or the one behind a writer."""
        if self.policy.kind == "denoising":
            return self.policy.model
        if isinstance(self.renderer, CodesRenderer):
            assert isinstance(self.policy.model, TokenModel | ImportedModel), "the recipe's checks see to it"
            return self.policy.model
        assert self.renderer is not None, "the recipe's checks see to it"
        return self.renderer.model

    @property
    def image_size(self) -> tuple[int, int] | None:
        """(height, width) in px of the image model's images, where the recipe fixes it."""
        return getattr(self.image_model, "size", None)

    def document(self) -> dict[str, JsonValue]:
        """The resolved recipe as JSON: every key, defaults and all; those of ``LEFT_OUT`` where they say something. ``parse`` takes
        it back."""
        return self.model_dump(mode="json", exclude={key for key in LEFT_OUT if getattr(self, key) is None})
