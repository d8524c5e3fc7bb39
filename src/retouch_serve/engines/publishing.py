"""Keeps a server's weights equal to the policy's: the common part of publishing a LoRA and publishing all weights."""

import hashlib
import json
import logging
import shutil
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from retouch.policies.engine import EngineFault
from retouch_serve.engines.client import Client

Served = TypeVar("Served")
log = logging.getLogger("retouch")


class WeightPublisher(ABC, Generic[Served]):
    """Writes the weights to a folder that the server reads too, and loads them into the server whenever they have changed.

    ``weights``: the trained parameters, by name. ``save``: writes them to a folder. ``folder``: a folder that the server sees under
    the same path. ``prefix``: the beginning of the names; a digest of the weights follows it. ``first``: whether this rank writes
    and loads the weights; all ranks have the same weights. ``any_rank``: tells whether a flag is true on at least one rank.
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
        self._restoring = threading.Lock()

    @property
    def has_loaded(self) -> bool:
        """Whether the server has weights from this publisher."""
        return self._loaded is not None

    def publish(self, client: Client) -> Served:
        """Load the current weights if the server does not have them; returns their name in requests. EngineFault on all ranks."""
        name = f"{self._prefix}-{_digest(self._weights)}"
        if name != self._loaded:
            fault = self._replace(client, name) if self._first else None
            if self._any_rank(fault is not None):
                raise fault or EngineFault(f"rank 0 could not load the weights into the {client.kind} server; its log says why")
            self._loaded = name
        return self.served(name)

    def restore(self, client: Client) -> None:
        """Load the weights of the last ``publish`` again, into a server that was restarted. Raises EngineFault if this fails."""
        assert self._loaded is not None
        with self._restoring:
            self.load(client, self._loaded)

    def close(self, client: Client) -> None:
        """Remove the run's weights from the server and the folder. If the server cannot be reached, this is only logged."""
        if self._loaded is None or not self._first:
            return
        name, self._loaded = self._loaded, None
        try:
            self.unload(client, name)
        except EngineFault as fault:
            log.warning("%s may still have %s: %s", client.server, name, fault)
        shutil.rmtree(self._folder / name, ignore_errors=True)

    @abstractmethod
    def served(self, name: str) -> Served:
        """The name of these weights in requests."""

    @abstractmethod
    def load(self, client: Client, name: str) -> None:
        """Load weights from their folder, unless the server has them. Raises EngineFault if this fails."""

    @abstractmethod
    def unload(self, client: Client, name: str) -> None:
        """Remove unused weights, if the server keeps several. Raises EngineFault if the server cannot be reached."""

    def _replace(self, client: Client, name: str) -> EngineFault | None:
        """Write and load the weights ``name``, and unload the previous weights. Returns the fault, None if there was none."""
        target = self._folder / name
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        self._save(target)
        try:
            self.load(client, name)
            if self._loaded is not None:
                self.unload(client, self._loaded)
                shutil.rmtree(self._folder / self._loaded, ignore_errors=True)
        except EngineFault as fault:
            return fault
        return None


def _digest(weights: Mapping[str, Tensor]) -> str:
    """The first 64 bits of SHA-256 over names, types, shapes and values, in hexadecimal."""
    digest = hashlib.sha256()
    for name, tensor in weights.items():
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def release_weights(publisher: WeightPublisher[Any], connect: Callable[[], Client], folder: Path | None) -> None:
    """Unload the run's weights from the server, and remove ``folder`` if it is given."""
    if publisher.has_loaded:
        with connect() as client:
            publisher.close(client)
    if folder is not None:
        remove_folder(folder)


def remove_folder(folder: Path) -> None:
    """Remove the folder of the adapters, and the run's folder if it is then empty, which it is after ``retouch doctor``."""
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(OSError):
        folder.parent.rmdir()
