"""A script with a ``Trainer`` runs unchanged under torchrun."""

import os
import subprocess
from pathlib import Path

import pytest

from retouch.records.folder import RunFolder
from warm_python import python

SUPPORT = Path(__file__).parents[1] / "support"


def run_script(out, *launcher):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
    }
    command = [python(), "-W", "ignore", *launcher, str(SUPPORT / "trainer_script.py"), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return RunFolder(out / "run")


@pytest.fixture(scope="module")
def single_process_run(tmp_path_factory):
    """The run of a single process."""
    return run_script(tmp_path_factory.mktemp("single_process_run"))


LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
    "accelerate launch": [
        *("accelerate.commands.accelerate_cli", "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    ],
}


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("accelerate launch", marks=pytest.mark.slow)])
def test_training_on_two_ranks_matches_training_on_one(launcher, single_process_run, tmp_path):
    together = run_script(tmp_path / "together", "-m", *LAUNCHERS[launcher])
    one, two = single_process_run.read_metrics(), together.read_metrics()
    assert [line["step"] for line in two] == [1, 2]
    for mine, theirs in zip(one, two, strict=True):
        assert mine["reward/mean"] == theirs["reward/mean"]
        assert mine["policy/grad_norm"] == pytest.approx(theirs["policy/grad_norm"], rel=1e-4)
    before, after = single_process_run.read_summary(), together.read_summary()
    assert before.after == pytest.approx(after.after, abs=1e-6)
