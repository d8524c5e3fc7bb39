"""Publishes the policy's weights to an SGLang-Diffusion server: the LoRA, or all weights of the transformer.

The server is asked which weights it has after each load, and again after each rollout. So a server that was restarted, or changed
by another client, is detected before its samples are used.
"""

import json
import re
from abc import abstractmethod
from contextlib import suppress
from typing import Any

from retouch.policies.engine import EngineFault
from retouch_serve.engines.client import Client, RequestRefused
from retouch_serve.engines.publishing import WeightPublisher

SET_LORA, LIST_LORAS = "/v1/set_lora", "/v1/list_loras"
UPDATE, CHECKSUM = "/update_weights_from_disk", "/get_weights_checksum"
TRANSFORMER = "transformer"
_SHA256 = re.compile(r"[0-9a-f]{64}")


class ConfirmedPublisher(WeightPublisher[str]):
    """A publisher whose server can be asked which weights it has."""

    def served(self, name: str) -> str:
        return name

    def unload(self, client: Client, name: str) -> None:
        """Do nothing: the next weights replace these, and SGLang has no request that removes weights."""

    def has_lost(self, client: Client) -> bool:
        """Whether the server has other weights than were loaded last. Always False on all ranks but the first, which loads them."""
        assert self._loaded is not None, "the weights were published"
        return self._first and not self.confirms(client, self._loaded)

    def reload(self, client: Client) -> None:
        """Load the weights of the last ``publish`` again, if this rank loads weights. Raises EngineFault if this fails."""
        if self._first:
            self.restore(client)

    @abstractmethod
    def confirms(self, client: Client, name: str) -> bool:
        """Whether the server reports that it has exactly these weights. Raises EngineFault if it does not answer."""

    def _require(self, client: Client, name: str) -> None:
        if not self.confirms(client, name):
            raise EngineFault(f"{client.server} reports that it loaded {self._folder / name}, but then that it has other weights")

    def _refused(self, client: Client, name: str, why: object) -> EngineFault:
        return EngineFault(
            f"{client.server} did not load {(self._folder / name).absolute()}: {why}. It must see that folder under the same path "
            "(rollout.engine.adapters)"
        )


class LoraPublisher(ConfirmedPublisher):
    """Keeps the server's adapter equal to the policy's. ``save`` writes PEFT's format.

    All adapters of a run have the same name, because the server frees an adapter only when another adapter with its name replaces
    it. The adapter is not merged into the base weights: in 16 bits, merging would round away most of a small update.
    """

    def load(self, client: Client, name: str) -> None:
        body = {
            "lora_nickname": self._prefix,
            "lora_path": self._path(name),
            "target": TRANSFORMER,
            "strength": 1.0,
            "merge_mode": "dynamic",
        }
        try:
            client.post(SET_LORA, body, tries_of_500=1)
        except RequestRefused as refused:
            raise self._refused(client, name, refused) from None
        self._require(client, name)

    def confirms(self, client: Client, name: str) -> bool:
        active = _ask(client, LIST_LORAS, None).get("active")
        if not isinstance(active, dict) or active.keys() != {TRANSFORMER} or not isinstance(active[TRANSFORMER], list):
            return False
        expected = {"nickname": self._prefix, "path": self._path(name), "strength": 1.0, "mode": "unmerged"}
        return [{key: each.get(key) for key in expected} for each in active[TRANSFORMER] if isinstance(each, dict)] == [expected]

    def _path(self, name: str) -> str:
        return str((self._folder / name).absolute())


class TransformerPublisher(ConfirmedPublisher):
    """Keeps all weights of the server's transformer equal to the policy's. ``save`` writes diffusers' layout into ``transformer``.

    The server's checksum depends on its own parameter names and number type, so it cannot be computed here. It is checked that the
    checksum changes with each update, and stays the same until the next update.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._checksums: dict[str, str] = {}

    def load(self, client: Client, name: str) -> None:
        body = {"model_path": str((self._folder / name).absolute()), "target_modules": [TRANSFORMER], "flush_cache": True}
        try:
            reply = _document(client, client.post(UPDATE, body, tries_of_500=1))
        except RequestRefused as refused:
            raise self._refused(client, name, refused) from None
        if reply.get("success") is not True:
            raise self._refused(client, name, reply.get("message"))
        checksum = self._checksum(client)
        if checksum in [known for weights, known in self._checksums.items() if weights != name]:
            raise EngineFault(f"{client.server} reports that it loaded {self._folder / name}, but its weights did not change")
        if self._checksums.get(name, checksum) != checksum:
            raise EngineFault(f"{client.server} loaded {self._folder / name} twice, but has other weights than the first time")
        self._checksums = {name: checksum}

    def confirms(self, client: Client, name: str) -> bool:
        return self._checksums.get(name) == self._checksum(client)

    def _checksum(self, client: Client) -> str:
        found = _ask(client, CHECKSUM, {"module_names": [TRANSFORMER]}).get(TRANSFORMER)
        if not isinstance(found, str) or not _SHA256.fullmatch(found):
            raise EngineFault(f"{client.server} returned no checksum of its transformer, but {found!r}")
        return found


def _ask(client: Client, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
    """The JSON object of a response. Raises EngineFault if the server refuses, or answers anything else."""
    try:
        return _document(client, client.get(path) if body is None else client.post(path, body))
    except RequestRefused as refused:
        raise EngineFault(f"{client.server} refuses {path}: {refused}") from None


def _document(client: Client, body: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        document = json.loads(body)
        if isinstance(document, dict):
            return document
    raise EngineFault(f"{client.server} did not answer with a JSON object; it is not an SGLang-Diffusion server")
