"""Queries what a vLLM server serves, and which of the required endpoints it has."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from retouch.policies.engine import EngineFault
from retouch_serve.engines.adapters import LOAD
from retouch_serve.engines.client import Client, RequestRefused
from retouch_serve.engines.full_weights import VERSION
from retouch_serve.engines.grammar import KEY
from retouch_serve.engines.wire import GENERATE, InvalidResponse, ServerSampling, parse_probe, probe_body

_NO_ADAPTER = "retouch-probe-of-no-adapter"


class ModelCard(BaseModel):
    """A served model. ``root``: the source of its weights. ``parent``: the base model of an adapter, None for a base model."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    data: list[ModelCard]


class _Version(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    version: str


@dataclass(frozen=True, slots=True)
class EngineServerInfo:
    """``base``: the base model. ``loads_adapters``: adapters can be loaded at run time. ``has_lora``: the server was started with
    LoRA. ``reloads``: all weights can be reloaded at run time. ``takes_ids``: the server accepts and returns token ids."""

    version: str
    base: ModelCard
    loads_adapters: bool
    has_lora: bool
    reloads: bool
    takes_ids: bool


def query_server(client: Client) -> EngineServerInfo:
    """Ask what the server can do; changes nothing on it. Raises EngineFault if it does not answer like vLLM."""
    try:
        version = _parse(client.get("/version"), _Version).version
        bases = [card for card in _parse(client.get("/v1/models"), _Models).data if card.parent is None]
        if not bases:
            raise EngineFault(f"{client.url} serves no model")
        # An endpoint that exists refuses an empty body.
        loads = _exists(client, LOAD, {"lora_name": "", "lora_path": ""})
        return EngineServerInfo(
            version,
            bases[0],
            loads_adapters=loads,
            has_lora=loads and _has_lora(client),
            reloads=_has_page(client, VERSION),
            takes_ids=_exists(client, GENERATE, {}),
        )
    except RequestRefused as refused:
        raise EngineFault(f"{client.url} refuses: {refused}") from None


def query_sampling(client: Client) -> ServerSampling:
    """Ask how the server reports its samples; generates two tokens. Raises EngineFault if it refuses, or answers anything else."""
    try:
        found = [parse_probe(client.post(GENERATE, probe_body(token)), token) for token in (0, 1)]
    except RequestRefused as refused:
        raise EngineFault(f"{client.server} refuses to generate: {refused}") from None
    except InvalidResponse as invalid:
        raise EngineFault(f"{client.server} gave an invalid response: {invalid}") from None
    return ServerSampling(all(each.processed for each in found), returns_mask=all(each.returns_mask for each in found))


def has_plugin(client: Client) -> bool:
    """Whether the server has the plug-in for image tokens, which refuses an invalid grammar; other servers ignore a grammar."""
    parameters = {"max_tokens": 1, "top_k": 1, "extra_args": {KEY: {}}}
    try:
        client.post(GENERATE, {"request_id": "retouch-probe", "token_ids": [0], "sampling_params": parameters})
    except RequestRefused as refused:
        return KEY in refused.text
    return False


def _has_lora(client: Client) -> bool:
    """Whether the server was started with --enable-lora. Without this flag, vLLM cannot add any adapter (HTTP 500)."""
    try:
        client.post(LOAD, {"lora_name": _NO_ADAPTER, "lora_path": f"/{_NO_ADAPTER}"}, tries_of_500=1)
    except RequestRefused as refused:
        return refused.status != 500
    return True


def _has_page(client: Client, path: str) -> bool:
    try:
        client.get(path)
    except RequestRefused as refused:
        if refused.status == 401:
            raise
        return False
    return True


def _exists(client: Client, path: str, body: dict[str, Any]) -> bool:
    try:
        client.post(path, body)
    except RequestRefused as refused:
        if refused.status == 401:
            raise
        return refused.status in (400, 422)
    return False


def _parse(body: bytes, kind: Any) -> Any:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise EngineFault(f"the server at this address is not vLLM: {place}: {first['msg']}") from None
