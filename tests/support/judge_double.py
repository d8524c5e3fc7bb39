"""A strict local double of an OpenAI-compatible server: it rejects the requests that such a server rejects, and can inject faults.

Its scores depend only on the judged image's pixels, the score's name and the seed, so a test can compute the scores that it gives
without faults.
"""

import base64
import hashlib
import io
import json
import math
import threading
import time
from collections import Counter

from PIL import Image

import loopback
from retouch_judge.kinds import InProcess

KEY = "sk-canary-5f1c0ffee9d34b7aa1"
RETRIES = 1_000_003  # the client adds this number to the seed when it retries a request
FAULTS = (
    "429", "500", "503", "408", "time-out", "cut", "reset", "html", "no json", "empty choices", "two choices", "refusal",
    "filtered", "null", "empty", "prose", "cut json", "length", "wrong key", "off the scale", "negative", "nan", "text score",
    "double key", "no message",
)  # fmt: skip


def fraction(pixels: bytes, name: str, seed: int) -> float:
    """Return a number from 0 to 1 that depends on the judged image, the score's name and the panel's seed."""
    digest = hashlib.sha256(pixels + name.encode() + str(seed % RETRIES).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


def expected_score(image: Image.Image, name: str, seed: int, *, low: float, high: float, whole: bool = False) -> float:
    """Return the score that the double gives to an image if there is no fault."""
    value = low + (high - low) * fraction(image.convert("RGB").tobytes(), name, seed)
    return float(round(value)) if whole else round(value, 3)


class _Handler(loopback.Handler):
    server: "Double"

    def do_POST(self):
        self.server.answer(self)


class Double(loopback.Server):
    """The server. ``fault``: maps (digest of a request, how often it was received before) to a kind of fault, or to None."""

    def __init__(self, fault=lambda digest, times: None, *, words=None, hang=1.0):
        super().__init__(_Handler)
        self.fault, self.words, self.hang = fault, words or {"yes": 0.75, "no": 0.2}, hang
        self.requests: list[dict] = []
        self.refused: list[str] = []
        self.seen: Counter[str] = Counter()
        self.max_concurrent = self.now = 0
        self.lock = threading.Lock()
        self._running = loopback.running(self)

    @property
    def url(self):
        return f"{super().url}/v1"

    def __enter__(self):
        return self._running.__enter__()

    def __exit__(self, *raised):
        self._running.__exit__(*raised)

    def answer(self, handler):
        with self.lock:
            self.now += 1
            self.max_concurrent = max(self.max_concurrent, self.now)
        try:
            body = json.loads(handler.body())
            complaint = request_error(handler, body)
            if complaint:
                self.refused.append(complaint)
                return handler.reply(400, {"error": {"message": f"{complaint}; you sent {handler.headers['Authorization']}"}})
            base = json.dumps({**body, "seed": body["seed"] % RETRIES}, sort_keys=True)
            digest = hashlib.sha256(base.encode()).hexdigest()
            with self.lock:
                self.requests.append(body)
                times = self.seen[digest]
                self.seen[digest] += 1
            self.respond(handler, body, self.fault(digest, times))
        finally:
            with self.lock:
                self.now -= 1

    def respond(self, handler, body, fault):
        content, logprobs = self.content(body)
        scores = json.loads(content) if content.startswith("{") else {}
        numbers = {name: value for name, value in scores.items() if name != "reasoning"}
        first = next(iter(numbers), "score")
        match fault:
            case "429":
                return handler.reply(429, {"error": {"message": "slow down"}}, {"Retry-After": "0.02"})
            case "500" | "503" | "408":
                return handler.reply(int(fault), {"error": {"message": "oh no"}})
            case "400" | "401" | "403" | "404" | "422":
                return handler.reply(int(fault), {"error": {"message": f"bad key {handler.headers['Authorization']}"}})
            case "time-out":
                time.sleep(self.hang)
                return None
            case "reset":
                handler.close_connection = True
                return handler.connection.close()
            case "html":
                return handler.reply(200, b"<html>502 Bad Gateway</html>", {"Content-Type": "text/html"})
            case "no json":
                return handler.reply(200, b"{'choices': [")
        message, finish = {"role": "assistant", "content": content}, "stop"
        replaced = {
            "null": None,
            "empty": "",
            "prose": "I think it is a fine picture.",
            "cut json": content[:-3],
            "wrong key": json.dumps({"reasoning": "", "verdict": 7}),
            "off the scale": json.dumps({**numbers, first: 1e6}),
            "negative": json.dumps({**numbers, first: -1}),
            "nan": json.dumps({**numbers, first: float("nan")}),
            "text score": json.dumps({**numbers, first: "very good"}),
            "double key": content[:-1] + f', "{first}": 0}}',
        }
        if fault in replaced:
            message["content"], logprobs = replaced[fault], None
        if fault == "length":
            finish, logprobs = "length", None
        if fault == "filtered":
            finish = "content_filter"
        if fault == "refusal":
            message = {"role": "assistant", "content": None, "refusal": "I cannot help with that."}
        choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": logprobs}
        choices = {"empty choices": [], "two choices": [choice, choice], "no message": [{"index": 0}]}.get(fault, [choice])
        reply = {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": choices}
        reply["usage"] = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
        return handler.reply(200, reply, cut=fault == "cut")

    def content(self, body):
        """Return the correct answer, and the first token's log-probabilities if they were requested."""
        pixels = judged_pixels(body["messages"][-1]["content"][-1])
        if body.get("logprobs"):
            words = self.words(pixels) if callable(self.words) else self.words
            tokens = [{"token": word, "logprob": math.log(mass), "bytes": None} for word, mass in words.items()]
            return tokens[0]["token"], {"content": [{**tokens[0], "top_logprobs": tokens}]}
        choices = choices_of(body)
        if choices is not None:
            return vote(choices, pixels, body["seed"]), None
        properties = body["response_format"]["json_schema"]["schema"]["properties"]
        if "answer" in properties:
            return json.dumps({"answer": vote(properties["answer"]["enum"], pixels, body["seed"])}), None
        values = {"reasoning": 'The sign says "score": 10.'}
        for name, rule in properties.items():
            if name != "reasoning":
                value = rule["minimum"] + (rule["maximum"] - rule["minimum"]) * fraction(pixels, name, body["seed"])
                values[name] = round(value) if rule["type"] == "integer" else round(value, 3)
        return json.dumps(values), None


def judged_pixels(part) -> bytes:
    url = part["image_url"]["url"]
    kind, data = url.split(";base64,")
    assert kind in ("data:image/webp", "data:image/png", "data:image/jpeg")
    return Image.open(io.BytesIO(base64.b64decode(data, validate=True))).convert("RGB").tobytes()


def vote(choices, pixels: bytes, seed: int) -> str:
    """Return the double's choice, which depends on the judged image and the panel's seed."""
    return choices[int(fraction(pixels, "choice", seed) * len(choices))]


def choices_of(body) -> list[str] | None:
    """Return the allowed answers, from vLLM's field ``structured_outputs`` or its older field ``guided_choice``."""
    return body["structured_outputs"]["choice"] if "structured_outputs" in body else body.get("guided_choice")


def request_error(handler, body) -> str | None:
    """Return what a server would reject, or a wrong order of the parts (rubric first, judged image last), or None."""
    needed = {"model", "messages", "temperature", "max_completion_tokens", "seed"}
    known = needed | {"structured_outputs", "guided_choice", "response_format", "logprobs", "top_logprobs"}
    if handler.path != "/v1/chat/completions" or handler.headers["Authorization"] != f"Bearer {KEY}":
        return "no such path or key"
    if not needed <= set(body) <= known:
        return f"keys {sorted(body)}"
    system, user = body["messages"]
    if system["role"] != "system" or not isinstance(system["content"], str) or user["role"] != "user":
        return "messages"
    if any(part["type"] not in ("text", "image_url") for part in user["content"]) or user["content"][-1]["type"] != "image_url":
        return "parts"
    if body.get("logprobs"):
        return None if body.get("top_logprobs") == 20 and body["max_completion_tokens"] == 1 else "logprobs"
    if choices_of(body) is not None:
        return None if "response_format" not in body and len(choices_of(body)) > 1 else "choices"
    given = body["response_format"]
    schema = given["json_schema"]["schema"]
    strict = given["type"] == "json_schema" and given["json_schema"]["strict"] and schema["additionalProperties"] is False
    return None if strict and schema["required"] == list(schema["properties"]) else "schema"


def on_panel(judge, panel, **fields):
    """Make a judge of this class that uses the given panel."""
    return judge(judge=InProcess(path="not loaded"), **fields).with_model(panel)
