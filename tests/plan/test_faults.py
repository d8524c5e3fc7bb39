"""A dry run reports errors of device, dtype and shape with file and line, and what occupies memory."""

import json
from pathlib import Path

import pytest

from warm_python import run_python

SUPPORT = Path(__file__).parents[1] / "support"
SOURCE = (SUPPORT / "planted_faults.py").read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return dry_run(tmp_path_factory.mktemp("rehearsal") / "sd3")


def dry_run(folder, *chosen):
    """What ``planted_faults`` found with each of the ``chosen`` faults, or with all."""
    # A fake accelerator stays in its process.
    printed = run_python(SUPPORT / "planted_faults.py", folder, *chosen, search=[SUPPORT], timeout=600)
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    return {line["fault"]: line for line in lines}


def line_of(fault):
    return next(number for number, text in enumerate(SOURCE, start=1) if f"# fault: {fault}" in text)


def test_a_device_error_is_reported_with_file_and_line(tmp_path):
    error = dry_run(tmp_path / "sd3", "device")["device"]["error"]
    assert f"planted_faults.py:{line_of('device')}, in velocity" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("device", "expected all tensors to be on the same device, but found dryrun:0, cpu"), ("dtype", "same dtype"),
        ("shape", "invalid for input of size"),
    ],
)  # fmt: skip
def test_an_error_is_reported_with_its_mismatch_file_and_line(found, fault, says):
    assert f"planted_faults.py:{line_of(fault)}, in velocity" in found[fault]["error"]
    assert says in found[fault]["error"]


@pytest.mark.slow
def test_retained_memory_is_reported_in_the_stage_that_retains_it(found):
    more = {name: found["hog"]["peaks"][name] - size for name, size in found[""]["peaks"].items()}
    assert more["rollout"] >= 2**30  # kept since the preflight
    assert more["update"] >= more["rollout"] + 2 * 2**30
    assert found["hog"]["held"]["activations"] > found[""]["held"]["activations"] + 2**30


@pytest.mark.slow
def test_the_number_of_evaluations_equals_that_of_a_run(found):
    """Three steps, evaluated every 2 (after 0, 2 and 3 steps), every 3, and only at the start and at the end."""
    assert [found[name]["evaluations"] for name in ("", "checkpointing", "ranks")] == [3, 2, 2]


@pytest.mark.slow
def test_gradient_checkpointing_reduces_activations_and_increases_flops(found):
    plain, checkpointed = found[""], found["checkpointing"]
    assert checkpointed["held"]["activations"] < plain["held"]["activations"]
    assert checkpointed["flops"]["update"] > 1.1 * plain["flops"]["update"]
    assert checkpointed["flops"]["rollout"] == plain["flops"]["rollout"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("small chunks", ["policy.gradient_checkpointing=true"]),  # where the update alone is too large
        # Where the rollout is nearly as large as the update: gradient checkpointing was tried before, and is not needed beside it.
        ("", ["rollout.chunk=4"]),
    ],
)
def test_settings_that_make_the_recipe_fit_are_suggested_for_every_stage_that_is_too_large(found, case, settings):
    assert found[""]["peaks"]["rollout"] > 0.95 * found[""]["peak"]
    suggested, peak = found[case]["changes"]
    assert suggested == settings
    assert peak < 0.95 * found[case]["peak"]
    assert found[case]["again"] == {"peak": peak, "fits": True}


@pytest.mark.slow
def test_moments_in_8_bits_are_suggested_if_they_suffice(tmp_path):
    found = dry_run(tmp_path / "sd3", "all weights")["all weights"]
    assert found["changes"][0] == ["optimizer.moments=8bit"]
    assert found["again"] == {"peak": found["changes"][1], "fits": True}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["", "hog"])
def test_gradients_are_as_large_as_the_trained_weights(found, case):
    held = found[case]["held"]  # the peak is in the last microbatch
    assert held["gradients"] == held["trained weights"] == held["master weights"]


@pytest.mark.slow
def test_only_the_first_of_several_ranks_runs(found):
    assert found[""]["rows"] == 4 * found["ranks"]["rows"] == 16
    assert found[""]["flops"]["update"] == pytest.approx(4 * found["ranks"]["flops"]["update"], rel=0.05)
    assert found["ranks"]["peak"] < found[""]["peak"]


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp2", "zero2"])
def test_the_first_sharded_rank_holds_only_its_shard(found, sharding):
    sharded = found[sharding]
    assert "error" not in sharded
    assert sharded["communicated"] > found["ranks"]["communicated"]
    assert sharded["held"]["AdamW's moments"] < 2 * found["zero2"]["held"]["trained weights"]
    assert found["fsdp2"]["held"]["trained weights"] < 0.5 * found["zero2"]["held"]["trained weights"]


@pytest.mark.slow
def test_offloaded_sharded_weights_are_not_on_the_device(tmp_path):
    here, waiting = dry_run(tmp_path / "sd3", "fsdp2", "fsdp2, waiting").values()
    assert "error" not in waiting
    assert not {"trained weights", "AdamW's moments", "gradients"} & {name for name, size in waiting["held"].items() if size > 1000}
    gone = sum(here["held"][name] for name in ("trained weights", "AdamW's moments", "gradients"))
    assert waiting["peak"] < here["peak"] - 0.9 * gone
    assert waiting["flops"]["update"] == pytest.approx(here["flops"]["update"], rel=0.01)  # the optimizer steps on the host
    assert waiting["checkpoint"] == here["checkpoint"]


@pytest.mark.slow
@pytest.mark.parametrize(("way", "waits"), [("cached", ("text",)), ("offloaded", ("text", "vae"))])
def test_cached_or_offloaded_parts_are_not_on_the_device(found, way, waits):
    assert "error" not in found[way]
    frozen = {name.removeprefix("weights: "): size for name, size in found[""]["held"].items() if name.startswith("weights: ")}
    saved = found[""]["peaks"]["update"] - found[way]["peaks"]["update"]
    assert saved == pytest.approx(sum(size for name, size in frozen.items() if name.startswith(waits)), rel=0.03)
    assert found[way]["held"]["weights: transformer"] == frozen["transformer"]
    assert found[way]["flops"]["update"] == found[""]["flops"]["update"]


@pytest.mark.slow
def test_reading_the_loss_is_reported_as_a_host_synchronization(found):
    assert any(place.startswith("item at distributed/optimizer.py") for place in found[""]["waits"]["update"])
