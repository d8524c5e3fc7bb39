"""Images of rewritten prompts match those of diffusers' pipelines for the same prompts and noise."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import tiny_editing
import tiny_models
import tiny_writers
import tiny_writing
from families import FAMILIES
from retouch.models.flux.model import Flux
from retouch.models.pipeline import accepts_prompt
from retouch.models.qwen_image import model as qwen_model
from retouch.models.qwen_image.model import QwenImage
from retouch.protocols import Renderer
from retouch.renderers.base import IgnoreCompletionsRenderer, noise_generators
from retouch.renderers.prompts import PromptRenderer, TextToImage
from retouch.types import Completion
from retouch_worlds.models.family import PlaygroundTextToImage
from retouch_worlds.testing import check_renderer

STEPS, SIZE = 4, (24, 40)


@pytest.fixture(scope="module", params=["flux", "sd3", "qwen-image"])
def kind(request, tmp_path_factory):
    """A model, the arguments of its pipeline's call for a scale, and the pipeline."""
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp(request.param)
    family.save(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen_model, "OFFICIAL_PREFIX", {})
        model = family.build(folder)
    if isinstance(model, Flux):
        model.text.max_sequence_length = 80
    if isinstance(model, QwenImage):
        model.max_tokens = 90
    return model, family.pipeline(folder), family.asks


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
    told = options(tasks(2), guidance_scale)
    theirs = pipe(
        ["a purple rabbit", "a red circle on it"],
        **told | ({"max_sequence_length": 80} if isinstance(model, Flux) else {}),
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


@pytest.mark.parametrize("instruction", ["Prompt: a cat", "?!"])
def test_ignore_completions_does_not_parse_the_instruction(kind, instruction):
    draws, said = renderer(kind[0]), outputs("a dog")
    task = tiny_models.task("a", instruction)
    (wanted,) = draws.text_to_image.sample([task], noise_generators(said.outputs, shared=True))
    (ours,) = IgnoreCompletionsRenderer(draws)([task], said)
    assert ours.tobytes() == wanted.tobytes()
