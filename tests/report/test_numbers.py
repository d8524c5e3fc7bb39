"""The report's arithmetic: thinning, ticks, ranges, and how numbers are written."""

import dataclasses
import math

from hypothesis import given
from hypothesis import strategies as st

from html_check import read
from retouch.records.folder import Summary
from retouch_view.report import charts
from retouch_view.report import markup as numbers
from retouch_view.report.markup import join, tag, text
from retouch_view.report.page import gap_bar
from retouch_view.report.tables import seconds_spent


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
    assert numbers.format_percent(-0.034) == "−3 %"


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
