"""A run goes on, and is opened again, only with the tasks and the frozen weights that it was started with."""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageStat

import retouch
from retouch.models.parts import bits_hash
from retouch.run.evaluation import EvaluationResult
from retouch.run.ledger import changed_tasks, task_content
from retouch.types import Task
from slow_params import slow_after

sys.path.append(str(Path(__file__).parents[2] / "examples"))
from one_file_flow_grpo import build_models

SETTINGS: dict[str, Any] = {
    **{"tasks_per_step": 2, "group_size": 2, "device": "cpu", "trackers": (), "progress": False, "eval": {"tasks": 2}},
    **{"samples": {"every": 0, "tasks": 1}, "checkpoints": {"every": 1}, "peft_config": retouch.Lora(rank=2, alpha=4)},
    "rollout": {"num_steps": 2, "transition": {"kind": "sde", "noise_level": 0.7}},
}
PROMPTS = [{"prompt": f"a {colour} circle"} for colour in ("red", "blue", "green", "pink")]


@retouch.reward(low=0, high=1)
def brightness(images, **kwargs):
    return [ImageStat.Stat(image.convert("L")).mean[0] / 255 for image in images]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def photos(**changed):
    """A folder of photographs with masks. ``changed``: the file or the key of the last row that is different."""
    place = Path("photos")
    place.mkdir(exist_ok=True)
    rows = []
    for number in range(20):
        noise = np.random.default_rng(number).integers(0, 255, (32, 32, 3), np.uint8)
        mask = np.full((32, 32), 255, np.uint8)
        if number == 19 and "pixel" in changed:
            noise[0, 0] ^= 128
        if number == 19 and "mask" in changed:
            mask[0, 0] = 0
        Image.fromarray(noise).save(place / f"{number}.png", compress_level=changed.get("level", 6))
        Image.fromarray(mask).save(place / f"mask-{number}.png")
        rows.append(
            {"id": f"row{number}", "file_name": f"{number}.png", "mask": f"mask-{number}.png", "instruction": f"edit {number}"}
        )
    rows[19] |= {key: value for key, value in changed.items() if key == "instruction"}
    rows = rows[::-1] if "reordered" in changed else rows + changed.get("added", [])
    (place / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def edited(*, steps):
    model, settings = retouch.models.PlaygroundModel(), {**SETTINGS, "steps": steps}
    return retouch.Trainer(model, brightness, run_name="edited", train_dataset="photos", **settings).train()


def test_point_1_2_a_run_goes_on_only_with_the_content_of_its_training_data():
    photos()
    edited(steps=1)
    kept = Path("runs/edited/metrics.jsonl").read_text()
    for changed, message in (
        ({"pixel": 1}, "an image of a row was changed"),
        ({"mask": 1}, "an image of a row was changed"),
        ({"instruction": "another"}, "the text of a row was changed"),
        ({"added": [{"id": "row20", "file_name": "0.png", "instruction": "more"}]}, "the number of rows was changed"),
    ):
        photos(**changed)
        with pytest.raises(ValueError, match=f"the training data: {message}") as raised:
            edited(steps=2)
        assert "fresh" in str(raised.value)
        assert Path("runs/edited/metrics.jsonl").read_text() == kept
    for steps, same in enumerate(({"reordered": 1}, {"level": 1}), start=2):
        photos(**same)
        assert edited(steps=steps).steps == steps


def test_point_1_2_a_held_out_task_is_compared_by_its_content_and_named():
    image, other = Image.new("RGB", (4, 4)), Image.new("RGB", (4, 4))
    other.putpixel((3, 3), (0, 0, 1))
    tasks = [Task("a", "edit", (image,), target=image), Task("b", "edit it", (image, image), mask=image.convert("L"))]
    changes: dict[str, Task] = {
        "source image 2 was changed": Task("b", "edit it", (image, other), mask=image.convert("L")),
        "mask is gone": Task("b", "edit it", (image, image)),
        "instruction was changed": Task("b", "edit this", (image, image), mask=image.convert("L")),
        "tags was changed": Task("b", "edit it", (image, image), mask=image.convert("L"), tags={"kind": "x"}),
        "columns was changed": Task("b", "edit it", (image, image), mask=image.convert("L"), meta={"answer": 1}),
    }
    before = {task.id: task_content(task) for task in tasks}
    result = EvaluationResult(tasks, {"s": torch.tensor([1.0, 2.0])}, torch.tensor([1.0, 2.0]))
    for line, task in changes.items():
        assert changed_tasks(before, {"a": before["a"], "b": task_content(task)}) == [f"the held-out task b: {line}"]
        with pytest.raises(ValueError, match="the held-out tasks differ"):
            EvaluationResult.from_json(result.to_json(), [tasks[0], task])
    assert changed_tasks(before, {"b": before["a"], "a": before["b"]}) == []
    assert EvaluationResult.from_json(result.to_json(), tasks[::-1]).rewards.tolist() == [2.0, 1.0]


def test_point_1_2_the_hash_of_weights_notices_every_small_change():
    weights = torch.randn(3 * 2**15 + 77, generator=torch.Generator().manual_seed(0))

    def signs(tensor):
        tensor[[1, 9]] *= -1

    def order(tensor):
        tensor[[3, 70000]] = tensor[[70000, 3]]

    def blocks(tensor):
        tensor[: 2**16] = tensor[: 2**16].roll(2**15)

    def last(tensor):
        tensor[-1] = torch.nextafter(tensor[-1], torch.tensor(9.0))

    for dtype in (torch.float32, torch.bfloat16):
        start = weights.to(dtype)
        assert bits_hash(start) == bits_hash(start.clone())
        assert bits_hash(start[1:]) == bits_hash(start[1:].clone())  # at an odd place in memory
        for change in (signs, order, blocks, *((last,) if dtype == torch.float32 else ())):
            changed = start.clone()
            change(changed)
            assert bits_hash(changed) != bits_hash(start), change
    assert bits_hash(torch.zeros(3)) == bits_hash(torch.zeros(3))
    assert [int(bits_hash(torch.tensor(value))) for value in (True, 1.0 + 1.0j)]  # types of other sizes


def one_bias(pipeline):
    next(each for name, each in pipeline.transformer.named_parameters() if name.endswith("bias")).data[0] += 0.1


CHANGES: dict[str, Callable[[Any], Any]] = {
    "transformer": one_bias,
    "vae": lambda pipeline: next(pipeline.vae.parameters()).data.mul_(1.1),
    "text.clips.1": lambda pipeline: next(pipeline.text_encoder_2.parameters()).data.mul_(1.1),
}


@pytest.mark.parametrize("part", slow_after(1, CHANGES))
def test_point_1_3_a_run_is_resumed_and_opened_only_on_its_own_base(part, caplog):
    build_models(seed=0).save_pretrained("base")
    kind = type(build_models(seed=0))

    def own():
        pipeline = kind.from_pretrained("base")
        pipeline.set_progress_bar_config(disable=True)
        CHANGES[part](pipeline)
        return pipeline

    def trainer(pipeline, steps):
        return retouch.Trainer(pipeline, brightness, PROMPTS, run_name="own", size=32, steps=steps, **SETTINGS)

    first = trainer(own(), 1)
    first.train()
    first.save_pretrained("lora")
    card = Path("lora/README.md").read_text()
    assert "A LoRA for base," not in card
    assert f"({part})" in card
    wrong = f"the base weights are not those of the run in runs/own: {part} differs"
    with pytest.raises(ValueError, match=wrong):
        trainer(kind.from_pretrained("base"), 2).train()
    with pytest.raises(ValueError, match=wrong):
        _ = retouch.load_run("runs/own").policy
    with pytest.raises(ValueError, match=wrong):
        retouch.load_run("runs/own", model=kind.from_pretrained("base")).pipeline()
    identity = Path("runs/own/identity.json")
    identity.unlink()
    with caplog.at_level(logging.WARNING):
        assert trainer(own(), 2).train().steps == 2
    assert f"{identity} is missing: whether the data and the base weights are the same cannot be checked" in caplog.text
    with pytest.raises(ValueError, match=wrong):
        trainer(kind.from_pretrained("base"), 3).train()


def test_point_1_3_the_card_of_an_unchanged_base_names_it():
    build_models(seed=0).save_pretrained("base")
    base = type(build_models(seed=0)).from_pretrained("base")
    trainer = retouch.Trainer(base, brightness, PROMPTS, run_name="same", size=32, steps=1, **SETTINGS)
    trainer.train()
    trainer.save_pretrained("lora")
    assert "A LoRA for base, trained for 1 steps" in Path("lora/README.md").read_text()
    assert len(retouch.load_run("runs/same").policy.sample(["red"])) == 1


def test_point_1_2_a_run_with_a_new_judge_is_compared_with_its_first_evaluation_by_that_judge():
    def judge(factor):
        @retouch.reward(low=0, high=1)
        def light(images, **kwargs):
            return [factor * ImageStat.Stat(image.convert("L")).mean[0] / 255 for image in images]

        return light

    def trainer(factor, steps):
        model = retouch.models.PlaygroundTextToImage()
        return retouch.Trainer(
            model, judge(factor), PROMPTS, run_name="judged", steps=steps, **{**SETTINGS, "learning_rate": 1e-12}
        )

    trainer(0.25, 1).train()
    with pytest.raises(ValueError, match=r"the variable factor around .*light was changed"):
        trainer(1.0, 2).train()
    summary = trainer(1.0, 2).train(new_judge=True)
    assert summary.on.endswith("from step 1, when the judge changed")
    assert summary.gain == pytest.approx(0, abs=1e-6)  # with the first judge it would be three quarters of the score
    assert (summary.before > 0.1, summary.ceiling, summary.best_of_k) == (True, None, None)
