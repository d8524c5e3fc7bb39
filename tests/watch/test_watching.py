"""Complete runs with a watch: what they log, how an alarm stops them, and that a killed run ends with the same alarms and bits."""

import json
import math
import shutil
import sqlite3
from contextlib import closing

import pytest
import torch
from PIL import Image

import tiny_watched
from retouch.distributed.launching import rank_environments, run_ranks
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.rewards.base import BudgetSpent
from retouch.run import checkpoint
from retouch.run import session as training_session
from retouch.run.hooks import AlarmStop
from retouch.run.ledger import ledger_path
from retouch.run.session import run
from retouch.run.step import RewardFailed
from retouch.run.watch import Watcher, read_observations
from retouch_view.report.page import write_report
from warm_python import python


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Four steps, an observation every two steps, and a rule that stops the run at step 2."""
    recipe = parse(tiny_watched.recipe(tmp_path_factory.mktemp("runs"), limit=1e-9, on_alarm="stop"))
    with pytest.raises(AlarmStop) as error:
        run(recipe, fresh=False)
    return recipe, RunFolder(recipe.folder), str(error.value)


def test_watched_run_logs_its_measures_and_alarms(watched):
    _, folder, _ = watched
    first, second = folder.read_metrics()
    assert 0 < first["watch/diversity"] < 1
    assert [name for name in first if name.startswith("watch/")] == ["watch/diversity"]
    assert {name for name in second if name.startswith("watch/")} == {
        *("watch/proxy", "watch/heldout", "watch/heldout_missing", "watch/heldout_sigmas", "watch/canary_shift", "watch/diversity"),
        *("watch/brightness", "watch/saturation", "watch/detail", "watch/alarm/brightness"),
    }
    assert second["watch/canary_shift"] == 0
    start, now = read_observations(folder.watch, 2)
    assert (start.step, now.step, len(start.tasks)) == (0, 2, 3)
    assert second["watch/heldout"] == pytest.approx(now.mean("heldout"))
    assert not torch.equal(start.scores["brightness"], now.scores["brightness"])
    assert "time/watch" in folder.read_timings()[1]


def test_stop_alarm_saves_a_checkpoint_and_reports_the_reason(watched):
    _, folder, told = watched
    assert "stopped by an alarm after step 2" in told
    assert "watch.brightness" in told
    assert "The checkpoint of step 2 is saved" in told
    assert checkpoint.latest(folder.checkpoints).name == "step-000002"
    assert folder.read_alarm()["back_to"] is None
    assert not folder.summary.exists()
    page = folder.report.read_text()
    assert "Stopped by an alarm after step 2" in page
    assert "brightness at step 2" in page
    assert "<h2>Watched</h2>" in page


@pytest.mark.slow
def test_run_stopped_by_an_alarm_resumes_only_with_a_relaxed_rule(watched, tmp_path):
    recipe, folder, _ = watched
    with pytest.raises(AlarmStop, match="was stopped by an alarm"):
        run(recipe, fresh=False)
    copied = tmp_path / recipe.name
    shutil.copytree(folder.root, copied)
    relaxed = parse(tiny_watched.recipe(tmp_path, limit=0.9, on_alarm="stop"))
    assert run(relaxed, fresh=False) == 0
    on = RunFolder(copied)
    assert on.read_alarm() is None
    assert [line["step"] for line in on.read_metrics()] == [1, 2, 3, 4]
    alone = parse(tiny_watched.recipe(tmp_path / "alone", limit=0.9, on_alarm="stop"))
    assert run(alone, fresh=False) == 0
    last = "checkpoints/step-000004/weights.safetensors"
    assert (on.root / last).read_bytes() == (alone.folder / last).read_bytes()
    # The line of the observation with the alarm keeps the alarms of the earlier rules.
    lines = [{name: value for name, value in line.items() if "alarm" not in name} for line in on.read_metrics()]
    assert lines == RunFolder(alone.folder).read_metrics()


def test_a_run_that_is_killed_before_it_records_the_stop_stops_at_the_next_start(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def kill(*arguments, **options):
        raise Killed

    recipe = parse(tiny_watched.recipe(tmp_path, limit=1e-9, on_alarm="stop"))
    with monkeypatch.context() as patch:
        patch.setattr(training_session, "write_stop", kill)
        with pytest.raises(Killed):
            run(recipe, fresh=False)
    folder = RunFolder(recipe.folder)
    assert checkpoint.latest(folder.checkpoints).name == "step-000002"
    assert folder.read_alarm() is None
    with pytest.raises(AlarmStop, match=r"after step 2:\n  watch\.brightness"):
        run(recipe, fresh=False)
    assert folder.read_alarm()["step"] == 2


def test_roll_back_alarm_returns_the_run_to_an_earlier_checkpoint(tmp_path):
    recipe = parse(tiny_watched.recipe(tmp_path, limit=1e-9, on_alarm="roll_back"))
    with pytest.raises(AlarmStop, match="back in the state of step 0"):
        run(recipe, fresh=False)
    folder = RunFolder(recipe.folder)
    assert checkpoint.latest(folder.checkpoints).name == "step-000000"
    assert [line["step"] for line in folder.read_metrics()] == [1, 2], "later records are kept for inspection"
    assert folder.read_alarm() == {"step": 2, "back_to": 0, "alarms": folder.read_alarm()["alarms"]}
    with pytest.raises(AlarmStop, match="back in the state of step 0"):
        run(recipe, fresh=False)
    noted = parse(tiny_watched.recipe(tmp_path, limit=1e-9, on_alarm="note"))
    assert run(noted, fresh=False) == 0
    assert folder.read_alarm() is None
    alone = parse(tiny_watched.recipe(tmp_path / "alone", limit=1e-9, on_alarm="note"))
    assert run(alone, fresh=False) == 0
    assert folder.metrics.read_bytes() == RunFolder(alone.folder).metrics.read_bytes()
    assert all("watch/alarm/brightness" in line for line in folder.read_metrics() if line["step"] % 2 == 0)


@pytest.mark.parametrize(("response", "kept", "back_to"), [("stop", 2, None), ("roll_back", 0, 0)])
@pytest.mark.parametrize("kind", [BudgetSpent, pytest.param(RewardFailed, marks=pytest.mark.slow)])
def test_observation_skipped_by_a_failing_judge_raises_its_alarms_at_the_next_start(
    tmp_path, monkeypatch, kind, response, kept, back_to
):
    recipe = parse(tiny_watched.recipe(tmp_path, limit=1e-9, on_alarm=response))
    observe, failing = Watcher._observe, {2}

    def observe_unless_failing(self, step):
        if step in failing:
            raise kind("the held-out judge cannot score")
        return observe(self, step)

    monkeypatch.setattr(Watcher, "_observe", observe_unless_failing)
    with pytest.raises(kind):
        run(recipe, fresh=False)
    folder = RunFolder(recipe.folder)
    assert checkpoint.latest(folder.checkpoints).name == f"step-{kept:06d}"
    assert folder.read_alarm() is None
    failing.clear()
    with pytest.raises(AlarmStop, match=r"after step 2:\n  watch\.brightness"):
        run(recipe, fresh=False)
    assert (folder.read_alarm()["step"], folder.read_alarm()["back_to"]) == (2, back_to)
    assert [line["step"] for line in folder.read_metrics()] == [1, 2]
    assert checkpoint.latest(folder.checkpoints).name == f"step-{kept:06d}"


def test_diversity_is_logged_even_if_the_budget_is_spent_in_the_observation(watched, tmp_path, monkeypatch):
    recipe = parse(tiny_watched.recipe(tmp_path, limit=1e-9, on_alarm="stop"))
    observe = Watcher._observe

    def observe_within_budget(self, step):
        if step:
            raise BudgetSpent("the budget of the held-out judge is spent")
        return observe(self, step)

    monkeypatch.setattr(Watcher, "_observe", observe_within_budget)
    with pytest.raises(BudgetSpent):
        run(recipe, fresh=False)
    _, alone, _ = watched
    known = [line.get("watch/diversity") for line in RunFolder(recipe.folder).read_metrics()]
    assert known == [line["watch/diversity"] for line in alone.read_metrics()]


@pytest.mark.parametrize("gamed", [True, False])
def test_run_stops_if_the_reward_and_the_held_out_judge_diverge(tmp_path, gamed, monkeypatch):
    document = tiny_watched.recipe(tmp_path, limit=None, on_alarm="stop", reward="tiny_watched:PanelJudge")
    held = {"kind": "import", "class": "tiny_watched:FallingJudge", "combine": {"fidelity": 1}}
    document["watch"] |= {"judge": {"reward": held, "on_alarm": "stop"}, "canaries": None}
    recipe = parse(document)
    tiny_watched.FallingJudge.drop = 0.0
    real = checkpoint.save

    def then_part(*arguments, **options):
        monkeypatch.setenv("JUDGE_SHIFT", "0.2")
        tiny_watched.FallingJudge.drop = 0.3
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        if gamed:
            patch.setattr(checkpoint, "save", then_part)  # the first is saved after the observation of step 2
            with pytest.raises(AlarmStop, match=r"watch.judge: the reward and the held-out judge diverge: since step \d"):
                run(recipe, fresh=False)
        else:
            assert run(recipe, fresh=False) == 0
    folder = RunFolder(recipe.folder)
    last = folder.read_metrics()[-1]
    assert last["step"] == 4
    assert ("watch/alarm/judge" in last) == gamed
    assert (last["watch/heldout_sigmas"] < -3) == gamed
    assert (folder.read_alarm() is not None) == gamed
    assert ("Stopped by an alarm after step 4" in folder.report.read_text()) == gamed
    with closing(sqlite3.connect(ledger_path(recipe.folder, 0))) as ledger:
        told = ledger.execute("SELECT DISTINCT split, scores LIKE '%fidelity%', scores LIKE '%tone%' FROM samples").fetchall()
    assert {split for split, fidelity, _ in told if fidelity} == {"watch"}, "the held-out judge is called only for observations"
    assert not any(fidelity and tone for _, fidelity, tone in told)
    assert not any("fidelity" in name for name in last)


def test_canary_scores_are_never_taken_from_the_ledger(tmp_path, monkeypatch):
    """A judge that changes during the run is detected, although the ledger contains its earlier scores of the same images."""
    recipe = parse(tiny_watched.recipe(tmp_path, limit=None, on_alarm="stop", reward="tiny_watched:PanelJudge"))
    real = checkpoint.save

    def then_drift(*arguments, **options):
        monkeypatch.setenv("JUDGE_SHIFT", "0.3")
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", then_drift)  # the first is saved after the observation of step 2
        with pytest.raises(AlarmStop, match=r"watch.canaries: the judge itself has changed.*tone by 30.0%"):
            run(recipe, fresh=False)
    assert RunFolder(recipe.folder).read_alarm()["step"] == 4


def test_repeated_observations_after_a_resume_call_no_judge(tmp_path, monkeypatch):
    recipe = parse(tiny_watched.recipe(tmp_path, limit=None, on_alarm="note", reward="tiny_watched:PanelJudge"))
    assert run(recipe, fresh=False) == 0
    folder = RunFolder(recipe.folder)
    whole = folder.metrics.read_bytes()
    shutil.rmtree(folder.checkpoints / "step-000004")
    folder.summary.unlink()
    monkeypatch.setenv("JUDGE_SHIFT", "0.3")  # would change the metrics if the judge were called again for step 4
    assert run(recipe, fresh=False) == 0
    assert folder.metrics.read_bytes() == whole


def test_canaries_equal_the_held_out_images_of_step_0_in_every_pixel(watched):
    _, folder, _ = watched
    start = folder.read_samples(0)
    kept = [Image.open(folder.watch / f"canary-{place:03d}.png").tobytes() for place in range(2)]
    shown = [Image.open(folder.samples(0) / line["image"]).tobytes() for line in start if line["set"] == "heldout"]
    assert kept == shown[:2]


@pytest.mark.slow
def test_watch_metrics_of_two_ranks_match_those_of_one_rank(tmp_path, watched):
    recipe = tiny_watched.recipe(tmp_path, limit=0.9, on_alarm="note") | {"steps": 2}
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(recipe))
    command = [python(), "-m", "retouch.cli", "train", str(path)]
    assert run_ranks(command, rank_environments(2), logs=tmp_path / "logs", grace=20.0) == 0
    _, folder, _ = watched
    one, two = (RunFolder(root).read_metrics()[1] for root in (folder.root, tmp_path / recipe["name"]))
    for name in ("proxy", "heldout", "brightness", "detail", "diversity"):
        assert two[f"watch/{name}"] == pytest.approx(one[f"watch/{name}"], rel=1e-4), name


@pytest.mark.parametrize(
    ("watch", "told"),
    [
        ({"judge": {"reward": {"kind": "playground", "combine": {"overall": 1}}}}, "not held out"),
        ({"tasks": 4, "canaries": {"count": 8}}, "watch.canaries.count"),
        ({"judge": {"reward": {"kind": "playground", "combine": {"exact": 0}}}}, "all weights are 0"),
        ({"brightnes": None}, "brightness"),
        ({"detail": {"limit": 0.5}}, "watch.detail.limit"),
        ({"text": {"on_alarm": "explode"}}, "watch.text.on_alarm"),
    ],
)
def test_invalid_watch_settings_raise_when_the_recipe_is_parsed(tmp_path, watch, told):
    document = tiny_watched.recipe(tmp_path, limit=None, on_alarm="note")
    with pytest.raises(ValueError, match=told):
        parse({**document, "watch": watch})


def test_document_of_a_recipe_without_a_watch_has_no_watch_key(tmp_path):
    document = tiny_watched.recipe(tmp_path, limit=None, on_alarm="note")
    del document["watch"]
    assert "watch" not in parse(document).document()
    assert "watch" in parse({**document, "watch": {}}).document()
    assert math.isclose(parse({**document, "watch": {}}).watch.brightness.limit, 0.1)


def test_report_of_a_run_without_a_watch_has_no_watched_section(tmp_path):
    document = tiny_watched.recipe(tmp_path, limit=None, on_alarm="note")
    del document["watch"]
    recipe = parse(document)
    folder = RunFolder(recipe.folder)
    folder.write_recipe(recipe.document())
    assert "Watched" not in write_report(folder.root).read_text()
