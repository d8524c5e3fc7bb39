"""The interfaces between policies and the engines that sample for them: engines of completions and engines of denoising chains.

Recipes import this file, so it imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Protocol, TypeAlias, runtime_checkable

from pydantic import Field

from retouch.config.section import Count, Positive, Section
from retouch.models.base import ImageModel
from retouch.models.train import TrainSection
from retouch.protocols import AutoregressiveModel, DenoisingModel
from retouch.types import Batch, Conditioning, Prompts

if TYPE_CHECKING:
    from jaxtyping import Float, Int
    from torch import Tensor

Diagnosis: TypeAlias = tuple[Literal["ok", "note", "FAILED"], str, str]
"""A result of a check: the status, what was found, and for a failure what to do."""


class TokenSampling(Section):
    """How completions are sampled."""

    kind: Literal["tokens"] = "tokens"
    max_new_tokens: Count
    """Maximum number of tokens of a completion; a longer one is truncated."""
    temperature: Positive = 1.0
    """Logits are divided by the temperature, in sampling and in training."""
    top_k: Count | None = None
    """Sample only from the k most likely tokens; null keeps all."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Sample only from the most likely tokens whose probabilities reach this sum; null keeps all."""

    @property
    def truncates(self) -> bool:
        """Whether top-k or top-p may leave out ids that the grammar allows."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1)


class EngineFault(ValueError):
    """An engine failed, or its probabilities are too far from the policy's. Raised on all ranks, before any update of the step."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Generation:
    """The completions of a batch, row by row; t is ``max_new_tokens``, and ids after the end of a row are ``pad``.

    ``lengths``: number of tokens of each row, including its end token. ``log_probs``: in nats, as the engine reports them; 0 where
    no token was sampled. ``support``: the ids that top-k and top-p kept at each position, padded with -1; None if all were kept.
    """

    ids: Int[Tensor, "b t"]
    lengths: Int[Tensor, " b"]
    log_probs: Float[Tensor, "b t"]
    support: Int[Tensor, "b t w"] | None = None


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


@runtime_checkable
class ClosableEngine(Protocol):
    """An engine that keeps resources outside the process. It may be used again after ``close``."""

    def close(self) -> object: ...


@dataclass(frozen=True, kw_only=True)
class EngineContext:
    """The parts of a run that an engine may need.

    ``weights``: the trained parameters, by name. ``save``: writes them to a folder: a LoRA in PEFT's format, or all weights in
    transformers' layout if ``full_weights``. ``folder``: the folder of the run. ``first``: whether this is rank 0. ``any_rank``:
    tells whether a flag is true on at least one rank; all ranks must call it. ``in_step``: all ranks must call the model equally
    often, because its weights are sharded.
    """

    weights: Mapping[str, Tensor]
    save: Callable[[Path], None]
    folder: Path
    full_weights: bool = False
    first: bool = True
    any_rank: Callable[[bool], bool] = bool
    in_step: bool = False


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
