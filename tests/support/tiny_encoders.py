"""Tiny random image encoders of the real classes, for IP-Adapters."""

from pathlib import Path

import torch
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from tiny_towers import TOWER, randomize

VISION = {**TOWER, "image_size": 16, "patch_size": 8}


def write(root: Path) -> Path:
    """Save ``clip`` (embeddings of width 12) and ``siglip`` (width 16), and both as models with two towers, each in its folder."""
    small = {"height": 16, "width": 16}
    clip = CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=small)
    siglip = SiglipImageProcessorPil(size=small)
    text = {**TOWER, "vocab_size": 9}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        models = {
            "clip": (CLIPVisionModelWithProjection(CLIPVisionConfig(**VISION, projection_dim=12)), clip),
            "siglip": (SiglipVisionModel(SiglipVisionConfig(**VISION)), siglip),
            "two-clip": (CLIPModel(CLIPConfig(text_config=text, vision_config=VISION, projection_dim=12)), clip),
            "two-siglip": (SiglipModel(SiglipConfig(text_config=text, vision_config=VISION)), siglip),
        }
        for name, (model, processor) in models.items():
            randomize(model, 0.3)
            model.save_pretrained(root / name)
            processor.save_pretrained(root / name)
    return root
