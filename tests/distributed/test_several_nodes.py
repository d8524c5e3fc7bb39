"""Ranks on several nodes, and faults of ranks."""

import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

import loopback
import rank_faults
from folder_faults import WEIGHTS, file_hashes, six_step_recipe
from retouch.distributed.ranks import lost_contact
from retouch.recipe.recipe import Recipe
from retouch.records.folder import RunFolder

# torchrun on two nodes

RANK_TIMEOUT = 20
MAX_SECONDS = 180  # seconds: the time-out of a rank, torchrun's own wait for its ranks, and a slow machine


def start_process(command: list[str], log: Path) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RETOUCH_RANK_TIMEOUT": str(RANK_TIMEOUT)}
    with log.open("wb") as printed:
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", *command], stdout=printed, stderr=subprocess.STDOUT, env=environment, process_group=0
        )


def agents(made: Recipe, out: Path) -> "list[subprocess.Popen[bytes]]":
    """The agents of both nodes, each of which starts two ranks."""
    where = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", str(loopback.free_port())]
    return [
        start_process(
            ["-m", "torch.distributed.run", *where, "--node-rank", str(node), "-m", "retouch.cli", "train", write_recipe(made)],
            out / f"{made.name}-node-{node}.log",
        )
        for node in range(2)
    ]


def write_recipe(made: Recipe) -> str:
    file = made.folder.with_name(f"{made.name}.json")
    file.write_text(made.model_dump_json())
    return str(file)


def end(agent: "subprocess.Popen[bytes]") -> None:
    """End the agent and its ranks; torchrun puts the ranks into separate process groups, but they die with it."""
    if agent.poll() is None:
        os.killpg(agent.pid, signal.SIGKILL)
        agent.wait()


def ranks_of(agent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def logs(out: Path) -> str:
    return "\n".join(file.read_text(errors="replace")[-3000:] for file in sorted(out.glob("*.log")))


@pytest.mark.slow
def test_two_nodes_match_one_bitwise_and_one_resumes_after_a_node_is_lost(tmp_path: Path) -> None:
    with ExitStack() as stack:
        one = six_step_recipe(tmp_path, "one")
        launcher = start_process(["-m", "retouch.cli", "launch", "--nproc", "4", write_recipe(one)], tmp_path / "one.log")
        stack.callback(end, launcher)
        assert launcher.wait(600) == 0, logs(tmp_path)

        two = six_step_recipe(tmp_path, "two")
        both = agents(two, tmp_path)
        for agent in both:
            stack.callback(end, agent)
        assert [agent.wait(600) for agent in both] == [0, 0], logs(tmp_path)
        assert file_hashes(two.folder, (*WEIGHTS, "metrics.jsonl")) == file_hashes(one.folder, (*WEIGHTS, "metrics.jsonl"))

        lost = six_step_recipe(tmp_path, "lost")
        both = agents(lost, tmp_path)
        for agent in both:
            stack.callback(end, agent)
        while len(RunFolder(lost.folder).read_metrics()) < 2:
            assert all(agent.poll() is None for agent in both), logs(tmp_path)
            time.sleep(0.02)
        ranks = [rank for agent in both for rank in ranks_of(agent.pid)]
        assert len(ranks) == 4
        both[1].kill()  # the agent alone: its ranks must notice
        began = time.monotonic()
        while (any(map(is_running, ranks)) or both[0].poll() is None) and time.monotonic() - began < 2 * MAX_SECONDS:
            time.sleep(0.05)
        assert time.monotonic() - began < MAX_SECONDS, logs(tmp_path)
        assert both[0].returncode != 0

        launcher = start_process(["-m", "retouch.cli", "launch", "--nproc", "4", write_recipe(lost)], tmp_path / "again.log")
        stack.callback(end, launcher)
        assert launcher.wait(600) == 0, logs(tmp_path)
        assert file_hashes(lost.folder, (*WEIGHTS, "metrics.jsonl")) == file_hashes(one.folder, (*WEIGHTS, "metrics.jsonl"))


# Faults of a run on two ranks with sharded weights


@pytest.mark.slow
@pytest.mark.parametrize("fault", rank_faults.FAULTS)
def test_run_with_a_process_disk_or_network_fault_ends_in_time_and_resumes_bitwise(fault: str, tmp_path: Path) -> None:
    if fault.startswith("the network") and not rank_faults.can_partition():
        pytest.skip("no right to create a network namespace")
    found = rank_faults.outcome(fault, tmp_path, rank_faults.run_without_faults(tmp_path))
    assert not found.wrong, found
    assert found.seconds < rank_faults.MAX_SECONDS
    assert (found.code == 0) == (fault == "rank 1 is slow for a while")


def test_lost_contact_detects_only_connection_errors_of_distributed_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, lost in (
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3", True),
        ("Timed out waiting 10000ms for recv operation to complete", True),
        ("Connection reset by peer", True),
        ("shape '[3, 4]' is invalid for input of size 5", False),
    ):
        monkeypatch.setenv("WORLD_SIZE", "2")
        assert lost_contact(RuntimeError(text)) == lost
        monkeypatch.delenv("WORLD_SIZE")
        assert not lost_contact(RuntimeError(text))
