"""The league: statistics by hand, budgets against counted calls of the model, and a queue that survives killed workers."""

import importlib
import math
import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from retouch.core import intervals
from retouch.distributed.ranks import Ranks
from retouch.recipe.recipe import parse
from retouch.rewards.judging import ScoredBatch
from retouch.run.build import assemble
from retouch.run.step import train
from retouch.types import Sample, Task

FOLDER = Path(__file__).parents[2] / "measurements" / "league"
MODULES = (
    *("agreement", "budget", "contestants", "league_curves", "league_page", "noisy_judges", "ranking", "runs", "scaling_points"),
    "worlds",
)
QUEUE = ("tournament", "league")


@pytest.fixture(autouse=True)
def _intervals_of_few_tasks(monkeypatch):
    monkeypatch.setattr(intervals, "FEWEST", 2)  # the runs of these tests have three tasks


@pytest.fixture(scope="module")
def league():
    """The modules of the league that need no Optuna."""
    yield from imported(MODULES)


@pytest.fixture(scope="module")
def queue():
    """The same modules and those that need Optuna."""
    pytest.importorskip("optuna")
    yield from imported((*MODULES, *QUEUE))


def imported(names):
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in names})
    finally:
        sys.path.remove(str(FOLDER))
        for name in (*MODULES, *QUEUE):
            sys.modules.pop(name, None)


# Statistics


def test_statistics_equal_values_by_hand(league):
    ranking = league.ranking
    found = ranking.interquartile_mean(np.array([[90.0, 2, 3], [1, 4, 5], [-80, 6, 7]]))  # without a quarter at each end
    assert found == pytest.approx((2 + 3 + 4 + 5 + 6) / 5)
    assert ranking.interquartile_mean(np.array([[1.0, 5.0]])) == 3
    better = ranking.probability_of_improvement(np.array([[1.0], [3.0]]), np.array([[1.0], [2.0]]))
    assert better == (0.5 + 0 + 1 + 1) / 4  # a tie counts one half
    assert ranking.probability_of_improvement(np.array([[1.0, 0.0]]), np.array([[0.0, 1.0]])) == 0.5
    curve = [[0, 2.0], [100, 4.0], [200, 3.0], [300, 8.0]]
    times = [ranking.time_to(curve, share, ceiling=10) for share in (0.25, 0.5, 0.9)]
    assert times == [100, pytest.approx(200 + 100 * 3 / 5), None]
    correlation = league.agreement.rank_correlation
    first = np.array([0.1, 0.5, 0.2, 0.9])
    assert correlation(first, 10 * first**3) == pytest.approx(1.0)
    assert correlation(first, -first) == pytest.approx(-1.0)
    # Ranks 1, 3, 2, 4 and 2, 1, 3, 4: the squared differences sum to 1 + 4 + 1 + 0, and 1 - 6 * 6 / (4 * 15) = 0.4.
    assert correlation(first, np.array([2.0, 1.0, 3.0, 4.0])) == pytest.approx(0.4)
    # Ranks 1, 2.5, 2.5 and 1, 2, 3: the correlation is 1.5 / sqrt(1.5 * 2).
    assert correlation(np.array([1.0, 2.0, 2.0]), np.array([1.0, 2.0, 3.0])) == pytest.approx(1.5 / math.sqrt(3))
    assert math.isnan(correlation(np.ones(3), np.array([1.0, 2.0, 3.0])))


def record(after, **more):
    """A finished final run on two strata, of two tasks and one."""
    before = [0.0, 4.0, 5.0]
    curve = [[0, sum(before) / 3], [100, sum(after) / 3]]
    base = {"ended": "finished", "tasks": [2, 1], "before": before, "ceiling": 10.0, "after": after, "curve": curve}
    return {**base, "stage": "final", **more}


def test_shares_of_the_gap_are_those_of_each_seed_and_stratum(league):
    found = league.ranking.Finals.of("a", [record([2.0, 10.0, 5.0]), record([0.0, 4.0, 10.0])])
    assert found.shares() == pytest.approx(np.array([[(6 - 2) / 8, 0.0], [0.0, 1.0]]))
    chosen = league.ranking.shares_of([found, found], [np.array([1, 1]), np.array([0])])
    assert [each[1] for each in chosen] == pytest.approx(np.array([[0.0, 1.0]] * 2))
    assert league.runs.share_of_gap(record([2.0, 10.0, 5.0])) == pytest.approx((17 - 9) / (30 - 9))
    error = {"ended": "ValueError: no"}
    assert league.runs.share_of_gap(error) == league.runs.FLOOR
    assert [league.runs.diverged(run) for run in (error, record([0.0, 0.0, 5.0]), record([0.0, 4.0, 4.0]))] == [True, True, False]


def test_the_better_contestant_ranks_first_and_intervals_contain_the_estimates(league):
    good, bad = [record([4.0, 8.0, 8.0]), record([4.0, 9.0, 9.0])], [record([1.0, 5.0, 6.0]), record([0.0, 5.0, 5.0])]
    rows = league.ranking.ranking([league.ranking.Finals.of(name, runs) for name, runs in (("bad", bad), ("good", good))])
    assert [row.name for row in rows] == ["good", "bad"]
    assert [row.better for row in rows] == [1.0, 0.0]
    assert all(row.interval.low <= row.score <= row.interval.high for row in rows)
    assert rows[0].interval.low > rows[1].interval.high


def test_the_interval_of_a_mean_curve_equals_a_loop_over_resamples(league):
    runs = [record([2.0, 10.0, 5.0]), record([0.0, 4.0, 10.0]), record([1.0, 6.0, 7.0])]
    found = league.ranking.mean_interval(league.ranking.Finals.of("a", runs))
    drawn, count = np.random.default_rng(0), league.ranking.RESAMPLES
    first, second = drawn.integers(2, size=(count, 2)), drawn.integers(1, size=(count, 1))
    seeds, estimates = drawn.integers(3, size=(count, 3)), []
    for k in range(count):
        rows = [*first[k], *(2 + second[k])]
        base = np.mean([runs[0]["before"][row] for row in rows])
        after = np.mean([np.mean([runs[seed]["after"][row] for row in rows]) for seed in seeds[k]])
        estimates.append((after - base) / (10.0 - base))
    wanted = league.ranking.bootstrap_interval(np.array(estimates).round(9), clusters=3)
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))
    mean = np.mean([league.runs.share_of_gap(run) for run in runs])
    assert found.low < mean < found.high


# Recipes and budgets


def settings_of(contestant):
    return {knob.name: knob.default for knob in contestant.knobs}


def test_tuning_uses_no_test_tasks_and_final_runs_use_other_seeds(league):
    for world in league.worlds.WORLDS:
        contestant = world.contestants[0]
        splits = {}
        for stage in ("tuning", "final"):
            recipe = league.worlds.recipe_of(world, contestant, settings_of(contestant), stage=stage, seed=7)
            splits[stage] = recipe.eval_data().split
            assert recipe.data.split == "train"
            assert recipe.seed == 7
        assert splits == {"tuning": "validation", "final": "test"}
    seeds = league.worlds.FIRST_SEED
    assert seeds["final"] > seeds["tuning"]


@pytest.mark.parametrize("family", ["editor-exact", "tokens-exact"])
def test_every_contestants_steps_fit_into_the_budget_and_one_more_does_not(league, family):
    world = next(world for world in league.worlds.WORLDS if world.name == family)
    for contestant in world.contestants:
        recipe = league.worlds.recipe_of(world, contestant, settings_of(contestant), stage="final", seed=101)
        assert league.budget.spent(recipe, recipe.steps) <= world.budget < league.budget.spent(recipe, recipe.steps + 1)
        assert 3 <= math.ceil(recipe.steps / recipe.eval.every) <= 4


def test_every_knob_and_the_device_change_the_recipe(league):
    world, digest = league.worlds.EDITOR, league.worlds.digest
    for contestant in world.contestants:
        given = settings_of(contestant)
        before = league.worlds.recipe_of(world, contestant, given, stage="tuning", seed=0)
        for knob in contestant.knobs:
            other = next((choice for choice in knob.choices if choice != knob.default), knob.high)
            changed = league.worlds.recipe_of(world, contestant, {**given, knob.name: other}, stage="tuning", seed=0)
            assert digest(changed) != digest(before), knob.name
    on_gpu = league.worlds.recipe_of(world, contestant, given, device="cuda", stage="tuning", seed=0)
    assert (before.device, on_gpu.device) == ("cpu", "cuda")
    assert {**before.document(), "device": "cuda"} == on_gpu.document()
    assert digest(before) != digest(on_gpu)


def test_a_student_with_few_steps_is_measured_against_the_base_model_of_all_runs(league, tmp_path, monkeypatch):
    world = league.worlds.EDITOR
    raft, student = (world.contestant(name) for name in ("RAFT", "best-of-n distillation"))
    recipes = [league.worlds.recipe_of(world, each, settings_of(each), stage="final", seed=101) for each in (raft, student)]
    assert league.worlds.untrained(world, recipes[0]) is None
    base = league.worlds.untrained(world, recipes[1])
    assert (recipes[0].eval.num_steps, recipes[1].eval.num_steps, base.eval.num_steps) == (None, 2, None)
    assert base.rollout.num_steps == recipes[0].rollout.num_steps == recipes[1].rollout.num_steps == 6
    assert (base.steps, base.eval.split, base.eval.seed) == (1, "test", recipes[1].eval.seed)
    student_run = record([4.0, 8.0, 8.0], preservation=[9.0, 9.5])
    base_run = {**record([0.0, 0.0, 0.0], preservation=[9.8, 9.7]), "before": [1.0, 5.0, 6.0], "curve": [[0, 4.0], [1, 0.0]]}
    ran = []

    def run(recipe, folder, *, world):
        ran.append(recipe.eval.num_steps)
        return dict(student_run) if recipe.eval.num_steps == 2 else dict(base_run)

    monkeypatch.setattr(league.runs, "train_alone", run)
    made = league.runs.train(recipes[1], tmp_path, world=world)
    assert ran == [2, None]
    assert made["few_steps"] == {"steps": 2, "standard": 6, "base": 3.0}
    assert (made["before"], made["after"]) == ([1.0, 5.0, 6.0], [4.0, 8.0, 8.0])
    assert made["curve"] == [[0, 4.0], [100, 20 / 3]]
    assert made["preservation"] == [9.8, 9.5]
    assert league.runs.share_of_gap(made) == pytest.approx((20 / 3 - 4) / (10 - 4))
    assert league.runs.train(recipes[0], tmp_path, world=world) == base_run, "a run with the world's steps is not run twice"
    text = "\n".join(league.league_page.remarks({"student": [made], "other": [base_run]}))
    assert "student is evaluated with 2 denoising steps, the other algorithms with 6." in text
    assert "with 2 steps has a share of -0.17." in text
    assert "other is" not in text


def counted(league, world, contestant, **changes):
    """Network evaluations of a small step: as the budget computes them, and counted from the calls of the trained network."""
    recipe = league.worlds.recipe_of(world, contestant, settings_of(contestant), stage="tuning", seed=0)
    refill = recipe.rollout.refill is not None
    groups = {"tasks_per_step": 3 if refill else 2, "group_size": 4}
    small = {"tasks_per_step": 8, "group_size": 1} if contestant.tasks_for_groups else groups
    recipe = parse({**recipe.document(), **small, "steps": 1, **changes})
    parts = assemble(recipe, Ranks())
    calls = []

    def count(module, args, kwargs):
        rows = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        calls.append(len(rows) * (league.budget.TRAINED if torch.is_grad_enabled() else 1))

    def judge(batch, samples):
        future: Future[ScoredBatch] = Future()
        rewards = torch.arange(float(len(samples)))  # all different, so that every group has a best and a worst sample
        if refill:
            rewards[:4] = 0  # a third of the groups, again in every round
        future.set_result(ScoredBatch(dict.fromkeys(parts.judge.combination.columns, rewards), rewards, 0))
        return future

    hook = parts.model.module.register_forward_pre_hook(count, with_kwargs=True)
    try:
        parts.begin(0)
        run, phase = parts.phase(0, stepper=parts.stepper(), judge=judge)
        next(iter(train(run, phase, start=0)))
    finally:
        hook.remove()
        parts.judge.close()
    return league.budget.evaluations(recipe, 0), sum(calls)


@pytest.mark.slow
def test_computed_network_evaluations_equal_the_counted_calls(league):
    world = league.worlds.EDITOR
    found = {each.name: counted(league, world, each) for each in world.contestants}
    assert {name: pair for name, pair in found.items() if pair[0] != pair[1]} == {}


# Runs


def test_an_objective_without_an_entry_in_the_cost_table_raises(league, monkeypatch):
    monkeypatch.delitem(league.budget.UPDATE, "policy_gradient")
    world = league.worlds.EDITOR
    with pytest.raises(ValueError, match="UPDATE what an update of 'policy_gradient' costs"):
        league.worlds.recipe_of(world, world.contestants[0], settings_of(world.contestants[0]), stage="tuning", seed=0)


def test_a_run_that_fails_in_training_is_a_result_and_one_that_never_starts_raises(league, tmp_path, monkeypatch):
    world, contestant = league.worlds.EDITOR, league.worlds.EDITOR.contestants[0]
    recipe = league.worlds.recipe_of(world, contestant, settings_of(contestant), stage="tuning", seed=0)

    def command(words, *, trains=True, code=1):
        if trains:
            (tmp_path / "run" / "run").mkdir()
            (tmp_path / "run" / "run" / "metrics.jsonl").write_text('{}\n{"refill/samples": 56.0}\n')
        os.write(2, b"first line\nValueError: the loss is NaN\n")
        return code

    monkeypatch.setattr(league.runs, "main", command)
    made = league.runs.train(recipe, tmp_path / "run", world=world)
    assert made["ended"] == "ValueError: the loss is NaN"
    assert (made["steps"], made["images"]) == (recipe.steps, 48 + 56)  # of the two steps that it made
    for wrong in ({"trains": False}, {"code": 130}):
        monkeypatch.setattr(league.runs, "main", partial(command, **wrong))
        with pytest.raises(RuntimeError, match="the loss is NaN"):
            league.runs.train(recipe, tmp_path / "run", world=world)


# The noisy judge


def test_noisy_judge_scores_do_not_depend_on_the_batch_and_some_are_missing(league):
    samples = [Sample(Task(id=str(k), instruction="x"), Image.new("RGB", (4, 4), (k, 0, 0))) for k in range(400)]
    exact = torch.full((400,), 5.0)
    how = {"high": 10.0, "noise": 0.25, "levels": 6, "missing": 0.05}
    found = league.noisy_judges.judged(samples, exact, **how)
    again = league.noisy_judges.judged(samples[::-1], exact, **how).flip(0)
    assert torch.equal(found.nan_to_num(-1), again.nan_to_num(-1))
    known = found[~found.isnan()]
    assert set(known.tolist()) <= {0.0, 2.0, 4.0, 6.0, 8.0, 10.0}
    assert 0.02 < found.isnan().float().mean() < 0.08
    assert abs(known.mean() - 5.0) < 0.4
    assert 2.0 < known.std() < 3.0


# The page


@pytest.mark.slow
def test_the_page_matches_the_stored_runs_and_every_stored_file_belongs_to_a_row(league):
    page, kept = league.league_page, FOLDER / "kept"
    assert page.PAGE.read_text(encoding="utf-8") == page.page(kept)
    for world in league.worlds.WORLDS:
        if figure := page.curves(world, page.records(kept, world)):
            assert (page.PICTURES / f"league-{world.name}.svg").read_text() == figure
    rows = [(world, each.name) for world in league.worlds.WORLDS for each in world.contestants]
    rows += [(point.world, point.contestant.name) for point in league.scaling_points.every_point()]
    assert set(kept.rglob("*.json")) <= {league.runs.place(kept, *row) for row in rows}


def test_a_world_with_final_runs_has_a_ranking_a_figure_and_all_settings(league, tmp_path):
    world, page = league.worlds.EDITOR, league.league_page
    cost = {"steps": 9, "images": 432, "cpu_seconds": 20.0, "preservation": [9.9, 9.7]}
    for contestant, gain in (("Flow-GRPO", 1.0), ("Flow-CPS", 2.0)):
        good, bad = {"learning rate": 1e-3}, {"learning rate": 1e-4}
        found = {
            "a": record([gain, 4.0, 5.0], stage="tuning", number=0, settings=bad, **cost),
            "b": record([4.0, 4.0 + gain, 5.0], stage="tuning", number=1, settings=good, **cost),
            "c": {"stage": "tuning", "number": 2, "settings": {"learning rate": 9.0}, "ended": "ValueError: NaN", **cost},
            "d": record([4.0, 4.0 + gain, 5.0 + gain], seed=101, settings=good, **cost),
            "e": record([0.0, 4.0, 5.0], seed=102, settings=bad, **cost),  # of settings that are no longer the best
        }
        league.runs.keep(tmp_path, world, contestant, found)
    text = page.page(tmp_path)
    assert "each algorithm in the table has had 3 trials and 1 final run." in text
    rows = [line for line in text.splitlines() if line.startswith(("| Flow-CPS | arXiv", "| Flow-GRPO | arXiv"))]
    assert [row.split(" | ")[0] for row in rows] == ["| Flow-CPS", "| Flow-GRPO"]
    shares = (3 / 8, 2 / 5)  # of the two strata
    assert rows[0].split(" | ")[2:4] == ["1", f"{sum(shares) / 2:.2f} ({rows[0].partition('(')[2].partition(')')[0]})"]
    assert " | 1 of 3 | " in rows[0]
    assert "learning rate 0.001: **" in text
    assert "learning rate 9: error (ValueError: NaN)" in text
    figure = page.curves(world, page.records(tmp_path, world))
    assert figure.count("<polyline") == 2
    assert figure.count("<polygon") == 0
    assert "The best 2 are thick and have a bar at the end of the line: the 95 % interval" in text


def test_the_best_curves_have_bands_if_all_evaluations_have_scores_of_tasks(league, tmp_path):
    world, page = league.worlds.EDITOR, league.league_page
    given, cost = {"learning rate": 1e-3}, {"steps": 9, "images": 432, "cpu_seconds": 20.0, "preservation": [9.9, 9.7]}
    curve, between = [[0, 3.0], [50, 4.0], [100, 6.0]], [[1.0, 5.0, 6.0]]
    names = [each.name for each in world.contestants[: page.WITH_INTERVAL + 1]]
    for place, name in enumerate(names):
        final = record([4.0, 7.0, 7.0], seed=101, settings=given, **cost) | {"curve": [*curve[:2], [100, 6.0 - place / 10]]}
        trial = record([4.0, 4.0, 5.0], stage="tuning", number=0, settings=given, **cost)
        league.runs.keep(tmp_path, world, name, {"a": trial, "b": final | ({} if place == 0 else {"between": between})})
    found = page.records(tmp_path, world)
    runs = {name: page.completed(known) for name, known in found.items()}
    points = page.curve_intervals(names[1], runs[names[1]])
    assert [x for x, _, _ in points] == [0, 50, 100]
    assert points[0] == (0, 0, 0)
    middle = league.ranking.mean_interval(league.ranking.Finals.of("b", [{**runs[names[1]][0], "after": between[0]}]))
    assert points[1] == (50, middle.low, middle.high)
    assert [x for x, _, _ in page.curve_intervals(names[0], runs[names[0]])] == [100]
    figure = page.curves(world, found)
    assert figure.count("<polygon") == page.WITH_INTERVAL - 1, "the best one has a bar, and the worst one nothing"
    assert figure.count(f'stroke-width="{league.league_curves.THIN:g}" stroke-opacity') == 1
    assert f"have a band, or a bar at the end of the line ({names[0]}): the 95 % interval" in page.page(tmp_path)


def test_worlds_are_compared_over_the_algorithms_that_both_have(league):
    names = [f"A{k}" for k in range(8)]
    one = {name: float(k) for k, name in enumerate(names)} | {"only here": 9.0}
    other = {name: -float(k) for k, name in enumerate(names)}
    value, interval = league.agreement.agreement(one, other)
    assert (value, interval.low, interval.high) == pytest.approx((-1.0, -1.0, -1.0))
    assert league.agreement.agreement(one, {"A1": 0.0, "A2": 1.0}) is None
    text = "\n".join(league.agreement.section([("One", one), ("Other", other), ("Empty", {})]))
    assert "| One; Other | -1.00 (-1.00 to -1.00) |" in text
    assert "Empty" not in text
    assert "| only here | 1 | - |" in text
    assert "| A7 | 2 | 8 |" in text
    assert "In the first third of each of these worlds: none." in text
    same = "\n".join(league.agreement.section([("One", one), ("Same", {name: 2 * score for name, score in one.items()})]))
    assert "In the first third of each of these worlds: only here; A7; A6." in same
    assert "In the last third of each of these worlds: A2; A1; A0." in same
    assert not [*league.agreement.section([("One", one), ("Empty", {})])]
    wide = {f"A{k}": float(k) for k in range(16)}
    of_tokens = {f"A{k}": float(k) for k in range(6)}
    assert league.agreement.agreement(wide, of_tokens) is None, "less than half of the algorithms are in both worlds"
    text = "\n".join(league.agreement.section([("Wide", wide), ("Tokens", of_tokens), ("Other", wide)]))
    assert "Tokens" not in text
    assert "| Wide; Other | 1.00 (1.00 to 1.00) |" in text


# The queue


def small(queue, count=2):
    return replace(queue.worlds.EDITOR, contestants=queue.worlds.EDITOR.contestants[:count])


def fake_training(made, **more):
    """Makes a record without training, and remembers the recipe."""

    def make(recipe, folder, *, world):
        made.append(recipe)
        found = {**record([1.0, 5.0, 6.0 + recipe.learning_rate], cpu_seconds=1.0), **more}
        del found["stage"]  # the queue knows it
        return found

    return make


def test_every_trial_and_seed_is_run_once_and_nothing_twice(queue, tmp_path):
    made: list[Any] = []
    world, plan = small(queue), queue.tournament.Plan(trials=2, seeds=2)
    places = {"folder": tmp_path / "queue", "kept": tmp_path / "kept"}
    assert queue.league.work([world], plan, **places, train=fake_training(made)) == 8
    splits = [recipe.eval.split for recipe in made]
    assert splits == ["validation"] * 4 + ["test"] * 4
    assert {recipe.seed for recipe in made[:4]} == {0}
    assert {recipe.seed for recipe in made[4:]} == {101, 102}
    # The first trial has the defaults, and the second the same learning rate for everyone; final runs have the best.
    rates = [recipe.learning_rate for recipe in made]
    assert rates[0] == rates[1] == 3e-4
    assert rates[2] == rates[3] != 3e-4
    assert set(rates[4:]) == {max(rates[:4])}
    # Nothing is left to run, and a new queue uses the results of the stored runs.
    assert queue.league.work([world], plan, **places, train=fake_training(made)) == 0
    anew = {**places, "folder": tmp_path / "another"}
    assert queue.league.work([world], plan, **anew, train=fake_training(made)) == 8
    assert len(made) == 8


def test_a_repeated_run_adds_the_scores_during_training_to_the_same_record_only(queue, tmp_path, capsys):
    world, plan, kept = small(queue, 1), queue.tournament.Plan(trials=1, seeds=1), tmp_path / "kept"
    name, made = world.contestants[0].name, []
    queue.league.work([world], plan, folder=tmp_path / "0", kept=kept, train=fake_training(made))
    first = queue.runs.read(kept, world, name)
    again = {"kept": kept, "again": True}
    other = fake_training(made, between=[[0.0]], after=[9.0, 9.0, 9.0], cpu_seconds=2.0)
    queue.league.work([world], plan, folder=tmp_path / "1", train=other, **again)
    assert queue.runs.read(kept, world, name) == first
    assert "ended with other scores; the first record is kept" in capsys.readouterr().out
    queue.league.work([world], plan, folder=tmp_path / "2", train=fake_training(made, between=[[0.0]], cpu_seconds=2.0), **again)
    assert len(made) == 4, "the trial is run once, and the final run each time"
    (trial, final), (old_trial, old_final) = (list(runs.values()) for runs in (queue.runs.read(kept, world, name), first))
    assert (trial, final) == (old_trial, old_final | {"between": [[0.0]]})
    queue.league.work([world], plan, folder=tmp_path / "3", train=other, **again)
    assert len(made) == 4, "nothing is lacking any more"


def test_runs_on_a_gpu_have_records_and_a_page_of_their_own(queue, tmp_path, monkeypatch):
    made: list[Any] = []
    train = fake_training(made, steps=9, images=432, preservation=[9.9, 9.7])
    monkeypatch.setattr(queue.league, "work", partial(queue.league.work, train=train))
    monkeypatch.setattr(queue.league, "ROOT", tmp_path)
    monkeypatch.setattr(queue.league, "FOLDER", tmp_path / "runs" / "league")
    words = ["--worlds", "editor-exact", "--contestants", "Flow-CPS", "--trials", "1", "--seeds", "1", "--device", "cuda"]
    monkeypatch.setattr(sys, "argv", ["league.py", *words])
    stored = FOLDER / "kept" / "editor-exact" / "flow-cps.json"
    before = stored.read_bytes()
    queue.league.main()
    assert [recipe.device for recipe in made] == ["cuda", "cuda"]
    own = tmp_path / "runs" / "league-cuda"
    assert len(queue.runs.read(own / "kept", queue.worlds.EDITOR, "Flow-CPS")) == 2
    assert "| Flow-CPS | arXiv 2509.05952 | 1 |" in (own / "league.md").read_text()
    assert (own / "pictures" / "league-editor-exact.svg").exists()
    assert stored.read_bytes() == before


def test_two_workers_never_have_the_same_trial(queue, tmp_path, monkeypatch):
    world, plan = small(queue), queue.tournament.Plan(trials=2, seeds=1)
    with queue.tournament.Queue(tmp_path) as one:
        monkeypatch.setattr(queue.tournament.os, "getpid", lambda: -1)  # so that the second one has a name of its own
        with queue.tournament.Queue(tmp_path) as other:
            jobs = [worker.claim([world], plan) for worker in (one, other, other, one, one, other)]
    assert [job is None for job in jobs] == [False] * 4 + [True] * 2
    taken = {(job.contestant.name, job.number) for job in jobs if job is not None}
    assert taken == {(each.name, number) for each in world.contestants for number in range(2)}


WORKER = """
import sys, time
from dataclasses import replace
from functools import partial
from pathlib import Path
import league, tournament, worlds
world = replace(worlds.EDITOR, contestants=worlds.EDITOR.contestants[:1])
def train(recipe, folder, *, world):
    print(recipe.learning_rate, flush=True)
    time.sleep(600)
league.work([world], tournament.Plan(2, 1), folder=Path(sys.argv[1]), kept=Path(sys.argv[2]), train=train)
"""


def test_the_trial_of_a_killed_worker_is_run_again(queue, tmp_path):
    paths = os.pathsep.join([str(FOLDER), *sys.path])
    arguments = [str(tmp_path / "queue"), str(tmp_path / "kept")]
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, *arguments], env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, text=True
    )
    try:
        first = float(worker.stdout.readline())
        world, plan = small(queue, 1), queue.tournament.Plan(trials=2, seeds=1)
        with queue.tournament.Queue(tmp_path / "queue") as mine:
            second = mine.claim([world], plan)
            assert second.number == 1  # the first trial is running
            assert mine.claim([world], plan) is None
            worker.send_signal(signal.SIGKILL)
            worker.wait()
            again = mine.claim([world], plan)
            assert again.number == 0
            assert again.settings["learning rate"] == first
    finally:
        worker.kill()
        worker.wait()
        if worker.stdout is not None:
            worker.stdout.close()
