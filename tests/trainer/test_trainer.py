"""Runs from Python: a loaded pipeline, plain functions, lists, tables and streams, with the same bits as the command."""

import importlib
import json
import logging
import re
import signal
from pathlib import Path
from typing import Any

import datasets
import pytest
from PIL import Image

import retouch
import tiny_pipelines
from retouch.data.sources.stream import IterableData
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.rewards.function import ImportedReward
from retouch.run.session import run
from small_trainer import SMALL, assert_same, redness, run_results
from warm_python import run_python


def prompts(count=12):
    return [{"prompt": "a red circle" if number % 2 else "blue", "level": number, "id": str(number)} for number in range(count)]


def trainer(out, **changes):
    options = {"model": tiny_pipelines.sd3(), "reward_funcs": redness, "train_dataset": prompts(), **SMALL, **changes}
    return retouch.Trainer(**options, output_dir=out, run_name="run")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A trainer that has made all its steps."""
    made = trainer(tmp_path_factory.mktemp("whole"), eval={"every": 1, "tasks": 2})
    assert made.train() is not None
    return made


def test_training_changes_the_given_pipeline_in_place_and_saves_a_lora(whole, tmp_path):
    made, summary = whole, RunFolder(whole.folder).read_summary()
    pipe = made._objects[made.recipe.document()["policy"]["model"]["path"]]
    assert summary.steps == 3
    assert "had equal rewards" not in RunFolder(made.folder).log(0).read_text()
    assert re.search("<dd>function redness</dd>.*<dd>table with id, instruction</dd>", RunFolder(made.folder).report.read_text())
    assert 0 < made.state.log_history[-1]["eval/redness"] < 1
    trained = [name for name, weight in pipe.transformer.named_parameters() if weight.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert any(weight.abs().max() > 0 for name, weight in pipe.transformer.named_parameters() if "lora_B" in name)
    assert made.evaluate()["all"]["redness"] == pytest.approx(summary.after, abs=1e-6)
    files = {file.name for file in made.save_pretrained(tmp_path / "lora")}
    assert {"adapter_config.json", "adapter_model.safetensors", "pytorch_lora_weights.safetensors", "export.json"} <= files
    assert 'from_pretrained("BASE_MODEL", torch_dtype=torch.float32)' in (tmp_path / "lora" / "README.md").read_text()
    image = made.samples()
    assert image.width > 128
    with pytest.raises(AttributeError, match=r"Trainer has no attribute 'save_model'; write save_pretrained\(folder\)"):
        made.save_model("lora")


@pytest.mark.parametrize(("steps", "counts"), [(2, ["2"]), pytest.param(6, ["5"], marks=pytest.mark.slow)])
def test_equal_rewards_of_the_samples_of_each_task_are_a_warning(steps, counts, tmp_path, caplog):
    @retouch.reward(low=0, high=1)
    def constant(prompts, **rest):
        return [len(prompt) / 100 for prompt in prompts]

    trainer(tmp_path, reward_funcs=constant, steps=steps).train()
    assert re.findall(r"had equal rewards in the last (\d+) steps", caplog.text) == counts


def test_a_reward_class_of_a_recipe_is_given_by_its_path(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "levels.py").write_text("""
import torch
from retouch.types import Column

class Level:
    columns = {"level": Column(0.0, 1.0)}

    def __call__(self, samples):
        return {"level": torch.tensor([sample.task.meta["level"] / 12 for sample in samples])}
""")
    own = importlib.import_module("levels").Level()
    with pytest.raises(ValueError, match=r"Level has `columns`.*write reward_funcs='levels:Level', reward_weights={'level': 1.0}"):
        trainer(tmp_path, reward_funcs=own)
    made = trainer(tmp_path, reward_funcs="levels:Level", reward_weights={"level": 1.0}, steps=1)
    made.train()
    assert RunFolder(made.folder).read_metrics()[0]["reward/level"] > 0


@pytest.mark.parametrize(("decay", "said"), [({}, True), ({"rate": 1.0, "max": 0.9}, False)])
def test_a_run_says_that_diffusion_nft_has_no_contrast(decay, said, tmp_path, caplog):
    """With the default, the old policy is almost the current one after a step; not if it keeps 0.9 of the old weights."""
    objective = retouch.NFT(old_decay=decay)
    trainer(
        tmp_path, objective=objective, rollout={"num_steps": 2, "transition": {"kind": "ode"}}, learning_rate=0.05, steps=2
    ).train()
    assert ("it is advantage-weighted matching here. objective.old_decay makes them differ" in caplog.text) is said


def test_a_trainer_run_is_bitwise_equal_to_the_run_of_the_command(tmp_path):
    document = {
        **retouch.Trainer.from_recipe("quickstart").recipe.document(),
        **{"steps": 2, "tasks_per_step": 2, "group_size": 2, "microbatch": 4, "device": "cpu", "trackers": []},
        "eval": {"tasks": 4},
        "samples": {"every": 0},
    }
    assert run(parse({**document, "out": str(tmp_path / "command")}), fresh=False) == 0
    made = retouch.Trainer.from_recipe({**document, "out": str(tmp_path / "python")}, progress=False)
    assert made.train() is not None
    assert_same(run_results(tmp_path / "command" / "quickstart"), run_results(made.folder))
    loaded = retouch.load_run(tmp_path / "command" / "quickstart")
    source = Image.new("RGB", (24, 24), "blue")
    (edited,) = loaded.policy.sample(["make it red"], images=[source])
    assert edited.size == source.size
    assert len(loaded.ledger) > 8
    with pytest.raises(ValueError, match=r"built-in model of the playground is not opened as a pipeline; use run\.policy\.sample"):
        loaded.pipeline()


def test_a_resumed_run_is_bitwise_equal_to_an_uninterrupted_run_and_has_its_log_history(whole, tmp_path, caplog):
    expected = whole.state.log_history
    assert [(entry["step"], "eval/redness" in entry) for entry in expected] == [
        *[(0, True), (1, False), (1, True), (2, False), (2, True), (3, False), (3, True)]
    ]

    for step in trainer(tmp_path, eval={"every": 1, "tasks": 2}):
        if step.step == 1:
            break

    class Stop(retouch.Callback):
        def on_step(self, trainer, step, metrics):
            assert step == 2, "the first step is not made again"
            trainer.stop()

    stopped = trainer(tmp_path, callbacks=[Stop()], eval={"every": 1, "tasks": 2})
    assert stopped.train() is None
    assert stopped.state.stopped

    def history():
        again = trainer(tmp_path, eval={"every": 1, "tasks": 2})
        assert again.train() is not None
        assert again.state.step == again.state.steps == 3
        return again.state.log_history

    assert history() == expected
    folder = RunFolder(stopped.folder)
    assert_same(run_results(whole.folder), run_results(folder.root))
    assert history() == expected, "the run is finished"
    folder.summary.unlink()
    assert history() == expected, "the last evaluation is made again"
    folder.metrics.write_text("{\n")
    assert history() == []
    assert "state.log_history lacks the steps before this start" in caplog.text


def test_callbacks_are_called_for_steps_evaluations_and_checkpoints(tmp_path, capsys, monkeypatch):
    for name in ("root", "retouch"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])  # as in a script that has not set up logging
    told: list[Any] = []

    class Note(retouch.Callback):
        def on_step(self, trainer, step, metrics):
            told.append(("step", step, trainer.state.step))

        def on_evaluate(self, trainer, step, table):
            told.append(("evaluate", step, sorted(table["all"])))

        def on_save(self, trainer, step, folder):
            told.append(("save", step, (folder / "manifest.json").is_file()))

    # Log handlers and signal handlers of the script stay as they are.
    handlers, before = list(logging.getLogger("retouch").handlers), signal.getsignal(signal.SIGINT)
    made = trainer(tmp_path, callbacks=Note(), steps=2, checkpoints={"every": 1}, progress=True)
    for _ in made:
        assert signal.getsignal(signal.SIGINT) is before
    assert logging.getLogger("retouch").handlers == handlers
    assert "step 1/2" in (made.folder / "train.log").read_text()
    shown = capsys.readouterr()
    assert re.search(r"run: 100%.*2/2.*reward=0\.\d+", shown.err), "the progress bar shows the reward"
    assert re.search(
        r"^run run on .*; folder .*held-out tasks after step 2 \(before -> after\).*\nreport: .*html$", shown.out, re.S | re.M
    )
    assert re.search(r"6 held-out tasks from \d sources are too few for an interval, which needs 8", shown.out)
    assert "step 1/2" not in shown.out, "the bar shows the steps"
    columns = ["n", "redness", "reward"]
    steps = [("step", 1, 1), ("save", 1, True), ("step", 2, 2), ("save", 2, True)]
    assert told == [("evaluate", 0, columns), *steps, ("evaluate", 2, columns)]


def test_two_interleaved_trainers_and_two_of_the_same_pipeline_are_bitwise_equal(tmp_path):
    """A notebook runs a cell again: the LoRA of the first run is removed, and both runs start from the same weights."""
    one, other = trainer(tmp_path / "one", steps=1), trainer(tmp_path / "other", steps=1)
    for _, _ in zip(one, other, strict=False):
        pass
    assert_same(run_results(one.folder), run_results(other.folder))
    pipe = one._objects[one.recipe.document()["policy"]["model"]["path"]]
    again = trainer(tmp_path / "again", model=pipe, steps=1)
    again.train()
    assert_same(run_results(one.folder), run_results(again.folder))


def test_several_rewards_are_weighted_and_receive_a_data_column(tmp_path):
    seen: list[int] = []

    def level(images, level):
        seen.extend(level)
        return [None if number == 0 else float(number) for number in level]

    made = trainer(tmp_path, reward_funcs=[redness, level, "compressibility"], reward_weights=[1.0, 0.5, 0.0], max_missing=0.9)
    assert made.recipe.document()["reward"]["combine"] == {
        "redness/redness": 1.0, "level/level": 0.5, "compressibility/compressibility": 0.0,
    }  # fmt: skip
    made.train()
    assert set(seen) <= set(range(12))
    text = (made.folder / "train.log").read_text()
    assert "reward level scored from" in text
    assert "reward redness scored from" not in text, "its range is declared"


def test_resuming_with_changed_arguments_or_without_the_objects_raises_and_lists_the_changes(tmp_path):
    made = trainer(tmp_path, steps=1)
    made.train()

    def redness(images, **kwargs):
        return [0.5 for _ in images]

    with pytest.raises(ValueError, match="a run of another recipe") as refused:
        trainer(tmp_path, steps=1, reward_funcs=redness, train_dataset=prompts()[:-1], learning_rate=0.5).train()
    lines = str(refused.value).splitlines()
    assert "  data.rows_: the rows of train_dataset have changed" in lines
    assert "  reward.source: the source code of the reward function has changed" in lines
    assert any(line.startswith("  learning_rate: ") and line.endswith("in the run, 0.5 in the recipe") for line in lines)
    assert lines[-1] == "Give this run another run_name, or call train(fresh=True), which renames the folder of the old one"
    document = json.loads((made.folder / "recipe.json").read_text())["recipe"]
    with pytest.raises(ValueError, match=r"is a Python object of the script that started this run; run that script again"):
        run(parse({**document, "steps": 2}), fresh=False)


class Doubled(retouch.PolicyGradient):
    """An objective of the script's own."""

    kind: str = "doubled"
    factor: float = 2.0

    def losses(self, policy, minibatch):
        for loss in super().losses(policy, minibatch):
            yield type(loss)(loss.value * self.factor, loss.sums, loss.maxima)


def test_an_objective_class_defined_in_the_script_needs_no_consent(tmp_path, monkeypatch):
    monkeypatch.delenv("RETOUCH_ALLOW_IMPORTS")
    made = trainer(tmp_path, objective=Doubled(clip_low=1e-4, clip_high=1e-4), steps=1)
    section = made.recipe.document()["objective"]
    assert section["kind"] == "import"
    assert section["class"] == f"{__name__}:Doubled"
    assert made.train() is not None


def test_imported_rewards_need_consent_in_a_recipe_but_not_as_a_trainer_argument(tmp_path, monkeypatch):
    monkeypatch.delenv("RETOUCH_ALLOW_IMPORTS")
    path = "tiny_recipes:RedInCentre"
    for reward in (path, ImportedReward(**{"class": path})):
        made = trainer(tmp_path, reward_funcs=reward, reward_weights={"red": 1})
        assert made.recipe.document()["reward"]["class"] == path
    with pytest.raises(ValueError, match="--allow-import tiny_recipes"):
        retouch.Trainer.from_recipe(made.recipe.document())
    assert retouch.Trainer.from_recipe(made.recipe.document(), allow_imports=["tiny_recipes"]).recipe == made.recipe


def test_datasets_objects_are_used_for_training_and_evaluation(tmp_path):
    train, evaluation = datasets.Dataset.from_list(prompts(6)), datasets.Dataset.from_list(prompts(3))
    made = trainer(tmp_path, train_dataset=train, eval_dataset=evaluation, steps=1)
    assert made.train() is not None
    assert made.evaluate()["all"]["n"] == 3


def stream(count=8):
    rows = [{"prompt": f"a red circle {number}", "id": str(number)} for number in range(count)]
    return datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2)


def stream_trainer(out, **changes):
    data = IterableData.of(stream(), held_out=2, check=2, shuffle=3, ahead=changes.pop("ahead", 1))
    options = {"model": tiny_pipelines.sd3(), "reward_funcs": redness, "train_dataset": data, **SMALL, "steps": 4, **changes}
    return retouch.Trainer(**options, output_dir=out, run_name="run")


def test_a_resumed_run_on_a_stream_is_bitwise_equal_to_an_uninterrupted_run(tmp_path):
    whole = stream_trainer(tmp_path / "whole")
    whole.train()
    for step in stream_trainer(tmp_path / "parts"):
        if step.step == 3:
            break
    newest = max((tmp_path / "parts" / "run" / "checkpoints").glob("step-*"))
    (stored,) = json.loads((newest / "state.json").read_text())["numbers"]["streams"]
    assert stored["shards"] == 2
    assert stored["cursor"]["position"] == 3  # of 6 rows; the three steps drew rows 0 to 5
    rest = stream_trainer(tmp_path / "parts", ahead=0)
    assert rest.train() is not None
    assert_same(run_results(whole.folder), run_results(rest.folder))


def test_a_stream_trains_and_is_evaluated_on_a_table(tmp_path):
    given: dict[str, Any] = {"train_dataset": stream(), "eval_dataset": [{"prompt": "a red circle"}], "steps": 1}
    made = stream_trainer(tmp_path, **given)
    assert made.recipe.data.label == "iterable"
    assert made.train() is not None
    assert made.evaluate()["all"]["n"] == 1
    with pytest.raises(ValueError, match="passes: the number of rows of a stream is not known; give `steps` instead"):
        stream_trainer(tmp_path, steps=None, passes=1.0)  # before anything is read


SUPPORT = Path(__file__).parents[1] / "support"


def run_script(out, *launcher):
    run_python(*launcher, SUPPORT / "trainer_script.py", out, search=[SUPPORT], OMP_NUM_THREADS="1")
    return RunFolder(out / "run")


@pytest.fixture(scope="module")
def single_process_run(tmp_path_factory):
    """The run of a single process."""
    return run_script(tmp_path_factory.mktemp("single_process_run"))


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "accelerate launch": [
        *("accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    ],
}


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("accelerate launch", marks=pytest.mark.slow)])
def test_training_on_two_ranks_matches_training_on_one(launcher, single_process_run, tmp_path):
    together = run_script(tmp_path / "together", "-m", *LAUNCHERS[launcher])
    one, two = single_process_run.read_metrics(), together.read_metrics()
    assert [line["step"] for line in two] == [1, 2]
    for mine, theirs in zip(one, two, strict=True):
        assert mine["reward/mean"] == theirs["reward/mean"]
        assert mine["policy/grad_norm"] == pytest.approx(theirs["policy/grad_norm"], rel=1e-4)
    before, after = single_process_run.read_summary(), together.read_summary()
    assert before.after == pytest.approx(after.after, abs=1e-6)
