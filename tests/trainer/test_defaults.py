"""What a Trainer takes from the model and the device when the script does not say it, and its doctor."""

import re
from pathlib import Path

import pytest

import retouch
from retouch.cli import main
from retouch.config import wings
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.trainer import trainer as trainers
from retouch.trainer.arguments import describe
from small_trainer import SMALL, redness
from tiny_pipelines import sd3

ROWS = [{"prompt": "a red circle"}, {"prompt": "a blue square"}]
WINDOW = {"mode": "window", "size": 2, "low": 0}
ROOT = Path(__file__).resolve().parents[2]


def described(model, **changes):
    given = {"reward_funcs": redness, "train_dataset": ROWS, "peft_config": retouch.Lora(rank=4, alpha=8), "learning_rate": 1e-4}
    return describe(model=model, **given | changes).recipe


def resolved(recipe):
    policy, rollout = recipe.policy, recipe.rollout
    return policy.model.size, policy.model.dtype, rollout.guidance_scale, rollout.num_steps, rollout.window.model_dump()


@pytest.mark.parametrize(
    ("path", "size", "guidance", "steps", "window"),
    [
        ("stabilityai/stable-diffusion-3.5-medium", (512, 512), 4.5, 10, {**WINDOW, "high": 5}),
        ("black-forest-labs/FLUX.1-dev", (512, 512), 1.0, 10, {**WINDOW, "high": 5}),
        ("black-forest-labs/FLUX.1-schnell", (512, 512), 1.0, 4, {"mode": "all"}),
        ("black-forest-labs/FLUX.2-klein-base-4B", None, 4.0, 10, {**WINDOW, "high": 5}),
        ("Tongyi-MAI/Z-Image-Turbo", (512, 512), 1.0, 8, {**WINDOW, "high": 4}),
        ("Qwen/Qwen-Image-Edit-2511", None, 4.0, 10, {**WINDOW, "high": 5}),
    ],
)
def test_a_published_model_is_sampled_as_its_card_says_without_a_request_to_the_hub(path, size, guidance, steps, window):
    data = {} if size else {"train_dataset": [{**row, "image": "a.png"} for row in ROWS]}
    for gpu, dtype in ((True, "bfloat16"), (False, "float32")):
        recipe = described(path, gpu=gpu, **data)
        assert resolved(recipe) == (size, dtype, guidance, steps, window)
        assert recipe.policy.gradient_checkpointing is gpu
        assert recipe.policy.prompt_embeddings == ("cached" if gpu else "live")


def test_a_folder_and_a_loaded_pipeline_have_the_same_defaults(tmp_path):
    pipe = sd3()
    pipe.save_pretrained(tmp_path)
    assert resolved(described(pipe)) == resolved(described(tmp_path))
    assert resolved(described(pipe))[2] == 4.5


def test_what_the_script_says_is_kept():
    recipe = described("Qwen/Qwen-Image", size=768, dtype="bfloat16", gradient_checkpointing=True, rollout={**SMALL["rollout"]})
    assert resolved(recipe) == ((768, 768), "bfloat16", 4.0, 3, {"mode": "all"})
    assert recipe.policy.gradient_checkpointing
    velocities = described("Qwen/Qwen-Image", objective=retouch.NFT())
    assert (velocities.rollout.guidance_scale, velocities.rollout.window.mode) == (1.0, "all")
    with pytest.raises(ValueError, match=r"dtype: bfloat16, and model\.transformer was loaded in float32; load it with"):
        described(sd3(), dtype="bfloat16")


def test_a_recipe_without_guidance_has_that_of_its_model():
    document = described("Qwen/Qwen-Image").document()
    del document["rollout"]["guidance_scale"], document["policy"]["model"]["size"]
    assert parse(document) == described("Qwen/Qwen-Image")


def test_sizes_are_chosen_for_a_gpu_once_and_kept_by_a_resumed_run(tmp_path, monkeypatch):
    """The choice depends on the free memory, and the bits of a run on the choice."""
    asked = []

    def fit(recipe, device, *, allow_imports):
        asked.append(device)
        return {"microbatch": 1, "rollout.chunk": 2, "eval.batch": 2 * len(asked)}

    load = wings.load
    monkeypatch.setattr(trainers, "_is_gpu", lambda device: True)
    monkeypatch.setattr(trainers.wings, "load", lambda name: fit if name == "part.fit" else load(name))
    monkeypatch.setenv("RETOUCH_PROMPT_CACHE", str(tmp_path / "cache"))
    small = {**SMALL, "output_dir": tmp_path, "run_name": "run", "eval": {"tasks": 1}, "checkpoints": {"every": 1}}
    for steps in (1, 2):
        trainer = retouch.Trainer(sd3(), redness, ROWS, **{**small, "steps": steps})
        trainer.train()
        assert (trainer.recipe.microbatch, trainer.recipe.rollout.chunk, trainer.recipe.eval.batch) == (1, 2, 2)
    assert asked == ["cpu"]
    assert RunFolder(tmp_path / "run").read_recipe()["recipe"]["microbatch"] == 1
    told = retouch.Trainer(sd3(), redness, ROWS, **{**small, "run_name": "told", "microbatch": 2, "steps": 1})
    told.train()
    assert (told.recipe.microbatch, told.recipe.eval.batch) == (2, 4)


SCRIPT = """
import retouch
from small_trainer import SMALL, redness
from tiny_pipelines import sd3
trainer = retouch.Trainer(sd3(), redness, [{"prompt": "a"}, {"prompt": "b"}], **SMALL)
"""


def test_the_doctor_of_a_script_checks_its_run_and_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT + "trainer.train()\nraise SystemExit('it trained')\n")
    (tmp_path / "nothing.py").write_text(SCRIPT)
    assert main(["doctor", "script.py"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"settings +python:.*: 32 x 32 px, guidance 4.5, float32", said)
    assert said.endswith("ready\nnext: python script.py\n")
    assert not (tmp_path / "runs").exists()
    assert main(["doctor", "nothing.py"]) == 2
    assert "ended without a call of Trainer.train()" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("device", ["80gb", "24gb"])
def test_the_example_of_the_readme_fits_the_cards_that_it_names(device, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    block = re.search(r"```python\n(import retouch.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(block[1])
    assert main(["doctor", "example.py", "--device", device]) == 0
    assert "ready" in capsys.readouterr().out
