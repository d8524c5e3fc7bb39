"""Real vLLM servers on this machine's CPU, in the environment that ``make engines`` builds."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

import loopback

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("RETOUCH_TEST_VLLM", ROOT / ".venv-vllm")) / "bin" / "python"
"""The interpreter with vLLM; ``RETOUCH_TEST_VLLM`` names another environment."""
SHIM = Path(__file__).parent / "vllm_cpu"
NEEDS_VLLM = pytest.mark.skipif(
    not PYTHON.is_file(), reason="vLLM is not installed: `make engines` builds .venv-vllm, about 3.5 GB, and runs these tests"
)
START_TIMEOUT = 1200.0
COMMON = (
    *("--max-model-len", "512", "--enforce-eager", "--dtype", "float32", "--max-num-seqs", "16"),
    *("--logprobs-mode", "processed_logprobs"),
)
LORA_FLAGS = ("--enable-lora", "--max-lora-rank", "32", "--max-loras", "2")
WHOLE_PROMPTS = ("--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096")
"""Flags of runner V1: on a CPU it cannot sample with seeds while prompts are prefilled in chunks."""


@dataclass
class Server:
    """A vLLM server. ``runner``: 1 or 2; runner 2 accepts the plug-in, but runs in Triton's interpreter and is ten times slower.

    ``runtime_lora``, ``scale_out``, ``dev_mode``: which groups of endpoints the server has.
    """

    model: Path
    log: Path
    flags: Sequence[str] = ()
    runner: int = 1
    runtime_lora: bool = True
    scale_out: bool = True
    dev_mode: bool = False
    port: int = 0
    starts: int = 0
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server, on the same port as before. AssertionError with the end of its log if it does not start."""
        self.port = self.port or loopback.free_port()
        command = [*map(str, (PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model))]
        command += ["--host", "127.0.0.1", "--port", str(self.port), *COMMON, *self.flags]
        command += ["--enable-scale-out"] if self.scale_out else []
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, env=self._environment(), stdout=log, stderr=log, start_new_session=True)
        self.starts += 1
        ends = time.monotonic() + START_TIMEOUT
        while not self._is_healthy():
            assert self.process.poll() is None, f"vLLM ended:\n{self.tail()}"
            assert time.monotonic() < ends, f"vLLM did not start within {START_TIMEOUT:g} s:\n{self.tail()}"
            time.sleep(0.5)

    def kill(self) -> None:
        """Send SIGKILL to the server and its engine process."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """Send SIGTERM, and SIGKILL if the server does not end."""
        self._end(signal.SIGTERM)

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-150:])

    def _environment(self) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "TMPDIR", "LANG")}
        return {
            **kept,
            "PYTHONPATH": f"{SHIM}:{ROOT / 'src'}",
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            **({"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"} if self.runtime_lora else {}),
            **({"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"} if self.runner == 2 else {}),
            **({"VLLM_SERVER_DEV_MODE": "1"} if self.dev_mode else {}),
        }

    def _is_healthy(self) -> bool:
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False

    def _end(self, how: int) -> None:
        """Send a signal to all processes of the server's session; the server was started in a new session."""
        if self.process is None:
            return
        if self.process.poll() is None:
            os.killpg(self.process.pid, how)
            try:
                self.process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(timeout=30)
        with suppress(ProcessLookupError):  # processes that outlived the server
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process = None


@contextmanager
def running(model: Path, folder: Path, *flags: str, runner: int = 1, **endpoints: bool) -> Iterator[Server]:
    """Run a server until the end of the block. ``folder``: for its log. ``endpoints``: as for ``Server``."""
    folder.mkdir(parents=True, exist_ok=True)
    reading = () if any(flag.startswith("--max-num-batched") for flag in flags) else WHOLE_PROMPTS if runner == 1 else ()
    server = Server(model, folder / "server.log", (*reading, *flags), runner=runner, **endpoints)
    try:
        server.start()
        yield server
    finally:
        server.stop()


@contextmanager
def restarted_after_first_step(server: Server, metrics: Path) -> Iterator[None]:
    """Kill the server when the run that the block executes has written its first metrics, and start the server again."""

    def restart() -> None:
        ends = time.monotonic() + 600
        while not (metrics.exists() and metrics.read_text()) and time.monotonic() < ends:
            time.sleep(0.1)
        server.kill()
        server.start()

    restarting = threading.Thread(target=restart)
    restarting.start()
    try:
        yield
    finally:
        restarting.join()
