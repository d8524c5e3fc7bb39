"""Faults of a run on two ranks with sharded weights: it ends within a bounded time, and continues to the same bits."""

from pathlib import Path

import pytest

import rank_faults
from retouch.distributed.ranks import lost_contact


def check(fault: str, out: Path) -> rank_faults.Outcome:
    found = rank_faults.outcome(fault, out, rank_faults.run_without_faults(out))
    assert not found.wrong, found
    assert found.seconds < rank_faults.MAX_SECONDS
    return found


@pytest.mark.slow
def test_run_with_a_killed_rank_ends_in_time_and_resumes_bitwise(tmp_path: Path) -> None:
    assert check("rank 1 is killed", tmp_path).code != 0


@pytest.mark.slow
@pytest.mark.parametrize("fault", [name for name in rank_faults.FAULTS if name != "rank 1 is killed"])
def test_run_with_a_process_disk_or_network_fault_ends_in_time_and_resumes_bitwise(fault: str, tmp_path: Path) -> None:
    if fault.startswith("the network") and not rank_faults.can_partition():
        pytest.skip("no right to create a network namespace")
    found = check(fault, tmp_path)
    assert (found.code == 0) == (fault == "rank 1 is slow for a while")


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        ("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:3", True),
        ("Timed out waiting 10000ms for recv operation to complete", True),
        ("Connection reset by peer", True),
        ("shape '[3, 4]' is invalid for input of size 5", False),
    ],
)
def test_lost_contact_detects_only_connection_errors_of_distributed_runs(
    text: str, lost: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert lost_contact(RuntimeError(text)) == lost
    monkeypatch.delenv("WORLD_SIZE")
    assert not lost_contact(RuntimeError(text))
