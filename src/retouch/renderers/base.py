"""Base classes of the recipe's renderer sections. A renderer makes images from a policy's completions."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

from PIL.Image import Image
from pydantic import Field

from retouch.config.section import Count, Section
from retouch.core.random import generator
from retouch.models.base import ImageModel, LanguageModel, TokenKind
from retouch.models.kinds import IMAGE_MODELS
from retouch.protocols import DecodesCodes, Renderer
from retouch.types import Completion, Task

if TYPE_CHECKING:
    import torch

    from retouch.protocols import AutoregressiveModel, DenoisingModel
    from retouch.types import Conditioning

WeightContext: TypeAlias = "Callable[[], AbstractContextManager[None]]"
"""Opens a context in which a module computes with other weights."""


class RendererSection(Section):
    """Base of the renderers that a recipe can name, built in or your own. Subclasses override ``build``.

    By default, a renderer makes images from text, and has no model besides the policy's model.
    """

    kind: str = "import"
    batch: Count = 8
    """Number of images that are made at once."""

    reads: ClassVar[TokenKind] = "text"
    """The kind of tokens from which the renderer makes images."""
    uses_sources: ClassVar[bool] = True
    """Whether the image model reads the tasks' source images."""
    can_train: ClassVar[bool] = False
    """Whether the image model can be trained too (``text_to_image``); the renderer then says what it reads (``written_task``)."""
    keeps_first_reference: ClassVar[bool] = False
    """Whether the reference weights of all phases must be the weights from before the first phase."""
    loads_on_cpu: ClassVar[bool] = False
    """Whether the image model is loaded into CPU memory before it is moved to its device."""
    image_model: ClassVar[ImageModel | None] = None
    """The image model's section; None if the policy's own model makes the images."""
    policy_encodes: ClassVar[bool] = False
    """Whether the policy's current weights encode what the image model reads."""
    responses_at_once: ClassVar[int | None] = None
    """Number of responses that are encoded at once; None if the renderer does not encode responses."""
    weight_copies: ClassVar[frozenset[str]] = frozenset()
    """Copies of the policy's weights that the renderer needs."""

    def problems(self, writer: LanguageModel) -> Iterator[str]:
        """Yield a message for every setting that does not work with the policy's model, as "key: mistake; what to do"."""
        yield from ()

    def with_num_steps(self, num_steps: int | None) -> RendererSection:
        """Return the renderer with this number of denoising steps; unchanged for None, or if it has no denoising steps."""
        return self

    def load_writer(self, build_writer: Callable[[], AutoregressiveModel]) -> AutoregressiveModel:
        """Return the policy's model, with the prompts for this renderer. ``build_writer``: loads the model on its own device."""
        return build_writer()

    def load(
        self, build_writer: Callable[[], AutoregressiveModel], *, device: torch.device, base_frozen: bool
    ) -> tuple[AutoregressiveModel, DenoisingModel | AutoregressiveModel]:
        """Return the policy's model and the model that makes the images, which may be the same.

        ``device``: the device of the image model, if it is another model. ``build_writer``: loads the policy's model on its own
        device. ``base_frozen``: the policy's base weights do not train.
        """
        writer = build_writer()
        return writer, writer

    def build(
        self,
        image_model: DenoisingModel | AutoregressiveModel,
        writer: AutoregressiveModel,
        *,
        published: WeightContext | None = None,
        sharded: bool = False,
    ) -> Renderer:
        """Build the renderer of completions (``trajectory.outputs`` of ``retouch.types.Completion``). It freezes the image model.

        ``published``: opens a context with the policy's weights from before training, if they are kept. ``sharded``: the policy's
        weights are sharded over ranks, so all ranks must call the policy's model equally often.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no build")


class ImageModelRenderer(RendererSection):
    """Base of the renderers that use a frozen image model to render a writer's completions."""

    model: Annotated[ImageModel, IMAGE_MODELS]
    """The image model, which is frozen."""
    num_steps: Count
    """Number of denoising steps per image; the sampler is deterministic."""
    guidance_scale: Annotated[float, Field(ge=1.0)] = 1.0
    """Scale of classifier-free guidance; 1 means no guidance, larger values double the number of forward passes."""
    shared_noise: bool = True
    """All samples of a group start from the same noise, so that only the completions make their images different."""
    cut_off: Literal["draw", "fault"] = "fault"
    """What happens to a completion that is truncated at ``rollout.max_new_tokens``: ``draw`` renders it, ``fault`` gives it the
    lowest reward."""
    ignore_completions: bool = False
    """A control run: render the task's instruction instead of the completion, so that the reward does not depend on the policy."""

    @property
    def image_model(self) -> ImageModel:  # type: ignore[override]
        return self.model

    @property
    def guided(self) -> bool:
        """Whether a negative branch is computed too, for guidance."""
        return self.guidance_scale > 1

    def with_num_steps(self, num_steps: int | None) -> RendererSection:
        return self if num_steps is None else self.model_copy(update={"num_steps": num_steps})


T = TypeVar("T")


@contextmanager
def no_gradient() -> Iterator[None]:
    """``torch.no_grad()``, as a context or a decorator; imports torch when it is entered."""
    import torch

    with torch.no_grad():
        yield


@runtime_checkable
class HasCompletions(Protocol):
    """The field of a trajectory that a renderer of completions reads."""

    @property
    def outputs(self) -> Sequence[Completion]: ...


class OdeSampler:
    """Samples from a frozen flow-matching model: deterministic Euler steps along the model's own sigmas.

    ``guidance_scale``: 1 needs no negative branch; above 1, the two branches are combined as in the model's own pipeline. The
    constructor sets the transformer to eval mode. Raises ValueError for fewer than 1 step, or a scale below 1.

    Source: diffusers' FlowMatchEulerDiscreteScheduler.
    """

    def __init__(self, model: DenoisingModel, *, num_steps: int, guidance_scale: float = 1.0) -> None:
        if num_steps < 1 or guidance_scale < 1.0:
            raise ValueError(
                f"num_steps {num_steps}, guidance_scale {guidance_scale}: use at least 1 step, and a scale of at least 1"
            )
        self.model = model
        self.num_steps = num_steps
        self.guidance_scale = guidance_scale
        model.module.eval()

    @property
    def guided(self) -> bool:
        return self.guidance_scale > 1.0

    def __call__(self, conditioning: Conditioning, generators: Sequence[torch.Generator]) -> list[Image | None]:
        """Sample an image for each row, from the noise of its generator; None if the result is not finite.

        With guidance, ``conditioning.negative`` is the negative branch of each row.
        """
        model, negative = self.model, conditioning.negative
        assert self.guided == (negative is not None)
        with no_gradient():
            x = model.initial_noise(conditioning, generators)
            sigmas = model.sigmas(self.num_steps, conditioning).to(x.device)
            for k in range(self.num_steps):
                sigma = sigmas[k].expand(len(x))
                velocity = model.velocity(model.module, x, sigma, conditioning)
                if negative is not None:
                    other = model.velocity(model.module, x, sigma, negative)
                    velocity = model.combine(velocity, other, self.guidance_scale)
                x = x + (sigmas[k + 1] - sigmas[k]) * velocity
            finite = x.flatten(1).isfinite().all(dim=1)
            images = iter(model.decode(x[finite], conditioning) if finite.any() else [])
        return [next(images) if usable else None for usable in finite.tolist()]


def noise_generators(completions: Sequence[Completion], *, shared: bool) -> list[torch.Generator]:
    """Return a generator for the initial noise of each row. ``shared``: all rows of a group have the same noise.

    Raises ValueError for a completion without a key.
    """
    keys = []
    for row, completion in enumerate(completions):
        if completion.key is None:
            raise ValueError(
                f"output {row} has no key for its noise; set its key to (seed, step, group, slot), as a policy's rollout does"
            )
        keys.append(completion.key)
    if shared:
        return [generator(seed, "noise", step, group) for seed, step, group, _ in keys]
    return [generator(seed, "noise", step, group, slot) for seed, step, group, slot in keys]


def bucket(rows: Sequence[int], *, size: Callable[[int], Hashable], length: Callable[[int], int], batch: int) -> list[list[int]]:
    """Split the rows into batches of at most ``batch`` rows of equal size, with rows of similar lengths together.

    If all rows of one size fit into one batch, they keep their order.
    """
    buckets: dict[Hashable, list[int]] = {}
    for row in rows:
        buckets.setdefault(size(row), []).append(row)
    return [each for same_size in buckets.values() for each in sort_by_length(same_size, length=length, batch=batch)]


def sort_by_length(rows: Sequence[int], *, length: Callable[[int], int], batch: int) -> list[list[int]]:
    """Split the rows into ceil(rows / batch) batches, with rows of similar lengths together; one batch keeps their order."""
    if len(rows) <= batch:
        return [list(rows)] if rows else []
    order = sorted(rows, key=length)
    return [order[first : first + batch] for first in range(0, len(order), batch)]


def unique_objects(items: Sequence[T]) -> tuple[list[T], list[int]]:
    """Return the distinct objects (by identity), and for each item the index of its object among them."""
    numbers: dict[int, int] = {}
    index = [numbers.setdefault(id(item), len(numbers)) for item in items]
    first = {number: place for place, number in reversed(list(enumerate(index)))}
    return [items[first[number]] for number in range(len(numbers))], index


@dataclass(frozen=True, slots=True, eq=False)
class RendererInContext:
    """Calls ``renderer`` inside the context that ``context`` opens (implements ``retouch.protocols.Renderer``).

    The context may give the policy's module its averaged weights, or put frozen weights on a device
    (``retouch.models.offloading``).
    """

    renderer: Renderer
    context: WeightContext

    def __call__(self, tasks: Sequence[Task], trajectory: Any) -> list[Image | None]:
        with self.context():
            return self.renderer(tasks, trajectory)


@dataclass(frozen=True, slots=True, eq=False)
class Completions:
    """Completions in place of a trajectory (implements ``HasCompletions``)."""

    outputs: Sequence[Completion]

    @classmethod
    def empty(cls, tasks: Sequence[Task], completions: Sequence[Completion]) -> "Completions":
        """Replace each completion by an empty response whose text is the task's instruction; the noise stays the same."""
        pairs = zip(tasks, completions, strict=True)
        return cls([replace(each, ids=(), text=task.instruction, truncated=False) for task, each in pairs])


@dataclass(frozen=True, slots=True, eq=False)
class IgnoreCompletionsRenderer:
    """A control: makes the image of each row without its completion (implements ``retouch.protocols.Renderer``).

    If a policy still gains reward with this renderer, its completions are not the cause.
    """

    renderer: Renderer

    def __call__(self, tasks: Sequence[Task], trajectory: HasCompletions) -> list[Image | None]:
        return self.renderer(tasks, Completions.empty(tasks, trajectory.outputs))


@dataclass(frozen=True, slots=True, eq=False)
class LatentRenderer:
    """Decodes the latents of a denoising policy (implements ``retouch.protocols.Renderer``).

    The image of a row with a value that is not finite is None, the policy's own fault.
    """

    model: DenoisingModel

    def __call__(self, tasks: Sequence[Task], trajectory: Any) -> list[Image | None]:
        x = trajectory.outputs
        finite = x.flatten(1).isfinite().all(dim=1)
        if not finite.any():
            return [None] * len(x)
        with no_gradient():
            images = iter(self.model.decode(x[finite], trajectory.conditioning))
        return [next(images) if usable else None for usable in finite.tolist()]


class CodesRenderer(RendererSection):
    """Decodes the image tokens of a completion with the autoencoder of the policy's own model."""

    kind: Literal["codes"] = "codes"

    reads = "vision"

    def build(
        self,
        image_model: DenoisingModel | AutoregressiveModel,
        writer: AutoregressiveModel,
        *,
        published: WeightContext | None = None,
        sharded: bool = False,
    ) -> Renderer:
        if not isinstance(image_model, DecodesCodes):
            raise ValueError(f"renderer.kind: codes needs a model with codes_in and decode_codes, not {type(image_model).__name__}")
        return CodesDecoder(image_model, batch=self.batch)


class CodesDecoder:
    """Decodes the image tokens of completions, ``batch`` images at once (implements ``retouch.protocols.Renderer``).

    The image of a completion that is truncated or has no complete image is None, the policy's own fault.
    """

    def __init__(self, model: DecodesCodes, *, batch: int = 8) -> None:
        if batch < 1:
            raise ValueError(f"batch {batch}: give at least 1")
        self.model = model
        self.batch = batch

    def __call__(self, tasks: Sequence[Task], trajectory: HasCompletions) -> list[Image | None]:
        import torch

        images: list[Image | None] = [None] * len(trajectory.outputs)
        complete = []
        for row, completion in enumerate(trajectory.outputs):
            codes = None if completion.truncated else self.model.codes_in(completion.ids)
            if codes is not None:
                complete.append((row, codes))
        for first in range(0, len(complete), self.batch):
            part = complete[first : first + self.batch]
            with torch.no_grad():
                decoded = self.model.decode_codes(torch.stack([codes for _, codes in part]))
            for (row, _), image in zip(part, decoded, strict=True):
                images[row] = image
        return images
