"""Qwen-Image's transformer as a velocity field: what text-to-image and editing have in common.

x is (r, s, 64) packed tokens in fp32. A conditioning has "embeds" (r, L, d) and "mask" (r, L) for the text, "source" (r, S, 64)
where there are pictures to edit, and in ``shared`` "grids", the (1, height, width) in tokens of the output and of each source, and
"size", the output's (height, width) in px.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageTransformer2DModel
from jaxtyping import Float
from torch import Tensor, nn
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

from retouch.models.common.frozen import evaluating
from retouch.models.common.pipeline_model import PipelineModel
from retouch.models.ip_adapter.adapter import attention_inputs
from retouch.models.qwen_image.layout import QwenLatents
from retouch.models.qwen_image.text import QwenText, Tokens
from retouch.types import Conditioning, Task

PARTS = {
    "transformer": QwenImageTransformer2DModel,
    "vae": AutoencoderKLQwenImage,
    "text_encoder": Qwen2_5_VLForConditionalGeneration,
    "tokenizer": Qwen2Tokenizer,
}
"""The parts of every pipeline of the family."""


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Tasks as the model reads them: the text encoder's tokens, the packed source latents, and what all rows share."""

    tokens: Tokens
    source: Float[Tensor, "p s d"] | None
    shared: Mapping[str, Any]


class QwenFlow(PipelineModel):
    """What Qwen-Image and Qwen-Image-Edit have in common; subclasses give ``prepare``.

    Raises ``ValueError`` for guidance-distilled weights, whose guidance is an input that no adapter here gives.
    """

    NEGATIVE = " "
    latents: QwenLatents
    text: QwenText

    def __init__(self, *, transformer: QwenImageTransformer2DModel, **rest: Any) -> None:
        if transformer.config.guidance_embeds:
            raise ValueError("this transformer is guidance-distilled (guidance_embeds); take the undistilled weights")
        super().__init__(transformer=transformer, **rest)

    @abstractmethod
    def prepare(self, tasks: Sequence[Task], *, instructions: Sequence[str] | None = None) -> Prepared:
        """Everything that needs no gradient; ``instructions`` replace the tasks' own."""

    def condition(self, tasks: Sequence[Task], prompts: Sequence[str]) -> Conditioning:
        with evaluating(self.text.encoder):
            return self.embed(self.prepare(tasks, instructions=prompts))

    def embed(self, prepared: Prepared) -> Conditioning:
        """The conditioning with gradient to the text encoder, in the mode the encoder is in: for training it as well.

        ValueError where the text and the pictures together are longer than the transformer's table of rotary positions.
        """
        embeds, mask = self.text.embed(prepared.tokens)
        table = self.module.get_submodule("pos_embed").pos_freqs.shape[0]
        sides = [side for grid in prepared.shared["grids"] for side in grid[1:]]
        start = max(side // 2 for side in sides)
        if start + embeds.shape[1] > table:
            raise ValueError(
                f"{embeds.shape[1]} text tokens beside pictures of up to {max(sides)} tokens a side need {start + embeds.shape[1]} "
                f"rotary positions, and the transformer has {table}; shorten the instruction or shrink the pictures"
            )
        device = next(self.module.parameters()).device
        tensors = {"embeds": embeds.to(device), "mask": mask.to(device)}
        if prepared.source is not None:
            tensors["source"] = prepared.source.to(device)
        return Conditioning(tensors, frozenset({"embeds", "mask"}), prepared.shared)

    def combine(self, positive: Tensor, negative: Tensor, guidance_scale: float) -> Tensor:
        """Guidance with each token's velocity brought back to the length it has without (Qwen-Image's "true CFG"); in fp32."""
        guided = negative + guidance_scale * (positive - negative)
        return guided * (positive.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))

    def velocity(
        self, module: nn.Module, x: Float[Tensor, "r s d"], sigma: Float[Tensor, " r"], conditioning: Conditioning
    ) -> Float[Tensor, "r s d"]:
        """noise - data in fp32 at ``x``; the tokens of the sources are read and not predicted. ValueError for x of another size."""
        embeds, mask = conditioning.tensors["embeds"], conditioning.tensors["mask"]
        grids = list(conditioning.shared["grids"])
        if x.shape[1] != grids[0][1] * grids[0][2]:
            raise ValueError(f"x has {x.shape[1]} tokens, and its conditioning is for {grids[0][1]} x {grids[0][2]}")
        lengths = mask.sum(1).tolist()  # one transfer to the host says both how much is padding and whether a mask is needed
        longest = max(lengths)
        tokens = torch.cat([x, conditioning.tensors["source"]], dim=1) if "source" in conditioning.tensors else x
        dtype = next(module.parameters()).dtype
        output = module(
            hidden_states=tokens.to(dtype),
            # The pipelines hand timesteps over in thousandths and divide again; the rounding reaches the highest frequencies.
            timestep=sigma * 1000 / 1000,
            encoder_hidden_states=embeds[:, :longest].to(dtype),
            encoder_hidden_states_mask=None if min(lengths) == longest else mask[:, :longest],
            img_shapes=[grids] * len(x),
            attention_kwargs=attention_inputs(module, conditioning),
            return_dict=False,
        )[0]
        return output[:, : x.shape[1]].float()
