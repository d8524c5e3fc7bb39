"""A run's ``eval.suites``: the same results as `retouch bench`, unchanged training, and an alarm if a result falls."""

import json
import math

import pytest

import suite_rows
from html_check import read
from judge_double import KEY, Double
from rank_commands import on_ranks
from retouch.distributed.ranks import Ranks
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.rewards.base import BudgetSpent
from retouch.run import checkpoint
from retouch.run.hooks import AlarmStop
from retouch.run.session import run
from retouch_bench import run_suites as suites
from retouch_bench.results import BenchmarkResult, ImageRow, make_table
from retouch_bench.run_suites import Fall, RunSuites, fall, open_suites
from retouch_bench.running import run as bench
from retouch_view.report.page import write_report
from tiny_recipes import SMALL

ABOUT = {"title": "", "model": {"model": ""}, "judge": {"name": "own"}, "items": 6, "size": 256, "seed": 0}
ABOUT |= {"missing": [], "broken": []}
SUITE = {"suite": "playground", "every": 1, "subset": 6, "options": {"tasks": 12}}


def small(out, *suites, **changes):
    suites = {"suites": list(suites)} if suites else {}
    return parse({**SMALL, "out": str(out), **changes, "eval": {"tasks": 4, "audit": False, **suites}})


@pytest.mark.slow
def test_suite_results_equal_those_of_the_bench_command_and_do_not_change_training(tmp_path):
    made, plain = small(tmp_path, SUITE), small(tmp_path / "plain")
    assert run(made, fresh=False) == run(plain, fresh=False) == 0
    folder = RunFolder(made.folder)
    lines = folder.read_suites()
    assert [(line["step"], line["suite"], line["headline"], line["missing"]) for line in lines] == [
        (step, "playground", "overall", 0) for step in (0, 1, 2)
    ]
    metrics, without = folder.read_metrics(), RunFolder(plain.folder).read_metrics()
    assert [line.pop("suite/playground") for line in metrics] == [line["table"]["all"]["overall"]["mean"] for line in lines[1:]]
    assert metrics == without
    result = bench("playground", model=made.folder, subset=6, options={"tasks": 12}, out=tmp_path / "bench")
    assert result.table == lines[-1]["table"]
    page = write_report(made.folder).read_text()
    assert "Benchmarks" in read(page).words
    reward, benchmarks, scores = (page.index(f"<h2>{title}") for title in ("Reward", "Benchmarks", "Held-out scores"))
    assert reward < benchmarks < scores
    assert "data-chart" in page[benchmarks:scores]
    assert folder.truncate_after(1) == []
    assert [line["step"] for line in folder.read_suites()] == [0, 1]
    assert sorted(path.name for path in (made.folder / "suites" / "playground").glob("step-*")) == ["step-000000", "step-000001"]


@pytest.mark.parametrize(
    ("suites", "message"),
    [
        ([{"suite": "playgroud"}], "eval.suites.0: there is no suite 'playgroud'; did you mean 'playground'"),
        ([SUITE, SUITE], "names a suite twice"),
        ([{**SUITE, "options": {"task": 1}}], "eval.suites.0: .*unknown key"),
        ([{"suite": "gedit"}], "eval.suites.0: "),
    ],
)
def test_wrong_suites_are_refused_before_anything_is_loaded(tmp_path, suites, message):
    with pytest.raises(ValueError, match=message):
        open_suites(small(tmp_path, *suites), Ranks())


def result_of(suite, root, step, scores, *, write=True):
    """A result of a suite in a run's folder, with one score in every column for each item. ``write``: store it with its table."""
    items = [item for _, item in suite.items.chosen]
    empty = {"cluster": "", "sample": 0, "turn": 1, "prompt": "", "image": ""}
    rows = [
        ImageRow(item=item.id, category=item.category, scores=dict.fromkeys(suite.scorer.columns, value), **empty)
        for item, value in zip(items, scores, strict=True)
    ]
    table = make_table(suite.scorer.suite, items, rows) if write else {}
    path = root / "suites" / suite.name / f"step-{step:06d}" / "scores" / "own"
    made = BenchmarkResult(path, {"headline": suite.scorer.suite.headline_column, "table": table, **ABOUT}, rows, items)
    if write:
        made.write()
    return made


@pytest.mark.parametrize(
    ("change", "reward", "alarm"), [(-1.0, 0.2, True), (-1.0, 0.0, True), (-1.0, -0.2, False), (1.0, 0.2, False), (0.0, 0.2, False)]
)
def test_suite_alarm_is_raised_if_the_suite_falls_and_the_reward_does_not(tmp_path, change, reward, alarm):
    recipe = small(tmp_path, {**SUITE, "subset": 8, "on_alarm": "stop"})
    (suite,) = open_suites(recipe, Ranks())
    folder = RunFolder(recipe.folder)
    folder.create()
    for step, shift in ((0, 0.0), (30, change)):
        made = result_of(suite, folder.root, step, [5 + shift * (1 + index / 10) for index in range(8)])
        folder.write_suite(step, "playground", {"headline": "overall", "table": made.table, "missing": 0}, alarm=None)
    for step in range(1, 31):
        folder.append_metrics(step, "main", {"reward/mean": 1 + reward * step / 30})
    found = RunSuites(recipe, folder, Ranks()).stored_alarms(30)
    assert [(each.rule, each.response, each.key) for each in found] == [
        ("suite playground", "stop", "eval.suites, suite playground")
    ] * alarm
    if alarm:
        assert "since step 0 its overall has become worse by" in found[0].text
        folder.write_suite(30, "playground", {"headline": "overall", "table": made.table, "missing": 0}, alarm=found[0].text)
        folder.write_recipe(recipe.document())
        assert "Alarm: after step 30" in read(write_report(folder.root).read_text()).words


def test_increase_counts_as_a_fall_if_lower_scores_of_a_suite_are_better(tmp_path):
    data = suite_rows.preservation(tmp_path)
    (suite,) = open_suites(small(tmp_path, {"suite": "preservation", "data": str(data)}), Ranks())
    low, high = (result_of(suite, tmp_path, step, values) for step, values in ((0, [0.1, 0.11]), (1, [0.3, 0.32])))
    assert fall(suite, low, high).mean == pytest.approx(0.205)
    assert fall(suite, high, low).mean == pytest.approx(-0.205)
    assert math.isnan(fall(suite, low, high).sigmas), "both items have the same source image, so nothing is known of the error"


@pytest.fixture
def _falling(monkeypatch):
    """Every result of a suite is worse than the one before, and the reward rises."""
    monkeypatch.setattr(suites, "fall", lambda suite, before, now: Fall(5.0, 4.0, 1.0, 9.0))
    monkeypatch.setattr(RunSuites, "_reward_change", lambda self, since, step, metrics: 0.1)


def check_stop(folder, step, rule, back_to=None):
    stopped = folder.read_alarm()
    assert (stopped["step"], stopped["back_to"], [each["rule"] for each in stopped["alarms"]]) == (step, back_to, [rule])
    assert checkpoint.latest(folder.checkpoints).name == f"step-{step if back_to is None else back_to:06d}"


@pytest.mark.usefixtures("_falling")
@pytest.mark.parametrize(("response", "back_to"), [pytest.param("stop", None, marks=pytest.mark.slow), ("roll_back", 0)])
def test_suite_alarm_stops_or_rolls_back_the_run_as_configured(tmp_path, response, back_to):
    recipe = small(tmp_path, {**SUITE, "on_alarm": response}, checkpoints={"every": 0})
    with pytest.raises(AlarmStop, match=r"eval\.suites, suite playground: the reward and the suite playground diverge"):
        run(recipe, fresh=False)
    folder = RunFolder(recipe.folder)
    check_stop(folder, 1, "suite playground", back_to)
    assert folder.read_metrics()[-1]["watch/alarm/suite playground"] == 1.0
    assert "Stopped by an alarm after step 1" in read(folder.report.read_text()).words
    with pytest.raises(AlarmStop, match="was stopped by an alarm"):
        run(recipe, fresh=False)
    noted = small(tmp_path, {**SUITE, "on_alarm": "note"}, checkpoints={"every": 0})
    assert run(noted, fresh=False) == 0
    assert folder.read_alarm() is None
    assert [line["alarm"] is not None for line in folder.read_suites()] == [False, True, True]
    words = read(write_report(folder.root).read_text()).words
    assert "Alarm: after step 1" in words


def judged(url, **quota):
    endpoint = {"kind": "endpoint", "model": "double", "base_url": url, "key": "DOUBLE_KEY", "pause": 0.01, "longest_pause": 0.02}
    return {**SUITE, "judge": {"kind": "viescore", "judge": {**endpoint, **({"quota": quota} if quota else {})}}}


@pytest.fixture
def double(monkeypatch):
    with Double() as server:
        monkeypatch.setenv("DOUBLE_KEY", KEY)
        monkeypatch.setenv("RETOUCH_KEYS", f"DOUBLE_KEY={server.url.removesuffix('/v1')}")
        yield server


def results(recipe):
    return [(line["step"], line["table"]) for line in RunFolder(recipe.folder).read_suites()]


def test_an_alarm_of_the_watch_stops_the_run_although_a_budget_is_spent_in_the_same_step(tmp_path, double):
    watch = {"every": 2, "tasks": 3, "brightness": {"limit": 1e-9, "on_alarm": "roll_back"}}
    recipe = small(tmp_path, judged(double.url, calls=30), watch=watch, checkpoints={"every": 0})
    with pytest.raises(AlarmStop, match=r"watch\.brightness"):
        run(recipe, fresh=False)
    folder = RunFolder(recipe.folder)
    check_stop(folder, 2, "brightness", 0)
    assert [line["step"] for line in folder.read_metrics()] == [1, 2]
    assert folder.read_metrics()[-1]["watch/alarm/brightness"] == 1.0
    assert [step for step, _ in results(recipe)] == [0, 1]
    assert "budget of 30 calls" in folder.log(0).read_text()


@pytest.mark.usefixtures("_falling")
@pytest.mark.parametrize("resumed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_alarm_of_a_suite_stops_the_run_although_the_next_suite_spends_its_budget(tmp_path, monkeypatch, resumed):
    """``resumed``: the budget of the first suite was spent too, and was raised before the next start."""
    own, spent = RunSuites._run, {"preservation"}

    def run_suite(self, suite, step, metrics):
        if suite.name in spent and step == 1:
            raise BudgetSpent(f"the budget of {suite.name} is spent")
        if suite.name == "playground":
            return own(self, suite, step, metrics)
        return {"step": step, "headline": "overall", "table": {"all": {"overall": {"mean": 1.0}}}, "alarm": None}

    monkeypatch.setattr(RunSuites, "_run", run_suite)
    other = {"suite": "preservation", "data": str(suite_rows.preservation(tmp_path)), "every": 1}
    recipe = small(tmp_path, {**SUITE, "on_alarm": "stop"}, other, checkpoints={"every": 0})
    if resumed:
        spent.add("playground")
        with pytest.raises(BudgetSpent, match="of playground"):
            run(recipe, fresh=False)
        spent.remove("playground")
    with pytest.raises(AlarmStop, match="suite playground"):
        run(recipe, fresh=False)
    folder = RunFolder(recipe.folder)
    check_stop(folder, 1, "suite playground")
    (line,) = folder.read_metrics()
    assert ("watch/alarm/suite playground" in line) != resumed


def test_discarding_an_attempt_keeps_the_suite_ledger_and_deletes_the_suite_results(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "suites" / "playground" / "step-000000").mkdir(parents=True)
    ledger = tmp_path / "suites" / "playground" / "ledger.sqlite"
    ledger.touch()
    folder.discard_attempt()
    assert ledger.exists()
    assert not (tmp_path / "suites" / "playground" / "step-000000").exists()


KILLED = """
import os, signal, sys
from retouch.recipe.recipe import parse
from retouch.rewards.ledger.journal import Journal
from retouch.run.session import run
recipe = parse(__import__("json").load(open(sys.argv[1])))
inner, calls = Journal.record, []
def counted(self, *arguments, **options):
    inner(self, *arguments, **options)
    calls.append(os.environ.get("RANK", "0") if "suites" in str(self.database.path) else "")
    if "--kill" in sys.argv and len([each for each in calls if each == "0"]) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
Journal.record = counted
run(recipe, fresh=False)
"""


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_run_has_the_suite_results_of_a_whole_run_and_reuses_answers(tmp_path, double, ranks):
    whole, killed = (small(tmp_path / name, judged(double.url)) for name in ("whole", "killed"))
    for name, recipe in (("whole", whole), ("killed", killed)):
        (tmp_path / f"{name}.json").write_text(json.dumps(dict(recipe.document())))
    double_words = ["-c", KILLED, str(tmp_path / "killed.json")]
    with pytest.raises(AssertionError):  # one process is killed; the launcher ends the other one
        on_ranks(ranks, [*double_words, "--kill", "2"], tmp_path / "logs")
    assert [step for step, _ in results(killed)] == [0]
    asked = dict(double.seen)
    on_ranks(ranks, double_words, tmp_path / "logs")
    assert all(double.seen[digest] <= 2 for digest in asked)
    again = sum(double.seen[digest] > times for digest, times in asked.items())
    assert again <= 6 * (ranks - 1), "only answers that were on their way to another rank may be asked for again"
    double.seen.clear()
    on_ranks(ranks, ["-c", KILLED, str(tmp_path / "whole.json")], tmp_path / "logs")
    assert results(killed) == results(whole)
