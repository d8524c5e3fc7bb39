"""The policy's LoRA in a vLLM server: written to a folder that the server reads too, and loaded whenever its weights changed.

An adapter's name contains a digest of its weights. So the server's prefix cache, which is keyed by the name, is never stale, and
loading the same adapter twice does no harm.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from retouch.policies.engines.base import EngineFault
from retouch.policies.engines.client import Client, RequestRefused

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
log = logging.getLogger("retouch")


class AdapterPublisher:
    """Keeps the server's adapter equal to the policy's.

    ``weights``: the trained parameters, by name. ``save``: writes the adapter to a folder, in PEFT's format. ``folder``: must have
    the same path for the server. ``prefix``: of the adapters' names. ``first``: this rank writes and loads; all ranks have the same
    weights. ``any_rank``: whether a flag is true on at least one rank.
    """

    def __init__(
        self,
        *,
        weights: Mapping[str, Tensor],
        save: Callable[[Path], None],
        folder: Path,
        prefix: str,
        first: bool = True,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        self._weights = weights
        self._save = save
        self._folder = folder
        self._prefix = prefix
        self._first = first
        self._any_rank = any_rank
        self._loaded: str | None = None

    def publish(self, client: Client) -> str:
        """Load the current weights if the server does not have them; returns the adapter's name. EngineFault, on all ranks."""
        name = f"{self._prefix}-{_digest(self._weights)}"
        if name == self._loaded:
            return name
        fault = self._replace(client, name) if self._first else None
        if self._any_rank(fault is not None):
            raise fault or EngineFault("rank 0 could not load the adapter into the vLLM server; its log says why")
        self._loaded = name
        return name

    def load(self, client: Client, name: str) -> None:
        """Load an adapter from its folder, also again after the server was restarted. EngineFault."""
        folder = (self._folder / name).absolute()
        try:
            client.post(LOAD, {"lora_name": name, "lora_path": str(folder)})
        except RequestRefused as refused:
            if refused.status == 400 and "already been loaded" in refused.text:
                return
            raise EngineFault(
                f"the vLLM server at {client.url} did not load the adapter {folder}: {refused}. It must be started with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and a --max-lora-rank of at least policy.train.rank, and see "
                "that folder (rollout.engine.adapters)"
            ) from None

    def _replace(self, client: Client, name: str) -> EngineFault | None:
        """Write and load the adapter ``name``, and unload the one before it. Returns what went wrong."""
        shutil.rmtree(self._folder / name, ignore_errors=True)
        (self._folder / name).mkdir(parents=True)
        self._save(self._folder / name)
        try:
            self.load(client, name)
            if self._loaded is not None:
                self._unload(client, self._loaded)
        except EngineFault as fault:
            return fault
        return None

    def _unload(self, client: Client, name: str) -> None:
        try:
            client.post(UNLOAD, {"lora_name": name})
        except RequestRefused as refused:
            # After a restart it is gone already; one that stays costs only memory.
            log.warning("the vLLM server did not unload the adapter %s: %s", name, refused)
        shutil.rmtree(self._folder / name, ignore_errors=True)


def _digest(weights: Mapping[str, Tensor]) -> str:
    """The first 64 bits of SHA-256 over names, types, shapes and values, in hexadecimal."""
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
