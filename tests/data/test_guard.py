"""Known test sets are recognised by the paths and names in recipes; training sets with similar names are not."""

import pytest
from PIL import Image

from retouch.data.guard import find_test_sets, refuse_test_sets

TESTS = {
    "UCSC-VLAA/Complex-Edit": "Complex-Edit",
    "data/complex_edit/test_real": "Complex-Edit",
    "facebook/emu_edit_test_set": "Emu Edit test set",
    "facebook/emu_edit_test_set_generations": "Emu Edit test set",
    "geneval/prompts/evaluation_metadata.jsonl": "GenEval",
    "flow_grpo/dataset/geneval/test_metadata.jsonl": "GenEval",
    "prompts/geneval.jsonl": "GenEval",
    "djghosh13/geneval": "GenEval",
    "flow_grpo/dataset/ocr/test.txt": "Flow-GRPO's OCR test list",
    "prompts/ocr.txt": "Flow-GRPO's OCR test list",
    "flow_grpo/dataset/pickscore/test.txt": "Flow-GRPO's PickScore test list",
    "Calligrapher2025/Calligrapher_bench_testing": "Calligrapher's bench",
    "bench/self_bench.txt": "Calligrapher's bench",
    "MagicBrush/test": "MagicBrush test",
    "sikarwarank/magicbrush_eval": "MagicBrush test",
    "benchmarks/magicbrush-test-00000.parquet": "MagicBrush test",
    "benchmarks/emuedit.parquet": "EARL's evaluation sets",
    "earl-datasets/omniedit/validation": "EARL's validation lists",
    "sikarwarank/i2bench_eval": "I2EBench",
    "sikarwarank/omniedit_eval": "EARL's evaluation sets",
    "sikarwarank/vismin-test.parquet": "EARL's evaluation sets",
    "McGill-NLP/AURORA-Bench": "AURORA-Bench",
    "TIGER-Lab/OmniEdit-Filtered-1.2M/dev": "OmniEdit's split dev",
    "Calligrapher2025/Calligrapher": "Calligrapher's bench",
    "X-Omni/LongText-Bench": "LongText-Bench",
    "CodeGoat24/UniGenBench": "UniGenBench",
    "data/HPDv2/benchmark/photo.json": "HPSv2's benchmark",
    "stepfun-ai/GEdit-Bench": "GEdit-Bench",
    "sysuyy/ImgEdit-Bench": "ImgEdit-Bench",
    "TIGER-Lab/OmniEdit-Bench": "OmniEdit-Bench",
    "EditScore/EditReward-Bench": "EditReward-Bench",
    "black-forest-labs/kontext-bench": "KontextBench",
    "nateraw/parti-prompts": "PartiPrompts",
    "T2I-CompBench/examples/dataset/color_val.txt": "T2I-CompBench",
    "GenEval2/geneval2_data.jsonl": "GenEval",
    "ImgEdit/Benchmark/Multiturn": "ImgEdit-Bench",
    "downloads/basic_edit.json": "ImgEdit-Bench",
    "downloads/UGE_edit.json": "ImgEdit-Bench",
    "mair-lab/escher-vismin-dev": "EARL's evaluation sets",
    "PhoenixZ/RISEBench": "RISEBench",
    "downloads/datav2_total_w_subtask.json": "RISEBench",
    "mercurystraw/Kris_Bench": "KRIS-Bench",
    "downloads/text_prompts_zh.jsonl": "LongText-Bench",
    "downloads/test_prompts_en_long.csv": "UniGenBench",
    "ELLA/dpg_bench/dpg_bench.csv": "DPG-Bench",
    "data/drawbench.csv": "DrawBench",
}
TRAINING = [
    "UCSC-VLAA/GPT-Image-Edit-1.5M",
    "GPT-Image-Edit-1.5M/gpt-edit/omniedit/complex-edit",
    "TIGER-Lab/OmniEdit-Filtered-1.2M",
    "earl-datasets/omniedit/train",
    "osunlp/MagicBrush",
    "McGill-NLP/AURORA",
    "omniedit/development.jsonl",
    "ymhao/HPDv2/train.json",
    "BleachNick/UltraEdit_500k",
    "timbrooks/instructpix2pix-clip-filtered",
    "EditScore/EditScore-RL-Data",
    "EditScore/EditScore-Reward-Data",
    "flow_grpo/dataset/geneval/train_metadata.jsonl",
    "flow_grpo/dataset/ocr/train.txt",
    "flow_grpo/dataset/pickscore/train.txt",
    "T2I-CompBench/examples/dataset/color_train.txt",
    "sysuyy/ImgEdit",
    "ImgEdit/Multiturn/content_memory.json",
    "prompts/train_prompts_en.csv",
    "photos/my contest",
    "workbench.txt",
]


@pytest.mark.parametrize("place", TESTS)
@pytest.mark.parametrize("change", [str, str.upper, str.lower], ids=["as is", "upper", "lower"])
def test_test_sets_are_recognised(place, change):
    assert [known.name for known in find_test_sets([change(place)])] == [TESTS[place]]


@pytest.mark.parametrize("place", TRAINING)
def test_training_sets_are_not_recognised_as_test_sets(place):
    assert find_test_sets([place], split="train") == ()


def test_test_splits_are_recognised():
    assert "MagicBrush test" in {known.name for known in find_test_sets(["osunlp/MagicBrush"], split="test")}
    assert [known.name for known in find_test_sets(["me/mine"], split="test_real")] == ["the split 'test_real'"]
    assert find_test_sets(["osunlp/MagicBrush"], split="dev") == ()


def test_a_link_to_a_test_set_is_recognised(tmp_path):
    (tmp_path / "GEdit-Bench").mkdir()
    (tmp_path / "mine").symlink_to(tmp_path / "GEdit-Bench")
    assert [known.name for known in find_test_sets([tmp_path / "mine"])] == ["GEdit-Bench"]


def test_calligraphers_bench_is_recognised_by_its_files(tmp_path):
    folder = tmp_path / "items"
    folder.mkdir()
    (folder / "list.txt").write_text("11-Azir\n")
    assert find_test_sets([folder, folder / "list.txt"]) == ()
    Image.new("RGB", (4, 4)).save(folder / "test11_source.png")
    assert [known.place for known in find_test_sets([folder, folder / "list.txt"])] == [str(folder), str(folder / "list.txt")]


def test_test_sets_raise_without_allow_test_sets_and_are_recorded_with_it():
    with pytest.raises(
        ValueError, match=r"prompts/ocr\.txt is Flow-GRPO's OCR test list; x/GEdit-Bench is .*data\.allow_test_sets: true"
    ):
        refuse_test_sets(["prompts/ocr.txt", "photos", "x/GEdit-Bench"], allow_test_sets=False)
    with pytest.raises(ValueError, match=r"not for training: GEdit-Bench\. Use other data"):
        refuse_test_sets(["GEdit-Bench"], allow_test_sets=False)
    recorded = refuse_test_sets(["prompts/ocr.txt", "photos"], allow_test_sets=True)
    assert [(known.name, known.place) for known in recorded] == [("Flow-GRPO's OCR test list", "prompts/ocr.txt")]
    assert refuse_test_sets(["photos"], split="train", allow_test_sets=False) == ()
