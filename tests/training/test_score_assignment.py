"""Every sample of a batch has its own score, and its gradient has the weight of this score: rollout, mask, OCR and update."""

from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

import tiny_loop
import tiny_policies as tiny
from retouch.core.advantages import group_relative
from retouch.objectives.policy_gradient import PolicyGradient
from retouch.policies.denoising import DenoisingPolicy
from retouch.policies.weights import WeightCopies
from retouch.rewards.judging import RewardScorer
from retouch.run.step import train
from retouch.types import Task
from retouch_rewards.ocr import OcrReward
from retouch_worlds.models.tiny_fill import TinyFluxFill

pytest.importorskip("rapidocr")

HEIGHT, WIDTH = 64, 160
BOXES = ((4, 4, 155, 30), (4, 34, 155, 60))
# The words in the images of each task's samples, with more and more wrong letters.
WORDS = {
    "HARBOR": ("HARBOR", "HARBOW", "HARKEW", "HALKEW"),
    "TOWER": ("TOWEL", "TOMEL", "TIMEL", "SIMEL"),
    "MORNING": ("MORNINK", "MORNUNK", "MORDUNK", "BALDUNK"),
}
SCORES = (1, 5 / 6, 3 / 6, 2 / 6, 4 / 5, 3 / 5, 2 / 5, 1 / 5, 6 / 7, 5 / 7, 4 / 7, 1 / 7)
GROUP = 4
ROWS = len(SCORES)
CLIPPED = PolicyGradient(clip_low=1e-4, clip_high=1e-4)


def task(place, text):
    """The mask is the upper or the lower half of an image; the other half contains a word that must not be scored."""
    mask = Image.new("L", (WIDTH, HEIGHT))
    ImageDraw.Draw(mask).rectangle(BOXES[place % 2], fill=255)
    # Two of the three have the same instruction: a group belongs to a row of data, not to a string.
    instruction = "The text is new." if place < 2 else "Another."
    return Task(id=text, instruction=instruction, images=(tiny.tiny_models.image(place, HEIGHT, WIDTH),), mask=mask, text=text)


TASKS = tuple(task(place, text) for place, text in enumerate(WORDS))


def policy():
    model = TinyFluxFill(seed=0, size=(HEIGHT, WIDTH))
    tiny.make_trainable(model.module, "lora")
    return DenoisingPolicy(
        model, sampling=tiny.sampling("sde", "window"), eval_steps=4, microbatch=5, copies=WeightCopies(model.module)
    )


class DrawsWordOfSample:
    """Draws, for each row, the word of the sample with these latents; the order of the rows does not matter."""

    def __init__(self, latents):
        self.latents = latents

    def __call__(self, tasks, trajectory):
        return [self.drawn(task, x) for task, x in zip(tasks, trajectory.outputs, strict=True)]

    def drawn(self, task, x):
        apart = (self.latents - x).flatten(1).norm(dim=1)
        row = int(apart.argmin())
        assert apart[row] < 1e-3 * apart.median()
        word = list(WORDS.values())[row // GROUP][row % GROUP]
        image = Image.new("RGB", (WIDTH, HEIGHT), (240, 240, 230))
        mine = task.mask.getbbox()
        other = next(box for box in BOXES if box[1] != mine[1])
        for text, box in ((word, mine), ("OTHER", other)):
            ImageDraw.Draw(image).text((box[0] + 8, box[1] + 1), text, fill=(20, 30, 90), font=ImageFont.load_default(23))
        return image


class OcrJudge:
    """The real OCR model."""

    def __init__(self):
        self.judge = RewardScorer(OcrReward(where="mask"), {"correctness": 1.0})

    def __call__(self, batch, samples):
        future = Future()
        future.set_result(self.judge(samples))
        return future


@pytest.mark.slow
def test_gradient_weights_each_sample_by_its_own_score():
    phase = tiny_loop.phase(CLIPPED, count=len(TASKS), group_size=GROUP, steps=range(1))
    batch = replace(phase.batch(0), tasks=TASKS)
    acting = policy()
    alone = [acting.rollout(batch.take(slice(row, row + 1))) for row in range(ROWS)]
    run = tiny_loop.run(policy(), judge=OcrJudge(), chunk=5)
    run = replace(run, renderer=DrawsWordOfSample(torch.cat([each.outputs for each in alone])))
    ((_, collected, _),) = train(run, replace(phase, batch=lambda step: batch), start=0)
    assert collected.judged.rewards.tolist() == pytest.approx(SCORES, abs=1e-6)

    advantages = torch.cat(
        [(group - group.mean()) / (group.std(correction=0) + 1e-4) for group in torch.tensor(SCORES).split(GROUP)]
    )
    torch.testing.assert_close(collected.advantages[:, 0], advantages, atol=1e-4, rtol=1e-4)
    directions = [
        tiny.gradient(acting, CLIPPED, tiny.minibatch(batch.take(slice(row, row + 1)), each, [1.0]))[0]
        for row, each in enumerate(alone)
    ]

    def learned(weights):
        return {name: sum(w * each[name] for w, each in zip(weights, directions, strict=True)) / ROWS for name in directions[0]}

    found = tiny_loop.gradient(run)
    assert tiny.distance(found, learned(advantages.tolist())) < 1e-3
    # If each score belonged to the next sample, the gradient would differ.
    assert tiny.distance(found, learned(advantages.roll(1).tolist())) > 0.1
    everyone = group_relative(torch.tensor(SCORES), torch.zeros(ROWS, dtype=torch.long))
    assert tiny.distance(found, learned(everyone.tolist())) > 0.1
