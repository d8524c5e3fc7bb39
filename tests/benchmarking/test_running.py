"""A benchmark from a model, a LoRA or a folder of images to its table: equal images get equal scores, however they were made."""

import json
import math
import shutil
import signal
import subprocess
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
from PIL import Image

from judge_double import FAULTS, KEY, Double
from rank_commands import on_ranks
from retouch import cli
from retouch.inference.exporting import export_target
from retouch.recipe.recipe import parse
from retouch.records.files import read_json
from retouch.records.folder import RunFolder
from retouch.rewards.base import BudgetSpent
from retouch.run import session
from retouch.types import Column
from retouch_bench.comparison import compare
from retouch_bench.images import is_ours
from retouch_bench.kinds import find_suite
from retouch_bench.results import BenchmarkResult
from retouch_bench.running import run
from retouch_bench.suite import BrokenItem, Suite, SuiteItem, require_judge
from retouch_judge.kinds import Endpoint
from retouch_judge.models import JudgeQuota
from retouch_judge.rewards import VieScore
from tiny_recipes import SMALL
from warm_python import python


def scores(result):
    return [(row.item, dict(row.scores)) for row in result.rows]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Six tasks of the playground, edited by the untrained editor."""
    found = run("playground", model="playground", subset=6, out=tmp_path_factory.mktemp("base"))
    assert found is not None
    return found


def images_of(result):
    return result.folder.parents[1] / "images"


def test_an_editing_suite_rejects_a_policy_without_image_input(tmp_path):
    text_to_image = {
        **{**SMALL, "policy": {**SMALL["policy"], "model": {"kind": "playground-text-to-image"}}},
        "data": {"kind": "playground-scenes", "count": 8, "complexity": {"1": 1}, "known_words": True},
        **{"reward": {"kind": "share", "combine": {"share": 1}}, "eval": {"tasks": 4}},
    }
    (tmp_path / "text-to-image.json").write_text(json.dumps(text_to_image))
    with pytest.raises(ValueError, match=r"playground edits images, and the model of .*text-to-image\.json takes no image"):
        run("playground", model=tmp_path / "text-to-image.json", subset=2, out=tmp_path / "bench")


def test_a_model_may_be_the_name_of_a_run_as_in_other_commands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = RunFolder(tmp_path / "runs" / "mine").recipe
    assert not is_ours("mine")
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(SMALL))
    assert is_ours("mine")
    assert is_ours("runs/mine")


@pytest.mark.slow
def test_a_run_and_its_exported_lora_make_the_same_images_with_the_same_scores(tmp_path):
    recipe = parse({**SMALL, "out": str(tmp_path / "runs"), "learning_rate": 0.05})
    session.run(recipe, fresh=False)
    export_target(str(recipe.folder), to=tmp_path / "lora")
    options: dict[str, Any] = {"subset": 6, "options": {"tasks": 12}}
    ours = run("playground", model=recipe.folder, out=tmp_path / "ours", **options)
    peft = tmp_path / "peft"
    peft.mkdir()
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        shutil.copy(tmp_path / "lora" / name, peft)
    base = run("playground", model="playground", call={"num_inference_steps": 3}, out=tmp_path / "base", **options)
    assert scores(base) != scores(ours)
    for lora in (tmp_path / "lora", peft, tmp_path / "lora" / "comfyui_lora.safetensors"):
        out = tmp_path / f"of-{lora.name}"
        theirs = run("playground", model="playground", lora=lora, call={"num_inference_steps": 3}, out=out, **options)
        assert scores(theirs) == scores(ours), lora
        assert theirs.about["model"]["lora"]["path"] == str(lora)
        for path in sorted((out / "images").iterdir()):
            assert path.read_bytes() == (tmp_path / "ours" / "images" / path.name).read_bytes()


def test_a_folder_of_images_has_the_scores_of_the_model_that_made_them(base, tmp_path):
    again = run("playground", images=images_of(base), subset=6, out=tmp_path)
    assert scores(again) == scores(base)
    assert again.table == base.table
    assert base.table["all"]["overall"]["n"] == 6
    assert base.headline == pytest.approx(sum(row.scores["overall"] for row in base.rows) / 6)
    about = read_json(base.folder / "result.json")
    assert {"suite", "protocol", "deviations", "licence", "model", "judge", "seed", "items", "missing", "broken"} <= about.keys()
    assert (base.folder / "table.md").read_text().strip() == str(base)


def test_missing_and_broken_images_are_reported_and_excluded_from_the_mean(base, tmp_path):
    shutil.copytree(images_of(base), tmp_path / "images")
    first, second = sorted((tmp_path / "images").iterdir())[:2]
    first.unlink()
    second.write_bytes(b"not an image")
    notes: list[str] = []
    found = run("playground", images=tmp_path / "images", subset=6, out=tmp_path / "out", note=notes.append)
    assert notes[-1] == "scored 4 of 6 images"
    reasons = {each["item"]: each["reason"] for each in found.missing}
    assert len(reasons) == 2
    assert any(first.name in reason for reason in reasons.values())
    assert any(second.name in reason for reason in reasons.values())
    kept = [row.scores["overall"] for row in base.rows if row.item not in reasons]
    assert found.headline == pytest.approx(sum(kept) / 4)
    assert found.table["all"]["overall"]["n"] == 4
    assert "2 images without a score" in str(found)
    line = json.loads((found.folder / "rows.jsonl").read_text().splitlines()[0])
    assert found.rows[0].item == line["item"]


def test_a_folder_without_an_image_of_the_items_raises_and_writes_nothing(tmp_path):
    (tmp_path / "images").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "images" / "other.png")
    with pytest.raises(ValueError, match=r"no image of the 2 items; name the files by the ids of the items, for example .*\.png"):
        run("playground", images=tmp_path / "images", subset=2, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_judge_scores_the_existing_images_without_generating_new_ones(base, tmp_path, capsys):
    out = tmp_path / "out"
    shutil.copytree(base.folder.parents[1], out)
    before = {path: path.stat().st_mtime_ns for path in (out / "images").iterdir()}
    arguments = ["bench", "playground", "--model", "playground", "--subset", "6", "--out", str(out)]
    assert cli.main([*arguments, "--judge", "share:red"]) == 0
    assert "share" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (out / "images").iterdir()} == before
    assert sorted(path.name for path in (out / "scores").iterdir()) == ["own", "share"]
    with pytest.raises(ValueError, match="several results: own, share"):
        compare(out, out)
    assert cli.main(["bench", "playground", "--model", "playground", "--seed", "1", "--out", str(out)]) == 2
    assert "has the images of another seed: 0 there, 1 now" in capsys.readouterr().err


KILLED = """
import os, signal, sys
from retouch_bench.images import ImageFolder
from retouch.rewards.ledger.journal import Journal
from retouch_bench.running import run
kind, at = {"images": (ImageFolder, "write"), "scores": (Journal, "record")}[sys.argv[2]]
inner, calls = getattr(kind, at), []
def counted(self, *arguments, **options):
    calls.append(0)
    if len(calls) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return inner(self, *arguments, **options)
setattr(kind, at, counted)
run("playground", model="playground", subset=34, options={"tasks": 34}, out=sys.argv[1])
"""


@pytest.mark.slow
def test_a_killed_benchmark_resumes_with_its_images_and_gives_the_same_scores(tmp_path):
    for place, call in (("images", 5), ("scores", 2)):
        ended = subprocess.run([python(), "-c", KILLED, str(tmp_path / "out"), place, str(call)], check=False)
        assert ended.returncode == -signal.SIGKILL
        images = {path: path.stat().st_mtime_ns for path in (tmp_path / "out" / "images").glob("*.png")}
        assert len(images) == (4 if place == "images" else 34)
        assert not (tmp_path / "out" / "scores" / "own" / "result.json").exists()
    whole = run("playground", model="playground", options={"tasks": 34}, out=tmp_path / "whole")
    again = run("playground", model="playground", options={"tasks": 34}, out=tmp_path / "out")
    assert {path: path.stat().st_mtime_ns for path in images} == images
    assert scores(again) == scores(whole)


@pytest.mark.slow
def test_two_ranks_give_the_same_table_as_one_rank(base, tmp_path):
    words = ["bench", "playground", "--images", str(images_of(base)), "--subset", "6", "--device", "cpu"]
    on_ranks(2, ["-m", "retouch", *words, "--out", str(tmp_path / "two")], tmp_path / "logs")
    two = BenchmarkResult.read(tmp_path / "two" / "scores" / "own")
    assert two.table == base.table
    assert scores(two) == scores(base)


class JudgedSuite(Suite):
    """Plain images that a judge scores."""

    name, title = "judged", "Judged"
    source, licence, size = "https://example.org", "MIT", 30
    protocol: ClassVar[str] = "VIEScore."
    task = "text-to-image"
    needs_data = False
    columns: ClassVar[Mapping[str, Column]] = {"sc": Column(0.0, 10.0), "pq": Column(0.0, 10.0), "overall": Column(0.0, 10.0)}
    headline_column: ClassVar[str] = "overall"

    def items(self, data):
        return [SuiteItem(id=f"{row:03d}", prompt=f"colour {row}") for row in range(30)], [BrokenItem("031", "no prompt")]

    def reward(self, judge):
        return VieScore(judge=require_judge(self, judge))


def write_judged_images(folder):
    """The images of ``JudgedSuite``."""
    folder.mkdir()
    for row in range(30):
        Image.new("RGB", (8, 8), (8 * row, 100, 50)).save(folder / f"{row:03d}.png")
    return folder


def test_a_benchmark_stops_when_its_budget_is_spent_and_the_next_call_continues_it(tmp_path, monkeypatch, capsys):
    images = write_judged_images(tmp_path / "images")
    with Double() as server:
        monkeypatch.setenv("DOUBLE_KEY", KEY)
        monkeypatch.setenv("RETOUCH_KEYS", f"DOUBLE_KEY={server.url.removesuffix('/v1')}")
        judge = Endpoint(model="double", base_url=server.url, key="DOUBLE_KEY", quota=JudgeQuota(calls=35))
        with pytest.raises(BudgetSpent, match=r"budget of 35 calls .* the same command continues"):
            run(JudgedSuite(), images=images, judge=judge, audit=False, out=tmp_path / "out")
        assert 0 < len(server.requests) <= 35
        assert not (tmp_path / "out" / "scores" / "double" / "result.json").exists()
        second = run(JudgedSuite(), images=images, judge=judge, audit=False, out=tmp_path / "out")
        assert second.table["all"]["overall"]["n"] == 30
        assert set(server.seen.values()) == {1}, "nothing is asked twice"
        assert len(server.requests) == 60
        unlimited = judge.model_copy(update={"quota": None})
        clean = run(JudgedSuite(), images=images, judge=unlimited, audit=False, out=tmp_path / "clean")
        assert scores(second) == scores(clean)
        section = {"kind": "viescore", "judge": judge.model_copy(update={"quota": JudgeQuota(calls=1)}).model_dump(mode="json")}
        words = ["bench", "playground", "--images", str(images), "--judge", json.dumps(section), "--no-audit"]
        Image.new("RGB", (24, 24)).save(images / f"{find_suite('playground').items(None)[0][0].id.replace('/', '%2F')}.png")
        assert cli.main([*words, "--out", str(tmp_path / "command")]) == 2
        assert "the same command continues" in capsys.readouterr().err


@pytest.mark.slow
def test_judge_faults_cause_no_wrong_score_and_only_missing_answers_are_requested_again(tmp_path, monkeypatch):
    write_judged_images(tmp_path / "images")
    faulty = {"on": True}
    kinds: dict[str, str] = {}

    def fault(digest, times):
        if not faulty["on"] or int(digest[:2], 16) % 2:
            return None
        return kinds.setdefault(digest, FAULTS[len(kinds) % len(FAULTS)])

    with Double(fault, hang=5.5) as server:
        monkeypatch.setenv("DOUBLE_KEY", KEY)
        monkeypatch.setenv("RETOUCH_KEYS", f"DOUBLE_KEY={server.url.removesuffix('/v1')}")
        limits = {"attempts": 2, "deadline": 15.0, "concurrency": 8, "pause": 0.01, "longest_pause": 0.02, "timeout": 5.0}
        judge = Endpoint(model="double", base_url=server.url, key="DOUBLE_KEY", **limits)
        first = run(JudgedSuite(), images=tmp_path / "images", judge=judge, audit=False, out=tmp_path / "out")
        faulty["on"] = False
        asked = len(server.requests)
        second = run(JudgedSuite(), images=tmp_path / "images", judge=judge, audit=False, out=tmp_path / "out")
        again = len(server.requests) - asked
        clean = run(JudgedSuite(), images=tmp_path / "images", judge=judge, audit=False, out=tmp_path / "clean")
        right = dict(scores(clean))
        assert len(set(kinds.values())) >= 20
        lost = [each for each in first.missing if "overall" in each["columns"]]
        assert lost
        assert all(each["reason"] for each in lost)
        for item, found in scores(first):
            assert all(math.isnan(value) or value == right[item][name] for name, value in found.items())
        assert scores(second) == scores(clean)
        assert not second.missing
        assert second.table["all"]["overall"]["n"] == 30
        answered = sum(not math.isnan(found[name]) for _, found in scores(first) for name in ("sc", "pq"))
        assert again == 60 - answered, "only the questions without an answer are asked again"
        asked = len(server.requests)
        third = run(JudgedSuite(), images=tmp_path / "images", judge=judge, audit=False, out=tmp_path / "out")
        assert scores(third) == scores(second)
        assert len(server.requests) == asked
    assert "1 item of the data that cannot be used" in str(second)
    assert KEY not in (second.folder / "ledger.sqlite").read_bytes().decode(errors="replace")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["playgroud", "--model", "playground"], "did you mean 'playground'"),
        (["playground"], "either --model, or --images with a folder"),
        (["playground", "--images", "nowhere"], "no such folder"),
        (["playground", "--images", ".", "--lora", "x"], "--lora and --call need --model"),
        (["playground", "--model", "playground", "--lora", "nowhere"], "no such file or folder"),
        (["playground", "--model", "playground", "--call", "guidance_scale=3"], "only --call num_inference_steps"),
        (["playground", "--model", "quickstart", "--lora", "x"], "has its own weights"),
        (["playground", "--model", "playground", "--option", "task=3"], "unknown key"),
        (["playground", "--model", "playground", "--subset", "0"], "at least one item"),
        (["compare", "one"], "give two folders"),
        (["compare", "one", "two"], "no result there"),
    ],
)
def test_invalid_arguments_of_bench_exit_with_a_clear_message(arguments, message, tmp_path, capsys):
    out = [] if arguments[0] == "compare" else ["--out", str(tmp_path / "out")]
    assert cli.main(["bench", *arguments, *out]) == 2
    assert message in capsys.readouterr().err
    assert cli.main(["bench", "list"]) == 0
    assert "playground" in capsys.readouterr().out
