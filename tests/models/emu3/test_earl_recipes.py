"""EARL's recipes, their twins on the playground, and runs whose policy generates images as tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import tiny_writer_runs
from changed_recipes import values
from retouch.cli import main
from retouch.config.packaged import available, find
from retouch.recipe.document import apply, evaluate
from retouch.recipe.recipe import Recipe, check_ranks, load, parse
from retouch.records.folder import RunFolder
from retouch.run.session import run
from retouch_models.emu3 import DRAW, load_emu3
from retouch_models.features import Feature
from slow_params import slow_after, slow_except

# EARL's ten RL recipes and their supervised stages

RL = {
    **{"sft_s__rl_s": "s", "sft_s__rl_c": "c", "sft_s__rl_sc": "sc", "sft_sc__rl_c": "c", "sft_sc__rl_sc": "sc"},
    **{"sft_sc2stage__rl_c": "c", "sft_sc2stage__rl_sc": "sc"},
    **{"sft_think_s__rl_s": "s", "sft_think_s__rl_c": "c", "sft_think_s__rl_sc": "sc"},
}
SFT = ("sft_s", "sft_sc", "sft_sc2stage", "sft_think_s")
COMPLEX = ["magicbrush", "aurora-AG", "aurora-kubric", "ss2", "vismin", "human-edit"]
LISTS = {"s": ["omniedit"], "c": COMPLEX, "sc": ["omniedit", *COMPLEX]}
COEFFICIENTS = [0.13, 6.0, 6.0, 0.7, 1.55, 3.7, 11.0]
PUBLISHED = "sft_s__rl_sc-published"
REWARDS = {
    "viescore": {"combine.overall": 1.0},
    "ground_score": {"combine.ground": 1.0},
    "sqrt(viescore_pqxground_score)": {"combine": "sqrt(viescore_pqxground_score)"},
}
"""What the reward's ``combine`` contains for each value of the source's option."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APP__DATA_DIR", "/data")
    monkeypatch.setenv("APP__BASE_EXP_DIR", "/runs")
    monkeypatch.setenv("APP__REWARD_FUNCTION_API_BASE", "http://judge:4877")
    monkeypatch.setenv("APP__RUN_NAME", "mine")


def name_of(stem: str) -> str:
    return f"recipes/emu3/{stem}.jsonnet"


def test_recipe_files_are_exactly_those_of_the_source_and_have_twins() -> None:
    names = {Path(name).stem for name in available() if name.startswith("recipes/emu3/")}
    twins = {name.removesuffix("-playground") for name in names if name.endswith("-playground")}
    assert twins == {*RL, *SFT}
    assert {name for name in names if not name.endswith("-playground")} == {*twins, PUBLISHED}


@pytest.mark.parametrize("stem", RL)
def test_rl_recipe_values_match_the_source(stem: str) -> None:
    recipe = load(name_of(stem))
    check_ranks(recipe, 8)
    found, thinks = values(recipe.document()), "think" in stem
    wanted = {
        **{"name": "mine", "out": "/runs", "seed": 42, "steps": 2000, "learning_rate": 3e-6, "microbatch": 4 if thinks else 8},
        **{"tasks_per_step": 16, "group_size": 8, "epochs": 1, "minibatches": 1, "sharding": "zero2"},
        **{"policy.model.kind": "emu3", "policy.model.path": f"/runs/{stem.split('__')[0]}/exported/writer"},
        **{"policy.model.think": thinks, "policy.model.grammar": True, "policy.model.size": [256, 256]},
        **{"policy.train.kind": "full", "policy.model.dtype": "bfloat16"},
        **{"rollout.max_new_tokens": 2048, "rollout.temperature": 1.0, "rollout.top_p": None, "rollout.top_k": None},
        **{"objective.surrogate": "reinforce", "objective.kl.kind": "k3", "objective.kl.weight": 3e-4},
        **{"objective.normalise": "token", "advantage.ddof": 0, "advantage.eps": 1e-4, "advantage.clip": None},
        **{"optimizer.weight_decay": 0.0, "optimizer.max_grad_norm": 1.0, "optimizer.warmup_steps": 0},
        **{"reward.kind": "viescore", "reward.combine.overall": 1.0, "reward.judge.model": "Qwen/Qwen2.5-VL-72B-Instruct"},
        **{"reward.judge.base_url": "http://judge:4877/v1", "reward.judge.concurrency": 64, "reward.judge.timeout": 1000.0},
        **{"samples.every": 5, "checkpoints.every": 100},
        **{"data.lists": [f"/data/{each}" for each in LISTS[RL[stem]]]},
        **{"data.validation_lists": ["/data/validation_22march_256"], "data.validation_coefficients": [1.0]},
        "data.coefficients": {"s": [], "c": COEFFICIENTS[1:], "sc": COEFFICIENTS}[RL[stem]],
    }
    assert {path: found.get(path) for path in wanted} == wanted
    # One optimizer step for each rollout of 128 episodes.
    assert recipe.tasks_per_step * recipe.group_size == 128


@pytest.mark.parametrize("stem", SFT)
def test_supervised_recipe_values_match_the_source(stem: str) -> None:
    recipe = load(name_of(stem))
    check_ranks(recipe, 8)
    assert (recipe.name, recipe.learning_rate, recipe.objective.kind) == (stem, 1e-4, "sft")
    optimizer = recipe.optimizer
    assert (optimizer.betas, optimizer.eps, optimizer.weight_decay, optimizer.max_grad_norm) == ((0.9, 0.95), 1e-6, 0.1, 5.0)
    for phase in recipe.resolved_phases():
        rate = optimizer.learning_rate(peak=phase.learning_rate, steps=range(phase.steps))
        assert [rate(0), rate(29), rate(30)] == pytest.approx([1e-4 / 30, 1e-4, 1e-4])
        assert rate(phase.steps) == pytest.approx(1e-5)
    assert recipe.tasks_per_step == 4 * 2 * 8  # GPUs, edits at once, accumulated gradients
    # The variant that the header of each recipe names.
    assert load(name_of(stem), ["sharding=fsdp2", "devices.weights=cpu", "optimizer.moments=cpu"]).optimizer.moments == "cpu"
    data = [phase.data for phase in recipe.resolved_phases()]
    wanted = {"sft_s": ["s"], "sft_sc": ["sc"], "sft_sc2stage": ["s", "sc"], "sft_think_s": ["s"]}[stem]
    assert [[*each.lists] for each in data] == [[f"/data/{name}" for name in LISTS[key]] for key in wanted]
    assert recipe.policy.model.think == (stem == "sft_think_s")


def test_published_recipe_uses_the_published_data_layout() -> None:
    recipe = load(name_of(PUBLISHED), ["data.trusted=true"])
    names = ["omniedit", "magic_brush", "aurora_ag", "aurora_kubric", "ss2", "vismin", "human-edit"]
    assert [*recipe.data.lists] == [f"/data/earl-datasets/{name}/train" for name in names]
    assert [*recipe.data.validation_lists] == [f"/data/earl-datasets/{name}/validation" for name in names]
    assert [*recipe.data.coefficients] == COEFFICIENTS
    assert (recipe.steps, recipe.policy.model.path) == (3000, "/runs/sft-simple")


@pytest.mark.parametrize("final", REWARDS)
@pytest.mark.parametrize("base", ["http://judge:4877", "http://judge:4877/v1"])
def test_each_final_reward_loads_with_the_v1_url_of_the_judge(
    final: str, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APP__REWARD_FUNCTION_API_BASE", base)
    file = tmp_path / "r.jsonnet"
    file.write_text(f"local e = import 'lib/earl.libsonnet'; e.rl(start='sft_s', data=e.data.s, final='{final}')")
    found = values(load(file).document()["reward"])
    assert {value for path, value in found.items() if path.endswith("base_url")} == {"http://judge:4877/v1"}
    assert {path: value for path, value in found.items() if path.startswith("combine")} == REWARDS[final]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("emu3")
    tiny_writer_runs.save_emu3(path)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All the lists that the recipes name, each with a few edits of random codes in the tiny model's grid."""
    root = tmp_path_factory.mktemp("data")
    random = torch.Generator().manual_seed(0)
    for name in (*LISTS["sc"], "validation_22march_256"):
        (root / name / "feature").mkdir(parents=True)
        (root / name / "feature" / "list").mkdir()
        for number in range(3):
            codes = torch.randint(0, 16, (2, 3, 3), generator=random)
            made = Feature(id=str(number), instruction="make it red", source=codes[0], target=codes[1], thought="The cup.")
            (root / name / "feature" / f"{number}.safetensors").write_bytes(made.to_bytes())
        told = {"prefix": "", "path_list": [f"{number}.safetensors" for number in range(3)]}
        (root / name / "feature" / "list" / "tokenized_datalist.json").write_text(json.dumps(told))
    return root


def small(stem: str, folder: Path, data: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """The recipe with model, data, judge and sizes replaced, and everything else as it is."""
    monkeypatch.setenv("APP__DATA_DIR", str(data))
    monkeypatch.setenv("APP__BASE_EXP_DIR", str(out))
    document = evaluate(find(name_of(stem)))
    model = {"path": str(folder), "tokenizer": None, "autoencoder": None, "size": [24, 24], "dtype": "float32"}
    changes: dict[str, Any] = {f"policy.model.{key}": value for key, value in model.items()}
    changes |= {"tasks_per_step": 2, "group_size": 1 if stem in SFT else 2, "microbatch": 2, "device": "cpu", "trackers": []}
    changes |= {"rollout.max_new_tokens": 120, "ranks": None, "sharding": None, "eval": {"tasks": 2}}
    changes |= {"samples": {"every": 1, "tasks": 1, "groups": 1}}
    changes |= {"reward": {"kind": "compressibility", "combine": {"compressibility": 1}}, "learning_rate": 1e-3}
    changes["optimizer.warmup_steps"] = 0
    for key in ("steps", *(f"phases.{k}.steps" for k in range(len(document.get("phases", []))))):
        if key != "steps" or "steps" in document:
            changes[key] = 1
    return parse(apply(document, [f"{key}={json.dumps(value)}" for key, value in changes.items()]))


@pytest.mark.parametrize("stem", slow_after(1, ["sft_s__rl_sc", "sft_think_s", "sft_sc2stage"]))
def test_recipe_trains_one_step_per_phase_with_a_tiny_model(
    stem: str, folder: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = small(stem, folder, data, tmp_path, monkeypatch)
    assert run(recipe, fresh=False) == 0
    steps = RunFolder(recipe.folder).read_metrics()
    assert len(steps) == len(recipe.resolved_phases())
    assert all(step["policy/grad_norm"] > 0 for step in steps)


# Runs whose policy generates images as tokens, from the recipe to the export


@pytest.fixture
def document(tmp_path, folder):
    def made(**changes):
        # The playground's judge gives random images no reward, so there would be no gradient.
        reward = {"kind": "compressibility", "combine": {"compressibility": 1}}
        settings = {**tiny_writer_runs.image_tokens(folder), "policy__train": {"kind": "full"}, "reward": reward, **changes}
        return tiny_writer_runs.recipe(tmp_path / "runs", folder, **settings)

    return made


def trained(tmp_path, document):
    """The folder of a run, and its metrics."""
    file = tmp_path / "recipe.json"
    file.write_text(json.dumps(document))
    assert main(["train", str(file)]) == 0
    run = Path(document["out"]) / document["name"]
    return run, RunFolder(run).read_metrics()


def test_run_trains_samples_and_exports_loadable_weights(tmp_path, folder, document):
    run, steps = trained(tmp_path, document())
    assert len(steps) == 2
    assert all(step["policy/ratio_max_first"] <= 1e-5 for step in steps)
    assert all(step["completion/cut_off_fraction"] == 0 for step in steps)
    source, out, exported = tmp_path / "source.png", tmp_path / "out.png", tmp_path / "exported"
    Image.new("RGB", (24, 24), (90, 90, 90)).save(source)
    assert main(["sample", str(run), "--instruction", "add a red circle", "--image", str(source), "--out", str(out)]) == 0
    with Image.open(out) as shown:
        assert shown.size == (24, 24)
    assert main(["export", str(run), "--to", str(exported), "--weights", "current"]) == 0
    settings = {"size": (24, 24), "prefill": DRAW, "dtype": torch.float32, "device": "cpu", "autoencoder": folder}
    editor = load_emu3(exported / "writer", tokenizer=folder, **settings)
    before = load_emu3(folder, **settings)
    assert not torch.equal(editor.module.lm_head.weight, before.module.lm_head.weight)
    assert "report.html" in {path.name for path in run.iterdir()}


@pytest.mark.parametrize(
    "stem",
    slow_except(
        ["sft_s__rl_c", "sft_think_s"], ["sft_s__rl_c", "sft_sc__rl_sc", "sft_sc2stage__rl_sc", "sft_think_s__rl_s", "sft_think_s"]
    ),
)
def test_the_playgrounds_twins_of_earls_recipes_take_a_step(tmp_path, stem):
    twin = load(f"recipes/emu3/{stem}-playground.jsonnet").document()
    twin |= {"out": str(tmp_path), "tasks_per_step": 8, "trackers": [], "eval": {"tasks": 3, "complexity": [1, 2, 3]}}
    if twin["phases"] is None:
        twin["steps"] = 1
    for phase in twin["phases"] or ():
        phase |= {"steps": 1, "tasks_per_step": 2}
    _, lines = trained(tmp_path, twin)
    assert len(lines) == len(twin["phases"] or [None])
    if stem == "sft_think_s__rl_s":
        assert lines[-1]["completion/length"] > 24  # more than an image


def test_incompatible_recipe_parts_raise_when_the_recipe_is_parsed(document):
    server = {"kind": "vllm", "url": "http://127.0.0.1:1/v1", "adapters": "a"}
    response = {"kind": "response", "model": {"kind": "playground"}, "encoder": "frozen", "num_steps": 2}
    gradient, steps = {"kind": "policy_gradient", "surrogate": "reinforce"}, {"text_steps": 2, "vision_steps": 3}
    for message, changes in (
        (r"renderer\.kind: emu3 writes image tokens", {"renderer": response}),
        (r"renderer\.kind: playground-writer writes text", {"policy__model": {"kind": "playground-writer"}}),
        ("engine cached", {"rollout__engine": server, "rollout__top_k": 5}),
        (r"devices\.renderer", {"devices": {"renderer": "cuda:1"}}),
        (r"objective\.tokens: without policy\.model\.think", {"objective": {**gradient, "tokens": "text"}}),
        (r"objective\.tokens: without policy\.model\.think", {"objective": {**gradient, "tokens": steps}}),
        ("no source image", {"data": {"kind": "prompts", "path": "prompts.txt"}}),
    ):
        with pytest.raises(ValueError, match=message):
            parse(document(**changes))
    assert parse(document(rollout__engine=server)).policy.train.kind == "full"  # a server loads all weights too
    kept = parse(document(objective={**gradient, "tokens": "text"}, policy__model__think=True)).document()
    assert kept["objective"]["tokens"] == "text"
    assert "tokens" not in parse(document(objective=gradient)).document()["objective"]
