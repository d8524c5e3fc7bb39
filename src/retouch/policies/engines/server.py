"""What a vLLM server serves, and which of the endpoints needed here it has."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from retouch.policies.engines.adapters import LOAD
from retouch.policies.engines.base import EngineFault
from retouch.policies.engines.client import Client, RequestRefused
from retouch.policies.engines.grammar import KEY
from retouch.policies.engines.wire import GENERATE


class ModelCard(BaseModel):
    """A served model. ``root``: where its weights come from. ``parent``: an adapter's base model."""

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
    """``base``: the base model. ``loads_adapters``: adapters can be loaded at run time. ``takes_ids``: it takes and returns ids."""

    version: str
    base: ModelCard
    loads_adapters: bool
    takes_ids: bool


def query_server(client: Client) -> EngineServerInfo:
    """What the server can do; changes nothing on it. EngineFault if it does not answer as vLLM does."""
    try:
        version = _parse(client.get("/version"), _Version).version
        bases = [card for card in _parse(client.get("/v1/models"), _Models).data if card.parent is None]
        if not bases:
            raise EngineFault(f"{client.url} serves no model")
        # Their empty bodies are refused if the endpoints exist.
        loads = _exists(client, LOAD, {"lora_name": "", "lora_path": ""})
        return EngineServerInfo(version, bases[0], loads_adapters=loads, takes_ids=_exists(client, GENERATE, {}))
    except RequestRefused as refused:
        raise EngineFault(f"{client.url} refuses: {refused}") from None


def has_plugin(client: Client) -> bool:
    """Whether the server has the plug-in for image tokens, which refuses a wrong grammar; without it nothing reads the grammar."""
    try:
        client.post(GENERATE, {"token_ids": [0], "sampling_params": {"max_tokens": 1, "extra_args": {KEY: {}}}})
    except RequestRefused as refused:
        return KEY in refused.text
    return False


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
        raise EngineFault(f"what answers there is no vLLM server: {place}: {first['msg']}") from None
