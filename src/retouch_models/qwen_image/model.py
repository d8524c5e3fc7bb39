"""Qwen-Image and its editing models, as diffusers runs them: latents, the prompts' embeddings, and the velocity of the transformer.

x is (r, s, 64) packed tokens in fp32. A conditioning has "embeds" (r, L, d) and "mask" (r, L) for the text, and "source" (r, S, 64)
for source images. ``shared`` has "grids", the (1, height, width) in tokens of the output and of each source image, and "size", the
output's (height, width) in px. embeds are Qwen2.5-VL's last hidden states (after the final norm) for all tokens of a chat template
except padding, the system turn and the user header.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from jaxtyping import Bool, Float
from PIL.Image import Image
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from retouch.models.base import TURNS
from retouch.models.parts import Scheduler, Source, compute_device, load_parts
from retouch.models.pipeline import Area, FrameLatents, PipelineModel, Size, common_size, fit, reference_inputs
from retouch.models.quantized import compute_dtype
from retouch.types import Conditioning, Task
from retouch_models.chat_template import VISION, QwenTemplate, Tokens, load_image_processor


class QwenLatents(FrameLatents):
    """Converts images to packed latents and back; each channel is normalised. Afterwards, ``vae`` accepts single frames only."""

    def __init__(self, vae: AutoencoderKLQwenImage) -> None:
        use_last_temporal_tap(vae)
        super().__init__(vae)

    @staticmethod
    def geometry(config: Mapping[str, Any]) -> tuple[int, int]:
        return config["z_dim"], 2 ** len(config["temperal_downsample"])


def use_last_temporal_tap(vae: nn.Module) -> None:
    """Make every causal convolution of ``vae`` compute only its last temporal tap. Inputs must then be (b, c, 1, h, w).

    The autoencoder is a video model, for which an image is one frame after frames of zeros. So the last tap alone gives the same
    numbers up to rounding, with a third of the work, or even less if the 3D kernels are slow.
    """
    for module in vae.modules():
        if isinstance(module, QwenImageCausalConv3d) and module.stride[0] == 1:
            module.forward = _LastTap(module)


class _LastTap:
    """An object of our own, so that ``require_as_built`` accepts a pipeline that a run has used before."""

    def __init__(self, convolution: QwenImageCausalConv3d) -> None:
        self.convolution = convolution

    def __call__(self, x: Tensor, cache_x: Tensor | None = None) -> Tensor:
        convolution = self.convolution
        assert x.shape[2] == 1, "only single frames are supported, not videos"
        width, height = convolution._padding[0], convolution._padding[2]
        weight = convolution.weight[:, :, -1]
        return F.conv2d(x.squeeze(2), weight, convolution.bias, stride=convolution.stride[1:], padding=(height, width)).unsqueeze(2)


_DESCRIBE = (
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of the objects and "
    "background:"
)
_MODIFY = (
    "Describe the key features of the input image (color, shape, size, texture, objects, background), then explain how the user's "
    "text instruction should alter or modify the image. Generate a new image that meets the user's requirements while maintaining "
    "consistency with the original input where appropriate."
)
TEXT_TO_IMAGE = TURNS.format(system=_DESCRIBE, user="{}")
EDIT = TURNS.format(system=_MODIFY, user=VISION + "{}")
EDIT_PLUS = TURNS.format(system=_MODIFY, user="{}")
OFFICIAL_PREFIX = {TEXT_TO_IMAGE: 34, EDIT: 64, EDIT_PLUS: 64}


class QwenText:
    """A Qwen2.5-VL text encoder with its tokenizer and image processor, and the template that it reads.

    ``template`` has one placeholder ``{}``; the text before it, or before its first vision block, is the prefix that is dropped.
    Raises ValueError if an official template has another number of prefix tokens than in the training of the models.
    """

    def __init__(
        self,
        encoder: Qwen2_5_VLForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template: str,
        image_processor: Any = None,
    ) -> None:
        self._image_token = encoder.config.image_token_id
        self.template = QwenTemplate(tokenizer, template=template, image_processor=image_processor, image_token=self._image_token)
        self.encoder = encoder
        self.tokenizer = tokenizer
        self.image_processor = image_processor
        before_vision = self.template.head.partition("<|vision_start|>")[0]
        self.prefix = len(tokenizer(before_vision)["input_ids"]) if before_vision else 0
        if self.prefix != OFFICIAL_PREFIX.get(template, self.prefix):
            raise ValueError(
                f"the prefix of the official template must have {OFFICIAL_PREFIX[template]} tokens, but has {self.prefix} with "
                "this tokenizer: use the model's own tokenizer, or a template of your own"
            )

    @property
    def encoders(self) -> list[nn.Module]:
        return [self.encoder]

    def check(self, instruction: str, task: str) -> None:
        """Raise ValueError if an instruction contains a special token of the tokenizer, which would change the template."""
        self.template.check(instruction, task)

    def tokenise(self, bodies: Sequence[str], images: Sequence[Sequence[Image]]) -> Tokens:
        """Return the encoder's inputs for ``bodies``, which replace the placeholder, and the images; see ``QwenTemplate``."""
        return self.template.tokenise(bodies, images)

    def embed(self, tokens: Tokens) -> tuple[Float[Tensor, "r l d"], Bool[Tensor, "r l"]]:
        """Return embeddings and their mask, padded on the right with zeros; with gradient if gradients are enabled.

        Padding in ``tokens`` may be on either side. Rows of different lengths do not influence each other.
        """
        tokens = {name: tensor.to(self.encoder.device) for name, tensor in tokens.items()}
        keep = tokens["attention_mask"].bool()
        # Without the token types, the encoder gives image tokens the positions of text, without an error.
        types = (tokens["input_ids"] == self._image_token).int()
        states = self.encoder.model(**tokens, mm_token_type_ids=types, use_cache=False).last_hidden_state
        rows = [state[real][self.prefix :] for state, real in zip(states, keep, strict=True)]
        lengths = torch.tensor([len(row) for row in rows], device=states.device)
        embeds = pad_sequence(rows, batch_first=True)
        return embeds, torch.arange(embeds.shape[1], device=states.device) < lengths[:, None]


_PARTS = {
    "transformer": QwenImageTransformer2DModel,
    "vae": AutoencoderKLQwenImage,
    "text_encoder": Qwen2_5_VLForConditionalGeneration,
    "tokenizer": Qwen2Tokenizer,
}


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Tasks as the model reads them: the text encoder's tokens, the packed source latents, and the values that all rows share."""

    tokens: Tokens
    source: Float[Tensor, "p s d"] | None
    shared: Mapping[str, Any]


EncoderInputs: TypeAlias = tuple[Sequence[str], Sequence[Sequence[Image]]]
"""The text that replaces the template's placeholder, and the resized images, for each task."""


class QwenFlow(PipelineModel):
    """Base class of Qwen-Image and its editing models; subclasses define ``encoder_inputs`` and ``layout``.

    ``template``: the text encoder's template; None is ``TEMPLATE``, the official one. ``image_processor``: the text encoder's image
    processor for templates with images, for example Qwen2VLImageProcessorPil. ``size``: (height, width) of the output in px.

    Raises ``ValueError`` for guidance-distilled weights, whose guidance input is not supported.

    Source: Qwen-Image (arXiv 2508.02324) and diffusers' QwenImage pipelines.
    """

    TEMPLATE: ClassVar[str]
    NEGATIVE = " "
    latents: QwenLatents
    text: QwenText

    def __init__(
        self,
        *,
        transformer: QwenImageTransformer2DModel,
        vae: AutoencoderKLQwenImage,
        text_encoder: Qwen2_5_VLForConditionalGeneration,
        tokenizer: PreTrainedTokenizerBase,
        scheduler_config: Scheduler,
        image_processor: Any = None,
        size: Size | None = None,
        template: str | None = None,
    ) -> None:
        if transformer.config.guidance_embeds:
            raise ValueError("this transformer is guidance-distilled (guidance_embeds); use the undistilled weights")
        template = self.TEMPLATE if template is None else template
        text = QwenText(text_encoder, tokenizer, template=template, image_processor=image_processor)
        latents = QwenLatents(vae)
        super().__init__(transformer=transformer, latents=latents, text=text, scheduler_config=scheduler_config, size=size)

    @classmethod
    def from_pretrained(cls, path: Source, *, dtype: torch.dtype, device: torch.device | str, **options: Any) -> "QwenFlow":
        """Load a local diffusers folder (safetensors, no remote code) or take a loaded pipeline; everything but the transformer is
        frozen.

        ``options``: further arguments of the class, such as ``size``.
        """
        parts = load_parts(path, dtype=dtype, device=device, **_PARTS)
        options |= cls.processors(path)
        return cls(**{name: parts[name] for name in _PARTS}, scheduler_config=parts["scheduler"], **options)

    @classmethod
    def processors(cls, path: Source) -> dict[str, Any]:
        """Load further parts of the pipeline, as arguments of the class."""
        return {}

    @abstractmethod
    def encoder_inputs(self, tasks: Sequence[Task], *, instructions: Sequence[str] | None = None) -> EncoderInputs:
        """Return the text encoder's inputs; ``instructions`` replace the tasks' instructions. Image sizes may differ."""

    @abstractmethod
    def layout(self, tasks: Sequence[Task]) -> tuple[Float[Tensor, "p s d"] | None, Mapping[str, Any]]:
        """Return the packed source latents, and the values that all rows share.

        Raises ValueError for tasks that the model cannot read.
        """

    def tokenise(self, tasks: Sequence[Task], *, instructions: Sequence[str] | None = None) -> Tokens:
        """Convert the result of ``encoder_inputs`` to tokens and pixels."""
        return self.text.tokenise(*self.encoder_inputs(tasks, instructions=instructions))

    def prepare(self, tasks: Sequence[Task], *, instructions: Sequence[str] | None = None) -> Prepared:
        """Compute everything that needs no gradient; ``instructions`` replace the tasks' instructions.

        Raises ValueError in the same cases as ``layout`` and ``checked``.
        """
        source, shared = self.layout(tasks)
        return Prepared(self.tokenise(tasks, instructions=instructions), source, shared)

    def checked(self, tasks: Sequence[Task], instructions: Sequence[str] | None) -> list[str]:
        """Return ``instructions``, or the tasks' instructions if None. Raises ValueError if one contains a special token."""
        texts = [task.instruction for task in tasks] if instructions is None else list(instructions)
        for task, text in zip(tasks, texts, strict=True):
            self.text.check(text, task.id)
        return texts

    def condition(self, tasks: Sequence[Task], prompts: Sequence[str]) -> Conditioning:
        source, shared = self.layout(tasks)
        return self._conditioning(self.read_prompts(*self.encoder_inputs(tasks, instructions=prompts)), source, shared)

    def embed_prompts(self, prompts: Sequence[str], images: Sequence[Sequence[Image]]) -> dict[str, Tensor]:
        embeds, mask = self.text.embed(self.text.tokenise(prompts, images))
        return {"embeds": embeds, "mask": mask}

    def embed(self, prepared: Prepared) -> Conditioning:
        """Return the conditioning with gradient in the text encoder, to train it too; the encoder's mode does not change.

        Raises ValueError if text and images together are longer than the transformer's table of rotary positions.
        """
        embeds, mask = self.text.embed(prepared.tokens)
        return self._conditioning({"embeds": embeds, "mask": mask}, prepared.source, prepared.shared)

    def _conditioning(self, text: Mapping[str, Tensor], source: Tensor | None, shared: Mapping[str, Any]) -> Conditioning:
        embeds = text["embeds"]
        position: Any = self.module.get_submodule("pos_embed")
        table = position.pos_freqs.shape[0]
        sides = [side for grid in shared["grids"] for side in grid[1:]]
        start = max(side // 2 for side in sides)
        if start + embeds.shape[1] > table:
            raise ValueError(
                f"{embeds.shape[1]} text tokens next to images of up to {max(sides)} tokens a side need {start + embeds.shape[1]} "
                f"rotary positions, and the transformer has {table}; shorten the instruction or reduce the images"
            )
        device = compute_device(self.module)
        tensors = {name: tensor.to(device) for name, tensor in text.items()}
        if source is not None:
            tensors["source"] = source.to(device)
        return Conditioning(tensors, frozenset(text), shared)

    def combine(self, positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        """Guidance that rescales each token's velocity to its norm without guidance (Qwen-Image's "true CFG"); in fp32."""
        guided = super().combine(positive, negative, guidance_scale)
        return guided * (positive.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    def velocity(
        self, module: nn.Module, x: Float[Tensor, "r s d"], sigma: Float[Tensor, " r"], conditioning: Conditioning
    ) -> Float[Tensor, "r s d"]:
        """The predicted noise - data at ``x``, in fp32; the tokens of source images are read and not predicted.

        Raises ValueError for x of another size than the conditioning's.
        """
        embeds, mask = conditioning.tensors["embeds"], conditioning.tensors["mask"]
        grids = list(conditioning.shared["grids"])
        if x.shape[1] != grids[0][1] * grids[0][2]:
            raise ValueError(f"x has {x.shape[1]} tokens, but its conditioning is for {grids[0][1]} x {grids[0][2]}")
        lengths = mask.sum(1).tolist()  # one transfer to the host shows how much is padding, and whether a mask is needed
        longest = max(lengths)
        tokens = torch.cat([x, conditioning.tensors["source"]], dim=1) if "source" in conditioning.tensors else x
        dtype = compute_dtype(module)
        output = module(
            hidden_states=tokens.to(dtype),
            # The pipelines also multiply sigma by 1000 and divide again; the rounding changes high frequencies of the embedding.
            timestep=sigma * 1000 / 1000,
            encoder_hidden_states=embeds[:, :longest].to(dtype),
            encoder_hidden_states_mask=None if min(lengths) == longest else mask[:, :longest],
            img_shapes=[grids] * len(x),
            attention_kwargs=reference_inputs(module, conditioning),
            return_dict=False,
        )[0]
        return output[:, : x.shape[1]].float()


class QwenImage(QwenFlow):
    """Qwen-Image, text to image; images of a task are ignored.

    ``size``: None is the pipeline's 1024 x 1024 (128 latents per side). ``max_tokens``: maximum number of tokens of a prompt,
    including the end of the template.

    Source: Qwen-Image (arXiv 2508.02324) and diffusers' QwenImagePipeline.
    """

    TEMPLATE = TEXT_TO_IMAGE
    size: Size

    def __init__(self, *, max_tokens: int = 512, **parts: Any) -> None:
        super().__init__(**parts)
        self.size = self.size or (64 * self.latents.token_pixels,) * 2
        self.max_tokens = max_tokens

    def encoder_inputs(self, tasks: Sequence[Task], *, instructions: Sequence[str] | None = None) -> EncoderInputs:
        """Return the texts; ``instructions`` replace the tasks' instructions.

        Raises ValueError for a text of more than ``max_tokens`` tokens.
        """
        texts = self.checked(tasks, instructions)
        images: list[Sequence[Image]] = [()] * len(texts)
        lengths = self.text.tokenise(texts, images)["attention_mask"].sum(1) - self.text.prefix
        if lengths.max() > self.max_tokens:
            worst = int(lengths.argmax())
            raise ValueError(f"the text of task {tasks[worst].id!r} has {lengths[worst]} tokens; at most {self.max_tokens}")
        return texts, images

    def layout(self, tasks: Sequence[Task]) -> tuple[None, Mapping[str, Any]]:
        return None, {"grids": ((1, *self.latents.grid(self.size)),), "size": self.size}

    def check_prompt(self, prompt: str, task: str) -> None:
        """Raise ValueError if the model cannot read this prompt of the task with this id."""
        self.prepare([Task(id=task, instruction=prompt)])


class QwenImageEdit(QwenFlow):
    """Qwen-Image-Edit: the text encoder reads the source image, and the source's latents follow those of the output.

    ``size``: None takes the source's size after it is resized to ``source_area``. ``condition_area``, ``source_area``: area in px
    to which an image is resized for the text encoder and for the autoencoder. The aspect ratio is kept, and sides are multiples of
    32 (None: the pipeline's area; "as_is": images are not resized).

    Source: diffusers' QwenImageEditPipeline.
    """

    TEMPLATE = EDIT
    CONDITION_AREA: ClassVar[int] = 1024 * 1024
    SOURCE_AREA: ClassVar[int] = 1024 * 1024
    MOST_SOURCES: ClassVar[int] = 1

    def __init__(self, *, condition_area: Area | None = None, source_area: Area | None = None, **parts: Any) -> None:
        super().__init__(**parts)
        self.condition_area: Area = self.CONDITION_AREA if condition_area is None else condition_area
        self.source_area: Area = self.SOURCE_AREA if source_area is None else source_area

    @classmethod
    def processors(cls, path: Source) -> dict[str, Any]:
        return {"image_processor": load_image_processor(path)}

    def layout(self, tasks: Sequence[Task]) -> tuple[Float[Tensor, "p s d"], Mapping[str, Any]]:
        """Return the packed source latents, and the values that all rows share.

        Raises ValueError if a task has too many images or none, or if sizes differ between tasks.
        """
        for task in tasks:
            if not 1 <= len(task.images) <= self.MOST_SOURCES:
                raise ValueError(
                    f"task {task.id!r} has {len(task.images)} source images; {type(self).__name__} takes 1 to {self.MOST_SOURCES}"
                )
        sizes = common_size([tuple(fit(image, self.source_area) for image in task.images) for task in tasks], tasks)
        source = self.latents.encode_sources([task.images for task in tasks], sizes)
        size = sizes[-1] if self.size is None else self.size
        grids = tuple((1, *self.latents.grid(each)) for each in (size, *sizes))
        return source, {"grids": grids, "size": size}

    def encoder_inputs(self, tasks: Sequence[Task], *, instructions: Sequence[str] | None = None) -> EncoderInputs:
        texts = self.checked(tasks, instructions)
        seen = [[self.latents.resize(image, fit(image, self.condition_area)) for image in task.images] for task in tasks]
        bodies = [self._body(text, len(task.images)) for task, text in zip(tasks, texts, strict=True)]
        return bodies, seen

    def _body(self, instruction: str, images: int) -> str:
        assert images == 1  # the template contains the image's vision block
        return instruction

    def fit(self, image: Image) -> Size:
        return fit(image, self.source_area)


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-Plus: one or more source images ("Picture 1: ..."), which the text encoder reads at a small size.

    The output has the size of the last source image. 2511 differs from 2509 only in its transformer's configuration (zero_cond_t).

    Source: diffusers' QwenImageEditPlusPipeline.
    """

    TEMPLATE = EDIT_PLUS
    CONDITION_AREA: ClassVar[int] = 384 * 384
    MOST_SOURCES: ClassVar[int] = 8

    def _body(self, instruction: str, images: int) -> str:
        return "".join(f"Picture {k}: {VISION}" for k in range(1, images + 1)) + instruction
