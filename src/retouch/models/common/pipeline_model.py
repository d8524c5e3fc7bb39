"""What the adapters of diffusers pipelines have in common: prompts, guidance, noise, and images."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn

from retouch.models.common.latents import Size
from retouch.types import Conditioning, Task


@runtime_checkable
class Latents(Protocol):
    """Images as x and back, through a frozen autoencoder. Sizes are (height, width) in px."""

    @property
    def vae(self) -> nn.Module: ...

    def grid(self, size: Size) -> Any:
        """The size in tokens. Raises ``ValueError`` for sides that do not divide into tokens."""
        ...

    def pixels(self, images: Sequence[Image], size: Size) -> Float[Tensor, "r c h w"]:
        """-1 to 1, resized as the pipeline resizes."""
        ...

    def encode(self, pixels: Float[Tensor, "r c h w"]) -> Float[Tensor, "r s d"]:
        """Clean x."""
        ...

    def decode(self, tokens: Float[Tensor, "r s d"], size: Size) -> list[Image]:
        """RGB images of clean x."""
        ...

    def noise(self, size: Size, generators: Sequence[torch.Generator], device: torch.device | str) -> Float[Tensor, "r s d"]:
        """x at sigma 1, one row per generator, drawn as the pipeline draws it."""
        ...


@runtime_checkable
class PromptEncoder(Protocol):
    """A frozen text encoder with its tokenizer."""

    @property
    def encoders(self) -> list[nn.Module]:
        """Its modules."""
        ...

    def check(self, prompt: str, task: str) -> None:
        """Raises ``ValueError`` for a prompt that the encoder does not read to its end, or that contains a special token."""
        ...


class PipelineModel(ABC):
    """A ``retouch.protocols.DenoisingModel`` of packed tokens; subclasses give ``condition``, ``sigmas`` and ``velocity``.

    ``size``: (height, width) of the output in px; None leaves it to ``condition``. ``NEGATIVE``: the negative prompt. Raises
    ``ValueError`` for a size that does not divide into tokens.
    """

    NEGATIVE: ClassVar[str] = ""

    def __init__(
        self,
        *,
        transformer: nn.Module,
        latents: Latents,
        text: PromptEncoder,
        scheduler_config: Mapping[str, Any],
        size: Size | None,
    ) -> None:
        self.module = transformer
        self.latents = latents
        self.text = text
        self.scheduler_config = dict(scheduler_config)
        self.size = size
        if size is not None:
            latents.grid(size)

    @property
    def parts(self) -> list[nn.Module]:
        """All its modules, the transformer first."""
        return [self.module, self.latents.vae, *self.text.encoders]

    @abstractmethod
    def condition(self, tasks: Sequence[Task], prompts: Sequence[str]) -> Conditioning:
        """The conditioning of the tasks with these prompts instead of their own; without gradient."""

    @abstractmethod
    def sigmas(self, num_steps: int, conditioning: Conditioning) -> Float[Tensor, " num_steps_plus_1"]: ...

    @abstractmethod
    def velocity(
        self, module: nn.Module, x: Float[Tensor, "r s d"], sigma: Float[Tensor, " r"], conditioning: Conditioning
    ) -> Float[Tensor, "r s d"]: ...

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        for task in tasks:
            self.text.check(task.instruction, task.id)
        return self.condition(tasks, [task.instruction for task in tasks])

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        """The negative prompt, with the tasks' own images."""
        return self.condition(tasks, [self.NEGATIVE] * len(tasks))

    def combine(self, positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        """Classifier-free guidance (Ho & Salimans 2022, arXiv 2207.12598)."""
        return negative + guidance_scale * (positive - negative)

    def initial_noise(self, conditioning: Conditioning, generators: Sequence[torch.Generator]) -> Float[Tensor, "r s d"]:
        return self.latents.noise(conditioning.shared["size"], generators, conditioning.tensors["embeds"].device)

    def encode_images(self, images: Sequence[Image]) -> Float[Tensor, "r s d"]:
        size = common_size([(image.height, image.width) if self.size is None else self.size for image in images])
        return self.latents.encode(self.latents.pixels(images, size))

    def decode(self, x: Float[Tensor, "r s d"], conditioning: Conditioning) -> list[Image]:
        return self.latents.decode(x, conditioning.shared["size"])


def common_size(sizes: Sequence[Any]) -> Any:
    """The one value of ``sizes``. Raises ``ValueError`` where they differ."""
    if len(set(sizes)) != 1:
        raise ValueError(f"images of different sizes or numbers in one batch: {sorted(set(sizes))}; bucket the tasks by them")
    return sizes[0]
