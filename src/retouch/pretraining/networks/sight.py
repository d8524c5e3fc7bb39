"""The playground's image encoder for IP-Adapters: a CLIP vision model in small, of weights drawn from a seed and never trained.

It looks at patches of 4 px, as fine as a stroke, with weights small enough that layer norms do not drown them: ink and paper of a
sign can then be read off its embedding by a linear layer. Coarser patches mix both, and larger weights saturate.
"""

from pathlib import Path

import torch
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModelWithProjection

SIDE = 32


def build_sight(folder: Path, *, seed: int = 0) -> None:
    """Write it to ``folder``: embeddings of 64 numbers, from pictures of 32 x 32 px."""
    config = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        projection_dim=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=4,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CLIPVisionModelWithProjection(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, 0, 0.1)
    model.save_pretrained(folder)
    CLIPImageProcessorPil(size={"height": SIDE, "width": SIDE}, do_center_crop=False).save_pretrained(folder)
