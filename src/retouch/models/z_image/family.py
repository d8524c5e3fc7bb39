"""The recipe's section of Z-Image and Z-Image-Turbo."""

from __future__ import annotations

from typing import Any, Literal

from retouch.models.base import DiffusersModel
from retouch.models.common.comfyui_lora import ComfyUINames
from retouch.models.shapes import Blocks, ImageBatch, Part, PartConfigs, Shape


class ZImageModel(DiffusersModel):
    """Z-Image or Z-Image-Turbo, text to image.

    Source: Z-Image (arXiv 2511.22699), diffusers' ZImagePipeline; weights Tongyi-MAI/Z-Image-Turbo.
    """

    kind: Literal["z-image"] = "z-image"

    adapter = "retouch.models.z_image.model:ZImage"
    pipeline = "ZImagePipeline"
    # Attention and feed-forward layers of every block, including the refiner blocks of image and text.
    lora_targets = (
        *("attention.to_q", "attention.to_k", "attention.to_v", "attention.to_out.0"),
        *("feed_forward.w1", "feed_forward.w2", "feed_forward.w3"),
    )
    configurations = (("", "z-image.json"),)
    comfyui = ComfyUINames(prefix="diffusion_model.")
    text_tokens = 512
    pads_prompts = False

    def shape(self, transformer: Part) -> Shape:
        config = transformer["config"]
        # As many refiner blocks read the image as the text: together they cost as much as n_refiner_layers blocks on all tokens.
        blocks = Blocks(config["n_layers"] + config["n_refiner_layers"], {2: 90, 4: 132})
        return Shape(blocks=(blocks,), width=config["dim"], latents=4 * config["in_channels"], text=config["cap_feat_dim"])

    def step_inputs(self, described: PartConfigs, batch: ImageBatch) -> dict[str, Any]:
        config, side = described["transformer"]["config"], self.latent_pixels(described["vae"])
        return {
            "x": list(batch.empty(config["in_channels"], 1, batch.size[0] // side, batch.size[1] // side)),
            "t": batch.times(),
            "cap_feats": list(batch.empty(batch.text, config["cap_feat_dim"])),
            "return_dict": False,
        }
