"""Embeddings of a dialogue: without a response bitwise equal to diffusers, with a response equal to transformers."""

import pytest
import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline

import tiny_editing
import tiny_models
import tiny_writers
from retouch.models.qwen_image.model import QwenImageEdit, QwenImageEditPlus
from retouch.models.qwen_image.responses import QwenResponses, ResponseEncoder, writer_for

ODD = (3, 200, 255, 7, 180)  # bytes that are not valid text: decoding and tokenising them again gives other ids


def pass_token_types(encoder):
    return tiny_models.pass_token_types(encoder).to(encoder.dtype)


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
    made = tiny_editing.parts(dtype)
    pipe = tiny_editing.pipeline(QwenImageEditPipeline, made, tiny_models.TEMPLATE, pass_token_types=pass_token_types)
    tasks = tiny_editing.tasks()[:2]
    with torch.no_grad():
        theirs, mask = pipe.encode_prompt([task.instruction for task in tasks], image=[task.images[0] for task in tasks])
    ours = embeds(tiny_editing.responses(tiny_editing.editor(made)), tasks, [(), ()])
    assert ours["embeds"].dtype == dtype
    assert torch.equal(ours["embeds"], theirs)
    assert torch.equal(ours["mask"], mask.bool())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_response_with_several_images_is_bitwise_equal_to_the_pipeline(dtype):
    made = tiny_editing.parts(dtype)
    pipe = tiny_editing.pipeline(QwenImageEditPlusPipeline, made, tiny_models.TEXT_TEMPLATE, pass_token_types=pass_token_types)
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


def test_task_that_fills_the_rotary_positions_raises(editor):
    with pytest.raises(ValueError, match="task 'a' fill the transformer's 4096 rotary positions; shorten"):
        editor.prepare(tiny_models.task("a", "x" * 4096, tiny_models.image(0, 48, 48)))
