"""A server that runs Python programs in forks of itself, with the large libraries already imported (``warm_python`` starts it).

It reads requests from a Unix socket: ``warm_client`` sends the program, its arguments, environment and folder, and its open
files. A fork of the server handles the request: it starts another fork that runs the program, and answers with that fork's process
ID and, when it has ended, with its exit status. The server ends when its standard input is closed.

Retouch itself is not imported here, so that each program imports its own modules, and from its own ``PYTHONPATH``.
"""

import atexit
import fcntl
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import sys
import threading
import types
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch

LIBRARIES = (
    "sqlite3", "zoneinfo", "numpy", "PIL.Image", "PIL.PngImagePlugin", "PIL.JpegImagePlugin", "pydantic.deprecated.decorator",
    "pydantic.functional_serializers", "pydantic.functional_validators", "pydantic.root_model", "pydantic.types", "jaxtyping",
    "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp", "torch.distributed.tensor",
    "torch.utils.tensorboard", "safetensors.torch", "tokenizers", "transformers", "transformers.models.auto.modeling_auto",
    "transformers.models.clip.modeling_clip", "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.t5.modeling_t5", "peft", "diffusers", "diffusers.models.autoencoders", "diffusers.models.transformers",
    "diffusers.models.unets", "diffusers.schedulers.scheduling_flow_match_euler_discrete",
)  # fmt: skip
"""The modules that most programs import. They must not start threads, because a fork does not have them."""
MAX_FILES = 64
_HIGH = 500  # above the numbers of all open files


def main(address: str) -> Callable[[], object]:
    """Serve until the standard input closes. Return, in a fork, the program of a client; the server itself never returns."""
    with warnings.catch_warnings(action="ignore"):
        for name in LIBRARIES:
            import_module(name)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that end leave no zombies
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        while True:
            ready, _, _ = select.select([sys.stdin, listener], [], [])
            if sys.stdin in ready:
                sys.exit()
            connection, _ = listener.accept()
            if not os.fork():
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return handle(connection)


def handle(connection: socket.socket) -> Callable[[], object]:
    """Fork for a client, send the fork's process ID and its exit status, and end. Return, in this second fork, the program.

    The fork is killed when the client has died, or when the standard input of the server is closed.
    """
    request, files = receive_request(connection)
    process = os.fork()
    if not process:
        connection.close()
        return prepare_interpreter(request, files)
    for file in files:
        os.close(file)
    with suppress(OSError):
        connection.sendall(struct.pack("i", process))
    ended = os.pidfd_open(process)
    ready, _, _ = select.select([sys.stdin, connection, ended], [], [])  # a client sends nothing after its request
    if ended not in ready:
        os.kill(process, signal.SIGKILL)
    _, status = os.waitpid(process, 0)
    with suppress(OSError):
        connection.sendall(struct.pack("i", status))
    os._exit(0)


def receive_request(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Return a client's request and its open files."""
    text, files, _, _ = socket.recv_fds(connection, 4, MAX_FILES)
    (length,) = struct.unpack("i", text)
    body = b""
    while len(body) < length:
        body += connection.recv(length - len(body))
    return json.loads(body), list(files)


def prepare_interpreter(request: dict[str, Any], files: list[int]) -> Callable[[], object]:
    """Make this fork look like a new interpreter of the client's command line, and return the program."""
    with suppress(PermissionError):  # the client may lead a session of its own
        os.setpgid(0, request["group"])
    moved = [fcntl.fcntl(file, fcntl.F_DUPFD, _HIGH) for file in files]
    for file in files:
        os.close(file)
    for number, file in zip(request["files"], moved, strict=True):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    for number in request["ignored_signals"]:
        signal.signal(number, signal.SIG_IGN)
    if request["unbuffered"]:
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    for action in request["warnings"]:
        warnings.simplefilter(action)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))
    # The processes that the program starts are forks too, and compiled modules are kept until the tests end.
    sys.executable = request["executable"]
    sys.dont_write_bytecode, sys.pycache_prefix = False, os.path.dirname(request["executable"])
    return program_of(request)


def program_of(request: dict[str, Any]) -> Callable[[], object]:
    """Set the import path and the arguments as an interpreter does, and return the program."""
    name, kind = request["program"], request["kind"]
    folders = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    if kind == "module":
        first, shown = os.getcwd(), "-m"
        program: Callable[[], object] = partial(runpy.run_module, name, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        first, shown, file, source = "", "-c", "<string>", name
        if kind == "file":
            file = main.__file__ = os.path.abspath(name)
            first, shown, source = os.path.dirname(os.path.realpath(name)), name, Path(name).read_text()
        program = partial(exec, compile(source, file, "exec"), main.__dict__)
    sys.path[:] = [*([] if request["safe_path"] else [first]), *folders, *sys.path[1:]]
    sys.argv = [shown, *request["arguments"]]
    return program


def run(program: Callable[[], object]) -> NoReturn:
    """Run the program and end this fork as an interpreter ends, but skip freeing all modules, which takes half a second."""
    code = 0
    try:
        program()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:  # noqa: BLE001 - it is printed, as an interpreter prints it
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    run(main(sys.argv[1]))
