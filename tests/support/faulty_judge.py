"""A judge with wrong replies: an OpenAI-compatible endpoint whose replies come from a function, and tables of such functions."""

import gzip
import json
import math
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import loopback

Completion = dict[str, Any]


@dataclass
class Reply:
    """The HTTP response to send."""

    body: bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def parts(self) -> tuple[int, bytes, dict[str, str]]:
        return self.status, self.body, self.headers


ReplyMaker = Callable[[Completion], Reply]


def completion(content: object = '{"reasoning": "", "score": 7}', **choice: object) -> Completion:
    """Make a well-formed completion with this content."""
    message = {"role": "assistant", "content": content}
    whole = {"index": 0, "message": message, "finish_reason": "stop", **choice}
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    return {"id": "x", "object": "chat.completion", "created": 0, "model": "judge", "choices": [whole], "usage": usage}


def _json(value: object, **headers: str) -> Reply:
    return Reply(json.dumps(value).encode(), headers=headers)


def _content(content: object, **choice: object) -> ReplyMaker:
    return lambda true: _json(completion(content, **choice))


def _scores(*texts: str) -> dict[str, ReplyMaker]:
    return {f"a score of {text}": _content(f'{{"reasoning": "", "score": {text}}}') for text in texts}


def _changed(**changes: object) -> ReplyMaker:
    return lambda true: _json({**true, **changes})


def _message(finish_reason: str, **message: object) -> ReplyMaker:
    return _changed(choices=[{"message": message, "finish_reason": finish_reason}])


def _bytes(make: Callable[[bytes], bytes], **headers: str) -> ReplyMaker:
    return lambda true: Reply(
        make(json.dumps(true).encode()), headers={key.replace("_", "-"): value for key, value in headers.items()}
    )


def _first_token(*tokens: tuple[str, object]) -> ReplyMaker:
    """Reply with these candidates for the first token; a log-probability that is a text is inserted into the JSON unquoted."""

    def make_reply(true: Completion) -> Reply:
        given = [{"token": token, "logprob": f"@{value}@" if isinstance(value, str) else value} for token, value in tokens]
        place = {**given[0], "top_logprobs": given}
        text = json.dumps(completion(tokens[0][0], logprobs={"content": [place]}))
        return Reply(text.replace('"@', "").replace('@"', "").encode())

    return make_reply


def _gzipped_zeros(size: int) -> bytes:
    return gzip.compress(b'{"choices": "' + bytes(size) + b'"}', 1)


YES = math.log(0.7)
BOMB = 100 * 2**20

SCORES: dict[str, ReplyMaker] = {
    **_scores("1e300", "-1e300", "1e999", "-1e999", "NaN", "Infinity", "-Infinity", "11", "-1"),
    **_scores("10.000001", "-0.000001", "1" + "0" * 400, "9" * 5000, "true", "null", "[]", "[7, 8]"),
    **_scores('"7 or 8"', '"7-8"', '"１０"', '"7e0"', '"0x7"', '"+7"', '"VII"', '{"value": 7}', "07", ".7"),
    "two scores": _content('{"score": 7, "score": 8}'),
    "a score and a revised score": _content('{"score": 7, "revised_score": 2}'),
    "a score on another scale": _content('{"score": 7, "max_score": 100}'),
    "an error with a score": _content('{"error": "no image", "score": 7}'),
    "a schema": _content('{"properties": {"score": {"type": "number"}}, "score": 7}'),
    "a score in an unclosed think tag": _content("<think>Score: 7"),
    "a score in a quotation": _content('The sign reads "Score: 7"'),
    "a score that is withdrawn": _content("Score: 7. Actually, I cannot see the image."),
    "lists 5000 deep": _content("[" * 5000),
    "objects 5000 deep": _content('{"score":' * 3000 + "7" + "}" * 3000),
    "19 900 spaces before a figure": _content("score" + " " * 19_900 + "7x"),
    "19 900 spaces and a colon": _content("score" + " " * 19_900 + ":"),
    "10 000 opening tags": _content("<" + " " * 19_000 + "score"),
    "6000 quotation marks": _content("“" * 6000 + "score: 7"),
    "6000 backticks": _content("`a" * 6000),
    "5000 fences": _content("```\n" * 4999),
    "4000 labels": _content("score: " * 2800),
    "1 MB of text": _content("a " * 500_000 + "Score: 7"),
    "a null byte": _content("\0{}"),
    "half a surrogate pair": _content("\ud800"),
    "content that is a list": _content([{"type": "text", "text": '{"score": 7}'}]),
    "content that is an object": _content({"score": 7}),
    "content that is a number": _content(7),
    "cut off by length": _content('{"score": 7}', finish_reason="length"),
    "the finish reason content_filter": _content('{"score": 7}', finish_reason="content_filter"),
    "an unknown finish reason": _content('{"score": 7}', finish_reason="bored"),
    "no finish reason": _content('{"score": 7}', finish_reason=None),
    "a refusal together with a score": _message("stop", content='{"score": 7}', refusal="no"),
    "a tool call": _message("tool_calls", content=None, tool_calls=[{"function": {"name": "score"}}]),
    "no choices": _changed(choices=[]),
    "two choices": lambda true: _json({**true, "choices": true["choices"] * 2}),
    "ten thousand choices": lambda true: _json({**true, "choices": true["choices"] * 10_000}),
    "choices that are an object": lambda true: _json({**true, "choices": {"0": true["choices"][0]}}),
    "a usage that is a text": _changed(usage="many"),
    "tokens that are a text": _changed(usage={"prompt_tokens": "many", "completion_tokens": 1}),
    "half a token": _changed(usage={"prompt_tokens": 0.5, "completion_tokens": 1}),
    "a list": lambda true: _json([true]),
    "null": lambda true: _json(None),
    "an error with status 200": lambda true: _json({"error": {"message": "overloaded"}}),
}
"""Replies to a question for a score from 0 to 10 that must not be read as a score."""

_IMPOSSIBLE_DATES = ("Mon, 99 Foo 99999 99:99:99 GMT", "Fri, 31 Dec 9999 23:59:59 -2359")
WIRE: dict[str, ReplyMaker] = {
    "a gzip bomb": lambda true: Reply(_gzipped_zeros(BOMB), headers={"Content-Encoding": "gzip"}),
    "a gzip bomb as x-gzip": lambda true: Reply(_gzipped_zeros(BOMB), headers={"Content-Encoding": "X-GZIP"}),
    "a deflate bomb": lambda true: Reply(zlib.compress(bytes(BOMB), 1), headers={"Content-Encoding": "deflate"}),
    "a gzip bomb of an error": lambda true: Reply(_gzipped_zeros(BOMB), 500, {"Content-Encoding": "gzip"}),
    "a gzip bomb of a refusal": lambda true: Reply(_gzipped_zeros(BOMB), 400, {"Content-Encoding": "gzip"}),
    "gzip in gzip": _bytes(lambda text: gzip.compress(gzip.compress(text)), Content_Encoding="gzip, gzip"),
    "uncompressed data declared as gzip": _bytes(lambda text: text, Content_Encoding="gzip"),
    "gzip that is cut off": _bytes(lambda text: gzip.compress(text)[:-20], Content_Encoding="gzip"),
    "brotli": _bytes(lambda text: text, Content_Encoding="br"),
    "zstandard": _bytes(lambda text: text, Content_Encoding="zstd"),
    "an unknown compression": _bytes(lambda text: text, Content_Encoding="rot13"),
    "6 MB": _bytes(lambda text: text + b" " * 6 * 2**20),
    "6 MB of an error": lambda true: Reply(b" " * 6 * 2**20, 500),
    "6 MB of a refusal": lambda true: Reply(b'{"error": {"message": "' + b"a" * 6 * 2**20 + b'"}}', 400),
    "a non-text charset": lambda true: Reply(b"7b7d", headers={"Content-Type": "application/json; charset=hex"}),
    "an unknown charset": lambda true: Reply(b"{}", headers={"Content-Type": "application/json; charset=klingon"}),
    "an error in a non-text charset": lambda true: Reply(b"7b7d", 500, {"Content-Type": "text/plain; charset=hex"}),
    "no UTF-8": _bytes(lambda text: text.replace(b"assistant", b"assis\xfft")),
    "UTF-16": _bytes(lambda text: text.decode().encode("utf-16")),
    "lists 100 000 deep": _bytes(lambda text: b"[" * 100_000),
    "50 000 logprobs": lambda true: _json(
        completion("7", logprobs={"content": [{"token": "", "logprob": 0, "top_logprobs": []}] * 50_000})
    ),
    "a status of 299": lambda true: Reply(b"", 299),
    "a status of 600": lambda true: Reply(b"", 600),
    "no body": lambda true: Reply(b""),
    "HTML": lambda true: Reply(b"<html>", headers={"Content-Type": "text/html"}),
    "an event stream": _bytes(lambda text: b"data: " + text + b"\n\n", Content_Type="text/event-stream"),
    **{
        f"429 with Retry-After {value}": (lambda true, value=value: Reply(b"{}", 429, {"Retry-After": value}))
        for value in ("-1", "1e309", "nan", "1e20", "9" * 5000, "soon", *_IMPOSSIBLE_DATES)
    },
}
"""Replies that must not take much memory or time, and must not be read as a score."""

WORDS: dict[str, ReplyMaker] = {
    "a log-probability of 5": _first_token(("yes", 5.0), ("no", -1.0)),
    "a log-probability of 1e308": _first_token(("yes", 1e308), ("no", -1.0)),
    "a log-probability of infinity": _first_token(("yes", "Infinity"), ("no", -1.0)),
    "a log-probability of NaN": _first_token(("yes", "NaN"), ("no", -1.0)),
    "a log-probability of minus infinity, twice": _first_token(("yes", "-Infinity"), ("yes", "-Infinity")),
    "a log-probability of -1e308, twice": _first_token(("yes", -1e308), ("yes", -1e308)),
    "the same token twice at 1000": _first_token(("yes", 1000.0), ("yes", 1000.0)),
    "probabilities whose sum is 1.4": _first_token(("yes", YES), ("no", YES)),
    "other words": _first_token(("maybe", YES), ("perhaps", -2.0)),
    "a token of 1 MB": _first_token(("y" * 10**6, YES), ("no", -2.0)),
    "ten thousand candidates": _first_token(*[(f"t{k}", -20.0) for k in range(10_000)]),
    "no candidates": lambda true: _json(completion("yes")),
    "an empty list of candidates": lambda true: _json(completion("yes", logprobs={"content": []})),
    "a log-probability that is a text": lambda true: _json(
        completion(
            "yes", logprobs={"content": [{"token": "yes", "logprob": 0, "top_logprobs": [{"token": "yes", "logprob": "high"}]}]}
        )
    ),
    "a refusal": lambda true: _json(completion("yes", finish_reason="content_filter")),
}
"""Replies to a question for one word that must not be read as a score."""

USAGE: dict[str, object] = {
    "-1e9 prompt tokens": {"prompt_tokens": -(10**9), "completion_tokens": 1},
    "-1 completion tokens": {"prompt_tokens": 100, "completion_tokens": -1},
    "0 tokens": {"prompt_tokens": 0, "completion_tokens": 0},
    "1e15 prompt tokens": {"prompt_tokens": 10**15, "completion_tokens": 1},
    "10^400 prompt tokens": {"prompt_tokens": 10**400, "completion_tokens": 1},
    "a million completion tokens": {"prompt_tokens": 100, "completion_tokens": 10**6},
    "null": None,
}
"""Wrong token counts in the usage of a reply whose answer is correct."""

REDIRECTS = (300, 301, 302, 303, 304, 305, 307, 308)


class FaultyJudge(loopback.Scripted):
    """A local server. ``make_reply``: makes the reply from a true completion."""

    def __init__(self) -> None:
        self.make_reply: ReplyMaker = _json
        super().__init__(lambda request: self.make_reply(completion()).parts())

    @property
    def url(self) -> str:
        return f"{super().url}/v1"


def faulty_judge() -> AbstractContextManager[FaultyJudge]:
    """Run a judge that sends the true completion until its ``make_reply`` is replaced."""
    return loopback.running(FaultyJudge())
