"""What is peculiar to Qwen-Image: its official templates, its source images, and embeddings of a dialogue."""

import importlib.util
import itertools
import math
from base64 import b64decode
from pathlib import Path

import pytest
import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImagePipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit_module
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus_module
from hypothesis import given
from hypothesis import strategies as st
from PIL.Image import new
from transformers import Qwen2Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

import tiny_editing
import tiny_models
import tiny_writers
from retouch.models.pipeline import fit
from retouch.types import Conditioning
from retouch_models.qwen_image.model import (
    EDIT,
    EDIT_PLUS,
    OFFICIAL_PREFIX,
    TEXT_TO_IMAGE,
    QwenImage,
    QwenImageEdit,
    QwenImageEditPlus,
    QwenText,
)
from retouch_models.qwen_image.responses import QwenResponses, ResponseEncoder, writer_for


@pytest.fixture(scope="module")
def parts():
    return tiny_editing.parts()


# Qwen-Image against diffusers' own pipeline, with tiny random models; and the family's official templates


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


# Qwen-Image-Edit and Edit-Plus against diffusers' own pipelines, with tiny random models

PLUS_TEMPLATE = tiny_models.TEXT_TEMPLATE


def build_of_qwen_image_edit(cls, parts, **options):
    options = {"template": tiny_models.TEMPLATE, "condition_area": "as_is", "source_area": "as_is", **options}
    return cls(**parts, image_processor=tiny_models.qwen_image_processor(), scheduler_config=tiny_models.SCHEDULER, **options)


@pytest.fixture(scope="module")
def model(parts):
    return build_of_qwen_image_edit(QwenImageEdit, parts)


@given(st.integers(16, 600), st.integers(16, 600))
def test_fitted_sizes_match_the_pipelines(width, height):
    image = new("L", (width, height))
    for area in (1024 * 1024, 384 * 384):
        assert fit(image, area) == plus_module.calculate_dimensions(area, width / height)[::-1]
        assert fit(image, area) == edit_module.calculate_dimensions(area, width / height)[1::-1]


def test_embed_gives_the_text_encoder_gradients_and_encode_does_not(model, parts):
    encoder = parts["text_encoder"]
    tasks = [tiny_models.task("a", "red", tiny_models.image(0))]
    encoder.train()
    assert not model.encode(tasks).tensors["embeds"].requires_grad
    assert encoder.training
    conditioning = model.embed(model.prepare(tasks))
    x = model.initial_noise(conditioning, tiny_models.generators(1))
    model.velocity(model.module, x, torch.tensor([0.5]), conditioning).square().mean().backward()
    gradient = encoder.model.visual.patch_embed.proj.weight.grad
    assert gradient.abs().max() > 0
    encoder.eval()
    encoder.zero_grad()
    model.module.zero_grad()


def test_edit_plus_prompt_numbers_the_source_images(parts):
    model = build_of_qwen_image_edit(QwenImageEditPlus, parts, template=PLUS_TEMPLATE)
    prepared = model.prepare([tiny_models.task("a", "both", tiny_models.image(0, 24, 32), tiny_models.image(1))])
    text = parts["tokenizer"].decode(prepared.tokens["input_ids"][0])
    assert "Picture 1: <|vision_start|>" in text
    assert "Picture 2: <|vision_start|>" in text
    assert prepared.shared == {"grids": ((1, 3, 3), (1, 3, 4), (1, 3, 3)), "size": (24, 24)}
    assert prepared.source.shape == (1, 21, 64)


def test_sigmas_decrease_from_1_to_0_and_impossible_inputs_raise(model, editor):
    tasks = [tiny_models.task("a", "red", tiny_models.image(0)), tiny_models.task("b", "red", tiny_models.image(0, 24, 32))]
    conditioning = model.encode(tasks[:1])
    sigmas = model.sigmas(10, conditioning)
    assert sigmas[0] == 1
    assert sigmas[-1] == 0
    assert math.isclose(sigmas[-2], 0.02, rel_tol=1e-5)
    assert (sigmas.diff() < 0).all()
    long = tiny_models.task("a", "x" * 4096, tiny_models.image(0, 48, 48))
    for message, call in (
        ("2 steps", lambda: model.sigmas(1, conditioning)),
        (r"row 0 has 24 x 24, row 1 has 24 x 32 .*; set policy\.model\.size",
         lambda: model.encode_images([task.images[0] for task in tasks])),
        (r"rows of different sizes in one batch: .*; set policy\.model\.size \(in Python: size=\)",
         lambda: Conditioning.concat([model.encode([task]) for task in tasks])),
        ("task 'a' fill the transformer's 4096 rotary positions; shorten", lambda: editor.prepare(long)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()


# Embeddings of a dialogue

ODD = (3, 200, 255, 7, 180)  # bytes that are not valid text: decoding and tokenising them again gives other ids


@pytest.fixture(scope="module")
def made():
    return tiny_editing.parts()


@pytest.fixture(scope="module")
def editor(made):
    return tiny_editing.responses(tiny_editing.editor(made))


def embeds(editor, tasks, responses):
    contexts = [editor.prepare(task) for task in tasks]
    return editor.condition(contexts, editor.encode(contexts, responses)).tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_response_gives_embeddings_bitwise_equal_to_the_pipeline(dtype):
    """Of several tasks with one image, and of one task with several."""
    made, token_types = tiny_editing.parts(dtype), lambda encoder: tiny_models.pass_token_types(encoder).to(encoder.dtype)
    pipe = tiny_editing.pipeline(QwenImageEditPipeline, made, tiny_models.TEMPLATE, pass_token_types=token_types)
    tasks = tiny_editing.tasks()[:2]
    with torch.no_grad():
        theirs, mask = pipe.encode_prompt([task.instruction for task in tasks], image=[task.images[0] for task in tasks])
    ours = embeds(tiny_editing.responses(tiny_editing.editor(made)), tasks, [(), ()])
    assert ours["embeds"].dtype == dtype
    assert torch.equal(ours["embeds"], theirs)
    assert torch.equal(ours["mask"], mask.bool())
    made = tiny_editing.parts(dtype)
    pipe = tiny_editing.pipeline(QwenImageEditPlusPipeline, made, tiny_models.TEXT_TEMPLATE, pass_token_types=token_types)
    task = tiny_models.task("a", "put one on the other", tiny_models.image(0, 48, 32), tiny_models.image(1, 32, 64))
    with torch.no_grad():
        theirs, mask = pipe.encode_prompt(task.instruction, image=list(task.images))
    ours = embeds(tiny_editing.responses(tiny_editing.editor(made, QwenImageEditPlus)), [task], [()])
    assert torch.equal(ours["embeds"], theirs)
    assert mask is None
    assert ours["mask"].all()


def test_response_ids_are_appended_to_the_prompt_without_retokenisation(made, editor):
    task, tokenizer = tiny_editing.tasks()[0], made["tokenizer"]
    assert tuple(tokenizer(tokenizer.decode(ODD)).input_ids) != ODD
    pipe = tiny_editing.pipeline(QwenImageEditPipeline, made, tiny_models.TEMPLATE)
    inputs = pipe.processor(text=[tiny_models.TEMPLATE.format(task.instruction)], images=[task.images[0]], return_tensors="pt")
    ids = torch.cat([inputs["input_ids"], torch.tensor([[*ODD, tokenizer.convert_tokens_to_ids("<|im_end|>")]])], dim=1)
    with torch.no_grad():
        states = pipe.text_encoder(
            ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=inputs["pixel_values"],
            image_grid_thw=inputs["image_grid_thw"],
            output_hidden_states=True,
        ).hidden_states[-1]
    ours = embeds(editor, [task], [ODD])["embeds"]
    torch.testing.assert_close(ours, states[:, pipe.prompt_template_encode_start_idx :], atol=1e-6, rtol=0)


def test_encoding_uses_current_policy_weights_and_the_negative_does_not(made):
    editor = tiny_editing.editor(made)
    policy = tiny_editing.policy(editor)
    reader, task = QwenResponses(editor, tiny_editing.policy_encoder(policy)), tiny_editing.tasks()[0]
    with policy.copies.using("reference"):
        published = reader.encode([reader.prepare(task)], [ODD])[0]
        negative = reader.encode_negative([task])[0]
    moved = reader.encode([reader.prepare(task)], [ODD])[0]
    assert (moved - published).abs().max() > 1e-2
    assert torch.equal(reader.encode_negative([task])[0], negative)


@pytest.mark.parametrize("cls", [QwenImageEdit, QwenImageEditPlus])
def test_writer_and_response_encoder_use_the_same_ids_and_states(made, cls):
    editor = tiny_editing.editor(made, cls, condition_area=48 * 32)
    module = tiny_writers.module()
    writer, reader = writer_for(editor, module.requires_grad_(False)), QwenResponses(editor, ResponseEncoder.frozen(module))
    images = (
        (tiny_models.image(0, 40, 56),) if cls is QwenImageEdit else (tiny_models.image(0, 40, 56), tiny_models.image(1, 64, 32))
    )
    task = tiny_models.task("a", "make it red", *images)
    prompts, context = writer.encode([task]), reader.prepare(task)
    assert torch.equal(prompts.ids, context.prepared.tokens["input_ids"])
    # The states that its tokens were drawn from are among those that condition the image.
    ids = torch.tensor([[*ODD, 0]])
    with torch.no_grad():
        drawn_from = writer.states(module, prompts, ids, torch.ones_like(ids, dtype=torch.bool))[0]
    (states,) = reader.encode([context], [ODD])
    torch.testing.assert_close(states[-len(ODD) - 2 : -1], drawn_from, atol=1e-5, rtol=0)


def test_accepts_rejects_long_responses_and_invalid_tokens(made, editor):
    context = editor.prepare(tiny_editing.tasks()[0])
    image_token = made["text_encoder"].config.image_token_id
    assert editor.accepts(context, ())
    assert editor.accepts(context, (1,) * context.room)
    assert not editor.accepts(context, (1,) * (context.room + 1))
    assert not editor.accepts(context, (1, image_token))
    assert not editor.accepts(context, (len(made["tokenizer"]),))
    states = torch.zeros(1, context.length - editor.text.prefix + context.room + 1, 32)
    conditioning = editor.condition([context], list(states))
    x = editor.model.initial_noise(conditioning, tiny_models.generators(1))
    assert editor.model.velocity(editor.model.module, x, torch.ones(1), conditioning).isfinite().all()
