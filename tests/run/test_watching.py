"""Runs with a watch: the rules on artificial observations, the diversity of groups, and what whole runs log, stop and repeat."""

import functools
import itertools
import json
import math
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest
import torch
from PIL import Image

import tiny_watched
from retouch.distributed.launching import rank_environments, run_ranks
from retouch.distributed.ranks import Ranks
from retouch.recipe.keys import Canaries, HeldOutJudge, PaintedText, Watch
from retouch.recipe.recipe import parse
from retouch.records.files import write_json
from retouch.records.folder import RunFolder
from retouch.rewards.base import BudgetSpent
from retouch.run import checkpoint
from retouch.run import session as training_session
from retouch.run.hooks import AlarmStop
from retouch.run.ledger import ledger_path
from retouch.run.session import run
from retouch.run.step import RewardFailed
from retouch.run.watch import (
    Observation,
    Watcher,
    canary_shift,
    diversity_ratio,
    find_alarms,
    group_diversity,
    paired_change,
    read_observations,
    since_best,
)
from retouch.types import Batch, Column, Task
from tiny_loop import run_on_threads
from warm_python import python

COLUMNS = {"score": Column(0.0, 10.0), "other": Column(-1.0, 1.0)}
WATCH = Watch(
    judge=HeldOutJudge(reward={"kind": "playground", "combine": {"exact": 1.0}}), canaries=Canaries(count=3), text=PaintedText()
)
QUIET = {"brightness": 0.5, "saturation": 0.4, "detail": 0.02, "preservation": 0.9, "text_to_judge": 0.0}


def look(step, *, proxy=0.0, heldout=0.0, canaries=(5.0, 6.0, 7.0), **means):
    """An observation of eight tasks whose scores scatter the same way around the given means."""
    scatter = torch.tensor([-3.0, -2, -1, 0, 0, 1, 2, 3])
    scores = {"proxy": proxy + scatter, "heldout": heldout + scatter.flip(0)}
    scores |= {name: torch.full((8,), value) for name, value in (QUIET | means).items()}
    tasks = tuple(f"task {k}" for k in range(8))
    return Observation(step, tasks, scores, {"score": torch.tensor(canaries), "other": torch.zeros(3)}, "judge")


def rules(*looks, watch=WATCH, diversity=()):
    return [one.rule for one in find_alarms(watch, looks, diversity, COLUMNS)]


def with_scatter(made, name, amount):
    """The same observation, with a difference for each task; the mean of the differences is 0."""
    wave = amount * torch.tensor([1.0, -1, 1, -1, 1, -1, 1, -1])
    return Observation(made.step, made.tasks, {**made.scores, name: made.scores[name] + wave}, made.canaries)


def test_paired_change_is_measured_in_standard_errors_of_the_differences():
    def change(before, after, sources=()):
        made = [Observation(0, (), {"heldout": torch.tensor(scores)}, sources=sources) for scores in (before, after)]
        return paired_change(*made, "heldout")

    before, after = [1.0, 2, 3, math.nan], [2.0, 4, 6, 9]
    found = change(before, after)
    assert found.mean == 2
    assert found.sigmas == pytest.approx(2 / (1 / math.sqrt(3)))
    assert change(before, before).sigmas == 0
    assert change(before[:3], [score - 1 for score in before[:3]]).sigmas == -math.inf
    assert change(before[:1], after[:1]).sigmas == 0
    assert math.isnan(change(before[3:], after[3:]).mean)
    assert change([1.0, 1, 2, 2], [2.0, 2, 5, 5], ("a", "a", "b", "b")).sigmas == pytest.approx(2.0)  # changes 1 and 3


def test_unchanged_observations_and_missing_scores_of_the_held_out_judge_raise_no_alarm():
    assert rules(look(0)) == []
    assert rules(look(0), look(10), diversity=[0.2] * 40) == []
    silent = look(10, proxy=1)
    silent.scores["heldout"][:] = math.nan
    assert rules(look(0), silent) == []
    assert rules(silent, look(10, proxy=2)) == []
    assert math.isnan(since_best([look(0), silent])[2].mean)


def test_judge_alarm_is_raised_if_the_held_out_judge_falls_and_the_reward_does_not():
    start, fell = look(0), with_scatter(look(10, proxy=1, heldout=-1), "heldout", 0.5)
    (alarm,) = find_alarms(WATCH, [start, fell], [], COLUMNS)
    assert (alarm.rule, alarm.response) == ("judge", "note")
    assert "since step 0" in alarm.text
    assert "fell by 1 (" in alarm.text
    assert "rose by 1" in alarm.text
    assert rules(start, look(10, proxy=1, heldout=1)) == []  # both rise
    assert rules(start, look(10, proxy=-1, heldout=-1)) == []  # both fall: the policy is worse, and the reward shows it
    assert rules(start, look(10, heldout=-1)) == ["judge"]  # the reward does not fall
    assert rules(start, with_scatter(look(10, proxy=1, heldout=-1), "heldout", 3)) == []  # within its noise


def test_judge_alarm_compares_with_the_best_held_out_score():
    looks = [look(0), look(10, proxy=1, heldout=2), look(20, proxy=2, heldout=1)]
    assert rules(*looks) == ["judge"]
    best, proxy, heldout = since_best(looks)
    assert (best.step, proxy.mean, heldout.mean) == (10, 1, -1)
    assert rules(looks[0], looks[2]) == []


def test_canary_alarm_is_raised_if_the_judge_scores_the_same_images_differently():
    start = look(0)
    assert rules(start, look(10, canaries=(5.4, 6.0, 7.0))) == []
    assert rules(start, look(10, canaries=(5.0, 4.0, 9.0))) == ["canaries"]  # same mean, other scores of the images
    assert canary_shift(look(10, canaries=(5.0, 4.0, 9.0)), start, COLUMNS) == ("score", pytest.approx(4 / 3 / 10))
    assert rules(start, look(10, canaries=(math.nan, math.nan, math.nan))) == []
    assert rules(start, look(10, canaries=(math.nan, 6.0, 9.0))) == ["canaries"]


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("brightness", 0.39, 0.61), ("saturation", 0.29, 0.51), ("detail", 0.013, 0.031), ("preservation", 0.79, None)],
)
def test_image_statistics_outside_their_limits_raise_an_alarm(name, low, high):
    start = look(0)
    assert rules(start, look(10, **{name: low})) == [name]
    assert rules(start, look(10, **{name: high or 1.0})) == ([name] if high else [])
    assert rules(start, look(10, **{name: 0.95 * QUIET[name]})) == []
    assert rules(start, look(10, **{name: math.nan})) == []
    assert rules(start, look(10, **{name: low}), watch=Watch(**{name: None})) == []


def test_alarms_are_raised_if_text_to_judge_increases_or_the_diversity_of_groups_drops():
    assert rules(look(0), look(10, text_to_judge=0.25)) == ["text"]
    assert rules(look(0, text_to_judge=0.25), look(10, text_to_judge=0.25)) == []
    shrinking = [0.2] * 10 + [0.15] * 5 + [0.09] * 10
    assert rules(look(0), look(25), diversity=shrinking) == ["diversity"]
    assert rules(look(0), look(25), diversity=[0.2] * 10 + [0.11] * 10) == []
    assert rules(look(0), look(19), diversity=[0.2] * 10 + [0.0] * 9) == []  # not yet two windows
    assert diversity_ratio([math.nan, 0.4, 0.2, 0.1], 1) == pytest.approx(0.25)
    assert math.isnan(diversity_ratio([0.0, 0.0], 1))


def test_observations_are_stored_and_loaded_bitwise(tmp_path):
    assert read_observations(tmp_path, 5) == []
    first, second = look(0, heldout=1 / 3), look(10)
    first.scores["preservation"][:] = math.nan
    for made in (second, first):
        write_json(tmp_path / f"step-{made.step:06d}.json", made.to_json())
    assert [kept.step for kept in read_observations(tmp_path, 10)] == [0, 10]
    assert [kept.step for kept in read_observations(tmp_path, 9)] == [0]
    kept, _ = read_observations(tmp_path, 10)
    assert (kept.tasks, kept.judge) == (first.tasks, "judge")
    for name, column in first.scores.items():
        torch.testing.assert_close(kept.scores[name], column, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(kept.canaries["score"], first.canaries["score"])


def batch(groups, slots):
    ids = sorted(set(groups))
    tasks = tuple(Task(f"t{group}", "") for group in ids)
    return Batch(0, 0, tasks, tuple(ids), tuple(ids.index(group) for group in groups), tuple(slots))


GROUPS, SLOTS = (0, 0, 0, 1, 1, 1, 1), (0, 1, 2, 0, 1, 2, 3)
PICTURES = [Image.fromarray(np.random.default_rng(seed).integers(0, 256, (32, 32, 3), dtype=np.uint8)) for seed in range(7)]


def pairs(pictures, groups):
    """The root mean square over all pairs within groups."""
    found = []
    for (one, left), (other, right) in itertools.combinations(zip(groups, pictures, strict=True), 2):
        if one == other and left is not None and right is not None:
            apart = (np.asarray(left, dtype=float) - np.asarray(right, dtype=float)) / 255
            found.append((apart**2).mean())
    return math.sqrt(np.mean(found))


def test_group_diversity_equals_the_rms_distance_of_pairs_within_groups():
    """Also of groups that span ranks."""
    whole = batch(GROUPS, SLOTS)
    for shown in (PICTURES, [None, *PICTURES[1:5], None, PICTURES[6]]):
        assert group_diversity(whole, shown, Ranks()) == pytest.approx(pairs(shown, GROUPS), rel=1e-9)
    assert group_diversity(whole, [PICTURES[0]] * 7, Ranks()) == pytest.approx(0, abs=1e-7)
    assert math.isnan(group_diversity(whole, [None] * 7, Ranks()))
    assert math.isnan(group_diversity(batch((0, 1), (0, 0)), PICTURES[:2], Ranks()))

    def one(ranks):
        rows = slice(0, 4) if ranks.rank == 0 else slice(4, 7)
        return group_diversity(batch(GROUPS[rows], SLOTS[rows]), PICTURES[rows], ranks)

    found = run_on_threads(2, one)
    assert found[0] == found[1] == pytest.approx(pairs(PICTURES, GROUPS), rel=1e-9)
    assert torch.get_default_dtype() == torch.float32


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """Four steps, an observation every two steps, and a rule that stops the run at step 2."""
    recipe = parse(tiny_watched.recipe(tmp_path_factory.mktemp("runs"), limit=1e-9, on_alarm="stop"))
    with pytest.raises(AlarmStop) as error:
        run(recipe, fresh=False)
    return recipe, RunFolder(recipe.folder), str(error.value)


def test_watched_run_logs_its_measures_and_alarms_and_stops_with_a_checkpoint(watched):
    """The canaries are the held-out images of step 0 in every pixel."""
    _, folder, told = watched
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
    kept = [Image.open(folder.watch / f"canary-{place:03d}.png").tobytes() for place in range(2)]
    heldout = [line["image"] for line in folder.read_samples(0) if line["set"] == "heldout"]
    assert kept == [Image.open(folder.samples(0) / name).tobytes() for name in heldout[:2]]

    for text in ("stopped by an alarm after step 2", "watch.brightness", "The checkpoint of step 2 is saved"):
        assert text in told
    assert checkpoint.latest(folder.checkpoints).name == "step-000002"
    assert folder.read_alarm()["back_to"] is None
    assert not folder.summary.exists()
    page = folder.report.read_text()
    for text in ("Stopped by an alarm after step 2", "brightness at step 2", "<h2>Watched</h2>"):
        assert text in page


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
    made = functools.partial(tiny_watched.recipe, limit=1e-9)
    recipe = parse({**made(tmp_path, on_alarm="roll_back"), "steps": 2})
    with pytest.raises(AlarmStop, match="back in the state of step 0"):
        run(recipe, fresh=False)
    folder = RunFolder(recipe.folder)
    assert checkpoint.latest(folder.checkpoints).name == "step-000000"
    assert [line["step"] for line in folder.read_metrics()] == [1, 2], "later records are kept for inspection"
    assert folder.read_alarm() == {"step": 2, "back_to": 0, "alarms": folder.read_alarm()["alarms"]}
    with pytest.raises(AlarmStop, match="back in the state of step 0"):
        run(recipe, fresh=False)
    noted = parse({**made(tmp_path, on_alarm="note"), "steps": 2})
    assert run(noted, fresh=False) == 0
    assert folder.read_alarm() is None
    alone = parse({**made(tmp_path / "alone", on_alarm="note"), "steps": 2})
    assert run(alone, fresh=False) == 0
    assert folder.metrics.read_bytes() == RunFolder(alone.folder).metrics.read_bytes()
    assert "watch/alarm/brightness" in folder.read_metrics()[1]


@pytest.mark.parametrize("kind", [BudgetSpent, pytest.param(RewardFailed, marks=pytest.mark.slow)])
def test_observation_skipped_by_a_failing_judge_raises_its_alarms_at_the_next_start(watched, tmp_path, monkeypatch, kind):
    recipe = parse({**tiny_watched.recipe(tmp_path, limit=1e-9, on_alarm="roll_back"), "steps": 2})
    observe, failing = Watcher._observe, {2}

    def observe_unless_failing(self, step):
        if step in failing:
            raise kind("the held-out judge cannot score")
        return observe(self, step)

    monkeypatch.setattr(Watcher, "_observe", observe_unless_failing)
    with pytest.raises(kind):
        run(recipe, fresh=False)
    folder = RunFolder(recipe.folder)
    assert folder.read_alarm() is None
    known = [line.get("watch/diversity") for line in folder.read_metrics()]
    assert known == [line["watch/diversity"] for line in watched[1].read_metrics()], "the images of the step are measured"
    failing.clear()
    with pytest.raises(AlarmStop, match=r"after step 2:\n  watch\.brightness"):
        run(recipe, fresh=False)
    assert (folder.read_alarm()["step"], folder.read_alarm()["back_to"]) == (2, 0)
    assert [line["step"] for line in folder.read_metrics()] == [1, 2]
    assert checkpoint.latest(folder.checkpoints).name == "step-000000"


def test_run_stops_if_the_reward_and_the_held_out_judge_diverge(tmp_path, monkeypatch):
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
        patch.setattr(checkpoint, "save", then_part)  # the first is saved after the observation of step 2
        with pytest.raises(AlarmStop, match=r"watch.judge: the reward and the held-out judge diverge: since step \d"):
            run(recipe, fresh=False)
    folder = RunFolder(recipe.folder)
    last = folder.read_metrics()[-1]
    assert last["step"] == 4
    assert "watch/alarm/judge" in last
    assert last["watch/heldout_sigmas"] < -3
    assert folder.read_alarm() is not None
    assert "Stopped by an alarm after step 4" in folder.report.read_text()
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_watch_metrics_of_two_ranks_match_those_of_one_rank(tmp_path):
    found = []
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        # Hardly learns: the sum of two ranks' gradients is rounded differently, and training makes the difference grow.
        recipe = tiny_watched.recipe(out, limit=0.9, on_alarm="note") | {"steps": 2, "learning_rate": 1e-12}
        path = tmp_path / f"{ranks}.json"
        path.write_text(json.dumps(recipe))
        command = [python(), "-m", "retouch.cli", "train", str(path)]
        assert run_ranks(command, rank_environments(ranks), logs=tmp_path / "logs", grace=20.0) == 0
        found.append(RunFolder(out / recipe["name"]).read_metrics()[1])
    one, two = found
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
