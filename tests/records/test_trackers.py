"""Trackers log what they are given, and hide the later steps that a killed run had already logged."""

import shutil
from unittest.mock import MagicMock

import pytest
import torch
from accelerate import PartialState
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from retouch.recipe.keys import Samples
from retouch.records.folder import RunFolder, SampleRecord
from retouch.records.libraries import require_trackers
from retouch.records.trackers import CompositeTracker, open_trackers, tracker_id
from retouch.run.evaluation import EvaluationResult
from retouch.run.recorder import Recorder
from retouch.types import Sample, Task


def scalars(folder, name):
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def open_tensorboard(folder, first_step=1):
    return open_trackers(["tensorboard"], folder, project="retouch", recipe={"seed": 1}, first_step=first_step)


@pytest.fixture
def fresh_accelerate():
    yield
    PartialState._reset_state()


def test_tensorboard_has_every_value_and_a_resumed_run_replaces_later_steps_of_the_killed_run(tmp_path):
    folder = RunFolder(tmp_path / "run")
    for first, last, reward in ((1, 5, -1.0), (3, 4, 1.0), (5, 5, 2.0)):
        tracker = open_tensorboard(folder, first_step=first)
        for step in range(first, last + 1):
            tracker.log({"reward/mean": reward, "policy/approx_kl": None}, step)
        tracker.close()
    assert scalars(folder, "reward/mean") == [(1, -1.0), (2, -1.0), (3, 1.0), (4, 1.0), (5, 2.0)]
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    assert events.Tags()["scalars"] == ["reward/mean"], "None is not logged"
    names = [file.name for file in folder.tensorboard.iterdir()]
    assert len({name.split(".")[3] for name in names}) == 3, "every file has a second of its own, also if a run resumes at once"


class Tables:
    """A tracker that shows tables."""

    def __init__(self):
        self.seen: list[tuple[str, list[dict[str, object]], int]] = []

    def log(self, values, step): ...

    def log_samples(self, title, rows, step):
        self.seen.append((title, rows, step))

    def close(self): ...


def test_tensorboard_shows_held_out_scores_and_a_picture_of_the_tasks(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create()
    tracker = CompositeTracker([open_tensorboard(folder)])
    recorder = Recorder(folder, tracker, total=3, samples=Samples(tasks=1))
    task = Task("t", "make it red", images=(Image.new("RGB", (4, 4), "blue"),))
    for step, value in ((0, 0.25), (3, 0.5)):
        folder.write_eval(step, "heldout", table={"all": {"n": 9, "share": value}, "headline": {"n": 4, "share": 1.0}}, ci95={})
        scores = torch.tensor([value])
        recorder.heldout(step, EvaluationResult([task], {"share": scores}, scores, [Image.new("RGB", (4, 4), "red")], [None]))
    tracker.close()
    assert scalars(folder, "heldout/share") == [(0, 0.25), (3, 0.5)]
    assert scalars(folder, "headline/share") == [(0, 1.0), (3, 1.0)]
    events = EventAccumulator(str(folder.tensorboard))
    events.Reload()
    sizes = [(image.step, image.width) for image in events.Images("samples/before_and_after")]
    assert sizes == [(0, 268), (3, 402)], "source and before, then also after"


@pytest.mark.parametrize("chosen", [True, False])
def test_stored_samples_are_logged_as_tables_only_if_requested(chosen, tmp_path):
    folder, tables = RunFolder(tmp_path / "run"), Tables()
    folder.create()
    both = CompositeTracker([open_tensorboard(folder), tables])
    recorder = Recorder(folder, both, total=3, samples=Samples(groups=1, tables=chosen))
    task = Task("t", "make it red", images=(Image.new("RGB", (4, 4), "blue"),))
    sample = Sample(task, Image.new("RGB", (4, 4), "red"))
    records = [
        SampleRecord(sample=sample, group=0, slot=0, scores={"share": 1.0}, reward=1.0, advantage=0.5, text="paint it red"),
        SampleRecord(sample=Sample(task, None), group=0, slot=1, scores={"share": float("nan")}, reward=float("nan")),
    ]
    recorder._write(2, "heldout", records[:1])
    recorder._write(2, "group", records)
    both.close()
    assert [(title, step) for title, _, step in tables.seen] == ([("heldout", 2), ("group", 2)] if chosen else [])
    if chosen:
        first, second = tables.seen[1][1]
        assert list(first) == ["task", "slot", "instruction", "text", "reward", "advantage", "source", "image", "share"]
        assert list(second) == list(first)
        assert (first["text"], first["reward"], first["share"], second["image"], second["text"]) == (
            "paint it red", 1.0, 1.0, None, None,
        )  # fmt: skip
        for part, colour in (("source", (0, 0, 255)), ("image", (255, 0, 0))):
            assert Image.open(str(first[part])).getpixel((0, 0)) == colour


def test_an_unknown_tracker_and_missing_libraries_raise(tmp_path, monkeypatch):
    keys = {"project": "p", "recipe": {}, "first_step": 1}
    with pytest.raises(ValueError, match="choose from tensorboard, wandb, trackio"):
        open_trackers(["mlflow"], RunFolder(tmp_path), **keys)
    monkeypatch.setattr("retouch.records.libraries.find_spec", lambda name: None)
    for name in ("wandb", "trackio"):
        with pytest.raises(ValueError, match=r"pip install 'retouch\[track\]'"):
            require_trackers(["tensorboard", name])
        with pytest.raises(ValueError, match=name):
            open_trackers([name], RunFolder(tmp_path), **keys)


def start(root, kind, monkeypatch):
    """Open a tracker of the run in ``root``, and return under which id or name its service finds the run."""
    root.mkdir(parents=True, exist_ok=True)
    keys = MagicMock()
    monkeypatch.setattr("retouch.records.libraries.find_spec", lambda name: True)
    monkeypatch.setattr(f"accelerate.tracking.{'WandBTracker' if kind == 'wandb' else 'TrackioTracker'}", keys)
    open_trackers([kind], RunFolder(root), project="retouch", recipe={}, first_step=1)
    return keys.call_args.kwargs["id" if kind == "wandb" else "name"]


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize("kind", ["wandb", "trackio"])
def test_point_1_7_a_tracker_knows_a_run_by_an_id_that_is_stored_in_its_folder(kind, tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    run, other = tmp_path / "machine-1" / "sd3", tmp_path / "machine-2" / "sd3"
    first = start(run, kind, monkeypatch)
    assert start(other, kind, monkeypatch) != first, "two runs of one name"
    assert start(run, kind, monkeypatch) == first, "a resume"
    copied = shutil.copytree(run, tmp_path / "copies" / "sd3")
    ids = {start(copied, kind, monkeypatch), start(copied, kind, monkeypatch)}
    assert len(ids) == 1, "the copy resumes too"
    assert ids != {first}, "a copy of a folder that is still there"
    moved = run.rename(tmp_path / "sd3")
    assert start(moved, kind, monkeypatch) == first, "a run whose folder was moved"
    aside = RunFolder(moved).set_aside()
    assert start(moved, kind, monkeypatch) != first, "a run that was started with --fresh"
    shutil.rmtree(moved)
    assert start(aside.rename(moved), kind, monkeypatch) == first, "the old run, renamed back"


def test_point_1_7_an_id_of_the_environment_is_kept_and_a_damaged_file_of_the_id_is_refused_by_name(tmp_path):
    assert [tracker_id(tmp_path, given="swept"), tracker_id(tmp_path)] == ["swept", "swept"]
    for content in ("[]", '{"id": 5, "folder": "/"}', '{"id": "a"}', "{"):
        (tmp_path / "tracker.json").write_text(content)
        with pytest.raises(ValueError, match=r"tracker\.json"):
            tracker_id(tmp_path)


@pytest.mark.parametrize("place", ["", "run"])
def test_point_3_1_wandb_takes_no_server_from_a_folder(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / place / "wandb" / "settings"
    file.parent.mkdir(parents=True)
    file.write_text("[default]\nbase_url = http://127.0.0.1:1\n")
    with pytest.raises(ValueError, match=r"wandb/settings can send W&B's key to another server"):
        open_trackers(["wandb"], RunFolder(tmp_path / "run"), project="p", recipe={}, first_step=1)


@pytest.mark.usefixtures("fresh_accelerate")
def test_wandb_uses_the_stored_id_unless_the_environment_sets_one(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    folder = RunFolder(tmp_path / "my-run")
    folder.create()
    tracker = open_trackers(["wandb"], folder, project="retouch", recipe={"seed": 1}, first_step=1)
    tracker.log({"reward/mean": 0.5, "policy/approx_kl": None}, 1)
    assert (wandb.run.id, wandb.run.name, wandb.run.config["seed"]) == (tracker_id(folder.root), "my-run", 1)
    Image.new("RGB", (4, 4), "red").save(tmp_path / "a.png")
    tracker.log_samples("group", [{"task": "t", "reward": 0.5, "image": tmp_path / "a.png", "source": None}], 1)
    tracker.log_picture("samples/before_and_after", lambda: Image.new("RGB", (8, 8), "blue"), 1)
    tracker.close()
    assert list((folder.root / "wandb").rglob("samples/before_and_after*.png"))
    assert list((folder.root / "wandb").rglob("samples/group*.table.json"))
    written = [file.read_bytes() for file in (tmp_path / "data").rglob("*") if file.is_file()]
    assert (tmp_path / "a.png").read_bytes() in written  # the image of the table, to be uploaded
    monkeypatch.setenv("WANDB_RUN_ID", "another")
    tracker = open_trackers(["wandb"], folder, project="retouch", recipe={}, first_step=1)
    assert wandb.run.id == "another"
    tracker.close()


@pytest.mark.usefixtures("fresh_accelerate")
def test_trackio_keeps_the_run_under_its_name_and_id(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    folder = RunFolder(tmp_path / "my-run")
    folder.create()
    tracker = open_trackers(["trackio"], folder, project="retouch", recipe={"seed": 1}, first_step=1)
    tracker.log({"reward/mean": 0.5}, 1)
    Image.new("RGB", (4, 4), "red").save(tmp_path / "a.png")
    tracker.log_samples("group", [{"task": "t", "reward": 0.5, "image": tmp_path / "a.png", "source": None}], 1)
    tracker.log_picture("samples/before_and_after", lambda: Image.new("RGB", (8, 8), "blue"), 1)
    tracker.close()
    assert len(list((tmp_path / "trackio").rglob("*.png"))) == 2
    assert [run.name for run in trackio.Api().runs("retouch")] == [f"my-run-{tracker_id(folder.root)}"]
