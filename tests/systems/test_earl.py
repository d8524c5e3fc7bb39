"""A user of EARL brings a configuration, features as .pth files and a model, and types one command."""

import base64
import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageStat
from transformers import Emu3VQVAE

import changed_recipes
import loopback
from retouch.cli import main
from retouch.recipe.recipe import load
from retouch_worlds.pretraining.emu3 import emu3_tokenizer, untrained_codes, untrained_emu3

CONFIG = Path(__file__).parent / "earl" / "sft_think_s__rl_c.jsonnet"
GRID = 4
"""Codes per side of an image of 256 px; Emu3's autoencoder has 32."""


def save_model(folder: Path) -> None:
    """A random Emu3 with an autoencoder whose spatial factor is 64."""
    torch.manual_seed(0)
    config = untrained_codes().config
    config.base_channels, config.channel_multiplier = 32, [*[1] * 6, 2]
    words = emu3_tokenizer(0)
    untrained_emu3(words, Emu3VQVAE(config).eval()).save_pretrained(folder)
    words.save_pretrained(folder)


def save_features(folder: Path, seed: int) -> None:
    """Edits in the layout of EARL's prepare_data.py."""
    random = np.random.default_rng(seed)
    (folder / "list").mkdir(parents=True)
    names = [f"{seed}_{number}.pth" for number in range(2)]
    for name in names:
        codes = random.integers(0, 80, (2, GRID, GRID))
        thought = {"scene": "A cup on a table.", "edit": "Paint the cup red."}
        made = {"edit_id": name, "original_image": codes[0], "edited_image": codes[1], "CoT": thought, "instruction": "make it red"}
        torch.save(made, folder / name)
    (folder / "list" / "tokenized_datalist.json").write_text(json.dumps({"prefix": "/elsewhere", "path_list": names}))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root: Path = tmp_path_factory.mktemp("earl")
    save_model(root / "model")
    for seed, name in enumerate(("magicbrush", "vismin", "validation_22march_256")):
        save_features(root / name / "feature", seed)
    return root


@pytest.fixture(autouse=True)
def environment(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APP__DATA_DIR", str(data))
    monkeypatch.setenv("APP__BASE_EXP_DIR", str(tmp_path / "runs"))
    monkeypatch.setenv("APP__REWARD_FUNCTION_API_BASE", "http://127.0.0.1:9")
    monkeypatch.setenv("APP__RUN_NAME", "mine")


class Judge(loopback.Handler):
    """A vLLM server without a key, whose scores rise with the brightness of the image."""

    def do_GET(self) -> None:
        self.reply(200, {"object": "list", "data": []})

    def do_POST(self) -> None:
        asked = json.loads(self.body())
        pictures = [part["image_url"]["url"] for part in asked["messages"][-1]["content"] if part["type"] == "image_url"]
        seen = Image.open(io.BytesIO(base64.b64decode(pictures[-1].partition(",")[2]))).convert("L")
        score = round(10 * ImageStat.Stat(seen).mean[0] / 255)
        names = asked["response_format"]["json_schema"]["schema"]["required"]
        content = json.dumps({name: "It is bright." if name == "reasoning" else score for name in names})
        message = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": "stop"}
        self.reply(200, {"id": "x", "object": "chat.completion", "created": 0, "model": asked["model"], "choices": [message]})


def changed(tmp_path: Path, **values: Any) -> Path:
    """The configuration with these values; None removes a key."""
    lines = "".join(f"{key}{'::' if value is None else ':'} {json.dumps(value)}," for key, value in values.items())
    file = tmp_path / "changed.jsonnet"
    file.write_text(f"(import '{CONFIG}') {{ {lines} }}")
    return file


@pytest.mark.slow
def test_the_configuration_trains_for_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loopback.Server(Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("APP__REWARD_FUNCTION_API_BASE", server.url)
        # The autoencoder, which EARL downloads, is in the folder of the model.
        assert main(["train", str(CONFIG), "--set", "policy.model.autoencoder=null"]) == 0
        server.shutdown()
    steps = [json.loads(line) for line in (tmp_path / "runs" / "mine" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step["reward/missing_fraction"] == 0 for step in steps)


def test_it_is_the_packaged_recipe_with_its_own_paths_and_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = changed(tmp_path, num_iterations=2000, episodes_per_iteration=128, generations_per_sample=8, max_response_tokens=2048)
    ours, theirs = changed_recipes.values(load("emu3/sft_think_s__rl_c").document()), changed_recipes.values(load(file).document())
    different = {key for key in {*ours, *theirs} if ours.get(key) != theirs.get(key)}
    of_paths = {"policy.model.path", "policy.model.tokenizer", "data.lists", "data.coefficients", "data.validation_lists"}
    # The packaged recipe uploads nothing, warns about another number of ranks, and has the microbatch of EARL's thinking runs.
    assert different == {*of_paths, "data.trusted", "push.repo", "push.every", "push.private", "ranks", "microbatch"}
    capsys.readouterr()
    assert main(["tools", "convert", str(file)]) == 0
    converted = tmp_path / "converted.json"
    converted.write_text(capsys.readouterr().out)
    assert load(converted) == load(file)


@pytest.mark.parametrize(
    ("values", "recipe"),
    [
        ({"reward_final_reward": "ground_score", "reward_compute_ground_score": True, "reward_compute_viescore": False},
         {"reward.kind": "ground", "reward.combine.ground": 1.0}),
        ({"reward_compute_ground_score": True}, {"reward.combine.viescore/overall": 1.0, "reward.combine.ground/ground": 0.0}),
        ({"reward_final_reward": "sqrt(viescore_pqxground_score)", "reward_compute_ground_score": True},
         {"reward.kind": "several", "reward.combine": "sqrt(viescore_pqxground_score)"}),
        ({"top_p": 0.9, "top_k": 50}, {"rollout.top_p": 0.9, "rollout.top_k": 50}),
        ({"kl_coeff": 0}, {"objective.kl": None, "objective.surrogate": "reinforce"}),
        ({"emu3_use_logit_processor": False, "separate_language_and_vision_vocabs": False}, {"policy.model.grammar": False}),
        ({"tokenizer_path": "BAAI/Emu3-Gen"}, {"policy.model.tokenizer": "Emu3-community/Emu3-Gen-hf"}),
        ({"assistant_prefill": "<|image start|>"}, {"policy.model.think": False}),
        ({"push_to_hub_repo_id": None, "random_seed": 7}, {"push": None, "seed": 7}),
        ({"keep_checkpoints_every_n_iterations": 50, "save_checkpoints_every_n_iterations": 25},
         {"checkpoints.every": 25, "checkpoints.keep_every": 50}),
    ],
)  # fmt: skip
def test_a_key_has_the_effect_of_its_counterpart(values: dict[str, Any], recipe: dict[str, Any], tmp_path: Path) -> None:
    found = changed_recipes.values(load(changed(tmp_path, **values)).document())
    assert {key: found.get(key) for key in recipe} == recipe


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"train_paths_file": []}, "train_paths_file: the list is empty"),
        ({"model_path": None}, "model_path: missing"),
        ({"model_revision": "main"}, "model_revision: download this revision"),
        ({"emu3_use_logits_processor": True}, "did you mean .*emu3_use_logit_processor"),
        ({"episodes_per_iteration": 5}, "5 is not a multiple of generations_per_sample"),
        ({"assistant_prefill": " Think."}, "assistant_prefill: ' Think.' is none of EARL's"),
        ({"reward_final_reward": "psnr"}, "reward_final_reward: 'psnr' is none of"),
        ({"reward_compute_viescore": False}, "reward_compute_viescore: viescore needs it"),
        ({"separate_language_and_vision_vocabs": False}, "must equal emu3_use_logit_processor"),
        ({"train_vision_tokens_only": True}, "--set objective.tokens=vision"),
    ],
)
def test_a_key_without_a_counterpart_is_refused_by_its_name(values: dict[str, Any], error: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=error):
        load(changed(tmp_path, **values))


def test_keys_without_effect_and_another_tokenizer_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(changed(tmp_path, tokenizer_path="BAAI/Emu3-Gen"))
    assert "Emu3-community/Emu3-Gen-hf is the same tokenizer" in caplog.text
    assert "model_context_size has no effect" in caplog.text
    assert "vllm_gpu_memory_utilization has no effect" in caplog.text


@pytest.mark.parametrize("missing", ["model", "magicbrush"])
def test_missing_data_and_weights_are_reported_before_the_run_waits_for_the_judge(
    missing: str, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = {"model": "model_path", "magicbrush": "train_paths_file"}[missing]
    absent = str(data / "absent")
    file = changed(tmp_path, **{place: absent if missing == "model" else [absent], "coefficients": []})
    # The address of the judge answers nothing, and the configuration waits two hours for it.
    assert main(["train", str(file), "--set", "policy.model.autoencoder=null"]) != 0
    assert absent in capsys.readouterr().err


def test_the_check_of_data_reads_the_layout(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "check", str(data / "magicbrush")]) == 1
    assert "set data.trusted: true if you trust its author" in capsys.readouterr().out
    # The configuration says whose files it trusts.
    assert main(["data", "check", str(CONFIG)]) == 0
    assert "6 rows read, 0 errors" in capsys.readouterr().out
