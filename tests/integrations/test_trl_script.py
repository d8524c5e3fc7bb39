"""``examples/train_grpo_trl.py``: Complex-Edit as the data set, the evaluation set of TRL's trainer, and refused arguments."""

import importlib.util
from pathlib import Path

import pytest

import suite_rows
from judge_double import KEY, Double

SCRIPT = Path(__file__).parents[2] / "examples" / "train_grpo_trl.py"
IMAGES = 8

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed (extra `trl`)"),
    # TRL and transformers warn about deprecated names that they use themselves.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("train_grpo_trl", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def complex_edit(tmp_path, monkeypatch):
    """Eight images with Complex-Edit's columns."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def row(number):
        compound = [{"reasoning": "", "compound_instruction": f"{number}, {level}: make the circle red"} for level in range(1, 9)]
        sequence = [{"name": "ADD", "instruction": f"step {level}"} for level in range(1, 9)]
        return {
            "image": suite_rows.stored(number),
            "edit": {"sequence": sequence, "original_sequence": sequence, "reasoning": "", "compound": compound},
        }

    suite_rows.parquet(tmp_path / "set" / "data" / "test_real-00000-of-00001.parquet", [row(number) for number in range(IMAGES)])
    return tmp_path / "set"


def words(folder, options):
    """The command line of two tiny steps of the playground's writer, with the given options."""
    known = {
        "output_dir": folder / "run", "num_steps": 1, "max_steps": 2, "save_strategy": "no", "logging_steps": 1,
        "learning_rate": 1e-2, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_generations": 2,
        "max_completion_length": 24, "lora_r": 4, "bf16": "false", "use_cpu": "true", "report_to": "none", **options,
    }  # fmt: skip
    return [*(word for name, value in known.items() for word in (f"--{name}", str(value))), "--use_peft"]


def test_the_script_trains_on_complex_edit_and_evaluates_on_other_images(script, complex_edit, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with Double() as double:
        options = {
            "complex_edit": complex_edit, "complexity": "3,8", "allow_test_sets": "true", "held_out": 0.3, "judge": "m",
            "judge_url": double.url, "n_evals": 1, "eval_strategy": "steps", "eval_steps": 2,
        }  # fmt: skip
        trainer = script.main(words(tmp_path, options))
    prompts = [{row["prompt"][0]["content"] for row in rows} for rows in (trainer.train_dataset, trainer.eval_dataset)]
    training, heldout = ({text.partition(",")[0] for text in side} for side in prompts)
    assert training
    assert heldout
    assert not training & heldout
    assert len(training | heldout) == IMAGES
    assert prompts[0] | prompts[1] == {f"{number}, {level}: make the circle red" for number in range(IMAGES) for level in (3, 8)}
    (evaluated,) = (line for line in trainer.state.log_history if "eval_reward" in line)
    assert evaluated["step"] == 2
    expected = 0.6 * evaluated["eval_reward/alignment"] + 0.4 * evaluated["eval_reward/quality"]
    assert evaluated["eval_reward"] == pytest.approx(expected, abs=1e-5)
    assert evaluated["eval_reward/fault_fraction"] < 1
    assert evaluated["eval_reward/missing_fraction"] == 0
    assert double.refused == []
    assert {request["model"] for request in double.requests} == {"m"}


def test_the_script_trains_on_the_playground_evaluates_on_other_tasks_and_saves_the_adapter(script, tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "eval_tasks": 2, "encoder": "frozen"}
    trainer = script.main(words(tmp_path, {**options, "save_strategy": "steps", "save_steps": 1}))
    assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (10_000, 2)
    lines = trainer.state.log_history
    assert [0.0 <= line["reward/overall"] <= 10.0 for line in lines if "reward" in line] == [True] * 2
    assert [0.0 <= line["eval_reward/overall"] <= 10.0 for line in lines if "eval_reward" in line] == [True] * 2
    assert (tmp_path / "run" / "checkpoint-1" / "optimizer.pt").is_file()
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()


def test_the_script_holds_out_nothing_without_an_evaluation(script, complex_edit):
    arguments = script.ScriptArguments(complex_edit=str(complex_edit), allow_test_sets=True, held_out=0.5)
    sets = script.sets_of(arguments, seed=0, evaluates=False, images=(1, 1))
    assert (len(sets.train), len(sets.heldout)) == (IMAGES, 0)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"complex_edit": "DIR", "judge": "m"}, "Complex-Edit has only test splits.*--allow_test_sets true"),
        ({"complex_edit": "DIR", "photos": "DIR", "judge": "m"}, "--photos and --complex_edit are both given"),
        ({"complex_edit": "DIR"}, "name the model of a judge with --judge"),
        ({"complex_edit": "DIR", "judge": "m", "allow_test_sets": "true", "complexity": "9"}, "levels go from 1 to 8"),
    ],
)
def test_the_script_refuses_wrong_arguments_before_it_loads_a_model(script, tmp_path, monkeypatch, options, says):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setattr(script, "ResponseRenderer", lambda **fields: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=says):
        script.main(words(tmp_path, {**options, "judge_url": "http://127.0.0.1:1/v1"}))
