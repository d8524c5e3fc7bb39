"""Training on a stream resumes to the same bits, however much is read in advance; a checkpoint has the position in the stream."""

import json
from typing import Any

import datasets
import pytest

import retouch
import tiny_pipelines
from retouch.data.sources.stream import IterableData
from small_trainer import SMALL, assert_same, redness, run_results


def stream(count=8):
    rows = [{"prompt": f"a red circle {number}", "id": str(number)} for number in range(count)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2)


def trainer(out, **changes):
    data = IterableData.of(stream(), held_out=2, check=2, shuffle=3, ahead=changes.pop("ahead", 1))
    options = {"model": tiny_pipelines.sd3(), "reward_funcs": redness, "train_dataset": data, **SMALL, "steps": 4, **changes}
    return retouch.Trainer(**options, output_dir=out, run_name="run")


def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_run(tmp_path):
    whole = trainer(tmp_path / "whole")
    whole.train()
    for step in trainer(tmp_path / "parts"):
        if step.step == 3:
            break
    newest = max((tmp_path / "parts" / "run" / "checkpoints").glob("step-*"))
    (stored,) = json.loads((newest / "state.json").read_text())["numbers"]["streams"]
    assert stored["shards"] == 2
    assert stored["cursor"]["position"] == 3  # of 6 rows; the three steps drew rows 0 to 5
    rest = trainer(tmp_path / "parts", ahead=0)
    assert rest.train() is not None
    assert_same(run_results(whole.folder), run_results(rest.folder))


def test_a_stream_trains_and_is_evaluated_on_a_table(tmp_path):
    given: dict[str, Any] = {"train_dataset": stream(), "eval_dataset": [{"prompt": "a red circle"}], "steps": 1}
    made = trainer(tmp_path, **given)
    assert made.recipe.data.label == "iterable"
    assert made.train() is not None
    assert made.evaluate()["all"]["n"] == 1


def test_passes_over_a_stream_raise(tmp_path):
    with pytest.raises(ValueError, match="passes: the number of rows of a stream is not known; give `steps` instead"):
        trainer(tmp_path, steps=None, passes=1.0)  # before anything is read
