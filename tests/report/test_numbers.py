"""The report's arithmetic: thinning, ticks, ranges, and how numbers are written."""

import dataclasses
import itertools
import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from html_check import read
from retouch.records.folder import Summary
from retouch_view.report import charts
from retouch_view.report import markup as numbers
from retouch_view.report.charts import (
    Line,
    Point,
    average_points,
    average_with_envelope,
    axis_ticks,
    draw,
    padded_range,
    running_mean,
)
from retouch_view.report.markup import join, tag, text
from retouch_view.report.page import gap_bar
from retouch_view.report.tables import seconds_spent

FINITE = st.floats(-1e6, 1e6)


@given(st.lists(FINITE | st.just(math.nan), min_size=1, max_size=60), st.integers(1, 20))
def test_thinning_preserves_mean_minimum_and_maximum(values, most):
    points = [Point(float(x), y) for x, y in enumerate(values)]
    known = [y for y in values if math.isfinite(y)]
    thin = average_with_envelope(points, most)
    assert len(thin) <= most
    assert [point.x for point in thin] == sorted(point.x for point in thin)
    span = [value for point in thin for value in point.span]
    if known:
        assert (min(span), max(span)) == pytest.approx((min(known), max(known)))
        assert average_points(points, 1)[0].y == pytest.approx(statistics.fmean(known), abs=1e-6)
    else:
        assert span == []


def test_a_running_mean_is_nan_until_its_window_is_full():
    points = [Point(x, y) for x, y in enumerate([1.0, 2.0, 3.0, math.nan, 5.0])]
    smooth = [point.y for point in running_mean(points, 3)]
    assert math.isnan(smooth[0])
    assert math.isnan(smooth[1])
    assert smooth[2:] == [2.0, 2.5, 4.0]


@given(FINITE, st.floats(1e-3, 1e6), st.integers(2, 8))
def test_axis_ticks_are_evenly_spaced_within_the_range(low, width, about):
    found = axis_ticks(low, low + width, about)
    assert 1 <= len(found) <= 2 * about
    slack = 1e-6 * (abs(low) + width)
    assert low - slack <= found[0]
    assert found[-1] <= low + width + slack
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert all(gap == pytest.approx(gaps[0], rel=1e-3) for gap in gaps)


@given(st.lists(FINITE, max_size=9))
def test_a_padded_range_contains_its_values_and_is_not_empty(values):
    low, high = padded_range(values)
    assert low < high
    assert all(low <= value <= high for value in values)
    if values and min(values) >= 0:
        assert low >= 0


def test_numbers_durations_ticks_and_percentages_are_formatted():
    written = {
        0.0: "0", 8.5e-5: "8.5e−5", 1e-6: "1e−6", -0.5: "−0.50", 0.0123: "0.012", 3.14159: "3.14", 12345: "12345",
        1234.5: "1234", 2.5e7: "2.5e7", math.nan: "–", None: "–",
    }  # fmt: skip
    assert [numbers.format_number(value) for value in written] == [*written.values()]
    assert [numbers.format_signed(value) for value in (0.724, -0.004, -1.5, None)] == ["+0.72", "0.00", "−1.50", "–"]
    decimals = [numbers.decimals_for(values) for values in ([0.5, None, math.nan], [0.5, -3.0])]
    assert [numbers.format_signed(-0.0099, each) for each in decimals] == ["−0.010", "−0.01"]
    seconds = {0.05: "50 ms", 2.0: "2.0 s", 263.0: "4 min 23 s", 660.0: "11 min", 7300.0: "2 h 02 min"}
    assert [numbers.format_duration(each) for each in seconds] == [*seconds.values()]
    assert axis_ticks(0.0, 10.0, 5) == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert axis_ticks(6.2, 9.7, 4) == [7.0, 8.0, 9.0]
    assert axis_ticks(2e-5, 1.9e-4, 3) == [5e-5, 1e-4, 1.5e-4]
    assert [numbers.tick_label(value, 0.05) for value in (0.0, 0.25, 1.0)] == ["0", "0.25", "1.00"]
    assert [numbers.tick_label(value, 2.0) for value in (8.0, 10.0)] == ["8", "10"]
    assert numbers.format_percent(-0.034) == "−3 %"


def test_phases_begin_where_the_name_changes():
    lines = [{"step": step, "phase": "supervised" if step < 4 else "rl"} for step in range(1, 9)]
    drawn = [
        charts.reward_section([line | {"reward/mean": 1.0} for line in part], [], None, split="held-out")
        for part in (lines, lines[:3])
    ]
    assert [[label["style"] for label in read(page or "").all("span", "phase-label")] for page in drawn] == [
        ["left:0.00%;max-width:37.50%", "left:37.50%;max-width:62.50%"],
        [],
    ]


def test_time_bars_show_the_time_outside_all_stages_as_other():
    bars = charts.time_bars(
        [{"step": 1, "time/step": 10.0, "time/a": 6.0, "time/b": 3.0}, {"step": 2, "time/step": 10.0, "time/a": 6.0}]
    )
    assert bars is not None
    page = read(bars)
    assert [style["style"] for style in page.all("span") if "style" in style] == ["width:60.00%", "width:15.00%", "width:25.00%"]
    assert "other" in page.words
    assert charts.time_bars([{"step": 1, "time/a": None}]) is None
    assert seconds_spent([{"step": 1, "time/step": 10.0, "time/a": 6.0}, {"step": 2, "time/a": 5.0}]) == 15.0
    assert seconds_spent([{"step": 1, "time/a": 2.0, "time/b": None}, {"step": 2, "time/step": None, "time/a": 5.0}]) == 7.0


def test_a_better_score_is_on_the_right_of_the_gap_bar():
    rising = Summary(
        column="reward", on="tasks", before=-3.0, after=-2.0, steps=1, ceiling=-1.0, best_of_k=0.0, gain_ci95=(0.4, 1.6)
    )
    falling = Summary(column="error", on="tasks", before=0.9, after=0.6, steps=1, ceiling=0.3, best_of_k=0.45, lower_is_better=True)
    falling = dataclasses.replace(falling, gain_ci95=(-0.4, -0.2))
    for summary, best, width in ((rising, "100.00", "33.33"), (falling, "75.00", "50.00")):
        bar = read(gap_bar(summary) or "")
        (tick,) = bar.all("span", "tick")
        assert tick["style"] == f"left:{best}%"
        gained, *_ = bar.all("span", "gained")
        assert (gained["style"], gained["class"]) == (f"left:0.00%;width:{width}%", "gained good")
        unsure = read(gap_bar(dataclasses.replace(summary, gain_ci95=None)) or "")
        assert unsure.all("span", "gained")[0]["class"] == "gained flat"
    assert gap_bar(dataclasses.replace(falling, ceiling=1.0)) is None


@pytest.mark.parametrize("values", [[], [math.nan], [1.0], [1.0, math.nan, 2.0], [0.0] * 5, [-1e-9, 1e9]])
def test_charts_have_finite_coordinates_for_any_values(values):
    page = read(draw("c", [Line("l", "plain", [Point(x, y) for x, y in enumerate(values, start=1)])], len(values)))
    assert all("nan" not in (path["d"] or "") and "inf" not in (path["d"] or "") for path in page.all("path"))


@given(st.text(st.characters()))
def test_any_text_is_escaped_once_and_reads_back(value):
    """Only halves of surrogate pairs and control characters, which ``characters()`` includes, are replaced."""
    page = read(tag("p", value, title=value, data_x=value))
    (attributes,) = page.all("p")
    shown = "".join(page.text.get("p", []))
    forbidden = {*range(9), 11, 12, *range(14, 32), *range(127, 160), *range(0xD800, 0xE000)}
    expected = "".join(
        "�" if ord(c) in forbidden - set(range(0xD800, 0xE000)) else "?" if ord(c) in forbidden else c for c in value
    )
    assert attributes["title"] == attributes["data-x"] == expected
    assert shown == (expected if expected.strip() else "")


def test_markup_composes_without_escaping_twice():
    inner = tag("b", "<&>")
    assert join(["a<", inner, None, [inner, "b"]], " ") == f"a&lt; {inner} {inner}b"
    assert tag("p", text("<")) == "<p>&lt;</p>"
    assert tag("td", hidden=True, colspan=2, title=None, class_="x") == '<td hidden colspan="2" class="x"></td>'
