"""Edited images of responses match those of diffusers for the same embeddings and noise; frozen weights do not change."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPipeline, QwenImagePipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as edit_module

import tiny_editing
import tiny_models
from retouch.protocols import Renderer
from retouch.renderers.base import OdeSampler, noise_generators
from retouch.types import Completion
from retouch_models.qwen_image.model import QwenImage
from retouch_models.qwen_image.responses import QwenResponses, ResponseEncoder
from retouch_models.responses import ResponseRenderer, ResponseSampler
from retouch_worlds.models.family import PlaygroundModel
from retouch_worlds.testing import check_renderer
from slow_params import slow_after

STEPS = 3


@pytest.fixture(scope="module")
def made():
    return tiny_editing.parts()


@pytest.fixture(scope="module")
def editor(made):
    return tiny_editing.editor(made)


@pytest.fixture(scope="module")
def policy(editor):
    return tiny_editing.policy(editor)


@pytest.fixture(scope="module")
def tasks_and_rollout(policy):
    return tiny_editing.tasks_and_rollout(policy, tiny_editing.batch(tiny_editing.tasks()))


def renderer(editor, encoder, *, sharded=False, cached=64, **options):
    given = {"model": PlaygroundModel(), "encoder": "frozen", "num_steps": STEPS, "cut_off": "draw", "guidance_scale": 4.0}
    config = ResponseRenderer(**{**given, **options})
    return ResponseSampler(QwenResponses(editor, encoder), config, sharded=sharded, cached=cached)


def frozen(editor):
    return ResponseEncoder.frozen(editor.text.encoder)


def outputs(*ids, truncated=False, groups=None):
    """Completions of the first group, or of those given, in step 5."""
    pairs = zip(ids, groups or [0] * len(ids), strict=True)
    written = [Completion(said, "", truncated, (3, 5, group, slot)) for slot, (said, group) in enumerate(pairs)]
    return SimpleNamespace(outputs=tuple(written))


def pixels(image):
    return np.asarray(image).astype(int)


def max_pixel_difference(a, b):
    return np.abs(pixels(a) - pixels(b)).max()


def assert_drawn_by(pipe, draws, task, said, *image, guidance_scale, **sizes):
    """The rendered image of a response is that of the pipeline with the same embeddings; of an empty one, with the prompt."""
    trajectory = outputs(said)
    (ours,) = draws([task], trajectory)
    contexts = [draws.editor.prepare(task)]
    embeds = draws.editor.condition(contexts, draws.editor.encode(contexts, [said])).tensors
    assert ("source" in embeds) == bool(image)
    told = {"prompt_embeds": embeds["embeds"], "prompt_embeds_mask": embeds["mask"]} if said else {"prompt": task.instruction}
    told |= {"negative_prompt": " " if guidance_scale > 1 else None, "true_cfg_scale": guidance_scale, "num_inference_steps": STEPS}
    (theirs,) = pipe(*image, **told, **sizes, generator=noise_generators(trajectory.outputs, shared=True)).images
    assert theirs.size == ours.size == (64, sizes.get("height", 64))
    assert max_pixel_difference(ours, theirs) <= 1  # rounding to 8 bits can differ by one level
    assert pixels(ours).std() > 5


@pytest.mark.parametrize("whose", ["frozen", "policy"])
@pytest.mark.parametrize(
    "options", slow_after(2, [{}, {"encoder_batch": 2, "batch": 1}, {"guidance_scale": 1.0}, {"sharded": True}]), ids=str
)
def test_the_response_renderer_passes_the_contract_checks(editor, policy, tasks_and_rollout, whose, options):
    tasks, trajectory = tasks_and_rollout
    assert any(output.truncated for output in trajectory.outputs)
    assert len({len(output.ids) for output in trajectory.outputs}) > 1
    emptied = (replace(trajectory.outputs[0], ids=(), text="", truncated=False), *trajectory.outputs[1:])
    broken = (*emptied[:-1], replace(emptied[-1], ids=(policy.model.image_token,)))
    draws = renderer(editor, frozen(editor) if whose == "frozen" else tiny_editing.policy_encoder(policy), **options)
    assert isinstance(draws, Renderer)
    check_renderer(draws, tasks, replace(trajectory, outputs=broken))
    images = draws(tasks, replace(trajectory, outputs=broken))
    assert [image is None for image in images] == [False] * 5 + [True]
    assert [image.size for image in images[:5]] == [(48, 48)] * 4 + [(48, 32)]


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
@pytest.mark.parametrize("said", [(), (3, 200, 255)], ids=["empty", "said"])
def test_images_match_those_of_the_diffusers_edit_pipeline(made, monkeypatch, guidance_scale, said):
    area, real = 64 * 64, edit_module.calculate_dimensions
    monkeypatch.setattr(edit_module, "calculate_dimensions", lambda given, ratio: real(area, ratio))
    editor = tiny_editing.editor(made, condition_area=area, source_area=area)
    draws = renderer(editor, frozen(editor), guidance_scale=guidance_scale)
    task = tiny_models.task("a", "make it red", tiny_models.image(0, 40, 56))
    pipe = tiny_editing.pipeline(QwenImageEditPipeline, made, tiny_models.TEMPLATE)
    assert_drawn_by(pipe, draws, task, said, task.images[0], guidance_scale=guidance_scale)


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
@pytest.mark.parametrize("said", [(), (3, 200, 255)], ids=["empty", "said"])
def test_text_to_image_renders_responses_like_the_diffusers_pipeline(made, guidance_scale, said):
    """Qwen-Image: an empty response gives the pipeline's image, and there is no source."""
    model = QwenImage(**made, scheduler_config=tiny_models.SCHEDULER, template=tiny_models.TEXT_TEMPLATE, size=(48, 64))
    draws = renderer(model, frozen(model), guidance_scale=guidance_scale)
    pipe = QwenImagePipeline(**made, scheduler=FlowMatchEulerDiscreteScheduler(**tiny_models.SCHEDULER))
    pipe.prompt_template_encode = tiny_models.TEXT_TEMPLATE
    pipe.prompt_template_encode_start_idx = draws.editor.text.prefix
    pipe.set_progress_bar_config(disable=True)
    sizes = {"height": 48, "width": 64}
    assert_drawn_by(pipe, draws, tiny_models.task("a", "a red cat"), said, guidance_scale=guidance_scale, **sizes)


def test_noise_is_shared_within_a_group_and_differs_between_groups_and_steps(editor):
    task = tiny_editing.tasks()[0]
    drawn = outputs((65,), (65,), (66,))
    shared = renderer(editor, frozen(editor))([task] * 3, drawn)
    assert max_pixel_difference(shared[0], shared[1]) == 0
    assert max_pixel_difference(shared[0], shared[2]) > 0
    own = renderer(editor, frozen(editor), shared_noise=False)([task] * 3, drawn)
    assert max_pixel_difference(own[0], own[1]) > 5
    later = SimpleNamespace(outputs=tuple(replace(each, key=(3, 6, 0, 0)) for each in drawn.outputs))
    assert max_pixel_difference(shared[0], renderer(editor, frozen(editor))([task] * 3, later)[0]) > 5
    others = renderer(editor, frozen(editor))([task] * 3, outputs((65,), (65,), (66,), groups=(0, 1, 1)))
    assert max_pixel_difference(others[0], shared[0]) == 0
    assert max_pixel_difference(others[1], shared[1]) > 5


def test_completion_keys_are_seed_step_group_and_slot_of_the_batch(policy):
    batch = tiny_editing.batch(tiny_editing.tasks())
    keys = [output.key for output in policy.rollout(batch).outputs]
    assert keys == [(3, 5, 7, 0), (3, 5, 7, 1), (3, 5, 8, 0), (3, 5, 8, 1), (3, 5, 9, 0), (3, 5, 9, 1)]
    chunk = batch.take(slice(3, 6))
    assert [output.key for output in policy.rollout(chunk).outputs] == keys[3:6]
    with pytest.raises(ValueError, match="output 0 has no key"):
        noise_generators([Completion((1,), "", False)], shared=True)


def test_cut_off_completions_are_rendered_with_draw_and_none_with_fault(editor):
    task, cut = tiny_editing.tasks()[0], outputs((65, 66), truncated=True)
    assert renderer(editor, frozen(editor), cut_off="draw")([task], cut)[0] is not None
    assert renderer(editor, frozen(editor), cut_off="fault")([task], cut) == [None]


def calls(module, act):
    """The number of forward passes of ``module`` during ``act()``."""
    count = []
    handle = module.register_forward_pre_hook(lambda *_: count.append(1))
    act()
    handle.remove()
    return len(count)


@pytest.mark.parametrize("guidance_scale", [1.0, 4.0])
def test_ranks_call_the_encoder_equally_often(editor, guidance_scale):
    encoder, tasks = frozen(editor), tiny_editing.tasks()
    draws = renderer(editor, encoder, guidance_scale=guidance_scale, cut_off="fault", sharded=True, encoder_batch=2)
    ranks = [
        ([tasks[0]] * 5, outputs((), (), (), (), ())),
        ([tasks[0], tasks[1], tasks[2], tasks[2], tasks[2]], outputs((1,), (2, 3), (4,) * 9, (5,), ())),
        ([tasks[2]] * 5, outputs((1,), (2,), (3,), (4,), (5,), truncated=True)),
    ]
    counted = [calls(encoder.module.model, lambda rank=rank: draws(*rank)) for rank in ranks * 2]
    assert counted == [3 if guidance_scale == 1.0 else 6] * 6


def test_negative_embeddings_are_cached_up_to_the_limit(editor):
    encoder, tasks = frozen(editor), tiny_editing.tasks()[:2]
    draws = renderer(editor, encoder, cached=1)
    said = outputs((1,), (2,), (3,), (4,))
    both, one = [tasks[0], tasks[0], tasks[1], tasks[1]], [tasks[1]] * 4
    assert [calls(encoder.module.model, lambda rows=rows: draws(rows, said)) for rows in (both, one, both)] == [1 + 2, 1, 1 + 2]
    # A resumed run has an empty cache and renders the same images.
    fresh = renderer(editor, encoder)(one, said)
    assert [image.tobytes() for image in draws(one, said)] == [image.tobytes() for image in fresh]


def test_rendering_changes_neither_frozen_weights_nor_the_policy(made, editor, policy, tasks_and_rollout):
    module = policy.model.module
    held = {"editor": made["transformer"], "vae": made["vae"], "frozen": made["text_encoder"], "policy": module}
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    draws = [renderer(editor, frozen(editor)), renderer(editor, tiny_editing.policy_encoder(policy))]
    before = {name: {key: tensor.clone() for key, tensor in each.state_dict().items()} for name, each in held.items()}
    module.train()
    wanted = [each(*tasks_and_rollout) for each in draws]
    assert all(each.training for each in module.modules())
    module.eval()
    for first, second in zip(wanted, [each(*tasks_and_rollout) for each in draws], strict=True):
        assert [image.tobytes() for image in first] == [image.tobytes() for image in second]
    for name, each in held.items():
        assert all(torch.equal(tensor, before[name][key]) for key, tensor in each.state_dict().items())
        assert all(parameter.grad is None for parameter in each.parameters())
    assert {name for name, parameter in module.named_parameters() if parameter.requires_grad} == trained != set()
    for name in ("editor", "vae", "frozen"):
        assert not any(parameter.requires_grad for parameter in held[name].parameters())


def test_dropout_is_off_while_the_policy_reads(editor, tasks_and_rollout):
    policy = tiny_editing.policy(editor)
    adapters = [part for name, part in policy.model.module.named_modules() if name.endswith("lora_dropout")]
    for part in adapters:
        part["default"] = torch.nn.Dropout(0.5)
    draws = renderer(editor, tiny_editing.policy_encoder(policy))
    policy.model.module.eval()
    quiet = draws(*tasks_and_rollout)
    policy.model.module.train()
    assert [image.tobytes() for image in draws(*tasks_and_rollout)] == [image.tobytes() for image in quiet]
    assert adapters


def test_invalid_settings_raise(editor):
    for wrong in ({"num_steps": 0}, {"guidance_scale": 0.5}, {"batch": 0}, {"encoder_batch": 0}):
        with pytest.raises(ValueError, match="greater than or equal to 1"):
            renderer(editor, frozen(editor), **wrong)
    with pytest.raises(ValueError, match="give at least 1"):
        renderer(editor, frozen(editor), cached=0)
    for wrong in ({"num_steps": 0}, {"num_steps": 1, "guidance_scale": 0.5}):
        with pytest.raises(ValueError, match="use at least 1 step"):
            OdeSampler(editor, **wrong)
