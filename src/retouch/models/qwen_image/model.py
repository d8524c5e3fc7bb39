"""Qwen-Image, text to image, and the base class that it shares with its editing models, as diffusers runs them.

x is (r, s, 64) packed tokens in fp32. A conditioning has "embeds" (r, L, d) and "mask" (r, L) for the text, and "source" (r, S, 64)
for source images. ``shared`` has "grids", the (1, height, width) in tokens of the output and of each source image, and "size", the
output's (height, width) in px.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from jaxtyping import Float
from PIL.Image import Image
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from retouch.models.common.chat_template import Tokens
from retouch.models.common.latents import Size
from retouch.models.common.parts import Scheduler, Source, compute_device, load_parts
from retouch.models.common.pipeline_model import PipelineModel, reference_inputs
from retouch.models.qwen_image.layout import QwenLatents
from retouch.models.qwen_image.text import TEXT_TO_IMAGE, QwenText
from retouch.types import Conditioning, Task

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


@dataclass(frozen=True, slots=True, eq=False)
class EncoderInputs:
    """The text encoder's inputs for each task: the text that replaces the template's placeholder, and the resized images."""

    bodies: Sequence[str]
    images: Sequence[Sequence[Image]]


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
        inputs = self.encoder_inputs(tasks, instructions=instructions)
        return self.text.tokenise(inputs.bodies, inputs.images)

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
        inputs = self.encoder_inputs(tasks, instructions=prompts)
        return self._conditioning(self.read_prompts(inputs.bodies, inputs.images), source, shared)

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
        dtype = next(module.parameters()).dtype
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
        return EncoderInputs(texts, images)

    def layout(self, tasks: Sequence[Task]) -> tuple[None, Mapping[str, Any]]:
        return None, {"grids": ((1, *self.latents.grid(self.size)),), "size": self.size}

    def check_prompt(self, prompt: str, task: str) -> None:
        """Raise ValueError if the model cannot read this prompt of the task with this id."""
        self.prepare([Task(id=task, instruction=prompt)])
