"""Tiny random models of transformers' classes (CLIP, SigLIP, DINOv2) and an aesthetic head, saved like published weights."""

from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    CLIPConfig,
    CLIPImageProcessorPil,
    CLIPModel,
    Dinov2Config,
    Dinov2Model,
    PreTrainedTokenizerFast,
    SiglipConfig,
    SiglipImageProcessorPil,
    SiglipModel,
)

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
TOWER = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


@torch.no_grad()
def randomize(model: torch.nn.Module, spread: float) -> None:
    """Draw the weights again, but not the biases: with the spread of the classes, all inputs would give about the same output."""
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(0, spread)


def tokenizer(longest: int, *, pad: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with letters and digits as tokens."""
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *LETTERS]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<bos>", eos_token="<eos>", pad_token=pad, unk_token="<unk>", model_max_length=longest
    )


def clip(folder: Path, *, longest: int = 20, kind: str = "clip") -> Path:
    """Save a CLIP or SigLIP that reads at most ``longest`` tokens."""
    torch.manual_seed(5)
    text = {**TOWER, "vocab_size": 4 + len(LETTERS), "max_position_embeddings": longest}
    vision = {**TOWER, "image_size": 16, "patch_size": 8}
    if kind == "clip":
        config = CLIPConfig(
            text_config={**text, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}, vision_config=vision, projection_dim=12
        )
        model, processor = (
            CLIPModel(config),
            CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        )
    else:
        config = SiglipConfig(text_config={**text, "projection_size": 16}, vision_config=vision)
        model, processor = SiglipModel(config), SiglipImageProcessorPil(size={"height": 16, "width": 16})
    randomize(model, 0.3)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    tokenizer(longest, pad="<eos>" if kind == "clip" else "<pad>").save_pretrained(folder)
    return folder


def dino(folder: Path) -> Path:
    torch.manual_seed(6)
    model = Dinov2Model(Dinov2Config(**{**TOWER, "mlp_ratio": 2}, image_size=28, patch_size=7))
    randomize(model, 0.3)
    model.save_pretrained(folder)
    return folder


def head(path: Path, sizes=(12, 8, 4, 1)) -> Path:
    torch.manual_seed(7)
    tensors = {}
    for number, (width, out) in enumerate(pairwise(sizes)):
        tensors |= {f"layers.{2 * number}.weight": torch.randn(out, width), f"layers.{2 * number}.bias": torch.randn(out) + 1}
    save_file(tensors, path)
    return path
