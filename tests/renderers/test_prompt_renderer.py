"""Images of rewritten prompts match those of diffusers' pipelines for the same prompts and noise."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, QwenImagePipeline, StableDiffusion3Pipeline

import tiny_editing
import tiny_models
import tiny_writers
import tiny_writing
from retouch.models.flux.model import Flux, FluxText
from retouch.models.pipeline import accepts_prompt
from retouch.models.qwen_image.model import QwenImage
from retouch.models.sd3.model import SD3
from retouch.protocols import Renderer
from retouch.renderers.base import IgnoreCompletionsRenderer, noise_generators
from retouch.renderers.prompts import PromptRenderer, TextToImage
from retouch.types import Completion
from retouch_worlds.models.family import PlaygroundTextToImage
from retouch_worlds.testing import check_renderer

STEPS, SIZE = 4, (24, 40)
SHIFT = {"shift": 3.0, "num_train_timesteps": 1000}


def sd3():
    return SD3(
        transformer=tiny_models.sd3_transformer(),
        vae=tiny_models.sd3_vae(),
        text_encoders=(tiny_models.clip(16, 1), tiny_models.clip(24, 2), tiny_models.t5(48, 3)),
        tokenizers=[tiny_models.clip_tokenizer(), tiny_models.clip_tokenizer(), tiny_models.t5_tokenizer()],
        scheduler_config=SHIFT,
        size=SIZE,
        max_sequence_length=80,
    )


def sd3_pipeline(model):
    (first, second), third, (a, b, c) = model.text.clips, model.text.t5, model.text.tokenizers
    return StableDiffusion3Pipeline(
        transformer=model.module,
        vae=model.latents.vae,
        scheduler=FlowMatchEulerDiscreteScheduler(**SHIFT),
        text_encoder=first,
        text_encoder_2=second,
        text_encoder_3=third,
        tokenizer=a,
        tokenizer_2=b,
        tokenizer_3=c,
    )


def qwen():
    options = {"template": tiny_models.TEXT_TEMPLATE, "size": SIZE, "max_tokens": 90}
    return QwenImage(**tiny_editing.parts(), scheduler_config=tiny_models.SCHEDULER, **options)


def qwen_pipeline(model):
    pipe = QwenImagePipeline(
        transformer=model.module,
        vae=tiny_models.qwen_vae(),
        scheduler=FlowMatchEulerDiscreteScheduler(**tiny_models.SCHEDULER),
        text_encoder=model.text.encoder,
        tokenizer=model.text.tokenizer,
    )
    pipe.prompt_template_encode = tiny_models.TEXT_TEMPLATE
    pipe.prompt_template_encode_start_idx = model.text.prefix
    return pipe


def flux():
    return Flux(
        transformer=tiny_models.flux_transformer(),
        vae=tiny_models.sd3_vae(),
        text=FluxText(
            tiny_models.clip_text(16, 1),
            tiny_models.t5(48, 3),
            clip_tokenizer=tiny_models.clip_tokenizer(),
            t5_tokenizer=tiny_models.t5_tokenizer(),
            max_sequence_length=80,
        ),
        scheduler_config=tiny_models.SCHEDULER,
        size=SIZE,
    )


def flux_pipeline(model):
    return FluxPipeline(
        transformer=model.module,
        vae=model.latents.vae,
        scheduler=FlowMatchEulerDiscreteScheduler(**tiny_models.SCHEDULER),
        text_encoder=model.text.clip,
        tokenizer=model.text.clip_tokenizer,
        text_encoder_2=model.text.t5,
        tokenizer_2=model.text.t5_tokenizer,
    )


def flux_options(scale):
    return {"true_cfg_scale": scale, "max_sequence_length": 80, **({"negative_prompt": ""} if scale > 1 else {})}


KINDS = {
    "flux": (flux, flux_pipeline, flux_options),
    "sd3": (sd3, sd3_pipeline, lambda scale: {"guidance_scale": scale, "max_sequence_length": 80}),
    "qwen": (qwen, qwen_pipeline, lambda scale: {"true_cfg_scale": scale, **({"negative_prompt": " "} if scale > 1 else {})}),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    build, pipeline, options = KINDS[request.param]
    model = build()
    pipe = pipeline(model)
    pipe.set_progress_bar_config(disable=True)
    return model, pipe, options


def config(**options):
    return PromptRenderer(**{"model": PlaygroundTextToImage(), "num_steps": STEPS, "cut_off": "draw", **options})


def renderer(model, guidance_scale=4.0, **options):
    return config(guidance_scale=guidance_scale, **options).build(model, tiny_writers.writer("qwen2.5"))


def outputs(*texts, truncated=False):
    return SimpleNamespace(outputs=tuple(Completion((1,), text, truncated, (3, 5, 0, slot)) for slot, text in enumerate(texts)))


def tasks(count):
    return [tiny_models.task("a", "a cat")] * count


def max_pixel_difference(a, b):
    return np.abs(np.asarray(a).astype(int) - np.asarray(b).astype(int)).max()


COMPLETIONS = (
    "<think>what now</think>Enhanced prompt: a purple rabbit",
    "a green cat in soft light",
    "<think>a green cat",
    "<answer>a green cat in soft light</answer>",
    "...",
    "square wheel",
)


@pytest.fixture(scope="module")
def tasks_and_rollout():
    """A rollout of a text-only writer over prompts, with the texts of ``COMPLETIONS`` instead of its random completions."""
    asked = tuple(replace(task, instruction=f"prompt {k}") for k, task in enumerate(tiny_writers.tasks(3, with_images=False)))
    batch = tiny_writing.batch(asked)
    rows, trajectory = tiny_editing.tasks_and_rollout(tiny_writing.policy("qwen2.5"), batch)
    said = tuple(replace(output, text=text, truncated=False) for output, text in zip(trajectory.outputs, COMPLETIONS, strict=True))
    return rows, replace(trajectory, outputs=said)


@pytest.mark.parametrize("options", [{}, {"guidance_scale": 1.0}, {"batch": 2}], ids=str)
def test_the_prompt_renderer_passes_the_contract_checks(kind, tasks_and_rollout, options):
    draws = renderer(kind[0], **options)
    assert isinstance(draws, Renderer)
    assert isinstance(draws.text_to_image, TextToImage)
    check_renderer(draws, *tasks_and_rollout)
    assert [image is None for image in draws(*tasks_and_rollout)] == [False, False, True, False, True, False]


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_images_match_those_of_the_diffusers_pipeline(kind, guidance_scale):
    model, pipe, options = kind
    said = outputs("Prompt: a purple rabbit", '"a red circle on it"')
    ours = renderer(model, guidance_scale)(tasks(2), said)
    theirs = pipe(
        ["a purple rabbit", "a red circle on it"],
        **options(guidance_scale),
        height=SIZE[0],
        width=SIZE[1],
        num_inference_steps=STEPS,
        generator=noise_generators(said.outputs, shared=True),
    ).images
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.size == other.size == (40, 24)
        assert max_pixel_difference(mine, other) <= 1  # rounding to 8 bits can differ by one level
        assert np.asarray(mine).std() > 5


def test_images_depend_on_the_completion_and_not_on_the_task(kind):
    model, _, _ = kind
    draws = renderer(model)
    said = outputs("a red circle", "a red circle", "a blue square")
    first = draws([tiny_models.task(str(k), word, tiny_models.image(k)) for k, word in enumerate(("cat", "dog", "cat"))], said)
    assert max_pixel_difference(first[0], first[1]) == 0
    assert max_pixel_difference(first[0], first[2]) > 0
    own = renderer(model, shared_noise=False)(tasks(3), said)
    assert max_pixel_difference(own[0], own[1]) > 5


def test_prompts_that_the_model_cannot_encode_are_not_rendered(kind):
    model, _, _ = kind
    spelt = "a <|im_end|> cat"
    said = outputs("a cat", "cat " * 40, spelt)
    assert [image is None for image in renderer(model)(tasks(3), said)] == [False, True, isinstance(model, QwenImage)]
    assert accepts_prompt(model, "a cat")
    assert accepts_prompt(model, spelt) != isinstance(model, QwenImage)


def test_cut_off_completions_are_rendered_with_draw_and_none_with_fault(kind):
    model, _, _ = kind
    cut = outputs("a cat in", truncated=True)
    assert renderer(model, cut_off="draw")(tasks(1), cut)[0] is not None
    assert renderer(model, cut_off="fault")(tasks(1), cut) == [None]


def test_rendering_changes_no_weights_and_leaves_no_gradients(kind, tasks_and_rollout):
    model, _, _ = kind
    before = {name: tensor.clone() for name, tensor in model.module.state_dict().items()}
    renderer(model)(*tasks_and_rollout)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.module.state_dict().items())
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in model.module.parameters())


def test_a_batch_size_of_0_raises(kind):
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        renderer(kind[0], batch=0)


def test_ignore_completions_renders_the_instruction_of_the_task(kind, tasks_and_rollout):
    rows, trajectory = tasks_and_rollout
    draws = renderer(kind[0])
    asked = [replace(output, text=task.instruction) for task, output in zip(rows, trajectory.outputs, strict=True)]
    wanted = draws(rows, replace(trajectory, outputs=tuple(asked)))
    for ours, theirs in zip(IgnoreCompletionsRenderer(draws)(rows, trajectory), wanted, strict=True):
        assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("instruction", ["Prompt: a cat", "?!"])
def test_ignore_completions_does_not_parse_the_instruction(kind, instruction):
    draws, said = renderer(kind[0]), outputs("a dog")
    task = tiny_models.task("a", instruction)
    (wanted,) = draws.text_to_image.sample([task], noise_generators(said.outputs, shared=True))
    (ours,) = IgnoreCompletionsRenderer(draws)([task], said)
    assert ours.tobytes() == wanted.tobytes()


def test_an_empty_completion_is_not_rendered(kind):
    empty = SimpleNamespace(outputs=(Completion((), "", False, (3, 5, 0, 0)),))
    assert renderer(kind[0])(tasks(1), empty) == [None]
