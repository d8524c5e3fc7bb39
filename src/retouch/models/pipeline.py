"""Models in the layout of a diffusers pipeline: images as latents, prompts, guidance, schedules, and wrappers of such models.

An image of (height, width) px becomes c latent channels of (height / f, width / f) for an autoencoder of factor f. Most families
pack 2 x 2 normalised latents into one token: (r, height / 2f * width / 2f, 4c), channel index c * 4 + dy * 2 + dx.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils.torch_utils import randn_tensor
from jaxtyping import Float, Int
from PIL.Image import Image, fromarray
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from retouch.models.parts import Scheduler, compute_device, euler_scheduler, evaluating
from retouch.models.quantized import compute_dtype
from retouch.protocols import DecodesTensors, DenoisingModel
from retouch.types import Conditioning, Task

Size: TypeAlias = tuple[int, int]
Area: TypeAlias = int | Literal["as_is"]


def pack(latents: Float[Tensor, "r c h w"], side: int = 2) -> Float[Tensor, "r s d"]:
    """Pack latents into tokens: each ``side`` x ``side`` patch becomes one token, row by row.

    Source: ``_pack_latents`` of diffusers' Flux and Qwen-Image pipelines.
    """
    r, c, h, w = latents.shape
    patches = latents.reshape(r, c, h // side, side, w // side, side).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(r, (h // side) * (w // side), c * side**2)


def unpack(tokens: Float[Tensor, "r s d"], *, height: int, width: int, side: int = 2) -> Float[Tensor, "r c h w"]:
    """Unpack tokens into latents; ``height`` and ``width`` are in tokens.

    Source: ``_unpack_latents`` of diffusers' Flux and Qwen-Image pipelines.
    """
    r, _, d = tokens.shape
    patches = tokens.reshape(r, height, width, d // side**2, side, side).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(r, d // side**2, height * side, width * side)


def fit(image: Image, area: Area) -> Size:
    """Return the (height, width) to which an image is resized.

    The size has about ``area`` px, the image's aspect ratio, and sides that are positive multiples of 32. "as_is" keeps the image's
    size.

    Source: diffusers' Qwen-Image-Edit pipelines.
    """
    if area == "as_is":
        return image.height, image.width
    ratio = image.width / image.height
    width = math.sqrt(area * ratio)
    return max(1, round(width / ratio / 32)) * 32, max(1, round(width / 32)) * 32


class Latents:
    """Converts images to x and back with a frozen AutoencoderKL; x is the autoencoder's latents (r, c, h, w), shifted and scaled.

    ``channels``: number of channels of a latent. ``latent_pixels``: side of a latent in px. ``token_pixels``: side in px of a
    token, which has ``token_latents`` x ``token_latents`` latents. Sizes are (height, width) in px. Subclasses override ``pack``
    and ``unpack``, or ``normalise`` and ``denormalise``.
    """

    def __init__(self, vae: Any, *, token_latents: int = 2) -> None:
        self.vae = vae
        self.channels, self.latent_pixels = self.geometry(vae.config)
        self.token_latents, self.token_pixels = token_latents, token_latents * self.latent_pixels
        self._images = VaeImageProcessor(vae_scale_factor=self.token_pixels)

    @staticmethod
    def geometry(config: Mapping[str, Any]) -> tuple[int, int]:
        """Return the number of channels of a latent and its side in px, from the autoencoder's configuration."""
        return config["latent_channels"], 2 ** (len(config["block_out_channels"]) - 1)

    def grid(self, size: Size) -> tuple[int, int]:
        """Convert a size to (height, width) in tokens. Raises ``ValueError`` if a side is not a multiple of ``token_pixels``."""
        side = self.token_pixels
        if size[0] % side or size[1] % side or min(size) < side:
            raise ValueError(
                f"an image of {size[0]} x {size[1]} px (height x width) does not divide into tokens of {side} px; "
                "set policy.model.size (in Python: size=) to sides that are multiples of this number"
            )
        return size[0] // side, size[1] // side

    def resize(self, image: Image, size: Size) -> Image:
        """Resize the image to ``size`` as the diffusers pipelines do (Lanczos)."""
        return image if (image.height, image.width) == size else self._images.resize(image, *size)

    def pixels(self, images: Sequence[Image], size: Size) -> Float[Tensor, "r k h w"]:
        """Convert images to tensors from -1 to 1, resized to ``size`` as in the diffusers pipelines (Lanczos)."""
        self.grid(size)
        return torch.cat([self._images.preprocess(image, *size) for image in images])

    def encode(self, pixels: Float[Tensor, "r k h w"]) -> Float[Tensor, "r ..."]:
        """Encode pixels to clean x: the mode of the posterior, normalised, in fp32, on the autoencoder's device."""
        with evaluating(self.vae):
            latents = self.latents_of(pixels.to(self.vae.device, self.vae.dtype)).float()
        return self.normalise(self.pack(latents))

    def encode_sources(self, images: Sequence[Sequence[Image]], sizes: Sequence[Size]) -> Float[Tensor, "r s d"]:
        """Encode the source images of each row, resized to ``sizes``, to clean x; the tokens of a row's images are concatenated."""
        columns = zip(sizes, zip(*images, strict=True), strict=True)
        return torch.cat([self.encode(self.pixels(column, size)) for size, column in columns], dim=1)

    def decode(self, x: Float[Tensor, "r ..."], size: Size) -> list[Image]:
        """Decode clean x to images."""
        with evaluating(self.vae):
            pixels = self.decode_tensors(x, size)
        # Rounded on the device, as diffusers does on the host: the host then copies and holds a quarter of the bytes.
        levels = (pixels * 255).round().to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu()
        return [fromarray(image.numpy()) for image in levels]

    def decode_tensors(self, x: Float[Tensor, "r ..."], size: Size, *, recompute: bool = False) -> Float[Tensor, "r c h w"]:
        """Decode clean x to images from 0 to 1, with gradient in x.

        ``recompute``: use gradient checkpointing if the autoencoder supports it.
        """
        if recompute and getattr(self.vae, "_supports_gradient_checkpointing", False):
            self.vae.enable_gradient_checkpointing()
        latents = self.unpack(self.denormalise(x.to(self.vae.device, torch.float32)), size)
        pixels = self.pixels_of(latents.to(self.vae.dtype)).float()  # nominally from -1 to 1
        return (pixels / 2 + 0.5).clamp(0, 1)

    def noise(self, size: Size, generators: Sequence[torch.Generator], device: torch.device | str) -> Float[Tensor, "r ..."]:
        """Draw x at sigma 1, one row per generator, in the same way as the diffusers pipelines."""
        self.grid(size)
        shape = (1, self.channels, size[0] // self.latent_pixels, size[1] // self.latent_pixels)
        rows = [randn_tensor(shape, generator=generator, device=device, dtype=torch.float32) for generator in generators]
        return self.pack(torch.cat(rows))

    def latents_of(self, pixels: Float[Tensor, "r k h w"]) -> Float[Tensor, "r c y x"]:
        """Encode pixels to the autoencoder's latents: the mode of the posterior."""
        latents: Tensor = self.vae.encode(pixels).latent_dist.mode()
        return latents

    def pixels_of(self, latents: Float[Tensor, "r c y x"]) -> Float[Tensor, "r k h w"]:
        """Decode the autoencoder's latents to pixels."""
        pixels: Tensor = self.vae.decode(latents).sample
        return pixels

    def pack(self, latents: Float[Tensor, "r c y x"]) -> Float[Tensor, "r ..."]:
        """Convert from the autoencoder's layout to the transformer's."""
        return latents

    def unpack(self, x: Float[Tensor, "r ..."], size: Size) -> Float[Tensor, "r c y x"]:
        """Convert from the transformer's layout to the autoencoder's."""
        return x

    def normalise(self, x: Float[Tensor, "r ..."]) -> Float[Tensor, "r ..."]:
        """Convert from the autoencoder's scale to the transformer's."""
        return (x - self.vae.config.shift_factor) * self.vae.config.scaling_factor

    def denormalise(self, x: Float[Tensor, "r ..."]) -> Float[Tensor, "r ..."]:
        """Convert from the transformer's scale to the autoencoder's."""
        return x / self.vae.config.scaling_factor + self.vae.config.shift_factor


class PackedLatents(Latents):
    """Latents that are packed into tokens (r, s, c * token_latents ** 2)."""

    def pack(self, latents: Float[Tensor, "r c y x"]) -> Float[Tensor, "r s d"]:
        return pack(latents, self.token_latents)

    def unpack(self, x: Float[Tensor, "r s d"], size: Size) -> Float[Tensor, "r c y x"]:
        height, width = self.grid(size)
        return unpack(x, height=height, width=width, side=self.token_latents)


class FrameLatents(PackedLatents):
    """Packed latents of a video autoencoder, for which an image is one frame; each channel has its own mean and deviation."""

    def latents_of(self, pixels: Float[Tensor, "r k h w"]) -> Float[Tensor, "r c y x"]:
        latents: Tensor = self.vae.encode(pixels.unsqueeze(2)).latent_dist.mode()[:, :, 0]
        return latents

    def pixels_of(self, latents: Float[Tensor, "r c y x"]) -> Float[Tensor, "r k h w"]:
        pixels: Tensor = self.vae.decode(latents.unsqueeze(2)).sample[:, :, 0]
        return pixels

    def normalise(self, x: Float[Tensor, "r s d"]) -> Float[Tensor, "r s d"]:
        return (x - self._statistic("latents_mean", x)) / self._statistic("latents_std", x)

    def denormalise(self, x: Float[Tensor, "r s d"]) -> Float[Tensor, "r s d"]:
        return x * self._statistic("latents_std", x) + self._statistic("latents_mean", x)

    def _statistic(self, name: str, x: Tensor) -> Float[Tensor, " d"]:
        return torch.tensor(self.vae.config[name], device=x.device).repeat_interleave(self.token_latents**2)


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


ReadsPrompts: TypeAlias = Callable[[Sequence[str], Sequence[Sequence[Image]]], dict[str, Tensor]]
"""A source of prompt embeddings that replaces the text encoders, such as a cache. It returns what ``PipelineModel.embed_prompts``
returns, without gradient."""


class PipelineModel(ABC):
    """A ``retouch.protocols.DenoisingModel``; subclasses define ``condition`` and ``velocity``, and ``embed_prompts`` if
    ``condition`` calls ``read_prompts``.

    ``scheduler_config``: the pipeline's scheduler, or its configuration. ``size``: (height, width) of the output in px; None:
    ``condition`` chooses it. ``NEGATIVE``: the negative prompt. ``FILLS_MASKS``: whether it paints the masked part of an
    image. Raises ValueError for a size that does not divide into tokens, and
    as ``euler_scheduler``.
    """

    NEGATIVE: ClassVar[str] = ""
    FILLS_MASKS: ClassVar[bool] = False

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

    @property
    def encoders(self) -> list[nn.Module]:
        """The frozen modules that encode prompts."""
        return self.text.encoders

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
        """Return the sigmas of ``start``, shifted for the number of output tokens, and a final 0; in fp32 on the CPU.

        Without a ``shift`` of the pipeline, mu is on a line through two points (tokens, shift) of the scheduler's configuration, as
        in diffusers' Flux and Qwen-Image pipelines. Raises ValueError if the scheduler has no schedule of this many steps.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps is {num_steps}; it must be at least 1")
        config, tokens = self.scheduler.config, math.prod(self.latents.grid(conditioning.shared["size"]))
        start = self.start(num_steps)
        mu = self.shift(tokens, num_steps) if config.use_dynamic_shifting else None
        if config.use_dynamic_shifting and mu is None:
            low, high, first, last = (config[key] for key in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift"))
            mu = float(first + (last - first) * (tokens - low) / (high - low))
        if config.shift_terminal and num_steps == 1:
            raise ValueError("this scheduler stretches its sigmas to shift_terminal, which needs at least 2 steps")
        self.scheduler.set_timesteps(None if start is not None else num_steps, sigmas=start, mu=mu)
        sigmas: Tensor = self.scheduler.sigmas
        assert torch.isfinite(sigmas).all()
        return sigmas.to("cpu", torch.float32)

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


def padded_ids(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], length: int) -> Int[Tensor, "r l"]:
    """The token ids of prompts, truncated or padded to ``length``."""
    tokens = tokenizer(list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
    ids: Tensor = tokens["input_ids"]
    return ids


def reference_inputs(transformer: nn.Module, conditioning: Conditioning) -> dict[str, list[Tensor]] | None:
    """Return the attention's keyword arguments with the tokens of reference images, for an IP-Adapter on the transformer; None for
    rows without reference images. They are the argument ``joint_attention_kwargs`` of diffusers' Flux transformer and
    ``attention_kwargs`` of its Qwen-Image transformer."""
    embeds = conditioning.tensors.get(Conditioning.REFERENCE)
    if embeds is None:
        return None
    tokens: list[Tensor] = transformer.get_submodule("encoder_hid_proj")([embeds[:, None]])
    return {"ip_hidden_states": tokens}


Inner = TypeVar("Inner", bound=DenoisingModel)


class ModelWrapper(Generic[Inner]):
    """Base class of wrappers: passes every call to ``model`` unless a subclass overrides it. It is itself a ``DenoisingModel``."""

    def __init__(self, model: Inner) -> None:
        self.model = model
        self.module: nn.Module = model.module

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        return self.model.encode(tasks)

    def encode_negative(self, tasks: Sequence[Task]) -> Conditioning:
        return self.model.encode_negative(tasks)

    def combine(self, positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        return self.model.combine(positive, negative, guidance_scale)

    def initial_noise(self, conditioning: Conditioning, generators: Sequence[torch.Generator]) -> Float[Tensor, "r ..."]:
        return self.model.initial_noise(conditioning, generators)

    def sigmas(self, num_steps: int, conditioning: Conditioning) -> Float[Tensor, " num_steps_plus_1"]:
        return self.model.sigmas(num_steps, conditioning)

    def velocity(self, module: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Float[Tensor, "r ..."]:
        return self.model.velocity(module, x, sigma, conditioning)

    def encode_images(self, images: Sequence[Image]) -> Float[Tensor, "r ..."]:
        return self.model.encode_images(images)

    def decode(self, x: Tensor, conditioning: Conditioning) -> list[Image]:
        return self.model.decode(x, conditioning)

    def decode_tensors(self, x: Tensor, conditioning: Conditioning) -> Float[Tensor, "r 3 h w"]:
        if not isinstance(self.model, DecodesTensors):
            raise ValueError(f"{type(self.model).__name__} has no decode_tensors (retouch.protocols.DecodesTensors)")
        return self.model.decode_tensors(x, conditioning)


class Guided(ModelWrapper[DenoisingModel]):
    """A model whose velocity is guided at ``guidance_scale`` (above 1); it is itself a ``DenoisingModel``.

    Both branches are computed in one forward pass with twice the rows, and both have gradient (Ho & Salimans 2022, arXiv
    2207.12598). The model's own ``combine`` combines them. Texts of unequal length need a mask in a joint forward pass, and 16-bit
    attention with a mask has no flash kernel; so a 16-bit model with padded texts computes the branches one after the other.
    """

    def __init__(self, model: DenoisingModel, guidance_scale: float) -> None:
        if guidance_scale <= 1.0:
            raise ValueError(f"guidance_scale {guidance_scale}: guidance needs a scale above 1; use the model without guidance")
        super().__init__(model)
        self.guidance_scale = guidance_scale

    def encode(self, tasks: Sequence[Task]) -> Conditioning:
        return replace(self.model.encode(tasks), negative=self.encode_negative(tasks))

    def velocity(self, module: nn.Module, x: Tensor, sigma: Tensor, conditioning: Conditioning) -> Float[Tensor, "r ..."]:
        assert conditioning.negative is not None, "the conditioning was not encoded by this model"
        if conditioning.padded and compute_dtype(module).itemsize == 2:
            branches = (replace(conditioning, negative=None), conditioning.negative)
            positive, negative = (self.model.velocity(module, x, sigma, branch) for branch in branches)
            return self.combine(positive, negative, self.guidance_scale)
        both = Conditioning.concat([replace(conditioning, negative=None), conditioning.negative])
        positive, negative = self.model.velocity(module, torch.cat([x, x]), torch.cat([sigma, sigma]), both).chunk(2)
        return self.combine(positive, negative, self.guidance_scale)
