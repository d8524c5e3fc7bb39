"""Tiny random image encoders of the real classes, for IP-Adapters."""

from pathlib import Path

import torch
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    SiglipImageProcessorPil,
    SiglipVisionConfig,
    SiglipVisionModel,
)

VISION = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}


def write(root: Path) -> Path:
    """Folders ``clip``, whose embeddings are 12 wide, and ``siglip``, whose are 16."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        clip = CLIPVisionModelWithProjection(CLIPVisionConfig(**VISION, projection_dim=12))
        siglip = SiglipVisionModel(SiglipVisionConfig(**VISION))
        for model in (clip, siglip):
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    torch.nn.init.normal_(parameter, 0, 0.3)
    small = {"height": 16, "width": 16}
    clip.save_pretrained(root / "clip")
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=small).save_pretrained(root / "clip")
    siglip.save_pretrained(root / "siglip")
    SiglipImageProcessorPil(size=small).save_pretrained(root / "siglip")
    return root
