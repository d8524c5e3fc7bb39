"""``warm_python``: a program in a fork behaves like a program of a new interpreter."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from warm_python import is_warm, python

pytestmark = pytest.mark.skipif(not is_warm(), reason="programs start with a new interpreter")
SHOW = (
    "import os, sys; print(sys.argv, sys.path[0], os.getcwd(), os.environ.get('MINE'), sys.stdin.read()); sys.stderr.write('wrong')"
)
PROGRAMS = {
    "arguments": ["-c", SHOW, "a", "-b"],
    "path": ["-P", "-c", "import sys; print(sys.path[0])"],
    "warnings": ["-W", "ignore", "-c", "import warnings; warnings.warn('not printed')"],
    "code": ["-c", "import sys; sys.exit(7)"],
    "message": ["-c", "import sys; sys.exit('ended')"],
    "killed": ["-c", "import os; os.kill(os.getpid(), 9)"],
    "interrupted": ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"],
    "module": ["-m", "retouch", "--version"],
    "file": ["program.py", "x"],
    "at exit": ["-c", "import atexit, threading; atexit.register(print, 'last'); threading.Timer(0.2, print, ['thread']).start()"],
    "main": ["-c", "import pickle\nclass Mine: ...\nprint(type(pickle.loads(pickle.dumps(Mine()))))"],
    "threads": ["-c", "import torch; print(torch.get_num_threads())"],
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_and_prints_as_in_a_new_interpreter(tmp_path: Path, name: str) -> None:
    (tmp_path / "program.py").write_text(f"{SHOW}; print(__name__, __file__)")
    found = [
        subprocess.run(
            [start, *PROGRAMS[name]], cwd=tmp_path, env={**os.environ, "MINE": "1", "OMP_NUM_THREADS": "2"}, input="given",
            capture_output=True, text=True, check=False,
        )
        for start in (python(), sys.executable)
    ]  # fmt: skip
    assert found[0].stdout == found[1].stdout
    assert (found[0].returncode, found[0].stderr) == (found[1].returncode, found[1].stderr)


def test_signals_reach_the_program_and_it_does_not_outlive_its_client() -> None:
    code = "import os, signal, time; signal.signal(signal.SIGTERM, print); print(os.getpid(), flush=True); time.sleep(600)"
    with subprocess.Popen([python(), "-u", "-c", code], stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        program = int(client.stdout.readline())
        client.terminate()
        assert client.stdout.readline().startswith("15")
        client.send_signal(signal.SIGKILL)
    for _ in range(200):
        if not Path(f"/proc/{program}").exists():
            return
        time.sleep(0.05)
    pytest.fail(f"process {program} is still there")


def test_inherited_file_descriptors_are_kept_and_subprocesses_are_also_forked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with open(tmp_path / "file") as file:
        inner = f"import os, sys; print(os.read({file.fileno()}, 9), 'torch' in sys.modules)"
        code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}], pass_fds=({file.fileno()},), check=True)"
        done = subprocess.run([python(), "-c", code], pass_fds=(file.fileno(),), capture_output=True, text=True, check=True)
    assert done.stdout == "b'text' True\n"
