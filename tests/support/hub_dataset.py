"""Streams a data set from a local double of the Hugging Face Hub: ``hub_dataset.py FOLDER parquet|tar``.

The server answers the requests that ``datasets`` makes to list and read the files of one public data set. Prints the rows that the
stream returns.
"""

import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import loopback

NAME, COMMIT = "me/edits", "a" * 40
ABSENT = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}


def entries(root: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(root.rglob("*")):
        if path.is_file():
            oid = hashlib.sha1(path.read_bytes()).hexdigest()
            yield {"type": "file", "path": path.relative_to(root).as_posix(), "size": path.stat().st_size, "oid": oid}


def serve(root: Path) -> str:
    """Start a server for the files in ``root`` and return its address."""

    class Handler(loopback.Handler):
        def answer(self) -> None:
            path, body = self.path.partition("?")[0], self.body()
            listed = list(entries(root))
            if re.fullmatch(rf"/api/datasets/{NAME}(/revision/\w+)?", path):
                siblings = [{"rfilename": entry["path"]} for entry in listed]
                self.reply(200, {"id": NAME, "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
            elif path == f"/api/datasets/{NAME}/tree/{COMMIT}":
                self.reply(200, listed)
            elif path == f"/api/datasets/{NAME}/paths-info/{COMMIT}":
                wanted = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode())["paths"]
                self.reply(200, [entry for entry in listed if entry["path"] in wanted])
            elif (found := re.fullmatch(rf"/datasets/{NAME}/resolve/\w+/(.+)", path)) and (root / found[1]).is_file():
                self.send_file((root / found[1]).read_bytes())
            else:
                self.reply(404, {}, ABSENT)

        def send_file(self, data: bytes) -> None:
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"', "Accept-Ranges": "bytes"}
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            if asked is None:
                self.reply(200, data, headers)
                return
            first, last = int(asked[1]), min(int(asked[2] or len(data)), len(data) - 1)
            self.reply(206, data[first : last + 1], {**headers, "Content-Range": f"bytes {first}-{last}/{len(data)}"})

        do_GET = do_HEAD = do_POST = answer

    server = loopback.Server(Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server.url


def main(folder: Path, kind: str) -> None:
    # The libraries read the address of the Hub when they are imported.
    os.environ |= {"HF_ENDPOINT": serve(folder / "files"), "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}
    import stream_files
    from retouch.data.base import DataContext
    from retouch.data.sources.stream import StreamData
    from retouch.data.tasks import UnindexedTasks

    {"parquet": stream_files.parquet, "tar": stream_files.tar}[kind](folder / "files")
    rows = {}
    for ahead in (0, 1):
        stream = StreamData(path=NAME, held_out=5, check=3, shuffle=16, ahead=ahead).build(DataContext(seed=3)).train
        assert isinstance(stream, UnindexedTasks)
        steps = [stream.at_step(step, count=11, places=range(11)) for step in range(10)]
        rows[f"ahead {ahead}"] = [task.instruction for step in steps for task in step]
        stream.close()
    sys.stdout.write(json.dumps(rows) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
