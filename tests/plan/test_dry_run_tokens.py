"""A dry run decodes only a few tokens; its figures are those of decoding all of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from warm_python import python

pytestmark = pytest.mark.slow
SUPPORT = Path(__file__).parents[1] / "support"
STATIC = ("static", "static, long", "static, seldom")


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, Any]]:
    # A fake accelerator stays in its process.
    done = subprocess.run(
        [python(), "-W", "ignore", str(SUPPORT / "dry_run_tokens.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SUPPORT), *sys.path])},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return {line["case"]: line for line in map(json.loads, filter(lambda text: text.startswith("{"), done.stdout.splitlines()))}


@pytest.mark.parametrize("case", STATIC)
def test_the_counted_work_with_a_static_cache_equals_that_of_all_tokens(found: dict[str, dict[str, Any]], case: str) -> None:
    few, every = found[case]["few"], found[case]["all"]
    assert few["flops"] == every["flops"]
    assert few["kernels"] == pytest.approx(every["kernels"], abs=1)
    assert few["waits"] == pytest.approx(every["waits"], abs=0.5)


@pytest.mark.parametrize(("case", "waits"), [("static", 1 / 16), ("static, long", 1 / 16), ("static, seldom", 1 / 40)])
def test_the_host_waits_of_a_static_cache_are_its_checks(found: dict[str, dict[str, Any]], case: str, waits: float) -> None:
    assert found[case]["token"]["waits"] == pytest.approx(waits)


def test_the_peak_with_a_static_cache_contains_the_longest_completion(found: dict[str, dict[str, Any]]) -> None:
    tokens, keys_and_values, layers, rows, width, size = 112 - 48, 2, 2, 4, 16, 4
    assert found["static, long"]["few"]["peak"] - found["static"]["few"]["peak"] >= (
        tokens * keys_and_values * layers * rows * width * size
    )


@pytest.mark.parametrize("case", STATIC)
def test_the_peak_with_a_static_cache_is_near_that_of_all_tokens(found: dict[str, dict[str, Any]], case: str) -> None:
    assert found[case]["few"]["peak"] == pytest.approx(found[case]["all"]["peak"], rel=0.04)


def test_the_counted_work_with_a_growing_cache_is_near_that_of_all_tokens(found: dict[str, dict[str, Any]]) -> None:
    few, every = found["growing"]["few"], found["growing"]["all"]
    assert few["flops"] == pytest.approx(every["flops"], rel=0.01)
    assert few["kernels"] == pytest.approx(every["kernels"], rel=0.02)
    assert few["waits"] == pytest.approx(every["waits"], abs=1)
