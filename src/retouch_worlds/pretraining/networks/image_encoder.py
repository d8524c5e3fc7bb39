"""The playground's image encoder for IP-Adapters: a CLIP vision model with few parameters and random weights, which is never
trained.

Its patches of 4 px are as small as a stroke of a letter, and its weights are so small that activations do not saturate. So a linear
layer can recover the ink and the paper colour of a sign from the embedding. Larger patches would mix the two colours."""

from pathlib import Path

import torch
from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModelWithProjection

SIDE = 32


def build_image_encoder(folder: Path, *, seed: int = 0) -> None:
    """Write the encoder to ``folder``: embeddings of width 64, for images of 32 x 32 pixels."""
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
