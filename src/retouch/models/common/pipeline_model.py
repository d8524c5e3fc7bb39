"""The base class of models in the layout of a diffusers pipeline: prompts, guidance, schedule, noise, and images."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn

from retouch.models.common.latents import Latents, Size
from retouch.models.common.parts import Scheduler, compute_device, euler_scheduler, evaluating
from retouch.types import Conditioning, Task


@runtime_checkable
class PromptEncoder(Protocol):
    """A frozen text encoder with its tokenizer."""

    @property
    def encoders(self) -> list[nn.Module]:
        """The modules of the text encoder."""
        ...

    def check(self, prompt: str, task: str) -> None:
        """Raise ValueError for a prompt that is too long for the encoder, or that contains a special token."""
        ...


class ReadsPrompts(Protocol):
    """A source of prompt embeddings that replaces the text encoders, such as a cache."""

    def __call__(self, prompts: Sequence[str], images: Sequence[Sequence[Image]]) -> dict[str, Tensor]:
        """Return what ``PipelineModel.embed_prompts`` returns, without gradient."""
        ...


class PipelineModel(ABC):
    """A ``retouch.protocols.DenoisingModel``; subclasses define ``condition`` and ``velocity``, and ``embed_prompts`` if
    ``condition`` calls ``read_prompts``.

    ``scheduler_config``: the pipeline's scheduler, or its configuration. ``size``: (height, width) of the output in px; None:
    ``condition`` chooses it. ``NEGATIVE``: the negative prompt. Raises ValueError for a size that does not divide into tokens, and
    as ``euler_scheduler``.
    """

    NEGATIVE: ClassVar[str] = ""

    def __init__(
        self,
        *,
        transformer: nn.Module,
        latents: Latents,
        text: PromptEncoder,
        scheduler_config: Scheduler,
        size: Size | None,
    ) -> None:
        self.module = transformer
        self.latents = latents
        self.text = text
        self.scheduler = euler_scheduler(scheduler_config, key="scheduler")
        self.size = size
        self.prompt_embeddings: ReadsPrompts | None = None
        if size is not None:
            latents.grid(size)

    @property
    def parts(self) -> list[nn.Module]:
        """All modules of the model, the transformer first."""
        return [self.module, self.latents.vae, *self.text.encoders]

    def check_prompt(self, prompt: str, task: str) -> None:
        """Raise ValueError if the model cannot read this prompt of the task with this id."""
        self.text.check(prompt, task)

    @abstractmethod
    def condition(self, tasks: Sequence[Task], prompts: Sequence[str]) -> Conditioning:
        """Return the conditioning of the tasks, with ``prompts`` instead of their instructions; without gradient."""

    def embed_prompts(self, prompts: Sequence[str], images: Sequence[Sequence[Image]]) -> dict[str, Tensor]:
        """Return the text encoders' outputs for prompts, by the names of a conditioning's tensors; sequences are padded on the
        right.

        ``images``: the images that the encoders read with each prompt, already resized. Has gradient if gradients are enabled.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no embed_prompts")

    def read_prompts(self, prompts: Sequence[str], images: Sequence[Sequence[Image]] | None = None) -> dict[str, Tensor]:
        """Return the result of ``embed_prompts`` without gradient, from ``prompt_embeddings`` if that is set.

        ``images``: None if the encoders read no images.
        """
        seen: Sequence[Sequence[Image]] = [()] * len(prompts) if images is None else images
        if self.prompt_embeddings is not None:
            return self.prompt_embeddings(prompts, seen)
        with evaluating(*self.text.encoders):
            return self.embed_prompts(prompts, seen)

    @abstractmethod
    def velocity(
        self, module: nn.Module, x: Float[Tensor, "r ..."], sigma: Float[Tensor, " r"], conditioning: Conditioning
    ) -> Float[Tensor, "r ..."]: ...

    def conditioning(
        self,
        tensors: Mapping[str, Tensor],
        *,
        size: Size,
        images: Sequence[Sequence[Image]] = (),
        sizes: Sequence[Size] = (),
        padded: frozenset[str] = frozenset(),
    ) -> Conditioning:
        """Build a conditioning on the transformer's device; ``shared`` has "size" and "sources" (the ``sizes`` of source images).

        ``images``: the source images of each row; their concatenated tokens become the tensor "source" (r, s, d).
        """
        if sizes:
            tensors = {**tensors, "source": self.latents.encode_sources(images, sizes)}
        device = compute_device(self.module)
        tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        return Conditioning(tensors, padded, {"size": size, "sources": tuple(sizes)})

    def sigmas(self, num_steps: int, conditioning: Conditioning) -> Float[Tensor, " num_steps_plus_1"]:
        """Return the sigmas of ``start``, shifted for the number of output tokens, and a final 0."""
        tokens = math.prod(self.latents.grid(conditioning.shared["size"]))
        start, shift = self.start(max(num_steps, 1)), self.shift(tokens, num_steps)
        return pipeline_sigmas(self.scheduler, num_steps, image_tokens=tokens, start=start, shift=shift)

    def start(self, num_steps: int) -> list[float] | None:
        """The sigmas that the pipeline passes to its scheduler: 1 to 1 / num_steps in equal steps. None: the scheduler's own."""
        return list(np.linspace(1.0, 1 / num_steps, num_steps).tolist())

    def shift(self, tokens: int, num_steps: int) -> float | None:
        """mu of the time shift if the pipeline computes it; None: mu follows from the scheduler's configuration."""
        return None

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        for task in tasks:
            self.text.check(task.instruction, task.id)
        return self.condition(tasks, [task.instruction for task in tasks])

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        """Return the conditioning of the negative prompt with the tasks' images."""
        return self.condition(tasks, [self.NEGATIVE] * len(tasks))

    def combine(self, positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        """Classifier-free guidance (Ho & Salimans 2022, arXiv 2207.12598)."""
        return negative + guidance_scale * (positive - negative)

    def initial_noise(self, conditioning: Conditioning, generators: Sequence[torch.Generator]) -> Float[Tensor, "r ..."]:
        device = next(iter(conditioning.tensors.values())).device
        return self.latents.noise(conditioning.shared["size"], generators, device)

    def encode_images(self, images: Sequence[Image]) -> Float[Tensor, "r ..."]:
        size = common_size([self.fit(image) if self.size is None else self.size for image in images])
        return self.latents.encode(self.latents.pixels(images, size))

    def fit(self, image: Image) -> Size:
        """The size to which an image is resized if the output has no fixed size."""
        return image.height, image.width

    def decode(self, x: Float[Tensor, "r ..."], conditioning: Conditioning) -> list[Image]:
        return self.latents.decode(x, conditioning.shared["size"])

    def decode_tensors(self, x: Float[Tensor, "r ..."], conditioning: Conditioning) -> Float[Tensor, "r 3 h w"]:
        """``retouch.protocols.DecodesTensors``; with gradient checkpointing if the transformer has it on."""
        recompute = bool(getattr(self.module, "is_gradient_checkpointing", False))
        return self.latents.decode_tensors(x, conditioning.shared["size"], recompute=recompute)


def common_size(sizes: Sequence[Any], tasks: Sequence[Task] = ()) -> Any:
    """The one value of ``sizes``: for each row a (height, width) in px, or a tuple with one for each of its source images.
    ``tasks``: the tasks of the rows, for messages. Raises ValueError if the rows differ."""
    first, row = sizes[0], next((row for row, size in enumerate(sizes) if size != sizes[0]), None)
    if row is None:
        return first
    names = [f"task {tasks[each].id!r}" if tasks else f"row {each}" for each in (0, row)]
    if len(first) != len(sizes[row]):
        raise ValueError(
            f"different numbers of source images in one batch: {names[0]} has {len(first)}, {names[1]} has {len(sizes[row])}; "
            "give all tasks the same number of images"
        )
    raise ValueError(
        f"images of different sizes in one batch: {names[0]} has {_pixels(first)}, {names[1]} has {_pixels(sizes[row])} (height x "
        "width); set policy.model.size (in Python: size=; for a renderer: renderer.model.size) so that all images have one size"
    )


def _pixels(size: Any) -> str:
    return " and ".join(f"{height} x {width}" for height, width in (size if isinstance(size[0], tuple) else [size]))


def reference_inputs(transformer: nn.Module, conditioning: Conditioning) -> dict[str, list[Tensor]] | None:
    """Return the attention's keyword arguments with the tokens of reference images, for an IP-Adapter on the transformer; None for
    rows without reference images. They are the argument ``joint_attention_kwargs`` of diffusers' Flux transformer and
    ``attention_kwargs`` of its Qwen-Image transformer."""
    embeds = conditioning.tensors.get(Conditioning.REFERENCE)
    if embeds is None:
        return None
    tokens: list[Tensor] = transformer.get_submodule("encoder_hid_proj")([embeds[:, None]])
    return {"ip_hidden_states": tokens}


def accepts_prompt(model: object, prompt: str) -> bool:
    """Whether the model can read the prompt: it is not too long and contains no special token.

    True for a model without a method ``check_prompt(prompt, task)``.
    """
    check = getattr(model, "check_prompt", None)
    if check is not None:
        try:
            check(prompt, "written")
        except ValueError:
            return False
    return True


def dynamic_shift(config: Mapping[str, Any], image_tokens: int) -> float:
    """mu of the exponential time shift: a line through two points (tokens, shift) of the scheduler's configuration.

    Source: diffusers' Flux and Qwen-Image pipelines.
    """
    low, high = config["base_image_seq_len"], config["max_image_seq_len"]
    start, end = config["base_shift"], config["max_shift"]
    return float(start + (end - start) * (image_tokens - low) / (high - low))


def pipeline_sigmas(
    scheduler: FlowMatchEulerDiscreteScheduler,
    num_steps: int,
    *,
    image_tokens: int,
    start: Sequence[float] | None = None,
    shift: float | None = None,
) -> Float[Tensor, " num_steps_plus_1"]:
    """The sigmas of the scheduler for ``num_steps`` steps, from about 1 to 0; on the CPU.

    ``start``: the sigmas before shifting, if the pipeline passes its own to the scheduler. ``shift``: mu, if the pipeline computes
    it; otherwise ``dynamic_shift``. Raises ValueError if the scheduler has no schedule of this many steps."""
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; it must be at least 1")
    mu = None
    if scheduler.config.use_dynamic_shifting:
        mu = dynamic_shift(scheduler.config, image_tokens) if shift is None else shift
    if scheduler.config.shift_terminal and num_steps == 1:
        raise ValueError("this scheduler stretches its sigmas to shift_terminal, which needs at least 2 steps")
    scheduler.set_timesteps(None if start is not None else num_steps, sigmas=None if start is None else list(start), mu=mu)
    sigmas: Tensor = scheduler.sigmas
    assert torch.isfinite(sigmas).all()
    return sigmas.to("cpu", torch.float32)
