"""The job files for clusters, executed with stand-ins for a cluster: each rank gets its rank variables and the same command."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FILES = ROOT / "examples" / "cluster"
STANDIN = """#!/usr/bin/env bash
echo -n "RANK=${RANK:-} LOCAL_RANK=${LOCAL_RANK:-} WORLD_SIZE=${WORLD_SIZE:-} MASTER=${MASTER_ADDR:-} "
echo "TIMEOUT=${RETOUCH_RANK_TIMEOUT:-} $(basename $0) $@"
"""
SRUN = """#!/usr/bin/env bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 9
shift
for rank in 0 1 2 3; do SLURM_PROCID=$rank SLURM_LOCALID=$((rank % 2)) "$@"; done
"""


@pytest.fixture
def execute(tmp_path: Path):
    """Runs bash with these variables and the stand-ins; returns its lines."""
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\nprintf 'first\\nsecond\\n'\n"}.items():
        (tmp_path / name).write_text(text)
    for name in ("retouch", "torchrun", "ray"):
        (tmp_path / name).write_text(STANDIN)
    for file in tmp_path.iterdir():
        file.chmod(0o755)

    def run(*command: str, **variables: str) -> list[str]:
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECIPE": "my recipe.jsonnet", **variables}
        done = subprocess.run(["bash", *command], env=environment, capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.splitlines()

    return run


def load(name: str):
    return yaml.safe_load((FILES / name).read_text())


def test_slurm_sets_the_rank_variables_of_each_process(execute) -> None:
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "70001", "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2"}
    lines = execute(str(FILES / "slurm.sh"), **job)
    place = "WORLD_SIZE=4 MASTER=first TIMEOUT=1800 retouch train my recipe.jsonnet"
    assert lines == [f"RANK={rank} LOCAL_RANK={rank % 2} {place}" for rank in range(4)]
    header = [line for line in (FILES / "slurm.sh").read_text().splitlines() if line.startswith("#SBATCH")]
    assert any("--signal=TERM@" in line for line in header)  # without B: the ranks get it, and not the script
    assert any("--requeue" in line for line in header)


@pytest.mark.parametrize(("arguments", "launched"), [([], "--nproc 4"), (["--nproc", "1"], "--nproc 1")])
def test_slurm_on_one_node_launches_a_rank_per_gpu(execute, arguments: list[str], launched: str) -> None:
    (line,) = execute(str(FILES / "slurm_one_node.sh"), *arguments, SLURM_GPUS_ON_NODE="4")
    assert line.endswith(f"TIMEOUT=1800 retouch launch {launched} my recipe.jsonnet")


@pytest.mark.parametrize("stopped", [False, True])
def test_slurm_on_one_node_ends_with_the_exit_code_of_the_run(tmp_path: Path, stopped: bool) -> None:
    """With the signal, the script waits until the run has saved its checkpoint; without it, the run's exit code is the job's."""
    run = tmp_path / "retouch"
    run.write_text("#!/usr/bin/env bash\ntrap 'sleep 0.3; echo saved; exit 5' TERM\necho began\n" + "sleep 0.1\n" * 20 + "exit 3\n")
    run.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECIPE": "r.jsonnet"}
    command = ["bash", str(FILES / "slurm_one_node.sh")]
    job = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "began\n"
        if stopped:
            job.terminate()
        said, _ = job.communicate(timeout=30)
    finally:
        job.kill()
        job.wait()
    assert (said, job.returncode) == (("saved\n", 5) if stopped else ("", 3))


# Bash reads this before the script. It sends the signal right before the command that matches PLACE, once the run has begun.
EARLY_SIGNAL = """unset BASH_ENV
trap 'if [[ -z ${sent:-} && $BASH_COMMAND == $PLACE ]]; then
  sent=1; until [[ -e $BEGUN ]]; do sleep 0.01; done; kill -TERM $$; fi' DEBUG
"""


@pytest.mark.parametrize("place", ["run=*", "trap*kill*", "*-n*stopped*", "wait*"])
def test_slurm_on_one_node_passes_an_early_signal_on(tmp_path: Path, place: str) -> None:
    """The signal arrives when the run has begun and the script may not know the process id of the run yet."""
    run, before = tmp_path / "retouch", tmp_path / "before.sh"
    run.write_text("#!/usr/bin/env bash\ntrap 'echo saved; exit 5' TERM\ntouch $BEGUN\n" + "sleep 0.05\n" * 400 + "exit 3\n")
    run.chmod(0o755)
    before.write_text(EARLY_SIGNAL)
    place_of = {"PLACE": place, "BEGUN": str(tmp_path / "begun"), "BASH_ENV": str(before)}
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RECIPE": "r.jsonnet", **place_of}
    with subprocess.Popen(["bash", str(FILES / "slurm_one_node.sh")], env=environment, stdout=subprocess.PIPE, text=True) as job:
        try:
            said, _ = job.communicate(timeout=60)
        finally:
            job.kill()
    assert (said, job.returncode) == ("saved\n", 5)


def test_each_pod_of_a_jobset_starts_torchrun_as_one_node(execute) -> None:
    (job,) = load("jobset.yaml")["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == 2
    assert (spec["completionMode"], spec["backoffLimit"]) == ("Indexed", 0)
    (container,) = spec["template"]["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container["env"]}
    assert variables["MASTER_ADDR"] == "retouch-node-0-0.retouch"  # JobSet-job-index-pod.JobSet
    for index in ("0", "1"):
        bash, *arguments = container["command"]
        (line,) = execute(*arguments, **variables, JOB_COMPLETION_INDEX=index)
        assert bash == "bash"
        where = f"--nnodes 2 --nproc-per-node 8 --node-rank {index} --master-addr retouch-node-0-0.retouch --master-port 29500"
        assert line.endswith(f"TIMEOUT=1800 torchrun {where} -m retouch.cli train /shared/recipe.jsonnet")


def test_kubeflow_starts_torchrun_with_the_recipe(execute, tmp_path: Path) -> None:
    trainer = load("trainjob.yaml")["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    variables = {each["name"]: each["value"] for each in trainer["env"]}
    script = trainer["command"][2].replace("/shared &&", f"{tmp_path} &&")
    (line,) = execute("-c", script, **variables)
    assert line.endswith("torchrun -m retouch.cli train /shared/recipe.jsonnet")


def test_skypilot_runs_torchrun_on_each_node(execute) -> None:
    task = load("skypilot.yaml")
    node = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    (line,) = execute("-c", task["run"], **node, SKYPILOT_NODE_RANK="1")
    where = "--nnodes 2 --nproc-per-node 8 --node-rank 1 --master-addr 10.0.0.1 --master-port 29500"
    assert line.endswith(f"TIMEOUT=1800 torchrun {where} -m retouch.cli train my recipe.jsonnet --set out=/shared/runs")
    assert (ROOT / task["envs"]["RECIPE"]).is_file()


def test_a_ray_job_launches_on_one_machine(execute) -> None:
    (line,) = execute(str(FILES / "ray_job.sh"), "http://head:8265", GPUS="4")
    asked = "ray job submit --address http://head:8265 --entrypoint-num-gpus 4 --working-dir . --"
    assert line.endswith(f"{asked} retouch launch --nproc 4 my recipe.jsonnet --set out=/shared/runs")


def test_the_cluster_page_mentions_every_job_file() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text()
    assert all(f"examples/cluster/{file.name}" in page for file in FILES.iterdir())
