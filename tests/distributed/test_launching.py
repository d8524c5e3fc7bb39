"""Ranks on this machine, as real processes: their environment variables, their logs, and how they end."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from retouch.distributed.launching import launch, rank_environments, run_ranks
from retouch.distributed.ranks import init_distributed
from retouch.records.ownership import Owner
from warm_python import python

WAIT = "import time; time.sleep(60)"


def run(code: str, ranks: int, logs: Path, *, grace: float = 20.0, start: str = sys.executable) -> int:
    return run_ranks([start, "-c", code], rank_environments(ranks), logs=logs, grace=grace)


def test_ranks_get_environment_variables_and_logs_and_rank_0_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    code = f"import os; print(*(os.environ[name] for name in {names}))"
    assert run(code, 3, tmp_path / "logs") == 0
    said = [(tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in range(3)]
    port = said[0].split()[-1]
    assert said == [f"{rank} {rank} 3 3 127.0.0.1 {port}\n" for rank in range(3)]
    assert capfd.readouterr().out == said[0]


def test_cpu_threads_are_divided_among_ranks_unless_omp_num_threads_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = len(os.sched_getaffinity(0))
    assert {one["OMP_NUM_THREADS"] for one in rank_environments(2)} == {str(max(1, cores // 2))}
    assert {one["OMP_NUM_THREADS"] for one in rank_environments(10 * cores)} == {"1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert {one["OMP_NUM_THREADS"] for one in rank_environments(2)} == {"7"}


def test_all_ranks_see_all_gpus_and_differ_in_local_rank() -> None:
    seen = [(one["CUDA_VISIBLE_DEVICES"], one["LOCAL_RANK"]) for one in rank_environments(2, [1, 3])]
    assert seen == [("1,3", "0"), ("1,3", "1")]


def test_invalid_numbers_of_ranks_or_gpus_and_a_launch_inside_a_rank_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong: list[tuple[int, list[int] | None, str]] = [
        (0, None, "--nproc 0"),
        (2, [1], "devices for each of the 2 ranks"),
        (2, [1, 1], "each device once"),
        (2, [1, 2, 3], "the same number of devices"),
    ]
    for nproc, gpus, says in wrong:
        with pytest.raises(ValueError, match=says):
            launch(nproc, gpus, ["recipes"], logs=tmp_path)
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="already"):
        launch(2, None, ["recipes"], logs=tmp_path)


def test_all_ranks_end_if_one_exits_and_its_exit_code_is_returned(tmp_path: Path) -> None:
    code = f"import os, sys\nif os.environ['RANK'] == '1': sys.exit(7)\n{WAIT}"
    started = time.monotonic()
    assert run(code, 3, tmp_path) == 7
    assert time.monotonic() - started < 30


def test_exit_code_of_a_killed_rank_is_128_plus_the_signal(tmp_path: Path) -> None:
    code = f"import os, signal\nif os.environ['RANK'] == '0': os.kill(os.getpid(), signal.SIGKILL)\n{WAIT}"
    assert run(code, 2, tmp_path) == 128 + signal.SIGKILL


def test_a_rank_that_ignores_sigterm_is_killed_after_the_grace_with_its_child_processes(tmp_path: Path) -> None:
    stubborn = f"""
import os, signal, subprocess, sys, time
from pathlib import Path
ready = Path({str(tmp_path)!r}, 'ready')
if os.environ['RANK'] == '0':
    signal.signal(signal.SIGTERM, lambda *_: print('no', flush=True))
    print(subprocess.Popen([sys.executable, '-c', {WAIT!r}]).pid, flush=True)
    ready.touch()
    {WAIT}
while not ready.exists(): time.sleep(0.01)
sys.exit(3)
"""
    assert run(stubborn, 2, tmp_path, grace=0.5) == 3
    child, said = (tmp_path / "rank-0.log").read_text().split()
    assert said == "no"
    assert not _alive(int(child))


def _alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    for _ in range(200):
        if not status.exists() or status.read_text().rpartition(")")[2].split()[0] == "Z":
            return False
        time.sleep(0.02)
    return True


SAVER = """
import os, signal, sys, time
count = 0
def stop(number, frame):
    global count
    count += 1
    print(signal.Signals(number).name, flush=True)
signal.signal(signal.SIGINT, stop)
signal.signal(signal.SIGTERM, stop)
print('ready', flush=True)
while not count: time.sleep(0.01)
time.sleep(0.3 * int(os.environ['RANK']))  # saving; rank 0 is done first
print('saved', flush=True)
sys.exit(130 if os.environ['RANK'] == '0' else 0)
"""
LAUNCHER = """
import signal, sys
from pathlib import Path
from retouch.distributed.launching import rank_environments, run_ranks
signal.signal(signal.SIGHUP, signal.{hang_up})  # the tests may run under nohup, whose setting is inherited
sys.exit(run_ranks([sys.executable, '-c', sys.argv[1]], rank_environments(2), logs=Path(sys.argv[2]), grace=20.0))
"""


@contextmanager
def launched(code: str, logs: Path, *, hang_up: str = "SIG_DFL") -> Iterator["subprocess.Popen[bytes]"]:
    """Start a launcher of two ranks; if the test fails, the launcher and its ranks are ended."""
    command = [sys.executable, "-c", LAUNCHER.format(hang_up=hang_up), code, str(logs)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as launcher:
        try:
            yield launcher
        finally:
            while launcher.poll() is None:
                launcher.terminate()  # the second one kills the ranks
                time.sleep(0.1)


def _wait_for_both(tmp_path: Path, what: str) -> None:
    logs = [tmp_path / "rank-0.log", tmp_path / "rank-1.log"]
    for _ in range(1000):
        if all(log.exists() and what in log.read_text() for log in logs):
            return
        time.sleep(0.02)
    raise AssertionError(f"the ranks never said {what!r}")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, None])
def test_signal_is_forwarded_once_and_ranks_finish_saving(tmp_path: Path, number: signal.Signals | None) -> None:
    """None: SIGHUP is ignored under nohup, and SIGINT ends the ranks."""
    with launched(SAVER, tmp_path, hang_up="SIG_DFL" if number else "SIG_IGN") as launcher:
        _wait_for_both(tmp_path, "ready")
        for each in (number,) if number else (signal.SIGHUP, signal.SIGINT):
            launcher.send_signal(each)
        assert launcher.wait(30) == 130
    heard = "SIGTERM" if number == signal.SIGHUP else (number or signal.SIGINT).name
    for rank in range(2):
        assert (tmp_path / f"rank-{rank}.log").read_text() == f"ready\n{heard}\nsaved\n"


PARENT = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, '-c', {WAIT!r}])
print(os.getpid(), child.pid, 'ready', flush=True)
time.sleep(60)
"""


def _logged_pids(tmp_path: Path) -> list[int]:
    """The processes of both ranks and their children."""
    _wait_for_both(tmp_path, "ready")
    return [int(word) for rank in range(2) for word in (tmp_path / f"rank-{rank}.log").read_text().split()[:2]]


def test_ranks_and_their_children_die_with_a_killed_launcher(tmp_path: Path) -> None:
    with launched(PARENT, tmp_path) as launcher:
        processes = _logged_pids(tmp_path)
        launcher.kill()
    assert [process for process in processes if _alive(process)] == []


def test_retouch_ranks_die_with_the_launcher_even_if_the_guardian_was_killed(tmp_path: Path) -> None:
    code = "from retouch.distributed.launching import die_with_launcher\ndie_with_launcher()\n" + PARENT
    with launched(code, tmp_path) as launcher:
        processes = _logged_pids(tmp_path)
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        (guardian,) = {int(child) for child in children} - set(processes)
        os.kill(guardian, signal.SIGKILL)
        launcher.kill()
    assert [process for process in processes[::2] if _alive(process)] == []
    for process in processes[1::2]:
        os.kill(process, signal.SIGKILL)


def test_a_rank_whose_launcher_has_already_ended_does_not_begin() -> None:
    code = "from retouch.distributed.launching import die_with_launcher\ndie_with_launcher()\nprint('began')"
    environment = {**os.environ, "RETOUCH_LAUNCHER": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "launcher of this rank has ended" in done.stderr


def test_ranks_share_the_launchers_ownership_of_the_run_folder(tmp_path: Path) -> None:
    owner = Owner(tmp_path / "run")
    code = "import os, sys\nfrom pathlib import Path\nfrom retouch.records.ownership import shared_owner\n"
    code += f"shared_owner(Path({str(tmp_path / 'run')!r}), os.environ).require()\nprint('owned')"
    assert run_ranks([sys.executable, "-c", code], rank_environments(2), logs=tmp_path, grace=20.0, owner=owner) == 0
    owner.close()
    assert [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(2)] == ["owned\n"] * 2


def test_closed_stdout_does_not_stop_the_run(tmp_path: Path) -> None:
    talker = "import sys\nfor k in range(20000): print('line', k)\nsys.exit(0)"
    command = [sys.executable, "-c", LAUNCHER.format(hang_up="SIG_DFL"), talker, str(tmp_path)]
    launcher = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    launcher.stdout.close()
    assert launcher.wait(30) == 0
    assert (tmp_path / "rank-0.log").read_text().splitlines()[-1] == "line 19999"


def test_launch_runs_a_retouch_command_in_every_rank(tmp_path: Path) -> None:
    assert launch(2, None, ["recipes"], logs=tmp_path) == 0
    said = [(tmp_path / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert said[0] == said[1]
    assert re.search(r"^quickstart ", said[0], re.MULTILINE)


def test_one_rank_under_accelerates_cpu_launcher_says_that_it_is_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """``accelerate launch --cpu --num_processes 2`` starts one process, and tells it neither number."""
    assert init_distributed("cpu").world == 1
    assert caplog.text == ""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    assert init_distributed("cpu").world == 1
    assert "starts one rank, whatever --num_processes is; use `retouch launch --nproc N`" in caplog.text


LISTENERS = """
import os, re, socket
from pathlib import Path
from retouch.distributed.ranks import init_distributed
ranks = init_distributed("cpu")
ranks.barrier()
own = {os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.exists() or each.is_symlink()}
for table in ("tcp", "tcp6"):
    for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in own:
            print("listens on", words[1].partition(":")[0])
ranks.barrier()
"""


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="listening sockets are read from /proc")
def test_point_3_6_ranks_of_one_machine_listen_only_on_its_loopback_interface(tmp_path: Path) -> None:
    assert run(LISTENERS, 2, tmp_path, start=python()) == 0
    for rank in range(2):
        listening = set((tmp_path / f"rank-{rank}.log").read_text().splitlines())
        assert listening <= {"listens on 0100007F", "listens on 00000000000000000000000001000000"}, listening


def test_point_3_6_ranks_join_through_a_folder_that_only_this_user_can_open(tmp_path: Path) -> None:
    code = "import os, stat; at = os.environ['RETOUCH_RANK_STORE']; print(at, oct(os.stat(os.path.dirname(at)).st_mode & 0o777))"
    assert run(code, 2, tmp_path) == 0
    (folder, mode), other = ((tmp_path / f"rank-{rank}.log").read_text().split() for rank in range(2))
    assert (mode, other) == ("0o700", [folder, mode])
    assert not Path(folder).parent.exists()  # removed after the run
