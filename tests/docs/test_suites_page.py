"""docs/suites.md equals what its generator writes, and every published benchmark is detected as a test set."""

import runpy
from pathlib import Path

import pytest

from retouch.data.guard import find_test_sets
from retouch_bench.kinds import SUITES
from retouch_bench.suite import Suite

ROOT = Path(__file__).parents[2]
PUBLISHED = {
    "gedit": "stepfun-ai/GEdit-Bench", "imgedit": "PKU-YuanGroup/ImgEdit/Benchmark/Basic",
    "imgedit-uge": "PKU-YuanGroup/ImgEdit/Benchmark/UGE", "imgedit-multi-turn": "PKU-YuanGroup/ImgEdit/Benchmark/Multiturn",
    "complex-edit": "UCSC-VLAA/Complex-Edit", "earl": "facebook/emu_edit_test_set", "kris": "mercurystraw/Kris_Bench",
    "rise": "PhoenixZ/RISEBench", "geneval": "prompts/evaluation_metadata.jsonl", "geneval2": "GenEval2/geneval2_data.jsonl",
    "dpg": "dpg_bench/dpg_bench.csv", "unigenbench": "data/test_prompts_en.csv", "ocr": "dataset/ocr/test.txt",
    "longtext": "X-Omni/LongText-Bench",
}  # fmt: skip
OWN_DATA = {"import", "negation", "playground", "preservation", "multi-turn", "prompts", "edits"}


def test_the_suites_page_equals_the_generated_one():
    page = runpy.run_path(str(ROOT / "docs" / "generate_suites.py"))["page"]()
    assert page == (ROOT / "docs" / "suites.md").read_text(encoding="utf-8"), "run `python docs/generate_suites.py`"


def test_every_suite_declares_its_metadata():
    assert set(PUBLISHED) | OWN_DATA == set(SUITES)
    for name in set(SUITES) - {"import", "prompts", "edits"}:  # the columns of these two are those of the user's reward
        suite = SUITES.load(name)
        assert issubclass(suite, Suite)
        assert suite.name == name
        assert all((suite.title, suite.source, suite.licence, suite.columns, suite.task))
        assert suite.size >= 0
        assert suite.headline_column in suite.columns
        assert suite.protocol.endswith(".")
        assert all(each.endswith(".") for each in suite.deviations)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_benchmarks_are_detected_as_test_sets(name):
    assert find_test_sets([PUBLISHED[name]])
