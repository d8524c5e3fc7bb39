"""A dry run decodes only a few tokens; its figures are those of decoding all of them."""

import json
from pathlib import Path

import pytest

from warm_python import run_python

pytestmark = pytest.mark.slow
SUPPORT = Path(__file__).parents[1] / "support"
STATIC = ("static", "static, long", "static, seldom")


@pytest.fixture(scope="module")
def found():
    # A fake accelerator stays in its process.
    printed = run_python(SUPPORT / "dry_run_tokens.py", search=[SUPPORT], timeout=600)
    return {line["case"]: line for line in map(json.loads, filter(lambda text: text.startswith("{"), printed.splitlines()))}


@pytest.mark.parametrize("case", STATIC)
def test_the_counted_work_with_a_static_cache_equals_that_of_all_tokens(found, case):
    few, every = found[case]["few"], found[case]["all"]
    assert few["flops"] == every["flops"]
    assert few["kernels"] == pytest.approx(every["kernels"], abs=1)
    assert few["waits"] == pytest.approx(every["waits"], abs=0.5)


@pytest.mark.parametrize(("case", "waits"), [("static", 1 / 16), ("static, long", 1 / 16), ("static, seldom", 1 / 40)])
def test_the_host_waits_of_a_static_cache_are_its_checks(found, case, waits):
    assert found[case]["token"]["waits"] == pytest.approx(waits)


def test_the_peak_with_a_static_cache_contains_the_longest_completion(found):
    tokens, keys_and_values, layers, rows, width, size = 112 - 48, 2, 2, 4, 16, 4
    assert found["static, long"]["few"]["peak"] - found["static"]["few"]["peak"] >= (
        tokens * keys_and_values * layers * rows * width * size
    )


@pytest.mark.parametrize("case", STATIC)
def test_the_peak_with_a_static_cache_is_near_that_of_all_tokens(found, case):
    assert found[case]["few"]["peak"] == pytest.approx(found[case]["all"]["peak"], rel=0.04)


def test_the_counted_work_of_several_rooms_is_near_that_of_all_tokens(found):
    few, every = found["static, two rooms"]["few"], found["static, two rooms"]["all"]
    assert few["flops"] == pytest.approx(every["flops"], rel=0.03)
    assert few["kernels"] == pytest.approx(every["kernels"], rel=0.01)
    keys_and_values, rows, width, size = 2, 4, 16, 4  # of one layer, which is held twice while the room grows
    assert few["peak"] == pytest.approx(every["peak"] - 300 * keys_and_values * rows * width * size, rel=0.04)
    assert few["captured"] == pytest.approx(found["static, two rooms"]["token"]["kernels"] * 298)


def test_the_counted_work_with_a_growing_cache_is_near_that_of_all_tokens(found):
    few, every = found["growing"]["few"], found["growing"]["all"]
    assert few["flops"] == pytest.approx(every["flops"], rel=0.01)
    assert few["kernels"] == pytest.approx(every["kernels"], rel=0.02)
    assert few["waits"] == pytest.approx(every["waits"], abs=1)
