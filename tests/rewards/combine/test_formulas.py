"""Formulas over columns: values compared with Python's arithmetic, and ranges compared with sampled values."""

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retouch.rewards.combination import WeightedSum, bounds, combination, effect, names, read_formula, resolve, value
from retouch.types import Column

NAN = math.nan
COLUMNS = {"a": Column(0.0, 1.0), "b": Column(0.0, 10.0), "judge/c": Column(-1.0, 1.0), "note": Column(0.0, 1.0, diagnostic=True)}
RANGES = {name: (column.low, column.high) for name, column in COLUMNS.items()}
PYTHON = {
    "sqrt": math.sqrt,
    "min": min,
    "max": max,
    "mean": lambda *values: sum(values) / len(values),
    "gmean": lambda *values: math.prod(values) ** (1 / len(values)),
    "__builtins__": {},
}


def formulas(leaves):
    """Formulas that both Python and the formula parser accept."""

    def grown(inner):
        two = st.lists(inner, min_size=2, max_size=3).map(", ".join)
        return st.one_of(
            st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda part: f"{part[0]} {part[1]} {part[2]}"),
            inner.map(lambda part: f"({part})"),
            inner.map(lambda part: f"-{part}"),
            st.tuples(inner, st.sampled_from(["2", "0.5", "3e1"])).map(lambda part: f"({part[0]}) / {part[1]}"),
            st.tuples(st.sampled_from(["min", "max", "mean"]), two).map(lambda part: f"{part[0]}({part[1]})"),
        )

    return st.recursive(leaves, grown, max_leaves=8)


TEXTS = formulas(st.sampled_from(["a", "b", "c", "0.6", "2", "1e-1", ".5"]))


@given(TEXTS, st.lists(st.floats(-3, 3, width=32), min_size=3, max_size=3))
def test_the_value_of_a_formula_matches_pythons_eval_and_its_text_is_read_again(text, numbers):
    point, node = dict(zip("abc", numbers, strict=True)), read_formula(text)
    found = value(node, {name: torch.tensor([number], dtype=torch.float64) for name, number in point.items()})
    assert found.expand(1).item() == pytest.approx(eval(text, dict(PYTHON), point), rel=1e-9, abs=1e-9)  # noqa: S307
    assert read_formula(str(node)) == node
    assert set(names(node)) <= {"a", "b", "c"}


@given(TEXTS, st.integers(0, 10**6))
def test_values_of_a_formula_lie_inside_its_computed_range(text, seed):
    node, ranges = read_formula(text), {"a": (0.0, 1.0), "b": (0.0, 10.0), "c": (-1.0, 1.0)}
    low, high = bounds(node, ranges)
    draw = random.Random(seed)
    ends = [{name: torch.tensor(draw.choice(range_)) for name, range_ in ranges.items()} for _ in range(8)]
    inner = [{name: torch.tensor(draw.uniform(*range_)) for name, range_ in ranges.items()} for _ in range(8)]
    for point in ends + inner:
        assert low - 1e-4 <= value(node, point).item() <= high + 1e-4


@given(TEXTS, st.sampled_from("abc"), st.integers(0, 10**6))
def test_the_effect_of_a_column_is_the_sign_of_its_differences(text, name, seed):
    node, ranges = read_formula(text), {"a": (0.0, 1.0), "b": (0.0, 10.0), "c": (-1.0, 1.0)}
    way, draw = effect(node, name, ranges), random.Random(seed)
    if way is None:
        return
    for _ in range(8):
        point = {each: torch.tensor(draw.uniform(*range_), dtype=torch.float64) for each, range_ in ranges.items()}
        raised = {**point, name: point[name] + (ranges[name][1] - point[name]) * draw.random()}
        rise = (value(node, raised) - value(node, point)).item()
        assert abs(rise) < 1e-9 if way == 0 else way * rise > -1e-9


@pytest.mark.parametrize(
    ("text", "range_"),
    [
        ("0.6*a + 0.4*b", (0.0, 4.6)),
        ("sqrt(a * b)", (0.0, math.sqrt(10))),
        ("gmean(a, b)", (0.0, math.sqrt(10))),
        ("min(a, b)", (0.0, 1.0)),
        ("max(a, b) - 1", (-1.0, 9.0)),
        ("(1 - a) * `judge/c`", (-1.0, 1.0)),
        ("judge/c / 2", (-0.5, 0.5)),
        ("sqrt(1 - 0.3*a - 0.07*b)", (0.0, 1.0)),  # 0 but for rounding
        ("a * min(max(10*a - 5, 0), 1) * min(max(b - 5, 0), 1)", (0.0, 1.0)),
    ],
)
def test_ranges_of_the_usual_formulas_are_exact(text, range_):
    assert bounds(read_formula(text), RANGES) == pytest.approx(range_, abs=1e-7)
    scores = {"a": torch.tensor([0.0, 0.25, 1.0]), "b": torch.tensor([4.0, 1.0, 9.0])}
    assert value(read_formula("sqrt(a*b)"), scores).tolist() == [0.0, 0.5, 3.0]
    assert value(read_formula("gmean(a, b, b)"), scores).tolist() == pytest.approx([0, 0.25 ** (1 / 3), 81 ** (1 / 3)])


@pytest.mark.parametrize(
    "text", ["0.5*a + b", "sqrt(a * b)", "gmean(a, b)", "min(a, b)", "max(a, b)", "max(a, 0) + 0*b", "mean(a, b)"]
)
def test_a_formula_is_missing_where_any_of_its_columns_is_missing(text):
    scores = {"a": torch.tensor([0.5, NAN, 0.5, NAN]), "b": torch.tensor([1.0, 1.0, NAN, NAN])}
    assert combination(text, COLUMNS)(scores).isnan().tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the formula ends, but a number, a column or a parenthesis is expected"),
        ("0.6*", "the formula ends"),
        ("(a + b", r"the formula ends, but '\)' is expected"),
        ("a b", "there is 'b' at character 3, but an operator"),
        ("a ** 2", r"there is '\*' at character 4"),
        ("a ^ 2", r"'\^' at character 3 is not allowed"),
        ("pow(a, 2)", "no function 'pow'; there are sqrt, min, max, mean, gmean"),
        ("sqrt(a, b)", "sqrt takes one, not 2"),
        ("min(a)", "min takes two or more, not 1"),
        ("1 / a", "divide only by a number other than 0, not by a"),
        ("a / 0", "only by a number other than 0"),
        ("1e999 * a", "too large a number"),
        ("a.__class__()", "no function 'a.__class__'"),
        ("__import__('os')", "is not allowed in a formula"),
        ("(" * 60 + "a" + ")" * 60, "more than 50 nested"),
        ("a + " * 400 + "a", "1601 characters"),
        ("sqrt(judge/c)", "sqrt of judge/c, which may be as low as -1 .it ranges from -1 to 1.; write max"),
        ("gmean(a, judge/c)", "gmean of judge/c, which may be as low as -1"),
        ("sqrt(a - b)", r"sqrt of \(a - b\), which may be as low as -10"),
        ("alignmnt + a", "'alignmnt', but the reward has no such column; it has a, b, judge/c, note$"),
        ("a + nota", "did you mean 'note'"),
        ("a + note", "'note', which is a diagnostic"),
        ("1 + 1", "no column"),
        ("0 * a", "is always 0"),
    ],
)
def test_invalid_formulas_raise_with_the_position_or_the_cause(text, says):
    with pytest.raises(ValueError, match=says):
        combination(text, COLUMNS)


def test_earls_reward_name_is_the_square_root_of_the_product_of_its_columns():
    columns = {"viescore_pq": Column(0, 10), "ground_score": Column(0, 10)}
    found = combination("sqrt(viescore_pqxground_score)", columns)
    assert found({"viescore_pq": torch.tensor([4.0]), "ground_score": torch.tensor([9.0])}).item() == 6.0
    assert (found.low, found.high) == (0.0, 10.0)
    ours = dict.fromkeys(("viescore/sc", "viescore/pq", "viescore/overall", "ground/ground"), Column(0, 10))
    assert combination("sqrt( viescore_pqxground_score )", ours).columns == ("viescore/pq", "ground/ground")


def test_unambiguous_short_names_of_columns_are_resolved():
    columns = dict.fromkeys(["judge/alignment", "judge/quality", "other/quality", "pick/pickscore", "odd-one/x"], Column(0, 1))
    columns["pick/note"] = Column(0, 1, diagnostic=True)
    assert resolve("judge/quality", columns) == "judge/quality"
    assert resolve("alignment", columns) == "judge/alignment"
    assert resolve("other_quality", columns) == "other/quality"
    assert resolve("pick", columns) == resolve("pick_score", columns) == "pick/pickscore"
    assert combination("2 * `odd-one/x`", columns).columns == ("odd-one/x",)
    with pytest.raises(ValueError, match="may be judge/quality or other/quality; write the full name"):
        resolve("quality", columns)
    with pytest.raises(ValueError, match=r"did you mean '(judge/)?alignment'"):
        resolve("alignmemt", columns)
    with pytest.raises(ValueError, match="'judge/alignment' twice"):
        combination({"alignment": 1.0, "judge/alignment": 1.0}, columns)


def test_a_weighted_sum_has_a_range_and_a_column_of_weight_0_is_only_logged():
    found = combination({"a": 0.5, "b": 0.0, "judge/c": -2.0}, COLUMNS)
    assert isinstance(found, WeightedSum)
    assert (found.columns, found.low, found.high) == (("a", "judge/c"), -2.0, 2.5)
    scores = {"a": torch.tensor([1.0]), "b": torch.tensor([NAN]), "judge/c": torch.tensor([0.5])}
    assert found(scores).item() == -0.5
    with pytest.raises(ValueError, match="all weights are 0"):
        combination({"a": 0.0}, COLUMNS)
    for name in ("mean", "std", "n"):
        says = f"the reward has the column '{name}', but a run's metrics use this name .*; rename it"
        with pytest.raises(ValueError, match=says):
            combination({"a": 1.0}, {**COLUMNS, name: Column(0.0, 1.0)})


FALLS = ["1 - distance", "(2 - distance) * a", "a - 0.1 * distance", {"a": 1.0, "distance": -1.0}, "min(a, -distance)"]
RISES = ["distance", "a + distance", {"distance": 1.0}, "max(a, distance)", "(1 - distance) * (1 - distance)"]


@pytest.mark.parametrize("combine", FALLS + RISES)
def test_only_a_reward_that_falls_with_a_lower_is_better_column_is_accepted(combine):
    columns = {**COLUMNS, "distance": Column(0, 2, higher_is_better=False)}
    if combine in FALLS:
        assert "distance" in combination(combine, columns).columns
    else:
        with pytest.raises(ValueError, match=r"rises with 'distance', of which lower is better; .*write \(2 - distance\)"):
            combination(combine, columns)
