"""Tiny random detectors of transformers' classes (OWL-ViT, OWLv2, Grounding DINO), saved like published weights."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    GroundingDinoConfig,
    GroundingDinoForObjectDetection,
    GroundingDinoImageProcessorPil,
    Owlv2Config,
    Owlv2ForObjectDetection,
    OwlViTConfig,
    OwlViTForObjectDetection,
    OwlViTImageProcessorPil,
    PreTrainedTokenizerFast,
    SwinConfig,
)

from tiny_towers import LETTERS, TOWER, randomize, tokenizer


def owl(folder: Path, *, kind: str) -> Path:
    """Save an OWL-ViT or OWLv2 for 32 x 32 px in patches of 8 px, which has 16 candidates."""
    torch.manual_seed(11)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    text = {**TOWER, **ids, "vocab_size": 4 + len(LETTERS), "max_position_embeddings": 24}
    vision = {**TOWER, "image_size": 32, "patch_size": 8}
    config_class, model_class = {
        "owlvit": (OwlViTConfig, OwlViTForObjectDetection),
        "owlv2": (Owlv2Config, Owlv2ForObjectDetection),
    }[kind]
    model = model_class(config_class(text_config=text, vision_config=vision, projection_dim=16))
    randomize(model, 0.4)
    model.save_pretrained(folder)
    OwlViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    tokenizer(24, pad="<pad>").save_pretrained(folder)
    return folder


def grounding_dino(folder: Path) -> Path:
    torch.manual_seed(12)
    backbone = SwinConfig(
        image_size=64, patch_size=4, embed_dim=8, depths=[1, 1, 1], num_heads=[1, 1, 1], window_size=4, out_indices=[1, 2, 3]
    )
    text = BertConfig(**TOWER, vocab_size=6 + len(LETTERS), max_position_embeddings=64)
    sizes = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"d_model": 32, "num_queries": 12, "num_feature_levels": 3, "max_text_len": 64}
    config = GroundingDinoConfig(backbone_config=backbone, text_config=text, **sizes, **heads)
    model = GroundingDinoForObjectDetection(config)
    randomize(model, 0.3)
    model.save_pretrained(folder)
    GroundingDinoImageProcessorPil(size={"shortest_edge": 48, "longest_edge": 64}).save_pretrained(folder)
    words = ["<pad>", "<cls>", "<sep>", "<unk>", ".", " ", *LETTERS]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, cls_token="<cls>", sep_token="<sep>", pad_token="<pad>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
    return folder
