"""Base classes of the recipe's renderer sections. A renderer makes images from a policy's completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, TypeAlias

from pydantic import Field

from retouch.config.section import Count, Section
from retouch.models.base import ImageModel
from retouch.models.kinds import IMAGE_MODELS
from retouch.models.language import LanguageModel, TokenKind

if TYPE_CHECKING:
    import torch

    from retouch.protocols import AutoregressiveModel, DenoisingModel, Renderer

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
    keeps_first_reference: ClassVar[bool] = False
    """Whether the reference weights of all phases must be the weights from before the first phase."""
    loads_on_cpu: ClassVar[bool] = False
    """Whether the image model is loaded into CPU memory before it is moved to its device."""

    @property
    def image_model(self) -> ImageModel | None:
        """The image model's section; None if the policy's own model makes the images."""
        return None

    @property
    def policy_encodes(self) -> bool:
        """Whether the policy's current weights encode what the image model reads."""
        return False

    @property
    def responses_at_once(self) -> int | None:
        """Number of responses that are encoded at once; None if the renderer does not encode responses."""
        return None

    @property
    def weight_copies(self) -> frozenset[str]:
        """Copies of the policy's weights that the renderer needs."""
        return frozenset()

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

    renamed_keys: ClassVar[Mapping[str, str]] = {"blind": "ignore_completions"}

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
    def image_model(self) -> ImageModel:
        return self.model

    @property
    def guided(self) -> bool:
        """Whether a negative branch is computed too, for guidance."""
        return self.guidance_scale > 1

    def with_num_steps(self, num_steps: int | None) -> RendererSection:
        return self if num_steps is None else self.model_copy(update={"num_steps": num_steps})
