"""A local double of the Hugging Face Hub with the endpoints for uploads: repositories, branches, commits of small files."""

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import loopback

TOKEN = "hf_of_the_double"


class Hub:
    """The state of the Hub. ``files``: content by (revision, path). ``private``: whether each repository is private. ``statuses``:
    status with which requests are refused, by a part of their path."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.private: dict[str, bool] = {}
        self.branches: dict[str, set[str]] = {}
        self.files: dict[tuple[str, str], bytes] = {}
        self.messages: list[str] = []
        self.statuses: dict[str, int] = {}

    def answer(self, path: str, body: bytes) -> tuple[int, Any]:
        if (status := next((code for part, code in self.statuses.items() if part in path), None)) is not None:
            return status, {"error": "refused"}
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            if name in self.private:
                return 409, {"error": "exists", "url": f"{self.url}/{name}"}
            self.private[name], self.branches[name] = asked["visibility"] == "private", {"main"}
            return 200, {"url": f"{self.url}/{name}"}
        if path == "/api/validate-yaml":
            valid = json.loads(body)["content"].startswith("---\n")
            return (200, {"warnings": [], "errors": []}) if valid else (400, {"errors": [{"message": "no metadata"}]})
        match = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(branch|preupload|commit)/(.+)", path)
        assert match, path
        repo, what, revision = match.groups()
        if repo not in self.private:
            return 404, {"error": "no such repository"}
        if what == "branch":
            if revision in self.branches[repo]:
                return 409, {"error": "exists"}
            self.branches[repo].add(revision)
            return 200, {}
        if revision not in self.branches[repo]:
            return 404, {"error": "no such revision"}
        if what == "preupload":
            modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]]
            return 200, {"files": modes}
        for line in map(json.loads, body.splitlines()):
            if line["key"] == "header":
                self.messages.append(line["value"]["summary"])
            else:
                assert line["key"] == "file", line
                self.files[revision, line["value"]["path"]] = base64.b64decode(line["value"]["content"])
        return 200, {"commitUrl": f"{self.url}/{repo}/commit/1", "commitOid": "1", "pullRequestUrl": None}


@contextmanager
def serve() -> Iterator[Hub]:
    """Run a Hub that accepts only requests with ``TOKEN``."""

    class Handler(loopback.Handler):
        def do_POST(self) -> None:
            body = self.body()
            if self.headers["Authorization"] != f"Bearer {TOKEN}":
                self.reply(401, {"error": "unknown token"})
            else:
                self.reply(*hub.answer(self.path, body))

    with loopback.running(loopback.Server(Handler)) as server:
        hub = Hub(server.url)
        yield hub
