"""Compares the double of a vLLM server with a real server: the same requests must get the same status, fields and types."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from vllm_double import GENERATE, LOAD, UNLOAD, Double, serving

SAMPLING = {"max_tokens": 3, "logprobs": 0, "seed": 5, "ignore_eos": True, "detokenize": False}


@dataclass(frozen=True)
class Exchange:
    """A request, the expected status of the answer, and for an error a part of the expected message."""

    path: str
    body: Any = None
    status: int = 200
    expected_message: str = ""


def generate(status: int = 200, expected_message: str = "", *, sampling: dict[str, Any] | None = None, **body: Any) -> Exchange:
    """Make a request to generate, with changed fields."""
    document = {"token_ids": [5, 6], "return_token_ids": True, **body, "sampling_params": {**SAMPLING, **(sampling or {})}}
    return Exchange(GENERATE, document, status, expected_message)


ALL_SERVERS = (
    Exchange("/version"),
    Exchange("/health"),
    Exchange("/v1/models"),
    Exchange("/nothing", {}, 404),
    Exchange(GENERATE, {}, 400, "validation error"),
    generate(sampling={"n": 2}),
    generate(sampling={"top_k": 1, "logit_bias": {"7": 100.0}}, request_id="retouch-probe"),
    generate(400, "sampling_params.n must be at most the server's max_num_seqs (16), got 17.", sampling={"n": 17}),
    generate(400, sampling={"temperature": 3}),
    generate(400, sampling={"top_k": 2.5}),
    generate(400, "out-of-vocab token ids", sampling={"logit_bias": {"99999": -1.0}}),
    generate(400, "out-of-vocab token ids", sampling={"stop_token_ids": [99999]}),
    generate(400, "n must be 1 when using greedy sampling, got 2.", sampling={"temperature": 0.0, "n": 2}),
    generate(400, "Token id 99999 is out of vocabulary", token_ids=[5, 99999]),
    generate(400, token_ids=[]),
    generate(400, token_ids="5"),
    generate(404, "The model `none` does not exist.", model="none"),
)
ADAPTERS = (
    Exchange(LOAD, {"lora_name": "", "lora_path": ""}, 400, "Both 'lora_name' and 'lora_path' must be provided."),
    Exchange(LOAD, {"lora_name": "x", "lora_path": "/nowhere"}, 404, "Loading lora x failed: No adapter found for /nowhere"),
    Exchange(UNLOAD, {"lora_name": "x"}, 404, "The lora adapter 'x' cannot be found."),
    Exchange(UNLOAD, {}, 400),
)
NO_ADAPTERS = (Exchange(LOAD, {"lora_name": "x", "lora_path": "/nowhere"}, 500, "LoRA is not enabled. Use --enable-lora"),)
MASK = (generate(500, sampling={}), generate(sampling={"top_k": 4}))
DEVELOPMENT = (
    Exchange("/update_weight_version", {"new_version": "of-a-test"}),
    Exchange("/weight_info"),
    Exchange("/reset_prefix_cache", {}),
    Exchange("/sleep?level=1&mode=wait", {}),
    Exchange("/is_sleeping"),
    Exchange("/wake_up", {}),
    Exchange("/is_sleeping"),
    Exchange("/server_info?config_format=json"),
)
NO_DEVELOPMENT = (
    Exchange("/weight_info", status=404),
    Exchange("/collective_rpc", {}, 404),
    Exchange("/sleep?level=1&mode=wait", {}, 404),
    Exchange("/is_sleeping", status=404),
)
NO_SCALE_OUT = (Exchange(GENERATE, {}, 403, "--enable-scale-out"),)
NO_RUNTIME_LORA = (Exchange(LOAD, {"lora_name": "x", "lora_path": "/nowhere"}, 404),)


def differences(url: str, double: Double, exchanges: Sequence[Exchange]) -> list[str]:
    """Return the differences in status, fields and types between the double's answers and the answers of the server at ``url``."""
    with serving(double) as other:
        return [line for exchange in exchanges for line in _differing(exchange, _answer(url, exchange), _answer(other, exchange))]


def _answer(url: str, exchange: Exchange) -> httpx.Response:
    if exchange.body is None:
        return httpx.get(url + exchange.path, timeout=300.0, trust_env=False)
    return httpx.post(url + exchange.path, json=exchange.body, timeout=300.0, trust_env=False)


def _differing(exchange: Exchange, real: httpx.Response, double: httpx.Response) -> Iterator[str]:
    where = f"{exchange.path} {json.dumps(exchange.body)[:120]}"
    for name, response in (("the real server", real), ("the double", double)):
        if response.status_code != exchange.status:
            yield f"{where}: {name} answers {response.status_code}, not {exchange.status}: {response.text[:200]}"
        if exchange.expected_message and exchange.expected_message not in json.loads(response.text)["error"]["message"]:
            yield f"{where}: {name} does not say {exchange.expected_message!r}: {response.text[:200]}"
    if real.status_code == 404 and not exchange.expected_message:
        return  # no such endpoint: the client ignores the text of FastAPI's answer
    theirs, ours = (_form(json.loads(each.text)) if each.text not in ("", '""') else None for each in (real, double))
    exact = exchange.path == GENERATE
    yield from (f"{where}: {line}" for line in _missing(ours, theirs, "") if line)
    yield from (f"{where}: the double lacks {line}" for line in _missing(theirs, ours, "") if exact and line)


def _form(value: Any) -> Any:
    """Return the fields and types of a document; of a list only those of its first item."""
    if isinstance(value, dict):
        return {name: _form(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_form(each) for each in value[:1]]
    if value is None:
        return "null"
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def _missing(form: Any, other: Any, at: str) -> Iterator[str]:
    """Yield the fields of ``form`` that ``other`` lacks or has with another type."""
    if isinstance(form, dict) and isinstance(other, dict):
        for name, each in form.items():
            yield from _missing(each, other[name], f"{at}.{name}") if name in other else [f"{at}.{name}"]
    elif isinstance(form, list) and isinstance(other, list):
        if form and other:
            yield from _missing(form[0], other[0], f"{at}[]")
    elif form != other and not at.endswith(".param"):  # clients ignore which parameter was wrong
        yield f"{at}: {form}, {other}"
