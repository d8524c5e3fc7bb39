"""The playground's tokenizer: Qwen's own class and special tokens, over a byte-level vocabulary learned from its instructions."""

import json
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>",
    "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip


def build_tokenizer(texts: Sequence[str], *, vocabulary: int, special: Sequence[str] = SPECIAL_TOKENS) -> Qwen2Tokenizer:
    """Learn ``vocabulary`` byte-level merges' worth of tokens from ``texts``; any other text still has tokens, byte by byte."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    learner.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    state = json.loads(learner.to_str())["model"]
    tokenizer = Qwen2Tokenizer(vocab=state["vocab"], merges=[tuple(merge) for merge in state["merges"]], pad_token="<|endoftext|>")
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in special], special_tokens=True)
    return tokenizer
