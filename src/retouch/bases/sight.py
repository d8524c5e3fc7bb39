"""The playground's image encoder for IP-Adapters: a CLIP vision model in small, of weights drawn from a seed and never trained.

Drawn weights keep colours and coarse places apart, which is all that an adapter there has to read.
"""

from pathlib import Path

import torch
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModelWithProjection

SIDE = 32


def build_sight(folder: Path, *, seed: int = 0) -> None:
    """Write it to ``folder``: embeddings of 32 numbers, from pictures of 32 x 32 px."""
    config = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=64,
        projection_dim=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=8,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLIPVisionModelWithProjection(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, 0, 0.2)
    model.save_pretrained(folder)
    CLIPImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_center_crop=False).save_pretrained(folder)
