"""Eight processes share a quota: how many requests and tokens does a server receive in any minute, compared to the limit?

    python measurements/judging/quota.py [--seconds 150] [--processes 8]

Each process asks without a pause, through the client of judges. The server counts requests and tokens when they arrive.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

from PIL import Image

from retouch_judge.chat_client import ChatClient
from retouch_judge.kinds import Endpoint
from retouch_judge.models import JudgeQuota
from retouch_judge.questions import Question, ScoresForm
from retouch_judge.wording import Scale

REQUESTS = 600
TOKENS, LARGEST = 60_000, 200
REPLY_SECONDS = 0.5


class Server(ThreadingHTTPServer):
    """A judge server that answers every question, and records when each request arrived and how many tokens it took."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.seen: list[tuple[float, int]] = []
        self.draw = random.Random(0)

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client closed the connection after its deadline


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        came = time.monotonic()
        self.rfile.read(int(self.headers["Content-Length"]))
        tokens = self.server.draw.randint(LARGEST // 4, LARGEST)
        self.server.seen.append((came, tokens))
        time.sleep(REPLY_SECONDS)
        choice = {"index": 0, "message": {"role": "assistant", "content": '{"score": 5}'}, "finish_reason": "stop"}
        usage = {"prompt_tokens": tokens - 10, "completion_tokens": 10, "total_tokens": tokens}
        body = json.dumps({"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())


def ask(url: str, file: str, limits: dict[str, float], until: float) -> None:
    """The work of one process: ask as many questions as the quota allows, until ``until`` (``time.monotonic``)."""
    quota = JudgeQuota(**limits, file=file)  # type: ignore[arg-type]
    client = ChatClient(Endpoint(model="m", base_url=f"{url}/v1", timeout=30.0, deadline=30.0, quota=quota))
    form = ScoresForm({"score": Scale(0, 10)})
    picture = Image.new("RGB", (8, 8))
    while time.monotonic() < until:
        client.ask([Question("Judge.", (picture,), form, seed=0, temperature=0.0)] * 32)
    client.close()


def measure(limits: dict[str, float], *, processes: int, seconds: float) -> list[tuple[float, int]]:
    """Return the arrival time and the tokens of each request. Requests that arrive after the end are left out."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    url = f"http://127.0.0.1:{server.server_port}"
    with TemporaryDirectory() as folder:
        until = time.monotonic() + seconds
        words = [sys.executable, __file__, "--ask", url, str(Path(folder) / "quota"), json.dumps(limits), str(until)]
        keys = {"OPENAI_API_KEY": "none", "RETOUCH_KEYS": f"OPENAI_API_KEY={url}"}
        environment = {**os.environ, **keys, "OMP_NUM_THREADS": "1"}
        asking = [subprocess.Popen(words, env=environment) for _ in range(processes)]
        for process in asking:
            process.wait()
    server.shutdown()
    server.server_close()
    thread.join()
    return [each for each in server.seen if each[0] <= until]


def shares(seen: Sequence[tuple[float, float]], limit: float) -> dict[str, float]:
    """The largest sum in any 60 seconds, and the average per minute, as shares of the limit; and the number of requests."""
    times = [came for came, _ in seen]
    most, inside, first = 0.0, 0.0, 0
    for came, units in seen:
        inside += units
        while times[first] <= came - 60:
            inside -= seen[first][1]
            first += 1
        most = max(most, inside)
    average = sum(units for _, units in seen[:-1]) * 60 / (times[-1] - times[0])
    return {"most_in_any_minute": most / limit, "average": average / limit, "count": len(seen)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--ask", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.ask:
        url, file, limits, until = arguments.ask
        ask(url, file, json.loads(limits), float(until))
        return
    options = {"processes": arguments.processes, "seconds": arguments.seconds}
    seen = measure({"requests_per_minute": REQUESTS}, **options)
    print("requests", json.dumps(shares([(came, 1.0) for came, _ in sorted(seen)], REQUESTS)), flush=True)
    seen = measure({"tokens_per_minute": TOKENS, "tokens_per_question": LARGEST}, **options)
    print("tokens", json.dumps(shares(sorted(seen), TOKENS)), flush=True)


if __name__ == "__main__":
    main()
