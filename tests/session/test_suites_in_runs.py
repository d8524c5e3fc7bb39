"""A run's ``eval.suites``: the numbers of `retouch bench`, training that they do not change, and an alarm where they fall."""

from pathlib import Path
from typing import Any

import pytest

from html_check import read
from retouch.benchmarks.results import BenchmarkResult, ImageRow, make_table
from retouch.benchmarks.running import run as bench
from retouch.recipe.recipe import Recipe, parse
from retouch.records.folder import RunFolder
from retouch.report.page import write_report
from retouch.session.session import run
from retouch.session.suites import RunSuites, open_suites
from tiny_recipes import SMALL

ABOUT = {
    "title": "",
    "model": {"model": ""},
    "judge": {"name": "own"},
    "items": 6,
    "size": 256,
    "seed": 0,
    "missing": [],
    "broken": [],
}
SUITE = {"suite": "playground", "every": 1, "subset": 6, "options": {"tasks": 12}}


def small(out: Path, *suites: dict[str, Any], **changes: Any) -> Recipe:
    return parse({**SMALL, "out": str(out), **changes, "eval": {"tasks": 4, **({"suites": list(suites)} if suites else {})}})


def test_suites_have_the_numbers_of_the_command_and_do_not_change_training(tmp_path: Path) -> None:
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
    assert result is not None
    assert result.table == lines[-1]["table"]
    page = write_report(made.folder).read_text()
    assert "Benchmarks" in read(page).words
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
def test_wrong_suites_are_refused_before_anything_is_loaded(tmp_path: Path, suites: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_suites(small(tmp_path, *suites), world=1)


@pytest.mark.parametrize(("change", "reward", "alarm"), [(-1.0, 0.2, True), (-1.0, -0.2, False), (1.0, 0.2, False)])
def test_a_suite_that_falls_while_the_reward_rises_raises_an_alarm(
    tmp_path: Path, change: float, reward: float, alarm: bool
) -> None:
    recipe = small(tmp_path, SUITE)
    (suite,) = open_suites(recipe, world=1)
    folder = RunFolder(recipe.folder)
    folder.create()
    runs = RunSuites([suite], recipe, folder, None)  # type: ignore[arg-type]
    items = [item for _, item in suite.items.chosen]

    def stored(step: int, shift: float) -> BenchmarkResult:
        rows = [
            ImageRow(
                item=item.id, category=item.category, cluster="", sample=0, turn=1, prompt="", image="",
                scores=dict.fromkeys(suite.scorer.columns, 5 + shift * (1 + index / 10)),
            )
            for index, item in enumerate(items)
        ]  # fmt: skip
        table = make_table(suite.scorer.suite, items, rows)
        path = folder.root / "suites" / "playground" / f"step-{step:06d}" / "scores" / "own"
        return BenchmarkResult(path, {"headline": "overall", "table": table}, rows, items)

    start = stored(0, 0.0)
    BenchmarkResult(start.folder, {**start.about, **ABOUT}, start.rows, start.items).write()
    folder.write_suite(0, "playground", {"headline": "overall", "table": start.table, "missing": 0}, alarm=None)
    for step in range(1, 30):
        folder.append_metrics(step, "main", {"reward/mean": 1 + reward * step / 30})
    found = runs.alarm(suite, 30, stored(30, change), {"reward/mean": 1 + reward})
    assert (found is not None) == alarm
    if found is not None:
        assert "since step 0 its overall has become worse by" in found
        now = stored(30, change)
        folder.write_suite(30, "playground", {"headline": "overall", "table": now.table, "missing": 0}, alarm=found)
        folder.write_recipe(recipe.document())
        assert "Alarm: after step 30" in read(write_report(folder.root).read_text()).words
