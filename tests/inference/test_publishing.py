"""Weights that a run pushes to the Hub are those that `retouch export` writes; if the Hub fails, the run continues."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants
from huggingface_hub.utils import close_session
from safetensors.torch import load

import hub_double
import retouch
from hub_double import Hub
from retouch.inference import publishing
from retouch.inference.exporting import export_target
from retouch.inference.publishing import why_not_pushable
from retouch.recipe.recipe import Recipe, parse
from retouch.records.folder import RunFolder
from retouch.run.session import run
from retouch_plan.doctor.checks import check_push
from tiny_recipes import SMALL

REPO = "someone/edits"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_double.serve() as hub:
        monkeypatch.setenv("HF_TOKEN", hub_double.TOKEN)
        monkeypatch.setattr(publishing, "HfApi", partial(HfApi, endpoint=hub.url))
        monkeypatch.setattr(publishing, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub
        close_session()


def recipe(tmp_path: Path, **push: Any) -> Recipe:
    return parse({**SMALL, "out": str(tmp_path), "push": {"repo": REPO, **push}})


def log_text(recipe: Recipe) -> str:
    return RunFolder(recipe.folder).log(0).read_text()


def content_of(name: str, content: bytes) -> Any:
    """The content to compare: the tensors of safetensors, whose header is written in any order; otherwise the bytes."""
    if not name.endswith(".safetensors"):
        return content
    return {key: tensor.tolist() for key, tensor in load(content).items()}


def test_a_push_uploads_the_files_of_an_export_of_its_step(tmp_path: Path, hub: Hub) -> None:
    pushing = recipe(tmp_path, every=1)
    assert run(pushing, fresh=False) == 0
    assert (hub.private, hub.branches) == ({REPO: True}, {REPO: {"main", "step-000001", "step-000002"}})
    exported = export_target(str(pushing.folder), to=tmp_path / "exported")
    wanted = {path.name: path.read_bytes() for path in exported}
    for revision in ("main", "step-000002"):
        sent = {path: content for (at, path), content in hub.files.items() if at == revision}
        assert sent.keys() == wanted.keys()
        assert [name for name in wanted if content_of(name, sent[name]) != content_of(name, wanted[name])] == []
    first = json.loads(hub.files["step-000001", "export.json"])
    assert first["step"] == 1
    assert hub.files["step-000001", "adapter_model.safetensors"] != wanted["adapter_model.safetensors"]
    assert not any((pushing.folder / "push").iterdir())


def test_push_to_hub_uploads_the_same_files_as_save_pretrained(tmp_path: Path, hub: Hub) -> None:
    made = retouch.Trainer.from_recipe(parse({**SMALL, "out": str(tmp_path)}), progress=False)
    made.train()
    made.push_to_hub(REPO)
    saved = {path.name for path in made.save_pretrained(tmp_path / "saved")}
    assert {path for _, path in hub.files} == saved
    hub.statuses["/api/repos/create"] = 403
    with pytest.raises(ValueError, match="repo someone/else: the Hugging Face Hub refused it"):
        made.push_to_hub("someone/else")


def test_the_last_step_is_pushed_by_default_with_the_visibility_of_the_recipe(tmp_path: Path, hub: Hub) -> None:
    assert run(recipe(tmp_path, private=False), fresh=False) == 0
    assert (hub.private, hub.branches) == ({REPO: False}, {REPO: {"main", "step-000002"}})


def test_pushing_leaves_the_weights_of_the_run_bitwise_equal(tmp_path: Path, hub: Hub) -> None:
    pushing, alone = recipe(tmp_path / "a", every=1), parse({**SMALL, "out": str(tmp_path / "b")})
    for each in (pushing, alone):
        assert run(each, fresh=False) == 0
    name = "checkpoints/step-000002/weights.safetensors"
    assert (pushing.folder / name).read_bytes() == (alone.folder / name).read_bytes()


@pytest.mark.parametrize("part", ["/branch/", "/preupload/", "/commit/"])
def test_a_failed_push_keeps_its_files_and_the_run_continues(tmp_path: Path, hub: Hub, part: str) -> None:
    hub.statuses[part] = 403
    pushing = recipe(tmp_path)
    assert run(pushing, fresh=False) == 0
    kept = pushing.folder / "push" / "step-000002"
    assert f"hf upload {REPO} {kept} --revision step-000002" in log_text(pushing)
    assert (kept / "adapter_model.safetensors").is_file()
    assert not hub.files


def test_missing_write_access_to_the_hub_raises_before_the_first_step(tmp_path: Path, hub: Hub) -> None:
    hub.statuses["/api/repos/create"] = 403
    with pytest.raises(ValueError, match=f"push.repo {REPO}: the Hugging Face Hub refused it"):
        run(recipe(tmp_path), fresh=False)
    assert not list(tmp_path.glob("*/metrics.jsonl"))


def test_without_token_nothing_is_pushed_and_the_log_reports_it(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(publishing, "get_token", lambda: None)
    pushing = recipe(tmp_path)
    assert run(pushing, fresh=False) == 0
    assert "push is off: there is no token" in log_text(pushing)
    assert not hub.private
    [finding] = check_push(pushing)
    assert (finding.status, "nothing will be pushed" in finding.text) == ("note", True)


def test_hub_offline_mode_is_reported_as_the_reason_not_to_push(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "HF_HUB_OFFLINE", True)
    assert why_not_pushable() == "HF_HUB_OFFLINE is set"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"push": {"repo": "edits"}}, "push.repo"),
        ({"push": {"repo": REPO}, "sharding": "fsdp2"}, "push: with fsdp2 no rank has the whole weights"),
        ({"checkpoints": {"every": 2, "keep_every": 3}}, "checkpoints.keep_every"),
        ({"checkpoints": {"every": 0, "keep_every": 3}}, "checkpoints.keep_every"),
    ],
)
def test_invalid_push_settings_raise(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        parse({**SMALL, **change})
