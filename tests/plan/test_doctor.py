"""The doctor: its findings for good and bad recipes, checks between ranks, and the suggested next command."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import constants
from packaging.requirements import Requirement
from PIL import Image

from retouch import cli
from retouch.distributed.launching import rank_environments, run_ranks
from retouch.distributed.ranks import Ranks
from retouch.models.pretrained import fetch_weights, find_weights
from retouch.recipe.document import apply
from retouch.recipe.recipe import load, parse
from retouch.records import libraries
from retouch.records.folder import RunFolder
from retouch.rewards.base import close
from retouch.run.build import assemble, build_sets, sets_of, steps_of
from retouch.run.preflight import Check, preflight
from retouch.run.session import run
from retouch.types import Column
from retouch_judge.chat_client import ChatClient
from retouch_plan import checks
from retouch_plan.checks import (
    check_batch,
    check_data,
    check_disk,
    check_folder,
    check_scoring,
    check_trackers,
    check_watch,
    phase_steps,
)
from retouch_plan.findings import Finding, failed, ok
from retouch_plan.machines import MACHINES
from retouch_plan.system import (
    PlannedDevice,
    RankGroup,
    check_all_reduce,
    check_device,
    check_devices,
    check_install,
    check_playground,
    check_same,
    check_versions,
    machine_of,
)
from retouch_view.votes.commands import Calibration
from retouch_worlds.playground import playground_weights
from tiny_recipes import SMALL
from warm_python import python

FULL = "recipes/qwen-image-edit/flow-grpo.jsonnet"
REHEARSED = Path(__file__).parents[2] / "measurements" / "rehearsal" / "rehearsed.json"


def small(*changes):
    return parse(apply(SMALL, list(changes)))


@pytest.fixture
def photos(tmp_path):
    """A folder of twelve small images."""
    folder = tmp_path / "photos"
    folder.mkdir()
    lines = []
    for number in range(12):
        Image.new("RGB", (48, 32), (20 * number, 90, 200)).save(folder / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "instruction": "make it warmer"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def doctor(capsys, *words):
    code = cli.main(["doctor", *words])
    return code, capsys.readouterr().out.splitlines()


def recipe_file(tmp_path, *changes):
    """A small recipe as a file."""
    file = tmp_path / "small.json"
    file.write_text(json.dumps(apply(SMALL, [f"out={tmp_path / 'runs'}", *changes])))
    return str(file)


# The installation


def test_unsupported_versions_are_reported_with_the_pip_command():
    requirements = ["safetensors>=0.1", "peft>=99", "no-such-library>=2", "numpy<1", "torch>=2.11"]
    found = list(check_versions([Requirement(each) for each in requirements]))
    assert [finding.subject for finding in found] == ["torch", "peft", "no-such-library", "numpy", "libraries"]
    assert [finding.status for finding in found] == ["ok", "FAILED", "FAILED", "FAILED", "ok"]
    assert found[1].fix == "pip install --upgrade 'peft>=99'"
    assert found[2].text == "not installed; >=2 is supported"
    assert found[4].text.startswith("1 other")


def test_doctor_without_a_recipe_checks_the_installation_and_built_in_model(capsys):
    found = list(check_install())
    assert [finding.subject for finding in found] == ["python", "torch", "diffusers", "transformers", "peft", "libraries"]
    assert {finding.status for finding in found} == {"ok"}
    code, lines = doctor(capsys)
    assert code == 0
    assert any(line.startswith("ok      playground    the built-in model loads and samples") for line in lines)
    assert lines[-3:] == ["", "ready", "next: retouch train recipes/quickstart.jsonnet"]


def test_a_missing_or_damaged_built_in_model_is_a_failure(tmp_path):
    missing = check_playground(tmp_path)
    assert (missing.status, missing.fix) == ("FAILED", "retouch tools playground")
    for file in playground_weights().rglob("*.*"):
        if file.is_file():
            copy = tmp_path / file.relative_to(playground_weights())
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(file.read_bytes()[: 200 if file.parent.name == "vae" and file.suffix == ".safetensors" else None])
    assert check_playground(tmp_path).status == "FAILED"


# The full-size recipe, without its weights


@pytest.mark.slow
def test_full_size_recipe_is_ready_before_its_weights_are_downloaded(photos, tmp_path):
    reward = 'reward={"kind": "photos", "colour": [200, 60, 40], "combine": {"reward": 1}}'  # needs no weights
    words = [FULL, "--set", f"data.path={photos}", "--set", f"out={tmp_path / 'my runs'}", "--set", reward, "--device", "h100"]
    lines = doctor_with_a_dry_run(tmp_path, *words)
    assert "ok      batch         32 tasks x 16 samples = 512 a step; 64 on each of 8 ranks, 32 for each optimizer step" in lines
    assert any(line.startswith(f"ok      data          {photos}: ") for line in lines)
    (memory,) = (line for line in lines if line.startswith("ok      memory "))
    kept = json.loads(REHEARSED.read_text(encoding="utf-8"))["qwen-image-edit/flow-grpo"]
    assert memory.endswith(f"needs {kept['peak'] / 1e9:.2f} GB of the 84.93 GB of h100 on each of 8 ranks, in {kept['in']}:")
    rows = dict(line.strip().split("  ", 1)[::-1] for line in lines if re.match(r" +[\d.]+ GB  \w", line))
    assert float(rows["weights: transformer"].removesuffix(" GB")) == pytest.approx(40.86, abs=0.05)
    assert sum(float(size.removesuffix(" GB")) for size in rows.values()) == pytest.approx(kept["peak"] / 1e9, abs=0.05)
    found = "\n".join(lines)
    assert re.search(r"\nnote    time          a step takes [\d.]+ min, and there are \d+; the run takes ", found)
    assert re.search(r"\nok      disk          2 checkpoints of [\d.]+ GB, and one being written", found)
    there = "the weights of Qwen/Qwen-Image-Edit are not on this machine: they will be downloaded when training starts"
    assert f"note    weights       {there}" in lines
    assert lines[-2:] == ["ready", f"next: retouch launch --nproc 8 {shlex.join(words[:-2])}"]
    assert not (tmp_path / "my runs").exists()


def doctor_with_a_dry_run(tmp_path, *words, code=0):
    """The lines that `retouch doctor` prints in a process of its own, without weights on the machine."""
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "cache")}
    command = [python(), "-m", "retouch", "doctor", *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_gpu_that_is_too_small_is_refused_with_settings_that_fit(tmp_path):
    words = ["sd3/prompt-enhancer", "--device", "a100-40gb", "--set", "microbatch=64"]
    lines = doctor_with_a_dry_run(tmp_path, *words, code=1)
    refused = r"\nFAILED  memory        does not fit: needs [\d.]+ GB of the 42\.31 GB of a100-40gb, in update"
    assert re.search(refused, "\n".join(lines))
    changed = "--set microbatch=64 --device a100-40gb --set policy.gradient_checkpointing=true"
    assert lines[-1] == f"next: retouch doctor sd3/prompt-enhancer {changed}"
    again = doctor_with_a_dry_run(tmp_path, *words, "--set", "policy.gradient_checkpointing=true", code=1)
    assert any(line.startswith("ok      memory        needs ") for line in again)


def test_the_other_checks_run_if_the_data_and_a_reward_are_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    words = [FULL, "--allow-import", "mine", "--set", "data.path=nowhere", "--device", "4090", "--no-rehearsal"]
    code, lines = doctor(capsys, *words)
    assert code == 1
    assert "note    memory        not checked, because of --no-rehearsal" in lines
    assert any(line.startswith("note    weights ") for line in lines)
    assert "FAILED  data          nowhere: no such folder; give the folder of your data set (in a recipe: data.path)" in lines
    assert lines[-3] == "not ready: data, reward"
    assert lines[-2].startswith("next: hf download yuvalkirstain/PickScore_v1 config.json ")
    assert lines[-2].endswith(" --local-dir weights/pickscore  (reward)")
    given = f"{FULL} --allow-import mine --set data.path=nowhere"
    needed = "--device 4090 --no-rehearsal --set data.path=DIR --set reward.rewards.pick.path=weights/pickscore"
    assert lines[-1] == f"next: retouch doctor {given} {needed}"


def test_without_cuda_a_recipe_is_checked_for_an_h100_with_a_note():
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device, so that is checked for")
    target, finding = check_device("auto", device=None, weights_here=False)
    assert target == PlannedDevice("h100", MACHINES["h100"].memory, None)
    assert finding.status == "note"
    assert "no CUDA device on this machine" in finding.text
    here, _ = check_device("auto", device=None, weights_here=True)
    assert here is not None
    assert here.device is not None
    assert check_device("cuda", device=None, weights_here=True)[1].status == "FAILED"


def test_a_device_of_this_machine_has_the_rates_of_the_gpu_that_it_names():
    for name, rates in (
        ("cuda:0 (NVIDIA A100-SXM4-80GB)", "a100-80gb"), ("cuda:1 (NVIDIA GeForce RTX 4090)", "4090"),
        ("cuda:0 (NVIDIA B300)", "h100"),
    ):  # fmt: skip
        made = machine_of(PlannedDevice(name, 10**9, torch.device("cuda:0")), "auto")
        assert (made.name, made.memory, made.half) == (name, 10**9, MACHINES[rates].half)
        assert made.measured.startswith(f"rates of {rates}: ")
    assert machine_of(PlannedDevice("l40s", 1, None), "l40s") == MACHINES["l40s"]
    with pytest.raises(ValueError, match="4090"):
        cli.main(["doctor", "--device", "h20O", "--debug"])


# A model whose weights are present

_NFT = ('objective={"kind":"nft","reference_weight":0.1}', 'rollout={"num_steps":3,"transition":{"kind":"ode"}}')
_FULL_BF16 = ('policy.train={"kind":"full"}', "policy.model.dtype=bfloat16")


@pytest.mark.parametrize("changes", [(), (*_FULL_BF16, "rollout.staleness=2"), (*_FULL_BF16, *_NFT)])
def test_the_disk_is_checked_for_the_bytes_of_the_tensors_of_a_checkpoint(changes):
    parts = assemble(small(*changes), Ranks())
    stepper = parts.stepper()
    stepper.backward(torch.stack([parameter.float().sum() for parameter in parts.copies.parameters.values()]).sum())
    stepper.step(1e-3)
    state = parts.capture(stepper, step=1)
    kept = [tensor for group in ("weights", "optimizer", "copies") for tensor in state.tensors[group].values() if tensor.dim()]
    assert checks._checkpoint_bytes(parts) == sum(tensor.nbytes for tensor in kept)
    parts.judge.close()


def test_trial_step_of_a_small_recipe_passes_and_leaves_no_files(tmp_path, capsys):
    file = recipe_file(tmp_path)
    code, lines = doctor(capsys, file, "--device", "cpu")
    assert code == 0, "\n".join(lines)
    assert "ok      data          the playground: 8 tasks for training, 4 held out" in lines
    assert sum(line.startswith("ok      trial step    ") for line in lines) == 6
    assert lines[-2:] == ["ready", f"next: retouch train {file}"]
    assert not (tmp_path / "runs").exists()


def test_trial_step_samples_at_most_rollout_chunk_rows_at_once(monkeypatch):
    parts = assemble(small("rollout.chunk=3", "tasks_per_step=8"), Ranks())
    run, phase = parts.phase(0, stepper=parts.stepper(), judge=lambda batch, samples: pytest.fail("a reward was computed"))
    seen: list[tuple[int, ...]] = []
    rollout = run.policy.rollout
    monkeypatch.setattr(run.policy, "rollout", lambda batch: seen.append(batch.group_ids) or rollout(batch))
    checks = preflight(run, phase, step=0, rows=8)
    parts.judge.close()
    assert [len(groups) for groups in seen] == [3, 3, 2]
    assert len({group for groups in seen for group in groups}) == 8  # each of another task
    assert [check.name for check in checks if check.ok][1:] == ["ratio_before", "gradient", "moved", "ratio_after", "frozen"]


@pytest.mark.parametrize("objective", ['{"kind":"nft"}', '{"kind":"awm","reference_weight":0.1}', '{"kind":"dpo"}'])
def test_objectives_without_probabilities_move_the_weights_in_a_trial(objective):
    parts = assemble(small(f"objective={objective}", _NFT[1], "group_size=4"), Ranks())
    stepper = parts.stepper()
    parts.begin(0)
    run, phase = parts.phase(0, stepper=stepper, judge=lambda batch, samples: pytest.fail("a reward was computed"))
    checks = preflight(run, phase, step=0, rows=8)
    parts.judge.close()
    assert [check.name for check in checks if check.ok] == ["frozen_gradient", "gradient", "moved", "frozen"]


def test_unknown_lora_targets_and_missing_initial_adapter_are_failures(tmp_path, capsys):
    for change, what, said in (
        ('policy.train.targets=["no.such.layer"]', "model", "no.such.layer"),
        ("policy.train.init_from=nowhere", "weights", "policy.train.init_from: there is no file or folder nowhere"),
    ):
        code, lines = doctor(capsys, recipe_file(tmp_path, change), "--device", "cpu")
        assert (code, lines[-2]) == (1, f"not ready: {what}")
        assert any(said in line for line in lines)


# Recipes


_FLUX2, _WRITER = "flux2-klein/ocr-grpo", "sd3/prompt-enhancer"
_REPEATED = ["25% of the rows of the update's forward passes", "of 4 does not divide the 9 steps", "; 3 does"]
_HALVES = ("tasks_per_step=8", "group_size=8", "minibatches=2")


@pytest.mark.parametrize(
    ("name", "world", "changes", "says"),
    [
        (_FLUX2, 8, [], []), (_FLUX2, 8, ["microbatch=4"], _REPEATED), (_FLUX2, 8, ["microbatch=12"], []),
        (_FLUX2, 8, ["microbatch=4", "rollout.equal_shapes=false"], []), (_WRITER, 1, ["microbatch=8", "rollout.chunk=64"], []),
        (_WRITER, 1, ["microbatch=8", "rollout.chunk=12"], ["rollout.chunk 12 is not a multiple of microbatch 8", "use 16"]),
        (_WRITER, 1, [*_HALVES[:2], "minibatches=1", "microbatch=5", "rollout.chunk=40"], []),
        (_WRITER, 1, [*_HALVES, "microbatch=8", "rollout.chunk=64"], []),
        (_WRITER, 1, [*_HALVES, "microbatch=12", "rollout.chunk=96"], ["32 rows", "use microbatch 4"]),
    ],
)  # fmt: skip
def test_check_batch_reports_rows_that_are_repeated_and_chunks_and_minibatches_that_do_not_fit(name, world, changes, says):
    notes = [finding.text for finding in check_batch(load(name, changes), world=world) if finding.status == "note"]
    assert len(notes) == bool(says)
    assert all(part in text for text in notes for part in says)


def test_check_batch_reports_ranks_that_do_not_divide_the_batch():
    (good, unmeant) = check_batch(small("ranks=4"), world=2)
    assert good.text == "2 tasks x 2 samples = 4 a step; 2 on each of 2 ranks"
    assert (unmeant.status, unmeant.text) == ("note", "the recipe is meant for 4 ranks, and there are 2")
    (bad,) = check_batch(small(), world=3)
    assert bad.status == "FAILED"
    assert "tasks_per_step 3, 6 or 9" in bad.text
    phased = small("steps=null", 'phases=[{"name":"a","steps":1},{"name":"b","steps":1,"group_size":4}]')
    assert [finding.text.split(":")[0] for finding in check_batch(phased, world=1)] == ["phase a", "phase b"]


def test_run_on_another_number_of_ranks_logs_it_and_continues(tmp_path):
    changes = ("ranks=4", "steps=1", f"out={tmp_path}", "device=cpu", "trackers=[]", "policy.ema=null")
    assert run(small(*changes), fresh=False) == 0
    assert "the recipe is meant for 4 ranks, and there is 1" in (tmp_path / "small" / "train.log").read_text()


def test_check_data_reports_image_problems(photos):
    share = 'reward={"kind":"share","combine":{"share":1}}'
    ((finding, _),) = check_data(small(f'data={{"kind":"folder","path":"{photos}","held_out":24}}', share))
    assert (finding.status, finding.fix) == ("FAILED", "--set data.held_out=1")
    recipe = small(f'data={{"kind":"folder","path":"{photos}","held_out":0.5}}', share)
    ((finding, sets),) = check_data(recipe)
    assert (finding.status, len(sets.train), len(sets.heldout)) == ("ok", 5, 4)
    Image.new("L", (48, 32), 9).save(photos / "3.png")
    ((finding, sets),) = check_data(recipe)
    assert finding.status == "note"
    assert "3.png: mode L, read as RGB" in finding.text
    (photos / "5.png").write_bytes(b"not an image")
    ((finding, _),) = check_data(recipe)
    assert finding.status == "FAILED"
    assert "metadata.jsonl:6" in finding.text
    assert finding.fix == f"retouch data check {photos}"


def test_headline_tags_without_held_out_tasks_are_a_failure():
    ((good, _),) = check_data(small('eval.headline={"complexity":["1"]}'))
    ((bad, _),) = check_data(small('eval.headline={"complexity":["3"]}'))
    assert (good.status, bad.status) == ("ok", "FAILED")
    assert "evaluate on more tasks (eval.tasks), or set eval.headline to null" in bad.text


class NoScore:
    """A reward whose score is always missing, and that notes where it was built."""

    columns = {"overall": Column(0.0, 1.0)}  # noqa: RUF012
    built: list[torch.device] = []  # noqa: RUF012

    def __init__(self, *, device):
        self.built.append(device)

    def __call__(self, samples):
        return {"overall": torch.full((len(samples),), math.nan)}


@pytest.fixture
def judges(monkeypatch):
    """A module of the user with the reward `NoScore`."""
    NoScore.built.clear()
    module = SimpleNamespace(NoScore=NoScore, __spec__=SimpleNamespace(submodule_search_locations=None))
    monkeypatch.setitem(sys.modules, "judges", module)


def no_score(column="overall"):
    return f'reward={{"kind":"import","class":"judges:NoScore","combine":{{"{column}":1}}}}'


@pytest.mark.usefixtures("judges")
def test_check_scoring_scores_a_source_image_and_reports_faulty_rewards():
    recipe = small()
    sets = build_sets(recipe, recipe.data, size=None)
    good = check_scoring(recipe, sets)
    assert good.status == "ok"
    assert good.text.endswith("for an unedited source image")
    assert "not tested" in check_scoring(recipe, None).text
    for column, said in (("overal", "'overal'"), ("overall", "overall missing")):
        found = check_scoring(small(no_score(column)), sets)
        assert found.status == "FAILED"
        assert said in found.text


@pytest.mark.parametrize(
    ("changes", "gpus", "mps", "place"),
    [
        (["device=auto"], 0, True, "mps"), (["device=auto"], 1, False, "cuda:0"),
        (["device=auto", "devices.reward=cpu"], 1, False, "cpu"), (["device=auto", "devices.policy=cuda:1"], 2, False, "cuda:1"),
        (["device=auto", "devices.reward=cuda:1"], 2, False, "cuda:1"),
        (["device=auto", "devices.reward=cuda:1"], 0, False, "cpu"), (["device=cuda"], 0, False, "cpu"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("judges")
def test_reward_is_built_on_the_device_of_the_run_if_it_exists(changes, gpus, mps, place, monkeypatch):
    """If this machine lacks the device, the reward is built on one that it has."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert check_scoring(small(*changes, no_score()), None).status == "ok"
    assert NoScore.built == [torch.device(place)]


@pytest.mark.parametrize("column", ["preference", "win_probability"])
def test_a_reward_that_compares_images_is_not_tested_on_one(tmp_path, column):
    votes = {"kind": "votes", "queue": str(tmp_path / "queue")}
    if column == "win_probability":
        line = (0.0, 1.0)
        Calibration("preference", scores=line, probability=line, sd=line, low=line, high=line, votes=9, tasks=9).save(
            tmp_path / "map.json"
        )
        votes = {"kind": "calibrated", "of": votes, "column": "preference", "map": str(tmp_path / "map.json")}
    rewards = {"votes": votes, "judge": {"kind": "playground"}}
    reward = {"kind": "several", "rewards": rewards, "combine": {f"votes/{column}": 1}}
    recipe = small(f"reward={json.dumps(reward)}", "eval.column=judge/overall")
    found = check_scoring(recipe, build_sets(recipe, recipe.data, size=None))
    assert found.status == "ok"
    assert found.text.endswith("not tested, because it compares the images of a group")
    assert not (tmp_path / "queue").exists()


def test_doctor_does_not_wait_for_judge_servers(monkeypatch):
    waited: list[str] = []

    async def wait(client):
        waited.append(client.endpoint.model)

    monkeypatch.setattr(ChatClient, "_wait_until_up", wait)

    def judged(model, column):
        judge = {"kind": "endpoint", "model": model, "base_url": "http://127.0.0.1:9/v1", "key": None, "wait": 600}
        return {"kind": "aspects", "aspects": [column], "temperature": 0.7, "judge": judge, "combine": {column: 1}}

    watch = {"judge": {"reward": judged("watching", "quality")}, "text": None}
    recipe = parse({**SMALL, "reward": judged("training", "alignment"), "watch": watch})
    assert recipe.watch is not None
    assert check_scoring(recipe, None).status == "ok"
    assert check_watch(recipe.watch, torch.device("cpu")).status == "ok"
    assert waited == []
    close(recipe.reward.build())  # a run waits
    assert waited == ["training"]


def test_missing_tracker_package_is_a_failure(monkeypatch):
    monkeypatch.setattr(libraries, "find_spec", lambda name: None)
    assert check_trackers(small()).status == "ok"
    missing = check_trackers(small('trackers=["wandb"]'))
    assert (missing.status, missing.fix) == ("FAILED", "pip install 'retouch[track]'")


def test_run_folder_with_the_same_run_is_a_note_and_with_another_a_failure(tmp_path):
    recipe = small(f"out={tmp_path}")
    assert check_folder(recipe).status == "ok"
    folder = RunFolder(recipe.folder)
    folder.create()
    folder.write_recipe(recipe.document())
    assert check_folder(recipe).status == "note"
    assert check_folder(small(f"out={tmp_path}", "ranks=2", "steps=9")).status == "note"
    failed_early = check_folder(small(f"out={tmp_path}", "learning_rate=2e-3"))
    assert failed_early.status == "ok"
    assert "ended before its first step; it will be replaced" in failed_early.text
    folder.append_metrics(1, "main", {})
    other = check_folder(small(f"out={tmp_path}", "learning_rate=2e-3"))
    assert other.status == "FAILED"
    assert "learning_rate: 0.001 in the run, 0.002 in the recipe" in other.text
    folder.recipe.write_text("{")
    assert check_folder(recipe).status == "FAILED"


def test_run_that_cannot_be_built_suggests_the_key_to_correct(monkeypatch):
    for says, key in (
        ("policy.train.targets: a model of your own has no usual LoRA targets", "policy.train.targets"),
        ("eval.column: the reward has no column 'overall'", "eval.column"), ("no such folder: weights", "policy.model"),
    ):  # fmt: skip

        def refuse(*_, says=says):
            raise ValueError(says)

        monkeypatch.setattr(checks, "assemble", refuse)
        (found,) = checks.check_trial(small(), Ranks(), steps=None, check_space=False)
        assert (found.status, found.text, found.fix) == ("FAILED", says, f"correct {key}")


def test_checkpoints_must_fit_on_the_disk(tmp_path):
    recipe = small(f"out={tmp_path / 'not' / 'there' / 'yet'}")
    assert check_disk(recipe, 1000, steps=[1]).status == "ok"
    full = check_disk(recipe, 10**18, steps=[1])
    assert full.status == "FAILED"
    assert full.text.endswith(f"free under {tmp_path}")
    longer = small(f"out={tmp_path}", "steps=10", "checkpoints.every=1", "checkpoints.keep_every=2")
    found = check_disk(longer, 1000, steps=phase_steps(longer, [None]))
    assert found.text.startswith("7 checkpoints of 0.00 MB, and one being written"), "2 newest and 5 for good"


def test_disk_check_counts_the_checkpoints_of_a_run_measured_in_passes(tmp_path):
    changes = ["steps=null", "passes=2", "tasks_per_step=2", "checkpoints.every=1", "checkpoints.keep_every=2"]
    recipe = small(f"out={tmp_path}", *changes)
    sets = build_sets(recipe, recipe.data, size=None)
    (phase,) = recipe.resolved_phases()
    kept = 2 + phase.total_steps(len(sets.train)) // 2
    assert kept > 2
    assert check_disk(recipe, 1000, steps=phase_steps(recipe, [sets])).text.startswith(f"{kept} checkpoints of 0.00 MB")
    assert phase_steps(recipe, [None]) is None
    unknown = check_disk(recipe, 1000, steps=None)
    assert unknown.status == "note"
    assert "and another one for every 2 steps, whose number is not known" in unknown.text
    assert check_disk(recipe, 10**18, steps=None).status == "FAILED"


def test_steps_of_each_phase_follow_from_passes_over_its_own_data():
    data = small().document()["data"]
    phases = [{"name": name, "passes": 1, "data": {**data, "count": count}} for name, count in (("a", 4), ("b", 40), ("c", 4))]
    recipe = small("steps=null", "tasks_per_step=2", f"phases={json.dumps(phases)}")
    read = [sets for _, sets in check_data(recipe)]
    every = sets_of(recipe, recipe.resolved_phases(), size=None)
    assert phase_steps(recipe, read) == [len(steps) for steps in steps_of(recipe.resolved_phases(), every)] == [2, 20, 2]
    assert phase_steps(recipe, [read[0], None]) is None


TWO_RATES = 'phases=[{"name": "one", "steps": 1}, {"name": "two", "steps": 1, "learning_rate": 0.005}]'


@pytest.mark.parametrize(
    ("check", "changes", "fix"),
    [
        ("ratio_before", [], "--set policy.model.dtype=float32"),
        ("moved", [], "--set learning_rate=0.01"),
        ("ratio_after", ['policy.train.targets=["to_q"]'], "--set policy.train.targets=null --set learning_rate=0.01"),
        ("moved", [TWO_RATES, "steps=null"], "--set learning_rate=0.01 --set phases.1.learning_rate=0.05"),
        ("gradient", ['policy.train.targets=["to_q"]'], "--set policy.train.targets=null"),
    ],
)
def test_fix_of_a_failed_trial_step_is_a_valid_override(check, changes, fix, monkeypatch):
    recipe = small(*changes)
    parts = assemble(recipe, Ranks())
    monkeypatch.setattr(type(parts), "trial_steps", lambda *_, **__: [Check(check, False, 0.0, None, "it failed")])
    monkeypatch.setattr(checks, "assemble", lambda *_: parts)
    (found,) = (
        finding for finding in checks.check_trial(recipe, Ranks(), steps=None, check_space=False) if finding.status == "FAILED"
    )
    assert found.fix == fix
    parse(recipe.document(), fix.removeprefix("--set ").split(" --set "))
    for explained, words in (("frozen", "writes to weights"), ("kl_gradient", "do not depend on the trained")):
        assert words in checks._suggested_fix(small(), explained), "no override fixes it"


# Where weights are found


def test_weights_are_found_in_a_folder_or_in_the_hubs_cache(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert find_weights(str(tmp_path)) == tmp_path
    assert find_weights("some/model") is None
    cached = tmp_path / "models--some--model"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "model_index.json").write_text("{}")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    assert find_weights("some/model") == cached / "snapshots" / "abc"
    assert fetch_weights("some/model") == cached / "snapshots" / "abc"
    for wrong in ("/no/such/folder", "not an id", "a/b/c"):
        with pytest.raises(ValueError, match="neither a folder nor a Hugging Face id"):
            find_weights(wrong)


def test_failed_download_of_weights_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="the weights of some/model could not be downloaded"):
        fetch_weights("some/model")


# Ranks


def test_two_ranks_on_one_gpu_are_a_failure():
    assert check_devices(["a cpu", "a cpu"]).status == "ok"
    assert check_devices(["a cuda:0 GPU-1", "a cuda:0 GPU-2", "b cuda:0 GPU-3"]).status == "ok"
    shared = check_devices(["a cuda:0 GPU-1", "a cuda:1 GPU-2", "a cuda:0 GPU-1"])
    assert shared.status == "FAILED"
    assert shared.text.splitlines()[1:] == ["a cuda:0 GPU-1: ranks 0, 2"]


def test_check_same_reports_values_that_differ_between_ranks():
    same = json.dumps({"torch": "2.13", "git": "abc"})
    assert check_same("versions", [same, same]).status == "ok"
    other = check_same("versions", [same, json.dumps({"torch": "2.11"}), same])
    assert other.status == "FAILED"
    assert other.text.splitlines()[1:] == ["git: abc on ranks 0, 2; none on rank 1", "torch: 2.13 on ranks 0, 2; 2.11 on rank 1"]


def test_wrong_all_reduce_result_is_a_failure():
    class NoCommunication(Ranks):
        def sum(self, values):
            return values

        def max(self, values):
            return values

        def gather(self, values):
            return values

    assert check_all_reduce(NoCommunication(rank=0, world=1)).status == "ok"
    assert check_all_reduce(NoCommunication(rank=0, world=2)).status == "FAILED"


def test_a_single_rank_gathers_its_own_texts():
    group = RankGroup(Ranks())
    bad = failed("data", "gone", fix="look")
    assert group.gather_texts("é") == ["é"]
    assert group.gather_failures([ok("a", "b"), bad]) == {bad: [0]}
    assert isinstance(bad, Finding)


def test_distributed_doctor_without_a_launcher_fails(capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    code, lines = doctor(capsys, "--distributed")
    assert code == 1
    assert lines[-2:] == ["not ready: ranks", "next: retouch launch --nproc 2 doctor --distributed"]


TOGETHER = """
import os, sys
from retouch.cli import main
recipe, there, elsewhere = sys.argv[1:]
rank = os.environ["RANK"]
same = ["doctor", "--distributed", recipe, "--device", "cpu"]
codes = [main(same), main([*same, "--set", f"seed={rank}"])]
# Only the machine of the first rank has the photographs.
os.chdir(there if rank == "0" else elsewhere)
data = ["--set", 'data={"kind":"folder","path":"photos","held_out":0.5}']
codes.append(main([*same, *data, "--set", 'reward={"kind":"share","combine":{"share":1}}']))
print("codes", *codes)
"""


def test_launched_ranks_report_agreement_and_differences(tmp_path, photos):
    recipe = recipe_file(tmp_path, "ranks=2")
    (tmp_path / "elsewhere").mkdir()
    command = [python(), "-c", TOGETHER, recipe, str(photos.parent), str(tmp_path / "elsewhere")]
    assert run_ranks(command, rank_environments(2), logs=tmp_path / "logs", grace=20.0) == 0
    first, second = ((tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in range(2))
    assert "codes 0 1 1" in first
    assert "codes 0 1 1" in second
    assert "ready" not in second
    agreed, differing, lacking = first.split("ok      rendezvous    2 ranks connected\n")[1:]
    assert "ok      all-reduce" in agreed
    assert "ok      batch         2 tasks x 2 samples = 4 a step; 2 on each of 2 ranks" in agreed
    assert agreed.count("ok      trial step") == 6
    assert f"ready\nnext: retouch launch --nproc 2 {recipe}\n" in agreed
    assert "FAILED  recipe        the ranks differ:" in differing
    assert "not ready: recipe" in differing
    assert "FAILED  data          rank 1: photos: no such folder; give the folder of your data set" in lacking
    assert "trial step" not in lacking
    assert "not ready: data" in lacking


def test_the_report_for_a_maintainer_has_no_keys_and_no_folders(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret-0123456789")
    changes = [f"out={tmp_path / 'my runs' / 'x'}", "policy.model.path=org/model"]
    words = [word for change in changes for word in ("--set", change)]
    assert cli.main(["doctor", "sd3/ocr-grpo-playground", "--report", *words]) == 0
    printed = capsys.readouterr().out
    assert f"- torch: {torch.__version__}" in printed
    assert '"out": ".../x"' in printed
    assert '"path": "org/model"' in printed
    assert "secret" not in printed
    assert str(tmp_path.parent) not in printed
