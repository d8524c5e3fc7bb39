"""Images of rewritten prompts match those of diffusers' pipelines; prompts are extracted from completions."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import tiny_editing
import tiny_models
import tiny_writers
import tiny_writing
from families import FAMILIES
from retouch.core.answers import answer_in
from retouch.protocols import Renderer
from retouch.renderers.base import IgnoreCompletionsRenderer, noise_generators
from retouch.renderers.prompts import PromptRenderer, accepts_prompt
from retouch.types import Completion, Task
from retouch_models.flux.model import Flux
from retouch_models.qwen_image import model as qwen_model
from retouch_models.qwen_image.model import QwenImage
from retouch_worlds.models.family import PlaygroundTextToImage
from retouch_worlds.testing import check_renderer
from slow_params import slow_after

# Images of rewritten prompts match those of diffusers' pipelines for the same prompts and noise

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


def renderer(made, guidance_scale=4.0, **options):
    return config(guidance_scale=guidance_scale, **options).build(made, tiny_writers.writer("qwen2.5"))


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


@pytest.mark.parametrize("options", slow_after(1, [{"batch": 2}, {}, {"guidance_scale": 1.0}]), ids=str)
def test_the_prompt_renderer_passes_the_contract_checks(kind, tasks_and_rollout, options):
    draws = renderer(kind[0], **options)
    assert isinstance(draws, Renderer)
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


@pytest.mark.parametrize("guidance_scale", [1.0, 2.0])
def test_an_editor_edits_the_source_image_of_the_task_as_the_prompt_says(tmp_path, guidance_scale):
    family = FAMILIES["flux-kontext"]
    family.save(tmp_path)
    model = family.build(tmp_path)
    asked = [*family.tasks("a", sizes=((24, 40),)), replace(family.tasks("b")[0], images=(tiny_models.image(3, 24, 40),))]
    model.text.max_sequence_length = 80
    section = family.section(path=str(tmp_path), size=family.size)
    said = outputs("Prompt: a purple rabbit", '"a red circle on it"')
    ours = renderer(model, guidance_scale, model=section)(asked, said)
    told = family.asks(asked, guidance_scale) | {"max_sequence_length": 80, "height": SIZE[0], "width": SIZE[1]}
    draws = noise_generators(said.outputs, shared=True)
    theirs = family.pipeline(tmp_path)(
        prompt=["a purple rabbit", "a red circle on it"], num_inference_steps=STEPS, generator=draws, **told
    )
    assert all(max_pixel_difference(*pair) <= 1 for pair in zip(ours, theirs.images, strict=True))
    other = replace(asked[0], images=asked[1].images)
    assert max_pixel_difference(renderer(model, guidance_scale, model=section)([other, asked[1]], said)[0], ours[0]) > 0


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
    said = outputs("a cat", "cat " * 100, spelt)
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
    (wanted,) = draws.sample([task], noise_generators(said.outputs, shared=True))
    (ours,) = IgnoreCompletionsRenderer(draws)([task], said)
    assert ours.tobytes() == wanted.tobytes()


# The prompt is extracted from an enhancer's completion, whatever text surrounds it

PROMPT = "a red cat's hat, 35mm: soft light"
THOUGHTS = [
    "{}",
    '<think>first "x"\nEnhanced prompt: no</think>\n{}',
    "so <answer>no</answer></think>{}",
    "<THINKING>a</THINKING>{}",
]
TAGS = [
    "{}",
    "<answer>{}</answer>",
    "Well.\n<answer>\n{}\n</answer> Done.",
    "<answer>no</answer> <Answer>{}</Answer>",
    "<answer>{}",
]
LABELS = [
    *("{}", "Enhanced prompt: {}", "**Enhanced Prompt:** {}", "Sure! Here is it.\n\n### Improved image prompt:\n{}"),
    *("Original prompt: a cat\nRewritten prompt: {}", "Sure! Here's the enhanced prompt for you: {}", "Here you go:\n{}"),
    *("Certainly! {}", "Answer: {}", "Final version：{}", "```\n{}\n```", "```text\nno\n```\n```text\n{}\n```"),
]
QUOTES = ["{}", '"{}"', " “{}” ", "`{}`", "«{}»", '"“{}”"', "**{}**"]


@pytest.mark.parametrize(("thought", "tag"), list(itertools.product(THOUGHTS, TAGS)))
def test_thoughts_tags_labels_and_quotes_around_the_prompt_are_removed(thought, tag):
    for label, quote in itertools.product(LABELS, QUOTES):
        written = thought.format(tag.format(label.format(quote.format(PROMPT))))
        assert answer_in(written) == PROMPT, written


def test_a_label_within_quotes_is_removed_and_line_breaks_and_repeated_spaces_are_collapsed():
    for around in ("**Enhanced prompt: {}**", '"Prompt: {}"', "`Prompt: “{}”`"):
        assert answer_in(around.format(PROMPT)) == PROMPT
    assert answer_in(" a red  cat,\n soft light\t") == "a red cat, soft light"


def test_completions_without_a_prompt_give_none():
    thoughts = ["<think>a red cat", "<think>a</think>", "<think>a</think> <think>and a red cat"]
    answers = ["<answer></answer>", "<answer> </answer> a red cat"]
    for written in ("", " \n ", "...", *thoughts, *answers, "Enhanced prompt:", '""', "```\n\n```"):
        assert answer_in(written) is None, written


PROMPTS = [
    *('a sign that says "OPEN"', '"OPEN" beside "CLOSED"', "'tis the cat's", "a photograph of a sign: HELLO"),
    *("This is a poster that says: HELLO", "style: oil, lighting: soft", "response to a storm", "here be dragons"),
    *("surely a cat", "of course-grained sand", "a <b> in bold, 3 < 4", "紫色的兔子，柔和的光线"),
]


def test_a_prompt_alone_stays_as_it_is():
    for prompt in PROMPTS:
        assert answer_in(prompt) == prompt


def test_long_repetitions_cause_no_backtracking():
    """A regular expression that backtracks would not finish here."""
    for sign in ("<think>", "</think>", "<answer>", "</answer>", "```\n", "\n", "  ", "**", '"', "“", "new ", "here "):
        assert answer_in(sign * 100_000 + "x") in {None, "x", " ".join((sign * 100_000 + "x").split())}


@given(st.text(st.sampled_from('<>/think answer:"*`#\n\r\t’“” sure here prompt'), max_size=400))
def test_an_answer_is_one_line_with_a_letter_or_digit(written):
    answer = answer_in(written)
    if answer is not None:
        assert answer == " ".join(answer.split())
        assert any(sign.isalnum() for sign in answer)


# A control whose reward must not improve


def test_ignore_completions_passes_only_noise_keys_and_instructions_to_the_renderer() -> None:
    seen: list[Completion] = []

    def draws(tasks: Sequence[Task], trajectory: Any) -> list[Image.Image | None]:
        seen.extend(trajectory.outputs)
        return [Image.new("RGB", (8, 8)) for _ in tasks]

    written = outputs("make it red", "make it red and").outputs
    tasks = [Task(id=name, instruction=f"paint {name}") for name in ("one", "two")]
    assert len(IgnoreCompletionsRenderer(draws)(tasks, SimpleNamespace(outputs=written))) == 2
    assert seen == [Completion((), task.instruction, False, each.key) for task, each in zip(tasks, written, strict=True)]
