"""Comparisons: equal models rarely count as different, differences are paired by item, and the page shows the items that differ."""

import dataclasses
import json
import math

import numpy as np
import pytest

from html_check import read
from retouch_bench.comparison import compare, differences
from retouch_bench.kinds import find_suite
from retouch_bench.results import BenchmarkResult, ImageRow, make_table
from retouch_bench.suite import SuiteItem

SUITE = find_suite("playground", {"tasks": 12})
COMPARISONS = 1000


def items_in(clusters, members):
    return [SuiteItem(id=str(n), prompt="", cluster=str(n // members)) for n in range(clusters * members)]


@pytest.mark.parametrize(("clusters", "members"), [(60, 1), (40, 3)])
def test_equal_models_differ_in_3_to_7_percent_of_comparisons(clusters, members):
    draw = np.random.default_rng(clusters)
    items = items_in(clusters, members)
    shape = COMPARISONS, clusters, members
    difficulty = draw.standard_normal(shape)
    shared = draw.standard_normal((2, COMPARISONS, clusters, 1)) * (members > 1)
    sides = (difficulty + shared + draw.exponential(0.7, (2, *shape))).reshape(2, COMPARISONS, -1)
    found = [differences(SUITE, items, {"x": a}, {"x": b})["x"]["differs"] for a, b in zip(*sides, strict=True)]
    assert 0.03 <= np.mean(found) <= 0.07


def test_differences_are_paired_and_items_without_a_score_on_one_side_are_excluded():
    items = items_in(30, 1)
    difficulty = np.linspace(0, 10, 30)
    a, b = difficulty.copy(), difficulty + 0.3
    b[3], a[4] = math.nan, math.nan
    cell = differences(SUITE, items, {"x": a}, {"x": b})["x"]
    both = np.delete(difficulty, [3, 4])
    assert (cell["n"], cell["differs"]) == (28, True)
    assert (cell["a"], cell["b"]) == (pytest.approx(both.mean()), pytest.approx(both.mean() + 0.3))
    assert (cell["low"], cell["high"]) == (pytest.approx(0.3), pytest.approx(0.3))


def stored(folder, shift, *, judge="own", columns=("overall", "IF")):
    """A result of the playground in which later items have higher scores, by ``shift`` more for the last."""
    items, _ = SUITE.items(None)
    rows = []
    for index, item in enumerate(items):
        path = folder / "images" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        SUITE.task_for(item).images[0].save(path)
        scores = dict.fromkeys(columns, index / 2 + (shift if index == 11 else shift / 10))
        rows.append(
            ImageRow(
                item=item.id, category=item.category, cluster="", sample=0, turn=1,
                prompt=item.prompt, image=str(path), scores=scores,
            )
        )  # fmt: skip
    about = {
        "suite": {"name": "playground", **SUITE.model_dump(mode="json")}, "title": "Playground <b>",
        "model": {"model": f"shifted by {shift}"}, "judge": {"name": judge, "own": True, "fingerprint": judge},
        "headline": "overall", "items": 12, "size": 256, "seed": 0, "table": make_table(SUITE, items, rows), "missing": [],
        "broken": [],
    }  # fmt: skip
    BenchmarkResult(folder / "scores" / judge, about, rows, items).write()
    return folder


def test_the_page_shows_the_items_that_differ_most_first(tmp_path):
    found = compare(stored(tmp_path / "a", 0.0), stored(tmp_path / "b", 4.0), top=3)
    cell = found.about["table"]["all"]["overall"]
    assert cell["difference"] == pytest.approx((4 + 11 * 0.4) / 12)
    assert cell["differs"]
    text = found.page.read_text()
    read(text)
    items, _ = SUITE.items(None)
    assert text.count('class="card"') == 3
    assert text.index(items[11].prompt) < text.index("+0.4</span>")
    assert text.count("data:image/png") == 9, "source, A and B of three items"
    assert "| all | 12 | overall |" in str(found)
    assert set(found.about["table"]) == {"all", "1 edit", "2 edits", "3 edits"}


@pytest.fixture
def folders(tmp_path):
    return stored(tmp_path / "a", 0.0), stored(tmp_path / "b", 4.0)


@pytest.mark.parametrize(("lower", "style"), [([], "good"), (["overall"], "bad")])
def test_a_rise_is_shown_as_worse_if_lower_is_better(lower, style, folders):
    for each in folders:
        result = BenchmarkResult.read(each / "scores" / "own")
        dataclasses.replace(result, about={**result.about, "lower_is_better": lower}).write()
    page = read(compare(*folders, top=3).page.read_text())
    assert [len(page.all("span", each)) for each in ("good", "bad")] == [3 * (style == "good"), 3 * (style == "bad")]


def test_an_item_or_a_column_without_a_score_on_one_side_has_no_difference(folders):
    rows = folders[1] / "scores" / "own" / "rows.jsonl"
    first, *others = lines = [json.loads(line) for line in rows.read_text().splitlines()]

    def compared(changed, top):
        rows.write_text("".join(json.dumps(row) + "\n" for row in changed))
        found = compare(*folders, top=top)
        text = found.page.read_text()
        assert "nan" not in read(text).words
        return found, text

    _, text = compared([{**first, "scores": dict.fromkeys(first["scores"])}, *others], 12)
    assert text.count("no score") == 2, "of B, and of the difference"
    found, text = compared([{**row, "scores": {**row["scores"], "IF": None}} for row in lines], 1)
    assert "| all | 0 | IF | - | - | - | - |  |" in str(found)
    cells = read(text).text["td"]
    assert cells[cells.index("IF") - 1 :][:6] == ["0", "IF", "-", "-", "-", "-"]


def test_results_that_cannot_be_compared_are_refused(tmp_path):
    a = stored(tmp_path / "a", 0.0)
    with pytest.raises(ValueError, match="judge is"):
        compare(a, stored(tmp_path / "b", 0.0, judge="other"))
    other = BenchmarkResult.read(a / "scores" / "own")
    changed = {**other.about, "suite": {**other.about["suite"], "tasks": 13}}
    dataclasses.replace(other, folder=tmp_path / "c", about=changed).write()
    with pytest.raises(ValueError, match="suite is"):
        compare(a, tmp_path / "c")
    items = [dataclasses.replace(other.items[0], prompt="another prompt"), *other.items[1:]]
    dataclasses.replace(other, folder=tmp_path / "d", items=items).write()
    with pytest.raises(ValueError, match=r"of different data: item .* 'another prompt' in"):
        compare(a, tmp_path / "d")
    stored(tmp_path / "a", 0.0, judge="second")
    with pytest.raises(ValueError, match="choose one with --name"):
        compare(a, a)
