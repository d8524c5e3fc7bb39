"""The parts of a tiny Qwen-Image."""

import pytest

import tiny_models


@pytest.fixture(scope="module")
def parts():
    tokenizer = tiny_models.qwen_tokenizer()
    return {
        "transformer": tiny_models.qwen_transformer(),
        "vae": tiny_models.qwen_vae(),
        "text_encoder": tiny_models.qwen_text_encoder(tokenizer),
        "tokenizer": tokenizer,
    }
