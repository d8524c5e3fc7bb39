"""Engines from a recipe: rejected recipes, whole runs with the double of a vLLM server, and the doctor's checks of it."""

import copy
import json
import logging
from contextlib import contextmanager

import pytest
from transformers import Emu3ForConditionalGeneration, Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

import tiny_writer_runs
import vllm_runner
from retouch import cli
from retouch.distributed.ranks import Ranks
from retouch.policies.engine import EngineFault
from retouch.recipe.derived_facts import differences
from retouch.recipe.recipe import parse
from retouch.records.folder import RunFolder
from retouch.run import checkpoint
from retouch.run.build import assemble
from retouch.run.session import run
from retouch_models.emu3 import language_model
from retouch_plan.checks import check_engines
from retouch_serve.engines import sections as server_section
from retouch_serve.engines.vllm_wire import PLUGIN
from vllm_double import Double, always, at_first, serving


@pytest.fixture(autouse=True)
def longer_server_timeout(monkeypatch):
    """Give the server more time, because this machine may be busy."""
    monkeypatch.setattr(server_section, "_IMPATIENT_SECONDS", 600.0)


@contextmanager
def served(writer, **options):
    """The double with the writer's weights, and the section of a recipe that names it."""
    base = Qwen2_5_VLForConditionalGeneration.from_pretrained(writer).eval()
    processor = Qwen2VLImageProcessorPil.from_pretrained(writer)
    double = Double(base, image_processor=processor, image_token=base.config.image_token_id, **options)
    with serving(double) as url:
        yield double, {"kind": "vllm", "url": url, "patience": 0.2, "timeout": 600.0}


# Recipes


def error_of(document):
    with pytest.raises(ValueError, match=r".") as caught:
        parse(document)
    return str(caught.value)


VLLM = {"kind": "vllm", "url": "http://127.0.0.1:8000"}


def test_the_engine_key_is_omitted_from_the_document_if_it_is_not_set(make):
    assert "engine" not in parse(make()).document()["rollout"]
    named = parse(make(rollout__engine=VLLM))
    document = named.document()
    assert document["rollout"]["engine"] == {
        **VLLM,
        **{"max_mismatch": 0.1, "truncate_at": 3.0, "adapters": None, "timeout": 300.0, "patience": 600.0},
    }
    assert parse(json.loads(json.dumps(document))) == named


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rollout__temperature": 2.5}, "rollout.temperature: vllm does not accept 2.5; use 2 or less"),
        ({"rollout__top_p": 0.9}, "rollout.top_p: vllm reports which tokens it kept only if top_k is set too"),
        ({"rollout__engine__url": "localhost:8000"}, "rollout.engine.url: should match pattern '^https?://"),
        ({"rollout__engine__truncate_at": 0.5}, "rollout.engine.truncate_at: should be greater than or equal to 1"),
        ({"rollout__engine__kind": "continuous"}, "rollout.engine.kind: 'continuous' is not one of 'cached', 'vllm'"),
        ({"rollout__engine__max_mismatches": 1}, "rollout.engine.max_mismatches: unknown key; did you mean"),
    ],
)
def test_invalid_options_of_a_vllm_engine_raise_when_the_recipe_is_parsed(make, changes, line):
    assert line in error_of(make(rollout__engine=VLLM, **changes))


def test_image_token_recipes_with_a_vllm_engine_reject_top_k_and_top_p(make, tmp_path):
    tokens = tiny_writer_runs.image_tokens(tmp_path)
    parse(make(**tokens, rollout__engine=VLLM))
    parse(make(**tokens, rollout__engine=VLLM, policy__train={"kind": "full"}))
    for cut in ({"rollout__top_k": 100}, {"rollout__top_p": 0.9}):
        told = error_of(make(**tokens, rollout__engine=VLLM, **cut))
        assert "rollout.top_k, top_p: vllm does not report which tokens they kept" in told
        assert "set top_k, for example" not in told
        parse(make(**tokens, **cut))
    free = {**tokens, "policy__model": {**tokens["policy__model"], "grammar": False}}
    parse(make(**free, rollout__engine=VLLM, rollout__top_k=9))


def test_connection_keys_may_change_on_resume_and_max_mismatch_may_not(make):
    old = parse(make(rollout__engine=VLLM))
    connection = {"url": "http://gpu:1", "adapters": "/shared", "timeout": 9.0, "patience": 1.0, "sleep": True}
    assert not differences(old, parse(make(rollout__engine={**VLLM, **connection})))
    assert len(differences(old, parse(make(rollout__engine={**VLLM, "max_mismatch": 0.2})))) == 1


def test_a_writer_without_resized_images_raises(make):
    parts = assemble(parse(make(rollout__engine=VLLM)), Ranks())
    writer = copy.copy(parts.model)
    object.__setattr__(parts, "model", _WithoutImages(writer))
    with pytest.raises(ValueError, match="has no `resized_images`"):
        parts.phase(0, stepper=parts.stepper(), judge=parts.judge)


class _WithoutImages:
    """A writer without ``resized_images``."""

    def __init__(self, writer):
        self.__dict__ = {"writer": writer}

    def __getattr__(self, name):
        if name == "resized_images":
            raise AttributeError(name)
        return getattr(self.writer, name)


# Runs


def test_a_run_samples_its_completions_from_the_server(make, writer, caplog):
    with served(writer) as (double, section), caplog.at_level(logging.WARNING, "retouch"):
        # Large steps, and a mismatch limit that the adapter of the previous step would exceed.
        recipe = parse(make(steps=3, learning_rate=0.05, rollout__engine={**section, "max_mismatch": 1e-3}, rollout__chunk=4))
        assert run(recipe, fresh=False) == 0
    folder = RunFolder(recipe.folder)
    assert len(double.loaded) == len(set(double.loaded)) == 3
    assert all(name.startswith("retouch-written-") for name in double.loaded)
    for line in folder.read_metrics():
        assert 0 < line["engine/mismatch"] <= line["engine/mismatch_max"] < 1e-3
        assert line["policy/ratio_max_first"] <= 1e-5
    checks = {check["name"]: check for check in folder.read_preflight()}
    assert all(check["ok"] for check in checks.values())
    assert not double.adapters
    assert not (folder.root / "adapters").exists()
    assert any("not on a GPU" in line for line in (folder.root / "train.log").read_text().splitlines())
    assert any(asked.content_parts for asked in double.asked)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_unavailable_server_stops_the_run_and_the_run_resumes(make, writer, tmp_path, staleness):
    stale = {"rollout__staleness": staleness} if staleness else {}
    with served(writer) as (double, section):
        engine = {**section, "max_mismatch": 1e-3}
        steps = 2 + staleness
        document = make(steps=steps, learning_rate=0.05, rollout__engine=engine, checkpoints={"every": 0}, **stale)
        double.fault = lambda path: "503" if len(double.loaded) == 2 and path.endswith("generate") else None
        with pytest.raises(EngineFault, match=r"did not answer /inference/v1/generate within 0\.2 s"):
            run(parse(document), fresh=False)
        folder = RunFolder(tmp_path / "written")
        found = checkpoint.latest(folder.checkpoints)
        assert found is not None
        assert checkpoint.load(found).step == 1
        double.fault = at_first()
        assert run(parse(document), fresh=False) == 0
    assert len(folder.read_metrics()) == steps
    if staleness:
        first, second, *_ = double.loaded
        # After the resume, the newest weights sample the trial step, and the earlier ones sample the queue again.
        assert double.loaded == [first, second, second, first, second]
        for step, line in enumerate(folder.read_metrics()):
            assert line["staleness/steps"] == float(step > 0)
            assert 0 < line["engine/mismatch"] <= line["engine/mismatch_max"] < 1e-3
            assert line["policy/ratio_max_first"] <= 1e-5


@pytest.mark.slow
def test_a_run_samples_image_tokens_from_a_server_with_the_plugin(make, tmp_path, monkeypatch):
    tiny_writer_runs.save_emu3(tmp_path / "emu3")
    tokens = tiny_writer_runs.image_tokens(tmp_path / "emu3")
    base = language_model(Emu3ForConditionalGeneration.from_pretrained(tmp_path / "emu3")).eval()
    double = Double(base, processor=vllm_runner.install_plugin(monkeypatch))
    with serving(double) as url:
        section = {"kind": "vllm", "url": url, "patience": 0.2, "timeout": 600.0, "max_mismatch": 1e-3}
        reward = {"kind": "compressibility", "combine": {"compressibility": 1}}
        recipe = parse(make(**tokens, rollout__engine=section, reward=reward, rollout__chunk=4, steps=1))
        assert run(recipe, fresh=False) == 0
        assert not any(finding.status == "FAILED" for finding in check_engines(recipe))
        double.processor = None
        (failed,) = (finding for finding in check_engines(recipe) if finding.status == "FAILED")
        assert f"--logits-processors {PLUGIN}" in failed.text
    (line,) = RunFolder(recipe.folder).read_metrics()
    assert 0 < line["engine/mismatch_max"] < 1e-3
    assert line["completion/cut_off_fraction"] == 0
    assert line["policy/grad_norm"] > 0


# The doctor


def test_doctor_reports_a_ready_vllm_server(make, writer, tmp_path, capsys):
    with served(writer) as (_, section):
        file = tmp_path / "served.json"
        file.write_text(json.dumps(make(rollout__engine=section)))
        assert cli.main(["doctor", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("ok      engine        vLLM 0.32.0 at http://127.0.0.1:") for line in lines)
    assert any("is tested against vLLM 0.32.0 on a CPU, and not on a GPU" in line for line in lines)
    assert lines[-2] == "ready"


@pytest.mark.parametrize(
    ("options", "status", "says"),
    [
        ({"version": "0.20.1"}, "note", "vLLM 0.20.1 at"),
        ({"runtime_lora": False}, "FAILED", "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"),
        ({"scale_out": False}, "FAILED", "--enable-scale-out"),
        ({"has_lora": False}, "FAILED", "loads no LoRA: it was started without --enable-lora"),
        ({"processed": False}, "FAILED", "--logprobs-mode processed_logprobs"),
        ({"sampling_mask": True}, "FAILED", "answers only requests with top_k"),
        ({"max_model_len": 5}, "FAILED", "allows 5 tokens"),
        ({"key": "secret"}, "FAILED", "HTTP 401"),
        ({"fault": always("503", path="/version")}, "FAILED", "HTTP 503"),
    ],
    ids=lambda value: "fault" if isinstance(value, dict) and "fault" in value else str(value),
)
def test_doctor_reports_problems_of_the_server(make, writer, options, status, says):
    with served(writer, **options) as (double, section):
        found = list(check_engines(parse(make(rollout__engine=section))))
        assert any(finding.status == status and says in finding.text for finding in found), found
        assert not double.loaded


def test_doctor_reports_an_unreachable_server_and_skips_recipes_without_one(make):
    assert not list(check_engines(parse(make())))
    (finding,) = check_engines(parse(make(rollout__engine={"kind": "vllm", "url": "http://127.0.0.1:9"})))
    assert finding.status == "FAILED"
    assert "ConnectError" in finding.text
