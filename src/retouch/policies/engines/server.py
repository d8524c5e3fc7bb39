"""What a vLLM server says of itself, and what it lets be done."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from retouch.policies.autoregressive.mismatch import EngineFault
from retouch.policies.engines.adapters import LOAD
from retouch.policies.engines.client import Client, Refused
from retouch.policies.engines.form import KEY
from retouch.policies.engines.wire import GENERATE


class Card(BaseModel):
    """A model that is served: ``parent`` of an adapter is its base, ``root`` where its weights come from."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    data: list[Card]


class _Version(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    version: str


@dataclass(frozen=True, slots=True)
class Server:
    """``loads_adapters``: adapters may be loaded while it serves. ``takes_ids``: it takes ids and gives ids."""

    version: str
    base: Card
    loads_adapters: bool
    takes_ids: bool


def ask(client: Client) -> Server:
    """What the server says; nothing in it is changed. EngineFault where it does not answer as vLLM does."""
    try:
        version = _read(client.get("/version"), _Version).version
        bases = [card for card in _read(client.get("/v1/models"), _Models).data if card.parent is None]
        if not bases:
            raise EngineFault(f"{client.url} serves no model")
        # Both are refused for their empty bodies, where the page is there at all.
        loads = _is_there(client, LOAD, {"lora_name": "", "lora_path": ""})
        return Server(version, bases[0], loads_adapters=loads, takes_ids=_is_there(client, GENERATE, {}))
    except Refused as refused:
        raise EngineFault(f"{client.url} refuses: {refused}") from None


def keeps_to_forms(client: Client) -> bool:
    """Whether the plug-in for image tokens is there: it refuses a grammar that is none, and without it nobody reads one."""
    try:
        client.post(GENERATE, {"token_ids": [0], "sampling_params": {"max_tokens": 1, "extra_args": {KEY: {}}}})
    except Refused as refused:
        return KEY in refused.text
    return False


def _is_there(client: Client, path: str, body: dict[str, Any]) -> bool:
    try:
        client.post(path, body)
    except Refused as refused:
        if refused.status == 401:
            raise
        return refused.status in (400, 422)
    return False


def _read(body: bytes, kind: Any) -> Any:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"])) or "the body"
        raise EngineFault(f"what answers there is no vLLM server: {place}: {first['msg']}") from None
