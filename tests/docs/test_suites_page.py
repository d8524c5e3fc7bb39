"""The page of the suites is what their classes say, and every published set is refused for training."""

import importlib.util
from pathlib import Path

import pytest

from retouch.benchmarks.kinds import SUITES
from retouch.data.guard import find_test_sets

ROOT = Path(__file__).parents[2]
PUBLISHED = {
    "gedit": "stepfun-ai/GEdit-Bench",
    "imgedit": "PKU-YuanGroup/ImgEdit/Benchmark/Basic",
    "imgedit-uge": "PKU-YuanGroup/ImgEdit/Benchmark/UGE",
    "imgedit-multi-turn": "PKU-YuanGroup/ImgEdit/Benchmark/Multiturn",
    "complex-edit": "UCSC-VLAA/Complex-Edit",
    "earl": "facebook/emu_edit_test_set",
    "kris": "mercurystraw/Kris_Bench",
    "rise": "PhoenixZ/RISEBench",
    "geneval": "prompts/evaluation_metadata.jsonl",
    "geneval2": "GenEval2/geneval2_data.jsonl",
    "dpg": "dpg_bench/dpg_bench.csv",
    "unigenbench": "data/test_prompts_en.csv",
    "ocr": "dataset/ocr/test.txt",
    "longtext": "X-Omni/LongText-Bench",
}
OWN_DATA = {"import", "playground", "preservation", "multi-turn", "pickscore", "hpsv2", "aesthetic"}


def test_the_page_is_what_the_classes_say():
    spec = importlib.util.spec_from_file_location("generate_suites", ROOT / "docs" / "generate_suites.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == (ROOT / "docs" / "suites.md").read_text(encoding="utf-8"), "run `python docs/generate_suites.py`"


def test_every_suite_is_complete():
    assert set(PUBLISHED) | OWN_DATA == set(SUITES)
    for name in set(SUITES) - {"import"}:
        suite = SUITES.load(name)
        assert suite is not None
        assert suite.name == name
        assert suite.headline_column in suite.columns
        assert suite.protocol.endswith(".")
        assert all(each.endswith(".") for each in suite.deviations)


@pytest.mark.parametrize("name", PUBLISHED)
def test_no_published_set_is_for_training(name):
    assert find_test_sets([PUBLISHED[name]])
