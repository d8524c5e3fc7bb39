"""The rollout keys of both kinds of policies, and the interfaces of engines.

Recipes import this file, so it imports no torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from pydantic import Field

from retouch.config.section import Count, Kinds, NonNegative, Positive, Section, Share
from retouch.core.random import generator
from retouch.core.windows import all_steps, random_window, sliding_window
from retouch.models.base import ImageModel
from retouch.models.train import TrainSection
from retouch.policies.engine import Generation, TokenSampling
from retouch.protocols import AutoregressiveModel, DenoisingModel
from retouch.types import Batch, Conditioning, Prompts

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from retouch.core.transitions import TransitionResult

TRUNCATE_AT = 2.0


FirstGradientStep: TypeAlias = Callable[..., int]
"""``retouch.objectives.base.Objective.first_gradient_step``, called with (num_steps, seed=..., step=...)."""


class Refill(Section):
    """Replace groups whose rewards are all equal, because they have no gradient. They are replaced with samples of further tasks,
    until all groups of the step have different rewards or ``rounds`` is reached (dynamic sampling of DAPO, arXiv 2503.14476)."""

    rounds: Count
    """Largest number of rounds of replacement in a step. Each round samples and scores as many groups as have equal rewards."""


MOST_TURNS = 4


class EditingTurns(Section):
    """Editing in several turns: an episode is a chain of edits, each on the image that the sample itself has made in the turn
    before. Every turn is a row of the policy, and learns from its return: its own reward, the discounted rewards of the later
    turns, and that of the whole episode. Samples of a task are compared turn by turn."""

    most: Annotated[int, Field(ge=2, le=MOST_TURNS)]
    """The largest number of turns of a task. Fewer are allowed; a step costs as much as if all tasks had this number."""
    discount: Share = 1.0
    """Weight of the reward of the next turn in a return; that of the turn after it has the square of it, and so on."""
    end: NonNegative = 1.0
    """Weight of the reward of the last image, scored against the whole task. It is discounted like a reward of the last turn."""

    def bounds(self, low: float, high: float) -> tuple[float, float]:
        """The smallest and the largest return, of rewards from ``low`` to ``high``."""
        weights = [sum(self.discount**k for k in range(n)) + self.discount ** (n - 1) * self.end for n in range(1, self.most + 1)]
        return min(low * weight for weight in weights), max(high * weight for weight in weights)


class SharedRollout(Section):
    """The keys of a rollout that all policies share."""

    staleness: Annotated[int, Field(ge=0, le=16)] = Field(default=0, exclude_if=operator.not_)
    """Number of steps by which rollouts run ahead of learning. The samples of a step are generated, and their scoring begins, with
    weights that are up to this many steps old, so that slow rewards are computed while the policy learns. 0 samples every step with
    the current weights. Above 0, this number of copies of the trained weights is kept in CPU memory (with ``sharding: fsdp2``, on
    the device of the weights) and in checkpoints, and each step computes the log-probabilities of its samples again."""
    truncate_at: Annotated[float, Field(ge=1.0)] = Field(default=TRUNCATE_AT, exclude_if=partial(operator.eq, TRUNCATE_AT))
    """With ``staleness``: the largest importance weight of an action in the loss (truncated importance sampling). The weight is the
    probability of the action under the weights at the start of the step, divided by its probability under the weights that sampled
    it. For transitions it is computed like the objective's ratio, from log-probabilities reduced with ``reduction``."""
    refill: Refill | None = Field(default=None, exclude_if=operator.not_)
    """Replace groups whose rewards are all equal; null keeps them, though they do not contribute to the gradient."""
    turns: EditingTurns | None = Field(default=None, exclude_if=operator.not_)
    """Edit in several turns; null makes one image from the whole instruction."""


Diagnosis: TypeAlias = tuple[Literal["ok", "note", "FAILED"], str, str]
"""A result of a check: the status, what was found, and for a failure what to do."""


@runtime_checkable
class Engine(Protocol):
    """Samples a completion for each row of a batch under the model's current weights.

    ``exact``: the engine's log-probabilities equal those of the policy's own evaluation, up to rounding in fp32. If they do not,
    the policy evaluates the completions itself and keeps the engine's log-probabilities as ``behaviour_log_probs``.
    """

    @property
    def exact(self) -> bool: ...

    def __call__(self, batch: Batch, prompts: Prompts, sampling: TokenSampling) -> Generation: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ChainRequest:
    """A request for denoising chains.

    ``transition``: the kind of the stochastic steps, with ``noise_level``. ``sigmas``: the whole schedule, fp32, with n + 1 values
    for n steps. ``actions``: the numbers of the stochastic steps; all others are deterministic. ``shape``: the shape of a row's
    latents.
    """

    transition: str
    noise_level: float
    guidance_scale: float
    sigmas: Float[Tensor, " n_plus_1"]
    actions: range
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Chains:
    """The chains of a batch, row by row, in fp32 and on the CPU.

    ``latents``: the states before each action and after the last one. ``outputs``: the final latents. ``log_probs``: the
    log-probabilities of the actions as the engine reports them, in the form of ``core/transitions.py::transition`` with the mean
    over a latent's elements.
    """

    latents: Float[Tensor, "b t_plus_1 ..."]
    outputs: Float[Tensor, "b ..."]
    log_probs: Float[Tensor, "b t"]


@runtime_checkable
class DenoisingEngine(Protocol):
    """Samples a denoising chain for each row of a batch under the model's current weights, with numerics of its own."""

    def sample_chains(self, batch: Batch, conditioning: Conditioning, request: ChainRequest) -> Chains:
        """Sample the chains. Raises EngineFault on all ranks if the engine fails on any rank, or returns wrong chains."""
        ...


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """The parts of a run that an engine may need.

    ``weights``: the trained parameters, by name. ``save``: writes them to a folder: a LoRA in PEFT's format, or all weights in
    transformers' layout if ``full_weights``. ``folder``: the folder of the run. ``first``: whether this is rank 0. ``any_rank``:
    tells whether a flag is true on at least one rank; all ranks must call it. ``sharded``: all ranks must call the model equally
    often, because its weights are sharded.
    """

    weights: Mapping[str, Tensor]
    save: Callable[[Path], None]
    folder: Path
    full_weights: bool = False
    first: bool = True
    any_rank: Callable[[bool], bool] = bool
    sharded: bool = False


class EngineSection(Section):
    """Base class of engines of completions. An engine's log-probabilities are compared with the policy's unless they are exact."""

    max_mismatch: Positive = 0.1
    """The run stops if the engine's log-probabilities differ from the policy's by more nats than this, averaged over a rollout."""
    truncate_at: Annotated[float, Field(ge=1.0)] | None = None
    """Each token's loss is multiplied by the policy's probability / the engine's, at most by this; null uses no weights."""

    def build(self, model: AutoregressiveModel, context: EngineContext) -> Engine:
        """Build the engine for ``model``. Raises ValueError if the engine cannot generate for this model."""
        raise NotImplementedError

    def problems(self, sampling: TokenSampling, *, full_weights: bool, image_grammar: bool) -> Iterator[str]:
        """Yield a line for each rollout setting that this engine does not support. Each line begins with a key of the rollout.

        ``full_weights``: all weights train, not a LoRA. ``image_grammar``: the model writes image tokens under a grammar.
        """
        return iter(())

    def diagnose(
        self, sampling: TokenSampling, *, base_model: str | None, full_weights: bool, image_grammar: bool
    ) -> Iterator[Diagnosis]:
        """Check whether the engine is ready to be used, for ``retouch doctor``. ``base_model``: the path of the policy's base
        model, None if unknown. The other arguments are those of ``problems``."""
        return iter(())


class ChainEngineSection(Section):
    """Base class of engines of denoising chains. The policy computes the log-probabilities that are trained on."""

    max_mismatch: Positive = 0.1
    """The run stops if the means of the engine's steps differ from the policy's by more than this share of the step's standard
    deviation (the root of the mean square over the elements of a rollout). The difference is computed from the log-probabilities of
    the engine and of the policy."""
    truncate_at: Annotated[float, Field(ge=1.0)] | None = 2.0
    """Each action's loss is multiplied by the policy's probability / the engine's probability, at most by this; null uses no
    weights. The weight is computed like the objective's ratio, from log-probabilities reduced with ``reduction``."""

    def build(self, model: DenoisingModel, context: EngineContext) -> DenoisingEngine:
        """Build the engine for ``model``. Raises ValueError if the engine cannot sample for this model."""
        raise NotImplementedError

    def problems(
        self,
        key: str,
        *,
        transition: str,
        noise_level: float | None,
        shared_noise: bool,
        branches: bool,
        model: ImageModel,
        train: TrainSection,
    ) -> Iterator[str]:
        """Yield a line for each setting of the policy that this engine does not support, as "key: mistake; what to do".

        ``key``: the key of the rollout. ``transition``: the kind of the transition. ``noise_level``: its noise level, None if it
        has none. ``shared_noise``: the samples of a group start from the same noise. ``branches``: the samples of a group share the
        steps before the window.
        """
        return iter(())

    def diagnose(self, *, base_model: str | None, full_weights: bool) -> Iterator[Diagnosis]:
        """Check whether the engine is ready to be used, for ``retouch doctor``. ``base_model``: the path of the policy's base
        model, None if unknown. ``full_weights``: all weights train, not a LoRA."""
        return iter(())


ENGINES = Kinds(
    "engine",
    {
        "cached": "retouch.policies.rollout:CachedEngine",
    },
    with_wings=True,
)


class CachedEngine(EngineSection):
    """The policy's own model generates, token by token with a key-value cache. In float32 its log-probabilities are exact."""

    kind: Literal["cached"] = "cached"
    check_every: Count | None = Field(default=None, exclude_if=operator.not_)
    """Number of tokens after which the host asks the device whether completions have ended; each check waits for all queued
    kernels. null means 1 on the CPU and 16 elsewhere."""
    static: bool | None = Field(default=None, exclude_if=lambda static: static is None)
    """Give the cache room for 256 more tokens at a time, so that the forward passes of these tokens have the same shapes. On a CUDA
    device the pass is then captured as a CUDA graph, which saves the host's time to launch its kernels. null means true on a CUDA
    device, unless the weights are sharded or the model attends to a sliding window, and false elsewhere."""

    def build(self, model: AutoregressiveModel, context: EngineContext) -> Engine:
        from retouch.policies.decoding import CachedDecoding

        any_rank = context.any_rank if context.sharded else bool
        return CachedDecoding(model, check_every=self.check_every, static=self.static, any_rank=any_rank)


class TokenRollout(TokenSampling, SharedRollout):
    """How a policy that writes tokens samples during training."""

    chunk: Count = 128
    """Number of rows that are generated at once."""
    engine: Annotated[EngineSection, ENGINES] | None = Field(default=None, exclude_if=lambda engine: engine is None)
    """The engine that generates the completions; null means ``cached`` with its defaults."""

    is_autoregressive: ClassVar[bool] = True

    @property
    def actions(self) -> int | None:
        """Number of actions of every row; None, because completions have different lengths."""
        return None

    @property
    def longest(self) -> int:
        """The largest number of actions that a row can have."""
        return self.max_new_tokens

    def problems(self, key: str) -> Iterator[str]:
        """Yield a line for each setting that cannot work, as "key: mistake; what to do"."""
        yield from ()


TRANSITIONS = Kinds(
    "transition",
    {
        "sde": "retouch.policies.rollout:SDETransition",
        "dance": "retouch.policies.rollout:SDETransition",
        "cps": "retouch.policies.rollout:CPSTransition",
        "ode": "retouch.policies.rollout:ODETransition",
    },
)


class Transition(Section):
    """Base class of all transitions, built in or your own. Override ``step``, with the help of
    ``core/transitions.py::gaussian_step``."""

    stochastic: ClassVar[bool] = True
    """Whether the transition draws noise and has log-probabilities."""

    def step(
        self,
        x: Float[Tensor, "b ..."],
        velocity: Float[Tensor, "b ..."],
        sigma: Float[Tensor, " b"],
        sigma_next: Float[Tensor, " b"],
        *,
        sigma_max: Float[Tensor, ""],
        reduction: Literal["mean", "sum"],
        noise: Float[Tensor, "b ..."] | None = None,
        next: Float[Tensor, "b ..."] | None = None,
    ) -> TransitionResult:
        """Sample the next x from standard normal ``noise``, or evaluate a ``next`` that was reached, under the same distribution.

        Sigma runs from 1 to 0 and velocity is noise - data. ``sigma_max`` is the schedule's second sigma. ``reduction``: how the
        log-probability is reduced over a latent's elements.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no step")

    def noise_weights(self, sigmas: Float[Tensor, " n_plus_1"]) -> Float[Tensor, " n_minus_1"]:
        """The standard deviation of the noise of each step of a chain but the last, divided by the mean over these steps.

        Source: the noise-aware weighting of TempFlow-GRPO (arXiv 2508.04324, eq. 8).
        """
        before, after = sigmas[:-2], sigmas[1:-1]
        flat = sigmas.new_zeros(len(before), 1)
        made = self.step(flat, flat, before, after, sigma_max=sigmas[1], reduction="mean", next=flat)
        return made.step_std / made.step_std.mean()

    @property
    def exploration(self) -> float | None:
        """The noise level; with 0 the transition would not explore. None if the noise level is not known."""
        return None


class _Published(Transition):
    """A transition that is implemented in ``core/transitions.py``."""

    kind: Literal["sde", "cps", "dance", "ode"]

    @property
    def exploration(self) -> float | None:
        return getattr(self, "noise_level", None)

    def step(self, x: Tensor, velocity: Tensor, sigma: Tensor, sigma_next: Tensor, **options: Any) -> TransitionResult:
        from retouch.core.transitions import transition

        return transition(self.kind, x, velocity, sigma, sigma_next, noise_level=self.exploration or 0.0, **options)


class SDETransition(_Published):
    """``sde``: the stochastic step of Flow-GRPO (arXiv 2505.05470). ``dance``: the step of DanceGRPO (arXiv 2505.07818), whose
    noise does not depend on sigma.

    Example::

        >>> retouch.SDETransition(noise_level=0.7).kind
        'sde'
    """

    kind: Literal["sde", "dance"] = "sde"
    noise_level: NonNegative
    """Scale of the injected noise; 0.7 is usual, 1.0 to 1.5 for Qwen-Image."""


class CPSTransition(_Published):
    """The stochastic step that preserves the coefficients of the schedule (Flow-CPS, arXiv 2509.05952).

    Example::

        >>> retouch.CPSTransition(noise_level=0.5).stochastic
        True
    """

    kind: Literal["cps"] = "cps"
    noise_level: Share
    """Share of new noise in a step: from 0, no new noise, to 1, all noise is new."""


class ODETransition(_Published):
    """The deterministic Euler step: no exploration, no log-probabilities.

    Source: diffusers' FlowMatchEulerDiscreteScheduler.

    Example::

        >>> retouch.ODETransition().stochastic
        False
    """

    kind: Literal["ode"] = "ode"

    stochastic: ClassVar[bool] = False


WINDOWS = Kinds(
    "window",
    {
        "all": "retouch.policies.rollout:AllSteps",
        "window": "retouch.policies.rollout:RandomWindow",
        "branch": "retouch.policies.rollout:RandomWindow",
        "sliding": "retouch.policies.rollout:SlidingWindow",
    },
    tag="mode",
)
_LAST = "which never trains"


class Window(Section):
    """Base class of all windows, built in or your own. Override ``actions``."""

    branches: ClassVar[bool] = False
    """Whether the samples of a group share the chain up to the window."""

    def actions(self, *, num_steps: int, seed: int, step: int) -> range:
        """The steps of a chain of ``num_steps`` that are actions in training step ``step``. ValueError if they do not fit."""
        raise NotImplementedError(f"{type(self).__name__} defines no actions")

    @property
    def length(self) -> int | None:
        """The number of actions if it is the same for every chain; None if it depends on ``num_steps``."""
        return None

    def problems(self, *, num_steps: int, key: str) -> Iterator[str]:
        """Yield a line for each setting that does not fit a chain of ``num_steps``, as "key: mistake; what to do"."""
        yield from ()


class AllSteps(Window):
    """All steps but the last one train.

    Source: Flow-GRPO (arXiv 2505.05470).
    """

    mode: Literal["all"] = "all"

    def actions(self, *, num_steps: int, seed: int, step: int) -> range:
        return all_steps(num_steps)


class RandomWindow(Window):
    """``window``: consecutive steps train, from a start that is drawn in each training step (Flow-GRPO-Fast, arXiv 2505.05470).
    ``branch``: in addition, the samples of a group share all steps before the window."""

    mode: Literal["window", "branch"] = "window"
    size: Count
    """Number of steps in the window."""
    low: Annotated[int, Field(ge=0)] = 0
    """First step that the window may contain."""
    high: Count | None = None
    """One past the last step that the window may contain; null allows all steps but the last one, which never trains."""

    @property
    def branches(self) -> bool:  # type: ignore[override]
        return self.mode == "branch"

    @property
    def length(self) -> int | None:
        return self.size

    def actions(self, *, num_steps: int, seed: int, step: int) -> range:
        high = num_steps - 1 if self.high is None else self.high
        return random_window(num_steps, size=self.size, low=self.low, high=high, generator=generator(seed, "window", step))

    def problems(self, *, num_steps: int, key: str) -> Iterator[str]:
        trainable = num_steps - 1
        end = trainable if self.high is None else self.high
        if end > trainable:
            yield f"{key}.high: {end} includes the last of {num_steps} steps, {_LAST}; use {trainable} or less"
        elif self.size > end - self.low:
            yield f"{key}.size: {self.size} steps do not fit in [{self.low}, {end}); use fewer, or widen the range"


class SlidingWindow(Window):
    """Consecutive steps train, and the window moves towards less noise during training (MixGRPO, arXiv 2507.21802)."""

    mode: Literal["sliding"] = "sliding"
    size: Count
    """Number of steps in the window."""
    every: Count = 10
    """Number of training steps between two moves of the window."""
    stride: Count = 1
    """Number of steps by which the window moves, at most ``size``."""

    @property
    def length(self) -> int | None:
        return self.size

    def actions(self, *, num_steps: int, seed: int, step: int) -> range:
        return sliding_window(num_steps, size=self.size, step=step, every=self.every, stride=self.stride)

    def problems(self, *, num_steps: int, key: str) -> Iterator[str]:
        trainable = num_steps - 1
        if self.size > trainable:
            yield f"{key}.size: a window of {self.size} of {num_steps} steps includes the last, {_LAST}; use {trainable} or less"
        if self.stride > self.size:
            yield f"{key}.stride: {self.stride} would skip steps of a window of {self.size}; use {self.size} or less"


CHAIN_ENGINES = Kinds("chain_engine", {}, with_wings=True)


class DenoisingRollout(SharedRollout):
    """How a denoising policy samples during training."""

    num_steps: Annotated[int, Field(ge=1)]
    """Number of denoising steps of an image."""
    transition: Annotated[Transition, TRANSITIONS]
    """The transition of the steps that train, for example {"kind": "sde", "noise_level": 0.7}. All others are deterministic."""
    reduction: Literal["mean", "sum"] = "mean"
    """How a transition's log-probability is reduced over the elements of a latent; the clip range depends on it."""
    window: Annotated[Window, WINDOWS] = AllSteps()
    """Which steps of the chain train."""
    guidance_scale: Annotated[float, Field(ge=1.0)] = 1.0
    """Scale of classifier-free guidance in sampling and training; 1 means none, larger values double the forward passes."""
    shared_noise: bool = False
    """Whether all samples of a group start from the same noise."""
    chunk: Count = 128
    """Rows per forward pass when sampling."""
    equal_shapes: bool = Field(default=True, exclude_if=lambda equal: equal)
    """For a model in 16 bits: rollout and update compute the steps that train in forward passes with the same number of rows (that
    of a microbatch, at most ``chunk``), because a velocity in 16 bits depends on the shape of its forward pass. False is faster if
    ``microbatch`` is small, but then the ratios are not 1 before the first update."""
    engine: Annotated[ChainEngineSection, CHAIN_ENGINES] | None = Field(default=None, exclude_if=operator.not_)
    """The engine that samples the chains; null means the policy's own model."""

    is_autoregressive: ClassVar[bool] = False

    @property
    def actions(self) -> int | None:
        """Number of actions of a row; None if it is not known."""
        return self.num_steps - 1 if isinstance(self.window, AllSteps) else self.window.length

    @property
    def longest(self) -> int:
        """The largest number of actions that a row can have."""
        return len(self.window.actions(num_steps=self.num_steps, seed=0, step=0))

    def problems(self, key: str) -> Iterator[str]:
        """Yield a line for each setting that cannot work, as "key: mistake; what to do"."""
        if not self.transition.stochastic:
            if self.shared_noise:
                yield f"{key}.shared_noise: with ode all samples of a group would be equal; remove it, or use cps"
            if self.window != AllSteps():
                yield f"{key}.window: with ode no step is stochastic, so a window has no effect; remove it, or use cps"
        elif self.num_steps < 2:
            last = "leaves no step to train besides the last, which never trains"
            yield f"{key}.num_steps: {self.num_steps} {last}; use 2 or more"
        else:
            yield from self.window.problems(num_steps=self.num_steps, key=f"{key}.window")

    def engine_problems(self, key: str, *, model: ImageModel, train: TrainSection) -> Iterator[str]:
        """Yield a line for each setting that the engine does not support, in the form of ``problems``."""
        if self.engine is not None:
            yield from self.engine.problems(
                key,
                transition=getattr(self.transition, "kind", "import"),
                noise_level=self.transition.exploration,
                shared_noise=self.shared_noise,
                branches=self.window.branches,
                model=model,
                train=train,
            )
