"""Qwen-Image-2.1, text to image and editing, as diffusers' QwenImage21Pipeline runs it.

x is (r, s, 64) tokens in fp32, one per latent of 16 px. A conditioning has "embeds" (r, L, d), "mask" (r, L), "slots" (r, L), which
marks the positions in ``embeds`` that stand for source images, and for tasks with images "source" (r, S, 64), the latents of the
source images. ``shared`` has "size", the output's (height, width) in px, and "sources", the sizes of the source images.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage21, QwenImage21Transformer2DModel
from jaxtyping import Float
from PIL.Image import Image, new
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase, Qwen2Tokenizer, Qwen3VLModel

from retouch.models.base import TURNS
from retouch.models.parts import Source, load_parts
from retouch.models.pipeline import Area, FrameLatents, PipelineModel, Size, common_size, fit
from retouch.models.quantized import compute_dtype
from retouch.types import Conditioning, Task
from retouch_models.chat_template import VISION, ChatPrompts, QwenTemplate, load_image_processor


class QwenImage2Text(ChatPrompts):
    """A Qwen3-VL that reads a prompt and its images; the states before its final norm are kept, without the system turn."""

    FAMILY = "Qwen-Image-2.1"
    SYSTEM = "Comprehend and analyze the provided prompt."

    def __init__(self, encoder: Qwen3VLModel, tokenizer: PreTrainedTokenizerBase, image_processor: Any) -> None:
        self.image_token = encoder.config.image_token_id
        text = TURNS.format(system=self.SYSTEM, user="{}")
        template = QwenTemplate(tokenizer, template=text, image_processor=image_processor, image_token=self.image_token)
        prefix = len(tokenizer(text.partition("<|im_start|>user")[0])["input_ids"])
        super().__init__(encoder, template, max_sequence_length=512, prefix=prefix)

    def embed(self, prompts: Sequence[str], images: Sequence[Sequence[Image]]) -> dict[str, Tensor]:
        """Return embeddings, their mask, and a mask of the slots of images, all padded on the right with zeros."""
        visions = [" ".join(f"<image{k}>{VISION}" for k in range(1, len(row) + 1)) for row in images]
        bodies = [vision + (prompt or " ") for vision, prompt in zip(visions, prompts, strict=True)]
        tokens = {name: each.to(self.encoder.device) for name, each in self.template.tokenise(bodies, images).items()}
        slots, mask, states = tokens["input_ids"] == self.image_token, tokens["attention_mask"].bool(), []
        hook = self.encoder.language_model.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
        self.encoder(**tokens, mm_token_type_ids=slots.int(), use_cache=False)
        hook.remove()
        kept = {"embeds": states[0], "mask": mask, "slots": slots}
        rows = {name: [row[real][self.prefix :] for row, real in zip(each, mask, strict=True)] for name, each in kept.items()}
        return {name: pad_sequence(each, batch_first=True) for name, each in rows.items()}


class QwenImage2Latents(FrameLatents):
    """Converts RGBA images to normalised latents and back with a frozen autoencoder; one latent is a token of 64 channels."""

    def __init__(self, vae: AutoencoderKLQwenImage21) -> None:
        super().__init__(vae, token_latents=1)

    @staticmethod
    def geometry(config: Mapping[str, Any]) -> tuple[int, int]:
        return config["z_dim"], 16

    def grid(self, size: Size) -> tuple[int, int]:
        """Return (height, width) in tokens of an image of ``size`` px. Raises ``ValueError`` if a side is no multiple of 32."""
        if any(side < 1 or side % (2 * self.token_pixels) for side in size):
            raise ValueError(f"an image of {size[0]} x {size[1]} px (height x width): use sides that are multiples of 32 px")
        return super().grid(size)

    def resize(self, image: Image, size: Size) -> Image:
        """Resize a source image for the text encoder, on a white background."""
        resized = self._images.resize(image.convert("RGBA"), *size)
        ground = new("RGB", resized.size, (255, 255, 255))
        ground.paste(resized, mask=resized.getchannel("A"))
        return ground

    def pixels(self, images: Sequence[Image], size: Size) -> Float[Tensor, "r 4 h w"]:
        return super().pixels([image.convert("RGBA") for image in images], size)

    def decode_tensors(self, x: Float[Tensor, "r s d"], size: Size, *, recompute: bool = False) -> Float[Tensor, "r 3 h w"]:
        colours, alpha = super().decode_tensors(x, size, recompute=recompute).split([3, 1], dim=1)
        return colours * alpha + (1 - alpha)


class QwenImage2(PipelineModel):
    """Qwen-Image-2.1: an image from a prompt and any number of source images.

    ``size``: (height, width) of the output in px. None is the size of the last source image or, without source images, 1024 x 1024.
    ``source_area``: area in px to which a source image is resized (see ``fit``). ``sample_sigmas``: the sigmas before shifting for
    step-distilled weights, used if the schedule has the same number of steps.

    Source: diffusers' QwenImage21Pipeline.
    """

    NEGATIVE = " "
    latents: QwenImage2Latents
    text: QwenImage2Text

    def __init__(
        self,
        *,
        vae: AutoencoderKLQwenImage21,
        source_area: Area = 1024 * 1024,
        sample_sigmas: Sequence[float] | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(latents=QwenImage2Latents(vae), **rest)
        self.source_area = source_area
        self.sample_sigmas = sample_sigmas

    @classmethod
    def from_pretrained(
        cls, path: Source, *, dtype: torch.dtype, device: torch.device | str, size: Size | None = None, **options: Any
    ) -> "QwenImage2":
        """Load a local diffusers folder (safetensors, no remote code) or take a loaded pipeline; everything but the transformer is
        frozen."""
        kinds = {"transformer": QwenImage21Transformer2DModel, "vae": AutoencoderKLQwenImage21, "text_encoder": Qwen3VLModel}
        parts = load_parts(path, dtype=dtype, device=device, **kinds, processor=Qwen2Tokenizer)
        images = load_image_processor(path)
        return cls(
            transformer=parts["transformer"],
            vae=parts["vae"],
            text=QwenImage2Text(parts["text_encoder"], parts["processor"], images),
            scheduler_config=parts["scheduler"],
            size=size,
            sample_sigmas=parts["index"].get("sample_sigmas"),
            **options,
        )

    def embed_prompts(self, prompts: Sequence[str], images: Sequence[Sequence[Image]]) -> dict[str, Tensor]:
        return self.text.embed(prompts, images)

    def condition(self, tasks: Sequence[Task], prompts: Sequence[str]) -> Conditioning:
        images = [task.images for task in tasks]
        sizes = common_size([tuple(fit(image, self.source_area) for image in row) for row in images], tasks)
        tensors = self.read_prompts(prompts, [list(map(self.latents.resize, row, sizes)) for row in images])
        size = self.size or (sizes[-1] if sizes else (1024, 1024))
        return self.conditioning(tensors, size=size, images=images, sizes=sizes, padded=frozenset(tensors))

    def fit(self, image: Image) -> Size:
        return fit(image, self.source_area)

    def start(self, num_steps: int) -> list[float] | None:
        given = self.sample_sigmas
        return list(given) if given is not None and len(given) == num_steps else super().start(num_steps)

    def velocity(
        self, module: nn.Module, x: Float[Tensor, "r s d"], sigma: Float[Tensor, " r"], conditioning: Conditioning
    ) -> Float[Tensor, "r s d"]:
        """Runs one forward pass per row: rows of a pass share one layout, and padding would shift an image against its prompt."""
        dtype, shared = compute_dtype(module), conditioning.shared
        grids = [(1, *self.latents.grid(size)) for size in (*shared["sources"], shared["size"])]
        lengths, rows = conditioning.tensors["mask"].sum(1).tolist(), []
        for row, length in enumerate(lengths):
            inputs = {name: tensor[row : row + 1] for name, tensor in conditioning.tensors.items()}
            slots = inputs["slots"][:, :length]
            tokens = torch.cat([inputs["source"], x[row : row + 1]], dim=1) if shared["sources"] else x[row : row + 1]
            output: Tensor = module(
                hidden_states=tokens.to(dtype),
                encoder_hidden_states=inputs["embeds"][:, :length].to(dtype),
                # The pipelines also multiply sigma by 1000 and divide again; the rounding changes the embedding's high frequencies.
                timestep=sigma[row : row + 1] * 1000 / 1000,
                img_shapes=[grids],
                img_mask=torch.cat([slots, slots.new_ones(1, x.shape[1] // 4)], dim=1),
                return_dict=False,
            )[0]
            rows.append(output[:, -x.shape[1] :].float())
        return torch.cat(rows)
