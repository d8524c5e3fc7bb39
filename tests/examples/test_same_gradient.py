"""The first step of recipes/tiny-sd3.jsonnet in the real training loop equals that of the one-file example."""

import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from retouch.distributed.ranks import Ranks
from retouch.recipe.recipe import load
from retouch.run.build import assemble
from retouch.run.step import accumulate, collect, make_minibatch
from retouch_worlds.models.tiny_sd3 import tiny_sd3_pipeline

ROOT = Path(__file__).parents[2]
SEED = 0


@pytest.fixture(scope="module")
def first_step():
    """The recipe's parts on the example's first batch: (example, what was collected, gradient by name, metrics)."""
    sys.path.insert(0, str(ROOT / "measurements" / "speed"))
    try:
        from one_file_batches import one_file, one_file_batch

        recipe = load(ROOT / "recipes" / "tiny-sd3.jsonnet")
        parts = assemble(recipe, Ranks())
    finally:
        sys.path.remove(str(ROOT / "measurements" / "speed"))
    run, phase = parts.phase(0, stepper=parts.stepper(), judge=lambda batch, samples: parts.judge.submit(samples))
    phase = replace(phase, batch=partial(one_file_batch, SEED))
    collected = collect(run, phase, 0)
    _, maxima = accumulate(run, phase.objective, make_minibatch(run, phase, collected, slice(0, len(collected.batch)), 0))
    parts.judge.close()
    gradient = {name: weight.grad for name, weight in parts.model.module.named_parameters() if weight.requires_grad}
    return one_file, collected, gradient, maxima


def pixels(images):
    return torch.stack([torch.from_numpy(np.array(image)) for image in images]).permute(0, 3, 1, 2)


def test_the_first_gradient_matches_the_one_file_example(first_step, monkeypatch):
    one_file, collected, gradient, maxima = first_step
    assert maxima["policy/ratio_max"] <= 1e-6

    pipeline = one_file.build_models(SEED)
    one_file.add_lora(pipeline.transformer, SEED)
    decode, shown = one_file.decode, pixels(collected.images)

    def same_pictures(pipeline, latents):
        # Latents that differ only by rounding can give neighbouring 8-bit colours, so both score the same image.
        assert (latents - collected.trajectory.outputs).abs().max() < 1e-5
        apart = (decode(pipeline, latents).int() - shown.int()).abs()
        assert apart.max() <= 1
        assert (apart > 0).float().mean() < 1e-3
        return shown

    monkeypatch.setattr(one_file, "decode", same_pictures)
    prompts = [task.instruction for task in collected.batch.tasks]
    theirs = one_file.first_gradient(pipeline, prompts, one_file.draw_noise(SEED, 0))

    assert gradient.keys() == theirs.keys()
    size = math.sqrt(sum(each.square().sum().item() for each in theirs.values()))
    apart = math.sqrt(sum((gradient[name] - theirs[name]).square().sum().item() for name in theirs))
    assert size > 0
    assert apart / size <= 1e-5


def test_rewards_match_the_one_file_example(first_step):
    one_file, collected, _, _ = first_step
    assert collected.judged.rewards == pytest.approx(one_file.share_of_red(pixels(collected.images)), abs=1e-6)


def test_the_packaged_model_has_the_weights_of_the_one_file(first_step):
    one_file = first_step[0]
    theirs, ours = one_file.build_models(SEED), tiny_sd3_pipeline(SEED)
    for part in ("transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3"):
        expected, found = getattr(theirs, part).state_dict(), getattr(ours, part).state_dict()
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
