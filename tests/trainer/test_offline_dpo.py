"""DPO on pairs of the data: from Python and from recipes, resumed, on two ranks, and mistakes that raise before models load."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset, Features, Value
from datasets import Image as ImageFeature
from PIL import Image
from safetensors.torch import load_file

import retouch
import tiny_models
import tiny_pipelines
from retouch import cli
from retouch.data.base import DataContext
from retouch.data.sources.hub import HubData, TableData
from retouch.recipe.reward_arguments import read_reward
from retouch.records.folder import RunFolder
from retouch.run.session import run
from retouch_plan.checks import check_scoring
from small_trainer import SMALL, assert_same, run_results
from warm_python import run_python

SCRIPT = Path(__file__).parents[1] / "support" / "pairs_script.py"
PAIRED = {name: value for name, value in SMALL.items() if name != "group_size"}
PAIRED |= {"rollout": {"num_steps": 3, "transition": {"kind": "ode"}}, "samples": {"every": 0}}


def flat(colour, size=(32, 32)):
    return Image.new("RGB", size, colour)


def pairs(count=12):
    """A red image is preferred to a blue one."""
    return [
        {"prompt": f"image {k}", "id": str(k), "chosen": flat((200 + k, 9, 9)), "rejected": flat((9, 9, 200 + k))}
        for k in range(count)
    ]


def trainer(out, **changes):
    options = {"model": tiny_pipelines.sd3(), "train_dataset": pairs(), "objective": retouch.DPO(pairs="data"), **PAIRED, **changes}
    return retouch.Trainer(**options, output_dir=out, run_name="run")


def test_dpo_on_data_pairs_learns_without_a_reward_and_is_evaluated_on_held_out_pairs(tmp_path):
    options = {"steps": 14, "objective": retouch.DPO(pairs="data", beta=50.0), "samples": {"every": 0, "tasks": 2}}
    made = trainer(tmp_path, train_dataset=pairs(20)[:14], eval_dataset=pairs(20)[14:], eval={"every": 7}, **options)
    assert (made.recipe.group_size, made.recipe.reward.name) == (2, "none")
    summary = made.train()
    history = [entry for entry in made.state.log_history if "policy/loss" in entry]
    assert not any("reward/mean" in entry for entry in history)
    assert history[0]["policy/loss"] == pytest.approx(0.6931, abs=1e-3)  # log 2: the policy is the reference
    later = [sum(entry[key] for entry in history[-5:]) / 5 for key in ("policy/loss", "policy/preferred", "policy/margin")]
    assert later[0] < 0.6
    assert later[1] > 0.9
    assert later[2] > 0.1
    assert (summary.column, summary.before, summary.ceiling) == ("pairs/preferred", 0.5, None)
    assert summary.after > 0.9
    lines = RunFolder(made.folder).read_evals()
    assert [line["step"] for line in lines] == [0, 7, 14]
    assert all(line["table"]["all"].keys() == {"n", "pairs/preferred", "pairs/margin"} for line in lines)
    assert lines[-1]["ci95"]["all"] == {}, "6 pairs are too few for an interval"
    table = made.evaluate()
    assert table["all"]["pairs/preferred"] == summary.after
    evaluated = [entry["step"] for entry in made.state.log_history if "eval/pairs/preferred" in entry]
    assert evaluated == [0, 7, 14]
    images = [line["image"] for line in RunFolder(made.folder).read_samples(14) if line["set"] == "heldout"]
    assert len(images) == 2  # only these are made
    assert "pairs/preferred" in RunFolder(made.folder).report.read_text()
    with pytest.raises(ValueError, match="this run has no reward; name one"):
        read_reward(str(made.folder))
    assert check_scoring(made.recipe, None).text == "none: the run learns from pairs of the data and is evaluated on held-out pairs"


def test_a_given_reward_is_evaluated_in_addition_to_the_pairs(tmp_path):
    made = trainer(tmp_path, reward_funcs="share", steps=1, eval={"column": "pairs/margin"})
    summary = made.train()
    assert (summary.column, summary.before, summary.ceiling) == ("pairs/margin", 0.0, None)
    assert made.evaluate()["all"].keys() == {"n", "reward", "share", "pairs/preferred", "pairs/margin"}


@pytest.mark.slow
def test_a_folder_of_pairs_trains_equally_from_python_and_from_a_recipe(tmp_path, capsys):
    folder = tmp_path / "pairs"
    folder.mkdir()
    lines = []
    for row in pairs():
        for side in ("chosen", "rejected"):
            row[side].save(folder / f"{side}-{row['id']}.png")
        lines.append({"prompt": row["prompt"], "chosen": f"chosen-{row['id']}.png", "rejected": f"rejected-{row['id']}.png"})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    tiny_pipelines.sd3().save_pretrained(tmp_path / "sd3")
    options = {"train_dataset": str(folder), "model": str(tmp_path / "sd3"), "steps": 1}
    made = trainer(tmp_path / "python", **options)
    document = json.loads(json.dumps(made.recipe.document()))
    assert document["objective"]["pairs"] == "data"
    again = retouch.Trainer.from_recipe({**document, "out": str(tmp_path / "recipe")}).recipe
    assert run(again, fresh=False) == 0
    made.train()
    assert_same(run_results(made.folder), run_results(again.folder))
    capsys.readouterr()
    assert cli.main(["eval", str(again.folder)]) == 0
    held_out = json.loads(capsys.readouterr().out)
    assert held_out["table"]["all"] == RunFolder(again.folder).read_evals()[-1]["table"]["all"]


def test_hub_data_sets_with_mapped_column_names_give_pairs(tmp_path):
    rows = [{"text": row["prompt"], "good": row["chosen"], "bad": row["rejected"]} for row in pairs()]
    dataset = Dataset.from_list(rows, features=Features({"text": Value("string"), "good": ImageFeature(), "bad": ImageFeature()}))
    names = {"instruction": "text", "chosen": "good", "rejected": "bad"}
    made = trainer(tmp_path, train_dataset=dataset, columns=names, steps=1)
    assert made.train() is not None
    (tmp_path / "hub").mkdir()
    dataset.to_parquet(tmp_path / "hub" / "train.parquet")
    data: dict[str, Any] = {"path": str(tmp_path / "hub"), "columns": names, "held_out": 2}
    sets = HubData(**data).build(DataContext(size=(16, 16)))
    assert [task.chosen.size for task in sets.train if task.chosen and task.rejected] == [(16, 16)] * 10


@pytest.mark.slow
def test_training_on_two_ranks_matches_training_on_one(tmp_path):
    runs = []
    for name, launcher in (("alone", []), ("together", ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"])):
        run_python(*launcher, SCRIPT, tmp_path / name, search=[SCRIPT.parent], OMP_NUM_THREADS="1")
        runs.append(RunFolder(tmp_path / name / "run"))
    alone, together = (run.read_metrics() for run in runs)
    assert [line["step"] for line in together] == [1, 2, 3]
    one, two = (load_file(tmp_path / name / "lora" / "adapter_model.safetensors") for name in ("alone", "together"))
    assert all(torch.allclose(one[name], two[name], atol=1e-3) for name in one)
    for one, two in zip(alone, together, strict=True):
        for key in ("policy/loss", "policy/grad_norm", "policy/margin"):
            assert one[key] == pytest.approx(two[key], rel=1e-3, abs=1e-4)  # margins are differences of errors, times beta
    first, second = (run.read_evals()[-1] for run in runs)
    assert [line["table"]["all"]["n"] for line in (first, second)] == [5, 5]
    assert first["table"]["all"]["pairs/preferred"] == second["table"]["all"]["pairs/preferred"]
    margins = [line["table"]["all"]["pairs/margin"] for line in (first, second)]
    assert margins[0] == pytest.approx(margins[1], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_dataset": [{"prompt": "red"}, {"prompt": "blue"}]},
         "data: table has no columns `chosen` and `rejected`, which objective.pairs 'data' compares; name them in columns"),
        ({"group_size": 4}, "group_size: 4, and a pair of the data has 2 images; set 2"),
        ({"minibatches": 4}, "tasks_per_step: 2 pairs do not divide over 4 minibatches on 1 ranks"),
        ({"objective": retouch.DPO()}, "give retouch.DPO(pairs='data') to learn from the images, or remove these columns"),
        ({"reward_weights": [1.0]}, "reward_weights: there are no reward_funcs to weight"),
        ({"eval": {"column": "share"}}, "eval.column: without a reward, evaluation gives only pairs/preferred and pairs/margin"),
        ({"eval": {"best_of_k": 4}}, "eval.best_of_k: it needs a reward, and there is none; remove it, or give a reward"),
        ({"watch": {"every": 2}}, "watch: it needs a reward, and there is none; remove it, or give a reward"),
        ({"objective": retouch.GRPO(clip=1e-4), "group_size": 2},
         "reward: there is none, and policy_gradient learns from the rewards of its samples; give a reward (reward_funcs of a"),
        ({"objective": retouch.Supervised(), "train_dataset": [{"prompt": "a", "target": flat((1, 2, 3))}] * 2},
         "reward: there is none, and this run can only be evaluated by a reward; give a reward (reward_funcs of a Trainer)"),
        ({"columns": {"chosen": "best"}}, "'chosen' should be read from 'best'"),
        ({"columns": {"choosen": "chosen"}}, "'choosen' is not a field; 'chosen' is"),
    ],
)  # fmt: skip
def test_wrong_arguments_raise_in_the_constructor(tmp_path, changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer(tmp_path, **changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rejected": None}, "train_dataset:12: error: a chosen image without a rejected one; a pair needs both"),
        ({"chosen": None}, "train_dataset:12: error: a rejected image without a chosen one; a pair needs both"),
        ({"chosen": None, "rejected": None}, "train_dataset:12: error: no chosen and rejected image; DPO on the pairs of the data"),
        ({"chosen": flat((9, 9, 211))}, "train_dataset:12: error: the chosen and the rejected image are the same"),
        ({"chosen": "no-such-file.png"}, "train_dataset:12: error: no-such-file.png: no such file"),
    ],
)
def test_invalid_rows_raise_with_their_number_before_the_model_is_loaded(tmp_path, change, message, monkeypatch):
    monkeypatch.setattr("retouch.run.build.assemble_policy", lambda *_: pytest.fail("a model was built"))
    rows = [*pairs(11), {**pairs(12)[11], **change}]
    with pytest.raises(ValueError, match=re.escape(message)):
        trainer(tmp_path, train_dataset=rows).train()


def test_pairs_are_resized_to_the_model_and_different_shapes_are_reported():
    rows = [*pairs(2), {"prompt": "wide", "chosen": tiny_models.image(1, 48, 64), "rejected": tiny_models.image(2, 40, 40)}]
    table = TableData.of(rows, held_out=0)
    sets = table.build(DataContext(size=(32, 32), eval_split="train"))
    assert {image.size for task in sets.train for image in (task.chosen, task.rejected) if image} == {(32, 32)}
    assert "train_dataset:3: note: the chosen image is 64x48 and the rejected one 40x40" in str(sets.problems[-1])
    kept = table.build(DataContext(eval_split="train")).train[2]
    assert [image.size for image in (kept.chosen, kept.rejected) if image] == [(64, 48), (64, 48)]
