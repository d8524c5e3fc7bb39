"""Qwen-Image against diffusers' own pipeline, with tiny random models; and the family's official templates."""

import importlib.util
import itertools
from base64 import b64decode
from pathlib import Path

import pytest
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImagePipeline
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

import tiny_models
from retouch.models.qwen_image.model import EDIT, EDIT_PLUS, OFFICIAL_PREFIX, TEXT_TO_IMAGE, QwenImage, QwenText


def build(parts, **options):
    return QwenImage(
        **parts, scheduler_config=tiny_models.SCHEDULER, **{"template": tiny_models.TEXT_TEMPLATE, "size": (24, 40), **options}
    )


def test_official_templates_match_the_pipelines(parts):
    empty = {"scheduler": None, "vae": None, "text_encoder": None, "tokenizer": None, "transformer": None}
    for template, pipe in (
        (TEXT_TO_IMAGE, QwenImagePipeline(**empty)),
        (EDIT, QwenImageEditPipeline(**empty, processor=None)),
        (EDIT_PLUS, QwenImageEditPlusPipeline(**empty, processor=None)),
    ):
        assert template == pipe.prompt_template_encode
        assert OFFICIAL_PREFIX[template] == pipe.prompt_template_encode_start_idx


def merge(word, ranks, below):
    """Byte-pair encoding of a word with the ranks below a limit."""
    parts = [word[k : k + 1] for k in range(len(word))]
    while True:
        pairs = [(ranks.get(left + right, below), k) for k, (left, right) in enumerate(itertools.pairwise(parts))]
        rank, k = min(pairs, default=(below, 0))
        if rank >= below:
            return parts
        parts[k : k + 2] = [parts[k] + parts[k + 1]]


def official_tokenizer(text):
    """Qwen's tokenizer, with those of its tokens that occur in the text (no other could take part in a merge)."""
    found = importlib.util.find_spec("dashscope")
    if found is None:
        pytest.skip("Qwen's byte-pair ranks come with the package dashscope, which is not installed")
    lines = (Path(found.submodule_search_locations[0]) / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    words = ((b64decode(word), int(rank)) for word, rank in map(bytes.split, lines))
    ranks = {word: rank for word, rank in words if len(word) == 1 or word in text.encode()}
    letters = bytes_to_unicode()
    spell = {word: "".join(letters[value] for value in word) for word in ranks}
    halves = [merge(word, ranks, ranks[word]) for word in sorted(ranks, key=ranks.get) if len(word) > 1]
    merges = [tuple(spell[half] for half in pair) for pair in halves if len(pair) == 2]
    tokenizer = Qwen2Tokenizer(vocab={spell[word]: rank for word, rank in ranks.items()} | {"<|endoftext|>": 151643}, merges=merges)
    tokenizer.add_special_tokens({"additional_special_tokens": list(tiny_models.SPECIAL)})
    return tokenizer


@pytest.mark.parametrize(("template", "prefix"), [(TEXT_TO_IMAGE, 34), (EDIT, 64), (EDIT_PLUS, 64)])
def test_official_templates_have_the_expected_prefix_length(parts, template, prefix):
    tokenizer = official_tokenizer(TEXT_TO_IMAGE + EDIT)
    assert tokenizer.tokenize("Describe the image by detailing") == ["Describe", "Ġthe", "Ġimage", "Ġby", "Ġdetailing"]
    assert QwenText(parts["text_encoder"], tokenizer, template=template).prefix == prefix


def test_the_default_size_is_128_latents_per_side(parts):
    assert build(parts, size=None).size == (512, 512)  # this autoencoder downsamples by 4, the published one by 8


@pytest.mark.parametrize(
    ("template", "message"),
    [(None, "34 tokens"), ("no place", "exactly one placeholder"), ("{} and {}", "exactly one placeholder")],
)
def test_a_template_that_does_not_fit_raises(parts, template, message):
    with pytest.raises(ValueError, match=message):
        build(parts, template=template)
