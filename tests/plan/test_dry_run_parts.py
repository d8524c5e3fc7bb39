"""Parts of a dry run: made-up tasks, two calls at the same time, and microbatches that are counted without running them."""

import json
import math
import os
from multiprocessing import spawn
from pathlib import Path

import pytest

from retouch.recipe.recipe import load
from retouch.types import Slice
from retouch_plan.dry_run import both, each_in_turn, made_up_task
from retouch_plan.machines import MACHINES
from retouch_plan.meter import Meter
from retouch_plan.repeats import Repeats
from warm_python import python, run_python

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.mark.parametrize(
    ("recipe", "changes", "size"),
    [
        ("recipes/quickstart.jsonnet", [], (24, 24)),
        ("recipes/qwen-image-edit/flow-grpo.jsonnet", ["policy.model.size=[512,768]"], (768, 512)),
        ("recipes/qwen-image-edit/flow-grpo.jsonnet", ["policy.model.size=null"], (1024, 1024)),
    ],
)
def test_source_images_have_the_size_that_the_memory_plan_counts(recipe, changes, size):
    task = made_up_task(load(recipe, changes))
    assert [image.size for image in task.images] == [size]


def test_tasks_have_a_target_if_a_reward_with_gradient_compares_with_it():
    assert made_up_task(load("playground/draft")).target is not None
    assert made_up_task(load("quickstart")).target is None


def test_tasks_have_what_a_teacher_reads_and_the_costliest_teacher():
    several = 'objective.teachers={"plain": {"run": "r"}, "by-edit": {"instructions": "steps"}, "guided": {"guidance_scale": 4}}'
    task = made_up_task(load("playground/opd", [several, "objective.by=teacher"]))
    assert (len(task.meta["steps"]), task.tags) == (3, {"teacher": "by-edit"})
    larger = 'objective.teachers={"by-edit": {"instructions": "steps"}, "large": {"model": "owner/large"}}'
    assert made_up_task(load("playground/opd", [larger, "objective.by=teacher"])).tags == {"teacher": "large"}


def test_a_second_process_gives_the_same_results(caplog, monkeypatch):
    monkeypatch.setattr(spawn, "_python_exe", os.fsencode(python()))
    assert both(math.sqrt, 4.0, 9.0) == each_in_turn(math.sqrt, 4.0, 9.0) == (2.0, 3.0)
    assert not [record for record in caplog.records if record.name.startswith("retouch")]


@pytest.mark.slow
def test_what_a_second_process_cannot_do_is_done_in_this_one(caplog):
    assert both(lambda value: value + 1, 1, 2) == (2, 3)  # a lambda cannot be pickled
    assert "the second process failed" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("values", [(-1.0, 4.0), (4.0, -1.0)])
def test_errors_are_raised_in_this_process(values):
    with pytest.raises(ValueError, match=r"math domain error|nonnegative") as raised:
        both(math.sqrt, *values)
    assert raised.traceback[-1].name == "both"


@pytest.mark.slow
def test_an_image_model_that_trains_with_its_writer_counts_with_its_update_its_moments_and_its_checkpoint():
    printed = run_python(SUPPORT / "dry_run_joint.py", search=[SUPPORT], timeout=600)
    joint, alone = map(json.loads, filter(lambda text: text.startswith("{"), printed.splitlines()))
    trained, image_model = joint["held"]["trained weights"], alone["held"]["weights: transformer"]
    assert trained - alone["held"]["trained weights"] == image_model, "all its weights train, in fp32"
    assert joint["held"]["AdamW's moments"] == pytest.approx(2 * trained, rel=0.05)
    assert joint["checkpoint"] - alone["checkpoint"] == pytest.approx(3 * image_model, rel=0.05)
    assert joint["flops"] > 3 * alone["flops"]


def counted(sizes, *, calls=1):
    """The sizes of the microbatches that run, and the FLOPs of all, if a microbatch of size n has n FLOPs. ``calls``: the number of
    passes over the microbatches."""
    meter = Meter(MACHINES["h100"])
    microbatches = Repeats(meter).parts(lambda: iter([Slice(slice(3, 4), slice(10, 10 + size)) for size in sizes]))
    ran = []
    with meter.stage("update"):
        for _ in range(calls):
            for part in microbatches():
                size = part.actions.stop - part.actions.start
                meter.work.flops["half"] += size
                ran.append(size)
        return ran, meter.work.flops["half"]


@pytest.mark.parametrize("sizes", [[2, 1, 2, 1, 2, 1], [4, 4, 1, 4, 4, 1], [1, 1, 1, 1], [3], [4, 1]], ids=str)
@pytest.mark.parametrize("calls", [1, 3])
def test_all_microbatches_count_with_the_work_of_their_own_size(sizes, calls):
    assert counted(sizes, calls=calls)[1] == calls * sum(sizes)


def test_of_equal_microbatches_two_run_and_then_one_in_each_further_pass():
    assert counted([2, 2, 2, 2], calls=3)[0] == [2, 2, 2, 2]


def test_a_size_runs_once_besides_the_first_microbatch_which_has_no_gradients_yet():
    assert counted([2, 1, 2, 1, 2, 1])[0] == [2, 1, 2]
    assert counted([4, 4, 1, 4, 4, 1])[0] == [4, 4, 1]
