"""Starts the server of ``retouch view``."""

import importlib.util
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

_LAST_SECONDS = 5.0


def view(
    root: Path,
    *,
    port: int,
    hosts: Sequence[str] = (),
    vote: bool = False,
    control: bool = False,
    trying: str | None = None,
    report: Callable[[str], None],
) -> int:
    """Serve the page on the loopback address until a signal stops it, and return the exit code.

    ``port``: 0 chooses a free port. ``hosts``: further names under which a browser reaches this machine, for example behind a
    proxy. ``vote``, ``control`` and ``trying``: see ``build_app``. ``report``: called with the line that contains the address.
    Raises ValueError if the folder does not exist, the port is taken, or the extra ``serve`` is not installed.
    """
    for package in ("starlette", "uvicorn", "httptools"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"the page needs {package}: pip install 'retouch[serve]'")
    if not root.is_dir():
        raise ValueError(f"{root} is not a folder; give the folder that contains your runs, for example: retouch view runs")
    import uvicorn

    from retouch_serve.front.connections import bounded_config
    from retouch_view.live.app import LIMITS, build_app

    token = secrets.token_urlsafe(24)
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("127.0.0.1", port))
        listener.listen()  # before the address is printed, so that a browser that opens it at once waits and is not refused
    except OSError as error:
        listener.close()
        raise ValueError(f"port {port} cannot be used: {error.strerror}; choose another with --port, or 0 for any") from None
    with listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        report(f"runs in {root.resolve()}: open {address}/?token={token}")
        app = build_app(root, token=token, hosts=hosts, vote=vote, control=control, trying=trying)
        config = bounded_config(app, LIMITS, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        ends = server.handle_exit

        def end(sig: int, frame: FrameType | None) -> None:
            """End the process soon, also if a thread still reads a run."""
            limit = threading.Timer(_LAST_SECONDS, os._exit, (128 + sig,))
            limit.daemon = True
            limit.start()
            ends(sig, frame)

        server.handle_exit = end  # type: ignore[method-assign]
        server.run(sockets=[listener])
    return 0
