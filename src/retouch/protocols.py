"""The interfaces between the parts of Retouch, as protocols.

A model knows nothing about reinforcement learning, a policy nothing about rewards, a reward nothing about policies, and an
objective nothing about models. ``retouch.types`` defines the names of the axes. This module imports no torch, because recipes are
read without it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from retouch.types import (
    Batch,
    Column,
    Conditioning,
    Evaluation,
    Lesson,
    Needs,
    Prompts,
    Sample,
    Scores,
    Slice,
    Task,
    Trajectory,
    Weights,
)

if TYPE_CHECKING:
    import torch
    from jaxtyping import Bool, Float, Int
    from PIL.Image import Image
    from torch import Tensor, nn


@runtime_checkable
class DenoisingModel(Protocol):
    """A flow-matching model (arXiv 2210.02747), as the denoising policy uses it.

    ``x`` is fp32 in the layout of the transformer's input: packed tokens (s, d) for Qwen and Flux, (c, h, w) for SD3. ``sigma``
    runs from 1 (noise) to 0 (data)."""

    module: nn.Module  # the transformer, the only trainable part

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        """The conditioning of each task: p rows, without gradient, with frozen parts in eval mode."""
        ...

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        """The unconditional branch for each task (empty or negative prompt, same source images): p rows."""
        ...

    def combine(self, positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        """The guided velocity, as the model's diffusers pipeline computes it."""
        ...

    def initial_noise(self, conditioning: Conditioning, generators: Sequence[torch.Generator]) -> Float[Tensor, "r ..."]:
        """Standard normal x at sigma 1; row i is drawn from generator i, in the same way as in the diffusers pipeline."""
        ...

    def sigmas(self, num_steps: int, conditioning: Conditioning) -> Float[Tensor, " num_steps_plus_1"]:
        """The schedule of the diffusers pipeline, from its first sigma (about 1) to 0."""
        ...

    def velocity(
        self, module: nn.Module, x: Float[Tensor, "r ..."], sigma: Float[Tensor, " r"], conditioning: Conditioning
    ) -> Float[Tensor, "r ..."]:
        """The predicted velocity (noise - data) in fp32. ``module``: the transformer, which a stepper may have wrapped."""
        ...

    def encode_images(self, images: Sequence[Image]) -> Float[Tensor, "r ..."]:
        """Clean x of images (the mode of the VAE's posterior, normalised), as targets of supervised learning."""
        ...

    def decode(self, x: Float[Tensor, "r ..."], conditioning: Conditioning) -> list[Image]:
        """The images of clean x. ``conditioning`` has a row for each task, not for each row of x: read only what all rows share."""
        ...


@runtime_checkable
class DecodesTensors(Protocol):
    """A denoising model that decodes with gradient, for objectives that differentiate a reward (DRaFT and ReFL)."""

    def decode_tensors(self, x: Float[Tensor, "r ..."], conditioning: Conditioning) -> Float[Tensor, "r 3 h w"]:
        """The images of clean x, 0 to 1, in fp32 and without rounding; ``DenoisingModel.decode`` gives the same images.

        The images have a gradient with respect to x if gradients are enabled. No weight of the decoder gets a gradient.
        """
        ...


@runtime_checkable
class Grammar(Protocol):
    """Which tokens may follow which. It is part of the policy's distribution, in sampling and in evaluation.

    ``vocabularies``: sets of ids; True for each id that may be sampled. ``kinds``: the ``Kind`` of each set's tokens. A grammar
    that never forces an id may have ``forces = False``; decoding then does not wait for the device to look for forced ids.
    """

    vocabularies: Bool[Tensor, "s v"]
    kinds: tuple[int, ...]

    def parse(self, prompts: Prompts, ids: Int[Tensor, "r k"]) -> tuple[Int[Tensor, "r k_plus_1"], Int[Tensor, "r k_plus_1"]]:
        """For each position of the completions ``ids``, and for the next position: the index of the set of ``vocabularies`` from
        which the token is sampled, and the forced id (-1: not forced). A position depends only on the tokens before it."""
        ...


@runtime_checkable
class AutoregressiveModel(Protocol):
    """A causal language model or vision-language model, as the autoregressive policy uses it.

    A state is a hidden state after the final norm; a token is sampled from the logits of the state *before* it.
    ``stop``: ids that end a completion. ``pad``: the id after the end. ``shares_prompts``: the KV cache carries a gradient, so an
    evaluation computes a prompt once for all its rows; without it (gradient checkpointing), each row is computed whole.
    A stepper may wrap ``module``.
    """

    module: nn.Module
    grammar: Grammar
    shares_prompts: bool
    stop: tuple[int, ...]
    pad: int

    def encode(self, tasks: Sequence[Task]) -> Prompts:
        """The prompt of each task: p rows, without gradient, with frozen parts in eval mode."""
        ...

    def prefill(self, module: nn.Module, prompts: Prompts) -> tuple[Float[Tensor, "p d"], Any]:
        """The state before the first token of each row, and the KV cache of the prompts."""
        ...

    def extend(
        self,
        module: nn.Module,
        ids: Int[Tensor, "r k"],
        *,
        mask: Bool[Tensor, "r l_plus_k"],
        positions: Int[Tensor, "r k"],
        cache: Any,
    ) -> Float[Tensor, "r k d"]:
        """The states after k more tokens, which are added to the cache. ``mask`` covers the tokens in the cache and the new
        ones."""
        ...

    def select(self, cache: Any, rows: Int[Tensor, " r"]) -> Any:
        """The cache of the given rows, which may repeat. The given cache must not be used afterwards."""
        ...

    def states(
        self, module: nn.Module, prompts: Prompts, ids: Int[Tensor, "r k"], mask: Bool[Tensor, "r k"]
    ) -> Float[Tensor, "r k d"]:
        """The states before each of k tokens, in one forward pass without a cache, with gradient checkpointing if it is on."""
        ...

    def logits(self, module: nn.Module, states: Float[Tensor, "n d"]) -> Float[Tensor, "n v"]:
        """The logits of states, in fp32; separate from ``states``, so that the policy limits how many exist at the same time."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...


@runtime_checkable
class DecodesCodes(Protocol):
    """A model that finds the codes of an image in a completion, and decodes them."""

    def codes_in(self, ids: Sequence[int]) -> Int[Tensor, "h w"] | None:
        """The codes of the image in a completion; None if there is no complete image."""
        ...

    def decode_codes(self, codes: Int[Tensor, "r h w"]) -> list[Image]:
        """Decode codes to images."""
        ...


@runtime_checkable
class Policy(Protocol):
    """The model that is trained. It samples actions (rollout) and computes their probabilities (evaluation); it does not own the
    optimizer."""

    module: nn.Module  # trainable; a stepper may replace it by a wrapper, which every forward pass with gradient then uses

    def rollout(self, batch: Batch) -> Trajectory:
        """Sample the actions of every row of the batch, without gradient."""
        ...

    def sample(self, batch: Batch) -> Trajectory:
        """Act without exploration: the result is determined by the row's key. Uses the averaged weights if there are any."""
        ...

    def microbatches(self, trajectory: Trajectory) -> Iterator[Slice]:
        """Slices that cover every row and action once, each small enough for one evaluation; the same number on every rank."""
        ...

    def evaluate(self, trajectory: Trajectory, part: Slice, needs: Needs) -> Evaluation:
        """Evaluate the slice under the current weights, with gradient."""
        ...


@runtime_checkable
class VelocityPolicy(Policy, Protocol):
    """A denoising policy as DiffusionNFT, AWM, DPO and supervised flow matching use it: its velocity under several sets of
    weights."""

    def demonstrate(self, batch: Batch, *, images: Sequence[Image] | None = None) -> Trajectory:
        """A trajectory whose outputs are the encoded targets of the tasks, or the encoded ``images``, one per row."""
        ...

    def row_slices(self, trajectory: Trajectory) -> Iterator[slice]:
        """Slices that cover every row once, each small enough for one forward pass with gradient."""
        ...

    def velocity(
        self, trajectory: Trajectory, rows: slice, x: Float[Tensor, "r ..."], sigma: Float[Tensor, " r"], weights: Weights
    ) -> Float[Tensor, "r ..."]:
        """The predicted velocity (noise - data) at ``x`` for these rows, with the trajectory's conditioning. It has a gradient only
        if ``weights`` is "current"."""
        ...

    def follow_old(self, decay: float) -> None:
        """Move the old weights towards the current ones: old = decay * old + (1 - decay) * current."""
        ...


@runtime_checkable
class TaughtPolicy(Policy, Protocol):
    """A policy as on-policy distillation uses it: how far its actions are from those of teachers in the same states."""

    def teacher_images(self, batch: Batch, *, weights: str, guidance_scale: float | None) -> list[Image | None]:
        """The image that the teacher with these weights makes for each row; None where it made none."""
        ...

    def teacher_inputs(self, tasks: Sequence[Task], *, weights: str, guidance_scale: float | None) -> Any:
        """The conditioning of the tasks at the teacher's scale of guidance, or their prompts as the teacher encodes them."""
        ...

    def teach(self, trajectory: Trajectory, lessons: Sequence[Lesson]) -> Any:
        """What the teachers would do in the states of all rows, for ``divergence``; without gradient."""
        ...

    def divergence(self, trajectory: Trajectory, part: Slice, taught: Any, *, forward: bool) -> Float[Tensor, "r t"]:
        """The divergence of each action from the teacher of its task, with gradient in the current weights; 0 or more. ``taught``:
        the result of ``teach``. ``forward``: KL(teacher, policy) in place of KL(policy, teacher); Gaussian steps of equal variance
        have the same for both."""
        ...


@runtime_checkable
class InitialNoisePolicy(VelocityPolicy, Protocol):
    """A denoising policy as AWM uses it with ``noise: 'initial'``: the noise that each image was sampled from."""

    def initial_noise(self, trajectory: Trajectory, rows: slice) -> Float[Tensor, "r ..."]:
        """The state at sigma 1 of the deterministic chains of these rows (``Objective.needs_initial_noise``)."""
        ...


@runtime_checkable
class ImageGradientPolicy(Policy, Protocol):
    """A denoising policy as DRaFT and ReFL use it: its images with gradient in the current weights."""

    def row_slices(self, trajectory: Trajectory) -> Iterator[slice]:
        """Slices that cover every row once, each small enough for one forward pass with gradient."""
        ...

    def images(self, trajectory: Trajectory, rows: slice, *, predicted: bool) -> Float[Tensor, "r 3 h w"]:
        """The images of these rows, 0 to 1, from the state that the rollout kept (``Objective.first_gradient_step``).

        All steps after it are computed with gradient. ``predicted``: one step goes from the kept state to the clean image that the
        model predicts there.
        """
        ...


@runtime_checkable
class Renderer(Protocol):
    """Turns a policy's outputs into images; nothing in it is trained."""

    def __call__(self, tasks: Sequence[Task], trajectory: Any) -> list[Image | None]:
        """One image per row; None if the output cannot be rendered, which is the policy's own fault."""
        ...


@runtime_checkable
class Reward(Protocol):
    """Scores samples. ``columns`` declares the scores; a call returns each of them as (b,), with NaN for missing scores."""

    @property
    def columns(self) -> Mapping[str, Column]:
        """The declared columns by name."""
        ...

    def __call__(self, samples: Sequence[Sample]) -> Scores: ...


@runtime_checkable
class DifferentiableReward(Protocol):
    """A reward section that also scores images as tensors, with gradient (``objective.reward`` of DRaFT and ReFL)."""

    def build(self, *, device: torch.device | str) -> Any:
        """Load the reward, which has ``score_tensors`` too. Raises ValueError if something that it needs is missing."""
        ...

    def score_tensors(self, images: Float[Tensor, "r 3 h w"], tasks: Sequence[Task]) -> Float[Tensor, " r"]:
        """One score per image, higher is better, on the device of the images, with gradient with respect to the images only.

        ``images``: 0 to 1, one per task. The score equals one column of the reward, up to the rounding of images to 8 bits. If the
        column is clamped to its range, the score may exceed that range.
        """
        ...


@runtime_checkable
class AsyncReward(Reward, Protocol):
    """A reward that scores in the background while sampling continues."""

    def submit(self, samples: Sequence[Sample]) -> "Future[Scores]":
        """Score the samples in the background."""
        ...


@runtime_checkable
class Collectives(Protocol):
    """The collective operations that an advantage may use. All ranks make the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank's number."""
        ...

    def gather(self, values: Tensor) -> Tensor:
        """Gather the rows of all ranks in rank order, on the CPU: (n, ...) to (world * n, ...). ``n`` is the same on every rank."""
        ...
