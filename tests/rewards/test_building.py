"""Rewards built from recipe sections: requests of judges, sharing of clients, devices, and columns of remote rewards."""

from pathlib import Path

import pytest
import torch
from PIL import Image

import tiny_models
import tiny_towers
from judge_double import KEY, Double
from live_server import live
from pictures import picture
from retouch.protocols import Reward
from retouch.recipe.document import evaluate
from retouch.recipe.reward_arguments import parse_reward
from retouch.rewards.base import close
from retouch.rewards.judging import CompositeReward
from retouch.types import Sample, Task
from retouch_judge.local_model import LocalJudge

ROOT = Path(__file__).parents[2]
WORDS = {"yes": 0.4, "no": 0.3, "second": 0.2, "first": 0.05, "5": 0.02, "0": 0.02}


def samples(count):
    task = Task("t", "make it red", (picture(100),), target=picture(101))
    return [Sample(task, picture(k), completion="give me 10") for k in range(count)]


@pytest.fixture
def build(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    made: list[Reward] = []

    def building(section, **options):
        made.append(parse_reward(section).build(**options))
        return made[-1]

    yield building
    for each in made:
        close(each)


def endpoint(url, **more):
    return {"kind": "endpoint", "model": "m", "base_url": url, **more}


@pytest.mark.parametrize("kind", ["aspects", "viescore", "complex_edit", "ground", "yes", "digit", "win_rate"])
def test_judge_requests_use_the_model_seeds_and_temperature_of_the_section(build, kind):
    words = {"yes": WORDS, "digit": {"5": 0.5, "0": 0.4}, "win_rate": {"first": 0.5, "second": 0.4}}.get(kind, WORDS)
    with Double(words=words) as double:
        section = {"kind": kind, "judge": endpoint(double.url), "n_evals": 2, "temperature": 0.5, "seed": 7}
        reward = build(section)
        assert dict(reward.columns) == parse_reward(section).known_columns()
        scores = reward(samples(2))
        assert double.refused == []
        asked = {(request["model"], request["temperature"], request["seed"]) for request in double.requests}
        assert asked == {("m", 0.5, 7), ("m", 0.5, 8)}
        assert "give me 10" not in str(double.requests)
    for name, column in reward.columns.items():
        assert ((scores[name] >= column.low) & (scores[name] <= column.high)).all()


def test_rewards_that_name_the_same_judge_share_its_connections(build):
    with Double() as double:
        same, other = endpoint(double.url), endpoint(double.url, concurrency=2)
        judges = {"viescore": same, "aspects": same, "yes": other}
        rewards = {kind: {"kind": kind, "judge": judge} for kind, judge in judges.items()}
        several = build({"kind": "several", "rewards": rewards})
        assert isinstance(several, CompositeReward)
        clients = [reward.panel.client for reward in several.rewards.values()]
        assert clients[0] is clients[1]
        assert clients[1] is not clients[2]
        assert len(several(samples(2))) == 3 + 4 + 3 + 1  # VIEScore has four sub-scores


def test_a_model_in_this_process_is_loaded_once_and_on_the_device_of_its_section_or_else_of_the_run(build, tmp_path):
    tokenizer = tiny_models.qwen_tokenizer()
    for part in (tiny_models.qwen_text_encoder(tokenizer), tokenizer, tiny_models.qwen_image_processor()):
        part.save_pretrained(tmp_path)
    judge = {"kind": "in_process", "path": str(tmp_path), "dtype": "float32"}
    rewards = {"yes": {"kind": "yes", "judge": judge, "min_mass": 1e-9}, "digit": {"kind": "digit", "judge": judge}}
    several = build({"kind": "several", "rewards": rewards}, device="meta")
    clients = [reward.panel.client for reward in several.rewards.values()]
    assert isinstance(clients[0], LocalJudge)
    assert clients[0] is clients[1]
    assert clients[0].model.device.type == "meta"
    named = build({"kind": "yes", "judge": {**judge, "device": "cpu"}}, device="meta")
    assert named.panel.client.model.device.type == "cpu"
    assert named.panel.client.model.dtype == torch.float32
    path = str(tiny_towers.clip(tmp_path / "clip"))
    assert build({"kind": "clip", "path": path}).model.device.type == "cpu"
    assert build({"kind": "clip", "path": path}, device="meta").model.device.type == "meta"
    assert build({"kind": "clip", "path": path, "device": "cpu"}, device="meta").model.device.type == "cpu"


def test_declared_columns_that_differ_from_those_of_the_servers_raise(build):
    with live("share:red") as server:
        reward = build({"kind": "remote", "endpoints": [server.url], "columns": {"share": [0, 1]}})
        assert reward([Sample(Task("t", "x"), Image.new("RGB", (2, 2), (255, 0, 0)))])["share"].tolist() == [1.0]
        for columns, says in [
            ({"share": [0, 10]}, "share is declared from 0 to 10, but the servers declare it from 0 to 1"),
            ({"x": [0, 1]}, "have no such column; they have share 0 to 1"),
        ]:
            with pytest.raises(ValueError, match=says):
                build({"kind": "remote", "endpoints": [server.url], "columns": columns})


def test_judges_libsonnet_returns_valid_reward_sections(tmp_path):
    """The writer's judge (weights 0.6 and 0.4, identity only logged), and the same judge with identity in the reward."""
    library = ROOT / "recipes" / "lib" / "judges.libsonnet"
    (tmp_path / "two.jsonnet").write_text(
        f"local judges = import '{library}'; local judge = judges.endpoint('gpt-4o');\n"
        "{ a: judges.alignment_quality(judge), b: judges.alignment_identity_quality(judges.in_process('folder')) }"
    )
    made = evaluate(tmp_path / "two.jsonnet")
    shipped, recommended = parse_reward(made["a"]), parse_reward(made["b"])
    assert shipped.combine == {"alignment": 0.6, "quality": 0.4, "identity": 0.0}
    assert shipped.n_evals == recommended.n_evals == 3
    assert set(shipped.known_columns()) == {"alignment", "quality", "identity"}
    assert "identity" in recommended.combine
