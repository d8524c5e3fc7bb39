"""The policy's LoRA adapter in a vLLM server: written to a folder that the server reads too, and loaded whenever it has changed.

An adapter is called by its weights (a digest of them), so its name never stands for others: the server's prefix cache, which goes
by name, cannot be stale, and loading one twice is no mistake.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from retouch.policies.autoregressive.mismatch import EngineFault
from retouch.policies.engines.client import Client, Refused

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
log = logging.getLogger("retouch")


class Adapters:
    """Keeps the server's adapter the policy's.

    ``weights``: what trains, by name. ``save``: writes the adapter as it is now to a folder, in PEFT's format. ``folder``: seen by
    the server under the same path. ``name``: what the adapters' names begin with. ``first``: this rank writes and loads; all ranks
    have the same weights. ``any_rank``: whether something is so on one rank at least.
    """

    def __init__(
        self,
        *,
        weights: Mapping[str, Tensor],
        save: Callable[[Path], None],
        folder: Path,
        name: str,
        first: bool = True,
        any_rank: Callable[[bool], bool] = bool,
    ) -> None:
        self._weights = weights
        self._save = save
        self._folder = folder
        self._prefix = name
        self._first = first
        self._any_rank = any_rank
        self._loaded: str | None = None

    def current(self, client: Client) -> str:
        """The name of the adapter with the weights as they are now, loaded. EngineFault, on all ranks, where it cannot be."""
        name = f"{self._prefix}-{_digest(self._weights)}"
        if name == self._loaded:
            return name
        fault = self._publish(client, name) if self._first else None
        if self._any_rank(fault is not None):
            raise fault or EngineFault("rank 0 could not load the adapter into the vLLM server; its log says why")
        self._loaded = name
        return name

    def load(self, client: Client, name: str) -> None:
        """Tell the server where the adapter lies; also when it has forgotten it, after a restart say. EngineFault."""
        folder = (self._folder / name).absolute()
        try:
            client.post(LOAD, {"lora_name": name, "lora_path": str(folder)})
        except Refused as refused:
            if refused.status == 400 and "already been loaded" in refused.text:
                return
            raise EngineFault(
                f"the vLLM server at {client.url} did not load the adapter {folder}: {refused}. It must be started with "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and a --max-lora-rank of at least policy.train.rank, and see "
                "that folder (rollout.engine.adapters)"
            ) from None

    def _publish(self, client: Client, name: str) -> EngineFault | None:
        shutil.rmtree(self._folder / name, ignore_errors=True)
        (self._folder / name).mkdir(parents=True)
        self._save(self._folder / name)
        try:
            self.load(client, name)
            if self._loaded is not None:
                self._forget(client, self._loaded)
        except EngineFault as fault:
            return fault
        return None

    def _forget(self, client: Client, name: str) -> None:
        try:
            client.post(UNLOAD, {"lora_name": name})
        except Refused as refused:
            # It may be gone already, after a restart; one that stays is only memory.
            log.warning("the vLLM server did not unload the adapter %s: %s", name, refused)
        shutil.rmtree(self._folder / name, ignore_errors=True)


def _digest(weights: Mapping[str, Tensor]) -> str:
    """64 bits of SHA-256 over names, shapes and numbers."""
    found = hashlib.sha256()
    for name, tensor in weights.items():
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
